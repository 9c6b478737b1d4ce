"""Packages that only an engine needs: the extra `local` installs them."""

from __future__ import annotations

from importlib.util import find_spec

from sglang_lite.protocol import BackendError

NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "xgrammar")


def check_installed(what: str) -> None:
    """
    Args:
        what: needs them.

    Raises:
        BackendError: one is not installed.
    """
    missing = [name for name in NEEDED if not _is_there(name)]
    if missing:
        raise BackendError(
            f"{what} needs {_listed(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed.",
            hint="pip install 'sglang-lite[local]'. The backends of APIs (sgl.OpenAI, sgl.Anthropic) do without.",
        )


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # refused by an import hook; a module without a spec
        return False


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
