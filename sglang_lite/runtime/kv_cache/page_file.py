"""Files of KV cache pages. A file has a header that describes the pages, a checksum of each page,
and the pages' bytes. Nothing in a file is ever executed.

A file is written under a temporary name and renamed, so readers see all of it or nothing. It
belongs to the user (mode 0600). The checksums detect accidental damage, but don't prove who wrote a
file: anyone with write access to the folder can forge pages that an engine accepts as its own.

A file written with a secret has authentication codes (keyed BLAKE2b) instead of checksums, which
take about five times as long to compute. Each code covers a page and the page's index in the file.
Its key is derived from the secret, the header and the sizes, so nobody can forge a code without the
secret.

After its pages, a file may have a second part of the same form, with its own header and page size.
This part has the state at the end of the last page.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.kv_cache.page_sums import (
    ENDS_EARLY,
    SUM,
    DamagedFileError,
    Rows,
    compute_page_sums,
)
from sglang_lite.runtime.kv_cache.pages import Ints

# magic, bytes of the header, pages, bytes of a page, checksum of what follows
_START: Final = struct.Struct("<8sIQQI")
_MAGIC: Final = b"sglkv\x00\x00\x05"
_MAGIC_OF_SECRET: Final = b"sglkvs\x00\x05"
_CODE: Final = np.dtype("V16")  # authentication code of a page
_MAX_HEADER: Final = 1 << 28
PART_BYTES: Final = 1 << 23  # bytes that a thread reads in one call, unless a page is larger
# enough to read and check as fast as memory can be written
THREADS: Final = min(16, os.cpu_count() or 1)
TEMPORARY: Final = ".tmp"

_Source: TypeAlias = int | bytes  # descriptor of an open file, or its contents


@dataclass(frozen=True, slots=True)
class PageFile:
    """Pages of an open file.

    Attributes:
        header: description of the pages.
        pages, page_bytes: number of pages, and bytes of each.
        following: the file's next part, if any.
    """

    header: bytes
    pages: int
    page_bytes: int
    _source: _Source
    _at: int  # offset of the first page in the file
    _checks: NDArray[Any]  # checksum or code of each page
    _key: bytes | None  # key of the authentication codes; None for checksums
    following: PageFile | None = None

    def read_into(self, rows: Rows, slots: Ints, skip: int = 0) -> None:
        """Reads pages into rows of a memory.

        Args:
            rows: uint8 [slots, bytes of a page].
            slots: int32 [N], rows for the pages after the first `skip`.

        Raises:
            OSError: the file can't be read.
            DamagedFileError: the file was altered; the contents of the rows are undefined.
        """
        at = self._at + skip * self.page_bytes
        if self._key is None and isinstance(self._source, int):
            checks = compute_page_sums(rows, slots, self._source, at)
        else:
            for i, slot in enumerate(slots.tolist()):
                _fill_from(rows[slot].data, self._source, at + i * self.page_bytes)
            checks = _compute_checksums(rows, slots, skip, self._key)
        if checks.tobytes() != self._checks[skip : skip + len(slots)].tobytes():
            raise DamagedFileError(
                "its checksum doesn't match"
                if self._key is None
                else "it was altered, or written with a different secret"
            )

    def read_with_threads(self, threads: Executor, rows: Rows, slots: Ints) -> Iterator[int]:
        """Reads the first pages like `read_into`, with several threads. After each portion, in
        order, yields how many pages have been read so far.
        """
        most = max(PART_BYTES // self.page_bytes, 1)
        starts = range(0, len(slots), most)
        for start, _ in zip(
            starts, threads.map(lambda at: self.read_into(rows, slots[at : at + most], at), starts)
        ):
            yield min(start + most, len(slots))


@contextmanager
def open_pages(path: str | os.PathLike[str], secret: str | None = None) -> Iterator[PageFile]:
    """Opens a file of pages and reads its header.

    Args:
        secret: secret the file was written with.

    Raises:
        OSError: it can't be read.
        DamagedFileError: it is not a file of pages, its size differs from the one in its header, or
            it was not written with `secret` (if that is None: it was written with a secret).
    """
    with open(path, "rb", buffering=0) as raw:
        yield _read_header(raw.fileno(), os.fstat(raw.fileno()).st_size, secret)


def open_pages_in_memory(data: bytes) -> PageFile:
    """Reads the header of a file of pages whose bytes are in memory.

    Raises:
        DamagedFileError: as for `open_pages`.
    """
    return _read_header(data, len(data), None)


def _read_header(source: _Source, size: int, secret: str | None, begin: int = 0) -> PageFile:
    """Reads and checks the headers of a file of `size` bytes from the part at `begin` on, and
    returns this part.
    """

    def read(count: int, at: int) -> bytes:
        found = bytearray(count)
        _fill_from(memoryview(found), source, at)
        return bytes(found)

    start = read(min(_START.size, size - begin), begin)
    if len(start) < _START.size or not start.startswith((_MAGIC, _MAGIC_OF_SECRET)):
        raise DamagedFileError("it is no file of pages of this version")
    if start.startswith(_MAGIC) != (secret is None):
        raise DamagedFileError(
            "it was written under no secret" if secret else "it was written under a secret"
        )
    _, header_bytes, pages, page_bytes, checksum = _START.unpack(start)
    kind = SUM if secret is None else _CODE
    sums_bytes = pages * kind.itemsize
    at = begin + _START.size + header_bytes + sums_bytes
    end = at + pages * page_bytes
    is_last = size == end or begin > 0
    if (
        max(header_bytes, sums_bytes) > _MAX_HEADER
        or not page_bytes
        or (size != end if is_last else size < end + _START.size)
    ):
        raise DamagedFileError(f"it has {size:,} bytes, which is not what its header says")
    header = read(header_bytes, begin + _START.size)
    sums = read(sums_bytes, begin + _START.size + header_bytes)
    if zlib.crc32(sums, zlib.crc32(header)) != checksum:
        raise DamagedFileError("the checksum of its header is another")
    key = None if secret is None else _derive_key(secret, header, pages, page_bytes)
    following = None if is_last else _read_header(source, size, secret, end)
    checks = np.frombuffer(sums, kind)
    return PageFile(header, pages, page_bytes, source, at, checks, key, following)


def _fill_from(view: memoryview, source: _Source, at: int) -> None:
    """Fills a buffer with the bytes at an offset in a file."""
    if isinstance(source, int):
        count = os.preadv(source, [view], at)
    else:
        count = len(part := source[at : at + len(view)])
        view[:count] = part
    if count != len(view):
        raise DamagedFileError(ENDS_EARLY)


def pack_pages(
    header: bytes, rows: Rows, slots: Ints, secret: str | None = None
) -> list[bytes | memoryview]:
    """Returns the contents of a file of pages as a sequence of buffers. Takes the same arguments as
    `write_pages`, except for the path.
    """
    key = None if secret is None else _derive_key(secret, header, len(slots), rows.shape[1])
    sums = _compute_checksums(rows, slots, 0, key).tobytes()
    magic = _MAGIC if secret is None else _MAGIC_OF_SECRET
    start = _START.pack(
        magic, len(header), len(slots), rows.shape[1], zlib.crc32(sums, zlib.crc32(header))
    )
    return [start + header + sums, *(rows[slot].data for slot in slots.tolist())]


def write_pages(
    path: Path,
    header: bytes,
    rows: Rows,
    slots: Ints,
    secret: str | None = None,
    following: Sequence[bytes | memoryview] = (),
) -> int:
    """Writes a file of pages. Returns its size in bytes.

    Args:
        header: description of the pages.
        rows: uint8 [slots, bytes of a page].
        slots: int32 [N], rows of the pages, in order.
        secret: secret that readers must have; None for checksums.
        following: contents of a second part, from `pack_pages` with the same secret.

    Raises:
        OSError: the file can't be written; no part of it is left.
    """
    parts = [*pack_pages(header, rows, slots, secret), *following]
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


def _derive_key(secret: str, header: bytes, pages: int, page_bytes: int) -> bytes:
    """Derives the key of a file's authentication codes."""
    under = blake2b(secret.encode("utf-8", "surrogatepass"), digest_size=64).digest()
    return blake2b(
        struct.pack("<QQ", pages, page_bytes) + header, key=under, digest_size=64
    ).digest()


def _compute_checksums(rows: Rows, slots: Ints, first: int, key: bytes | None) -> NDArray[Any]:
    """Computes the checksums of pages or, with a key, their authentication codes. `first` is the
    first page's index in the file.
    """
    if key is None:
        return compute_page_sums(rows, slots)
    places = (
        place.to_bytes(blake2b.SALT_SIZE, "little") for place in range(first, first + len(slots))
    )
    pages = (rows[slot] for slot in slots.tolist())
    codes = [
        blake2b(page, key=key, salt=place, digest_size=_CODE.itemsize)
        for page, place in zip(pages, places)
    ]
    return np.frombuffer(b"".join(code.digest() for code in codes), _CODE)
