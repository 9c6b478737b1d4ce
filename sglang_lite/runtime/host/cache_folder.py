"""Folder of this user's machine where models and other artefacts are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Returns the cache folder of models and other artefacts: $SGLANG_LITE_CACHE, or `sglang_lite`
    in the XDG cache folder.
    """
    override = os.environ.get("SGLANG_LITE_CACHE")
    if override:
        return Path(override).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sglang_lite"
