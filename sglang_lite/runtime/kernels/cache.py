"""The folder of compiled kernels, which is Triton's (`TRITON_CACHE_DIR`, else ~/.triton/cache), before it is used.

What another version of Triton or of the kernels, or a card of another kind, has left there is never read: Triton names
each kernel by all of that.
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

_ELF = struct.Struct("<4s36xQ")  # its first bytes, and where its table of sections begins
_SECTIONS = struct.Struct("<HH")  # size of a section's entry, and how many there are
_AT_SECTIONS = 58


def prepare_cache() -> Path:
    """The folder, once kernels can be read from there and written. Damaged ones are removed; where nothing can be
    written, the user's folder of temporary files takes its place, with links to what was there. Both are said in the
    log."""
    folder = Path(triton.knobs.cache.dir)
    damaged = _damaged(folder)
    try:
        for entry in damaged:
            shutil.rmtree(entry)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        own = _users_folder()
        logger.warning(
            "kernels can't be kept in %s (%s): what is not there is compiled into %s. Set TRITON_CACHE_DIR to a folder "
            "that can be written.", folder, error, own,
        )  # fmt: skip
        for entry in _damaged(own):
            entry.unlink() if entry.is_symlink() else shutil.rmtree(entry)
        _link(set(_entries(folder)) - set(damaged), own)
        os.environ["TRITON_CACHE_DIR"] = os.fspath(own)
        return own


def _users_folder() -> Path:
    """Folder that this user alone can read and write, the same at each start: an engine's process, which may be killed,
    need not remove it. A new one where the name is another's."""
    folder = Path(tempfile.gettempdir(), f"sglang_lite-kernels-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
        return folder
    return Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))


def _link(entries: set[Path], own: Path) -> None:
    """Links `entries` into `own`, where links of an earlier start may have lost their targets."""
    for link in list(own.iterdir()):
        if link.is_symlink() and not link.exists():
            link.unlink(missing_ok=True)
    for entry in entries:
        with contextlib.suppress(FileExistsError):  # of an earlier start, or of one beside this
            (own / entry.name).symlink_to(entry)


def _damaged(folder: Path) -> list[Path]:
    """Damaged kernels, which the log is told of."""
    damaged = [entry for entry in _entries(folder) if _is_damaged(entry)]
    if damaged:
        logger.warning("%d damaged kernels in %s are compiled anew.", len(damaged), folder)
    return damaged


def _entries(folder: Path) -> list[Path]:
    """Folders of a kernel each."""
    try:
        return [Path(entry) for entry in os.scandir(folder) if entry.is_dir()]
    except OSError:
        return []


def _is_damaged(entry: Path) -> bool:
    """True where a file was cut off, as by a full disk or a power failure."""
    try:
        for file in entry.iterdir():
            if file.suffix == ".json":
                json.loads(file.read_bytes())
            elif file.suffix == ".cubin" and _is_cut(file):
                return True
    except ValueError:
        return True
    except OSError:  # another process's, or not ours to read
        return False
    return False


def _is_cut(cubin: Path) -> bool:
    """True where a file is not an ELF file with all of its sections' table."""
    with cubin.open("rb") as file:
        head = file.read(64)
        size = os.fstat(file.fileno()).st_size
    if len(head) < 64:
        return True
    magic, sections = _ELF.unpack_from(head)
    entry, count = _SECTIONS.unpack_from(head, _AT_SECTIONS)
    return bool(magic != b"\x7fELF" or sections + entry * count > size)
