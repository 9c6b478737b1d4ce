"""First steps of the engine's process. Light: what takes long is begun before all else is imported."""

from __future__ import annotations

from sglang_lite.runtime.compile_process import start_early


def main(descriptor: int, model: str, device: str, compile_processes: int | None) -> None:
    """Runs the engine's process.

    Args:
        descriptor: of its end of the socket.
        model, device, compile_processes: as the engine's config has them.
    """
    compiler = start_early(model, device, compile_processes)
    from sglang_lite.engine.child.command_handler import serve

    serve(descriptor, compiler)
