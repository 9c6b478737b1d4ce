"""Entry point of the engine's process. It starts slow work before it imports most modules."""

from __future__ import annotations

import gc

from sglang_lite.runtime.host.process_name import set_process_name
from sglang_lite.runtime.kernels.compile_process import start_compiler_early


def main(descriptor: int, model: str, device: str, compile_processes: int | None) -> None:
    """Runs the engine's process.

    Args:
        descriptor: file descriptor of the process's end of the socket.
        model, device, compile_processes: fields of the engine's config.
    """
    set_process_name("sglang-engine")
    gc.disable()  # until the model is loaded: nearly all objects created until then stay
    compiler = start_compiler_early(model, device, compile_processes)
    from sglang_lite.engine.child.command_handler import serve

    serve(descriptor, compiler)
