"""Limits the total size of the files in a folder."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterable
from pathlib import Path


def remove_oldest_files(files: Iterable[Path], most: float) -> int:
    """Removes the least recently used files until the remaining files total at most `most` bytes.
    Returns the total size of the remaining files.
    """
    found = []
    for path in files:
        with contextlib.suppress(OSError):  # another process may also remove files
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                found.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= most:
            break
        path.unlink(missing_ok=True)
        total -= size
    return total
