"""Import paths that child processes inherit."""

from __future__ import annotations

import contextlib
import os
import sys


def import_paths() -> list[str]:
    """Returns the entries of this process's `sys.path`. An empty entry is replaced by the working
    directory, or dropped if that directory no longer exists.
    """
    paths = []
    for path in sys.path:
        with contextlib.suppress(OSError):
            paths.append(path or os.getcwd())
    return paths
