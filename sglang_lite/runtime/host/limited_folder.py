"""Folders of files that together have at most so many bytes."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterable
from pathlib import Path


def drop_oldest(files: Iterable[Path], most: float) -> int:
    """Removes the least recently used of some files until the others have at most `most` bytes together. Returns their
    bytes."""
    found = []
    for path in files:
        with contextlib.suppress(OSError):  # another process may remove files, too
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
