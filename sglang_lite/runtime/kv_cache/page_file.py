"""Files of pages: a header that says what they are, a checksum, and the bytes. Nothing of them is ever executed.

A file is written under a temporary name and renamed, so readers see all of it or nothing; it is the user's own (mode
0600). The checksum finds what was torn or altered by accident. It proves no origin: whoever may write a folder of files
may write what a model will take for computed.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.kv_cache.pages import Ints

_START: Final = struct.Struct("<8sIQQI")  # magic, bytes of the header, pages, bytes of a page, checksum
_MAGIC: Final = b"sglkv\x00\x00\x01"
_MAX_HEADER: Final = 1 << 28
TEMPORARY: Final = ".tmp"

Rows = NDArray[np.uint8]


class DamagedFileError(ValueError):
    """A file that is none of pages, or not whole."""


@dataclass(frozen=True, slots=True)
class PageFile:
    """Pages of a file that is open.

    Attributes:
        header: what the pages are.
        pages, page_bytes: number of pages, and bytes of each.
    """

    header: bytes
    pages: int
    page_bytes: int
    _file: FileIO
    _checksum: int

    def read(self, rows: Rows, slots: Ints, skip: int = 0) -> None:
        """Reads pages into rows of a memory.

        Args:
            rows: uint8 [slots, bytes of a page].
            slots: int32 [N], rows for the pages behind the first `skip`, which are read but not kept.

        Raises:
            DamagedFileError: the file was altered; the rows have anything then.
        """
        checksum, at = zlib.crc32(self.header), 0
        for first, count, target in _runs(slots, self.pages, skip):
            part = rows[target : target + count] if target >= 0 else np.empty((count, self.page_bytes), np.uint8)
            assert first == at
            view = part.data.cast("B")
            if self._file.readinto(view) != len(view):
                raise DamagedFileError("it ends too early")
            checksum, at = zlib.crc32(view, checksum), at + count
        if checksum != self._checksum:
            raise DamagedFileError("its checksum is another")


@contextmanager
def open_pages(path: str | os.PathLike[str]) -> Iterator[PageFile]:
    """Opens a file of pages and reads its header.

    Raises:
        OSError: it can't be read.
        DamagedFileError: it is none, or its size is not what its header says.
    """
    with open(path, "rb", buffering=0) as raw:
        start = raw.read(_START.size)
        if len(start) < _START.size or not start.startswith(_MAGIC):
            raise DamagedFileError("it is no file of pages of this version")
        _, header_bytes, pages, page_bytes, checksum = _START.unpack(start)
        size = os.fstat(raw.fileno()).st_size
        if header_bytes > _MAX_HEADER or size != _START.size + header_bytes + pages * page_bytes:
            raise DamagedFileError(f"it has {size:,} bytes, which is not what its header says")
        yield PageFile(raw.read(header_bytes), pages, page_bytes, raw, checksum)


def write_pages(path: Path, header: bytes, rows: Rows, slots: Ints) -> int:
    """Writes a file of pages. Returns its size in bytes.

    Args:
        header: what the pages are.
        rows: uint8 [slots, bytes of a page].
        slots: int32 [N], rows of the pages, in order.

    Raises:
        OSError: it can't be written; nothing is left of it.
    """
    parts = [rows[target : target + count].data.cast("B") for _, count, target in _runs(slots, len(slots), 0)]
    checksum = zlib.crc32(header)
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}{TEMPORARY}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(_START.pack(_MAGIC, len(header), len(slots), rows.shape[1], checksum) + header)
            for part in parts:
                file.write(part)
            size = file.tell()
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return size


def _runs(slots: Ints, pages: int, skip: int) -> Iterator[tuple[int, int, int]]:
    """Yields runs of pages that stand together: the first one, their number, and the row of the first, or -1 for those
    that are not kept: the first `skip`, and any behind the slots."""
    if skip:
        yield 0, skip, -1
    breaks = np.flatnonzero(np.diff(slots) != 1) + 1
    for start, end in zip([0, *breaks.tolist()], [*breaks.tolist(), len(slots)]):
        if end > start:
            yield skip + start, end - start, int(slots[start])
    if rest := pages - skip - len(slots):
        yield skip + len(slots), rest, -1
