"""Checks whether an engine can run here: on this operating system, with the packages that the extra
`local` installs.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from sglang_lite.protocol import BackendError

NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy")


def check_platform() -> None:
    """Checks that this operating system can run an engine.

    Raises:
        BackendError: it is Windows, whose Python has neither the locks nor the processes that an
            engine uses.
    """
    if sys.platform == "win32":
        raise BackendError(
            "an engine does not run on Windows.",
            hint="Run it in WSL 2 (`wsl --install`), or connect to a server: sgl.RuntimeEndpoint, sgl.OpenAI.",
        )


def check_engine_packages(what: str) -> None:
    """Checks that the packages needed by an engine are installed.

    Args:
        what: name of the thing that needs them, for the message.

    Raises:
        BackendError: a package is not installed.
    """
    missing = [name for name in NEEDED if not is_installed(name)]
    if missing:
        raise BackendError(
            f"{what} needs {_join_names(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed.",
            hint="pip install 'sglang-lite[local]', or [cpu] without GPU kernels. The backends of APIs (sgl.OpenAI, "
            "sgl.Anthropic) do without.",
        )


def is_installed(name: str) -> bool:
    """Returns whether a package can be imported."""
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # an import hook rejects it, or the module has no spec
        return False


def _join_names(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
