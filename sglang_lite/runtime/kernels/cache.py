"""The folder of compiled kernels, which is Triton's (`TRITON_CACHE_DIR`, else ~/.triton/cache), before it is used.

What another version of Triton or of the kernels, or a card of another kind, has left there is never read: Triton names
each kernel by all of that.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
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
    written, a folder for this process takes its place, which has what was there. Both are said in the log."""
    folder = Path(triton.knobs.cache.dir)
    damaged = [entry for entry in _entries(folder) if _is_damaged(entry)]
    if damaged:
        logger.warning("%d damaged kernels in %s are compiled anew.", len(damaged), folder)
    try:
        for entry in damaged:
            shutil.rmtree(entry)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        own = Path(tempfile.mkdtemp(prefix="sglang_lite-kernels-"))
        logger.warning(
            "kernels can't be kept in %s (%s): what is not there is compiled at each start. Set TRITON_CACHE_DIR to a "
            "folder that can be written.", folder, error,
        )  # fmt: skip
        for entry in _entries(folder):
            if entry not in damaged:
                (own / entry.name).symlink_to(entry)
        os.environ["TRITON_CACHE_DIR"] = os.fspath(own)
        return own


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
