"""Files of pages: a header that says what they are, a checksum of each page, and the bytes. Nothing of them is ever
executed.

A file is written under a temporary name and renamed, so readers see all of it or nothing; it is the user's own (mode
0600). The checksums find what was torn or altered by accident. They prove no origin: whoever may write a folder of
files may write what a model will take for computed.

A page's checksum is the sum of its words, each times an odd number of its place, modulo 2^64. Of the top bit of a word
of 8 bytes, which may be a sign, such a product keeps one bit, so that two changed ones would cancel out. So these bits
are packed into bytes, which count, too.

A file that is written under a secret has authentication codes instead (keyed BLAKE2b), which take some five times as
long: of each page with its place, under a key made of the secret, the header and the sizes. Who doesn't have the secret
can't write one.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.kv_cache.pages import Ints

_START: Final = struct.Struct("<8sIQQI")  # magic, bytes of the header, pages, bytes of a page, checksum of what follows
_MAGIC: Final = b"sglkv\x00\x00\x04"
_MAGIC_OF_SECRET: Final = b"sglkvs\x00\x04"
_SUM: Final = np.dtype("<u8")  # checksum of a page
_CODE: Final = np.dtype("V16")  # authentication code of a page
_MAX_HEADER: Final = 1 << 28
# Bytes that are read before their checksums are taken, unless a page is larger. With fewer, threads wait for one
# another: each call that leaves the interpreter's lock has to get it back.
_AT_ONCE: Final = 1 << 24
THREADS: Final = min(16, os.cpu_count() or 1)  # that read and check as fast as memory can be written
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
    _fill: Callable[[memoryview, int], int]  # fills memory with what is from a place on; returns the number of bytes
    _at: int  # place of the first page
    _checks: NDArray[Any]  # checksum or code of each page
    _key: bytes | None  # of the codes

    def read(self, rows: Rows, slots: Ints, skip: int = 0, threads: Executor | None = None) -> None:
        """Reads pages into rows of a memory.

        Args:
            rows: uint8 [slots, bytes of a page].
            slots: int32 [N], rows for the pages behind the first `skip`.
            threads: executor that reads and checks parts at the same time; None for the caller's thread.

        Raises:
            DamagedFileError: the file was altered; the rows have anything then.
        """
        read = partial(self._read, rows)
        parts = _parts(slots, max(_AT_ONCE // self.page_bytes, 1))
        for _ in (map if threads is None else threads.map)(read, [(skip + at, part) for at, part in parts]):
            pass

    def _read(self, rows: Rows, part: tuple[int, slice]) -> None:
        """Reads pages from one of the file's on into rows that stand together."""
        first, target = part[0], rows[part[1]]
        view, at = target.data.cast("B"), self._at + first * self.page_bytes
        if self._fill(view, at) != len(view):
            raise DamagedFileError("it ends too early")
        if _checks(target, first, self._key).tobytes() != self._checks[first : first + len(target)].tobytes():
            raise DamagedFileError("its checksum is another" if self._key is None else "it is of another secret")


@contextmanager
def open_pages(path: str | os.PathLike[str], secret: str | None = None) -> Iterator[PageFile]:
    """Opens a file of pages and reads its header.

    Args:
        secret: what the file was written under.

    Raises:
        OSError: it can't be read.
        DamagedFileError: it is none, its size is not what its header says, or it was written under no secret, or one
            that is not given.
    """
    with open(path, "rb", buffering=0) as raw:
        descriptor = raw.fileno()
        yield _opened(os.fstat(descriptor).st_size, lambda view, at: os.preadv(descriptor, [view], at), secret)


def pages_in(data: bytes) -> PageFile:
    """Pages of a file whose bytes are in memory.

    Raises:
        DamagedFileError: as of `open_pages`.
    """

    def fill(view: memoryview, at: int) -> int:
        part = data[at : at + len(view)]
        view[: len(part)] = part
        return len(part)

    return _opened(len(data), fill)


def _opened(size: int, fill: Callable[[memoryview, int], int], secret: str | None = None) -> PageFile:
    """Pages of a file of `size` bytes, whose header is read and checked."""

    def read(count: int, at: int) -> bytes:
        found = bytearray(count)
        return bytes(found[: fill(memoryview(found), at)])

    start = read(_START.size, 0)
    if len(start) < _START.size or not start.startswith((_MAGIC, _MAGIC_OF_SECRET)):
        raise DamagedFileError("it is no file of pages of this version")
    if start.startswith(_MAGIC) != (secret is None):
        raise DamagedFileError("it was written under no secret" if secret else "it was written under a secret")
    _, header_bytes, pages, page_bytes, checksum = _START.unpack(start)
    kind = _SUM if secret is None else _CODE
    sums_bytes = pages * kind.itemsize
    at = _START.size + header_bytes + sums_bytes
    if max(header_bytes, sums_bytes) > _MAX_HEADER or not page_bytes or size != at + pages * page_bytes:
        raise DamagedFileError(f"it has {size:,} bytes, which is not what its header says")
    header, sums = read(header_bytes, _START.size), read(sums_bytes, _START.size + header_bytes)
    if zlib.crc32(sums, zlib.crc32(header)) != checksum:
        raise DamagedFileError("the checksum of its header is another")
    key = None if secret is None else _key(secret, header, pages, page_bytes)
    return PageFile(header, pages, page_bytes, fill, at, np.frombuffer(sums, kind), key)


def packed(header: bytes, rows: Rows, slots: Ints, secret: str | None = None) -> list[bytes | memoryview]:
    """Contents of a file of pages, in parts; see `write_pages`."""
    key = None if secret is None else _key(secret, header, len(slots), rows.shape[1])
    found = [(at, rows[part]) for at, part in _parts(slots, max(_AT_ONCE // rows.shape[1], 1))]
    parts = [part for _, part in found]
    sums = b"".join(_checks(part, at, key).tobytes() for at, part in found)
    magic = _MAGIC if secret is None else _MAGIC_OF_SECRET
    start = _START.pack(magic, len(header), len(slots), rows.shape[1], zlib.crc32(sums, zlib.crc32(header)))
    return [start + header + sums, *(part.data.cast("B") for part in parts)]


def write_pages(path: Path, header: bytes, rows: Rows, slots: Ints, secret: str | None = None) -> int:
    """Writes a file of pages. Returns its size in bytes.

    Args:
        header: what the pages are.
        rows: uint8 [slots, bytes of a page].
        slots: int32 [N], rows of the pages, in order.
        secret: who reads the file must have it; None for checksums.

    Raises:
        OSError: it can't be written; nothing is left of it.
    """
    parts = packed(header, rows, slots, secret)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}{TEMPORARY}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            for part in parts:
                file.write(part)
            size = file.tell()
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return size


def _key(secret: str, header: bytes, pages: int, page_bytes: int) -> bytes:
    """Key of a file's codes."""
    under = blake2b(secret.encode("utf-8", "surrogatepass"), digest_size=64).digest()
    return blake2b(struct.pack("<QQ", pages, page_bytes) + header, key=under, digest_size=64).digest()


def _checks(rows: Rows, first: int, key: bytes | None) -> NDArray[Any]:
    """Checksums of pages, or under a key their codes, the first one's place being `first`."""
    if key is None:
        return checksums(rows)
    places = (place.to_bytes(blake2b.SALT_SIZE, "little") for place in range(first, first + len(rows)))
    codes = (blake2b(row, key=key, salt=place, digest_size=_CODE.itemsize).digest() for row, place in zip(rows, places))
    return np.frombuffer(b"".join(codes), _CODE)


def checksums(rows: Rows) -> NDArray[np.uint64]:
    """Checksum of each page, uint64 [pages], of rows uint8 [pages, bytes of a page]."""
    size = rows.shape[1]
    words = rows.view(f"<u{next(width for width in (8, 4, 2, 1) if size % width == 0)}")
    sums = _weighted(words)
    return sums + _weighted(np.packbits(words.view("<i8") < 0, axis=1)) if words.itemsize == 8 else sums


def _weighted(words: NDArray[Any]) -> NDArray[np.uint64]:
    """Sum of unsigned words [pages, words], each times the odd number of its place: uint64 [pages]."""
    sums: NDArray[np.uint64] = np.einsum("pw,w->p", words, _odd_numbers(words.shape[1]), dtype=_SUM)
    return sums


@cache
def _odd_numbers(count: int) -> NDArray[np.uint64]:
    """Odd numbers that look random, the same in every process: uint64 [count]. (SplitMix64: Steele et al., 2014.)"""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ mixed >> np.uint64(shift)) * np.uint64(factor)
    return mixed ^ mixed >> np.uint64(31) | np.uint64(1)


def _parts(slots: Ints, most: int) -> Iterator[tuple[int, slice]]:
    """Yields the runs of up to `most` pages whose rows stand together: the first page, and the rows."""
    breaks = (np.flatnonzero(np.diff(slots) != 1) + 1).tolist()
    for start, end in zip([0, *breaks], [*breaks, len(slots)]):
        for at in range(start, end, most):
            yield at, slice(int(slots[at]), int(slots[at]) + min(end - at, most))
