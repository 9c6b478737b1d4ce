"""Import paths that child processes take over."""

from __future__ import annotations

import contextlib
import os
import sys


def import_paths() -> list[str]:
    """Entries of this process's `sys.path`; an empty entry is replaced by the working directory, or dropped if that is
    gone."""
    paths = []
    for path in sys.path:
        with contextlib.suppress(OSError):
            paths.append(path or os.getcwd())
    return paths
