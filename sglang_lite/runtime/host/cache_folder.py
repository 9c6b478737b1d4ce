"""Path of the user's folder for downloaded models and other cached files."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Returns the folder for models and other cached files: $SGLANG_LITE_CACHE, or `sglang_lite` in
    the XDG cache folder.
    """
    override = os.environ.get("SGLANG_LITE_CACHE")
    if override:
        return Path(override).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sglang_lite"
