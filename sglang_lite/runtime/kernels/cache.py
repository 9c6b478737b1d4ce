"""Checks and prepares the folder of compiled kernels, which is Triton's cache (`TRITON_CACHE_DIR`,
by default ~/.triton/cache).

Kernels of other versions of Triton, other sources or other kinds of GPU are never read: Triton's
names depend on all of these.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import stat
import struct
import tempfile
from pathlib import Path

import triton

logger = logging.getLogger("sglang_lite")

_ELF = struct.Struct("<4s36xQ")  # magic bytes, and offset of the section table
_SECTIONS = struct.Struct("<HH")  # size of a section's entry, and number of sections
_AT_SECTIONS = 58


def prepare_cache() -> Path:
    """Removes damaged kernels from the cache folder, and returns the folder once kernels can be
    written there.

    If the folder isn't writable, uses a per-user folder among the temporary files instead. Links
    the existing kernels into that folder, and sets `TRITON_CACHE_DIR` to it. Logs a warning about
    damaged kernels, and about a folder that isn't writable.
    """
    folder = Path(triton.knobs.cache.dir)
    damaged = _find_damaged(folder)
    try:
        for entry in damaged:
            shutil.rmtree(entry)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        own = _fallback_folder()
        logger.warning(
            "kernels can't be kept in %s (%s): what is not there is compiled into %s. Set TRITON_CACHE_DIR to a folder "
            "that can be written.",
            folder,
            error,
            own,
        )
        for entry in _find_damaged(own):
            entry.unlink() if entry.is_symlink() else shutil.rmtree(entry)
        _link_kernels(set(_list_kernel_folders(folder)) - set(damaged), own)
        os.environ["TRITON_CACHE_DIR"] = os.fspath(own)
        return own


def _fallback_folder() -> Path:
    """Returns a folder that only this user can read and write. Its name is the same at each start,
    so nothing accumulates if engine processes are killed. If another user has taken that name,
    creates a new folder.
    """
    folder = Path(tempfile.gettempdir(), f"sglang_lite-kernels-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
        return folder
    return Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))


def _link_kernels(entries: set[Path], own: Path) -> None:
    """Links the entries into `own`, and removes dangling links of an earlier start."""
    for link in list(own.iterdir()):
        if link.is_symlink() and not link.exists():
            link.unlink(missing_ok=True)
    for entry in entries:
        with contextlib.suppress(FileExistsError):  # linked by an earlier or a concurrent start
            (own / entry.name).symlink_to(entry)


def _find_damaged(folder: Path) -> list[Path]:
    """Returns the damaged kernels in a folder, and logs a warning if there are any."""
    damaged = [entry for entry in _list_kernel_folders(folder) if _is_damaged(entry)]
    if damaged:
        logger.warning("%d damaged kernels in %s are compiled anew.", len(damaged), folder)
    return damaged


def _list_kernel_folders(folder: Path) -> list[Path]:
    """Returns the subfolders of a cache, one for each kernel."""
    try:
        return [Path(entry) for entry in os.scandir(folder) if entry.is_dir()]
    except OSError:
        return []


def _is_damaged(entry: Path) -> bool:
    """Returns whether a file of the kernel is truncated, for example by a full disk or a power
    failure.
    """
    try:
        for file in entry.iterdir():
            if file.suffix == ".json":
                json.loads(file.read_bytes())
            elif file.suffix == ".cubin" and _is_truncated(file):
                return True
    except ValueError:
        return True
    except OSError:  # removed by another process, or not readable
        return False
    return False


def _is_truncated(cubin: Path) -> bool:
    """Returns whether a file is not an ELF file with a complete section table."""
    with cubin.open("rb") as file:
        head = file.read(64)
        size = os.fstat(file.fileno()).st_size
    if len(head) < 64:
        return True
    magic, sections = _ELF.unpack_from(head)
    entry, count = _SECTIONS.unpack_from(head, _AT_SECTIONS)
    return bool(magic != b"\x7fELF" or sections + entry * count > size)
