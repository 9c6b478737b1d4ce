"""Paths of weights and adapters that requests name: which of them the server reads, and what their
errors reveal.
"""

from __future__ import annotations

from pathlib import Path

from sglang_lite.protocol import ModelError, ParameterError
from sglang_lite.runtime.models.folder_config import has_config
from sglang_lite.runtime.models.hub import ADAPTER
from sglang_lite.server.settings import ServerSettings


def require_allowed_path(settings: ServerSettings, path: str, field: str) -> None:
    """Checks the path of weights or of an adapter that a request names, before it is read.

    Args:
        path: path on this machine, name of a model, or address such as `s3://bucket/model`.
        field: field of the request that has the path.

    Raises:
        ParameterError: the path is an address whose scheme the settings don't allow, or lies
            outside of the settings' `weights_root`.
        ModelError: the path is a folder without a model or an adapter. The error names none of the
            folder's entries.
    """
    scheme, colon, _ = path.partition("://")
    if colon:
        if scheme not in settings.weights_scheme or "::" in path:
            raise ParameterError(
                field,
                f"{path[:200]!r} is an address, and its scheme is not allowed.",
                hint="Give a path of the server's machine, or start it with --weights-scheme and the scheme.",
            )
        return
    root = settings.weights_root
    try:
        folder = Path(path).expanduser()
        is_outside = root is not None and not _is_inside(folder, Path(root).expanduser())
        has_no_model = (
            folder.is_dir() and not has_config(folder) and not (folder / ADAPTER).is_file()
        )
    # too long, with a NUL, or `~` without a home
    except (OSError, RuntimeError, ValueError) as error:
        raise ParameterError(field, f"{path[:200]!r} is no path.", hint="Give a folder.") from error
    if is_outside:
        raise ParameterError(
            field,
            "the path is outside of the folder that weights_root names.",
            hint="Give one in that folder.",
        )
    if has_no_model:
        raise ModelError(f"{folder}: the folder has no model.", hint="Give one with a config.json.")


def _is_inside(path: Path, root: Path) -> bool:
    """Returns whether a path leads into a folder after links are followed."""
    return path.resolve().is_relative_to(root.resolve())
