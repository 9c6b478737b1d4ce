"""UTF-8 byte sequences of character sets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import TypeAlias

from sglang_lite.constraints.formal.charsets import Ranges

ByteRanges: TypeAlias = tuple[tuple[int, int], ...]  # (first, last) of each byte of a character

_LAST_OF_SIZE = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)


@lru_cache(maxsize=512)
def byte_ranges(ranges: Ranges) -> tuple[ByteRanges, ...]:
    """Returns the UTF-8 encodings of a set's characters, in order. Each result is a sequence with
    one range per byte.
    """
    return tuple(each for low, high in ranges for each in _split_code_points(low, high))


def _split_code_points(low: int, high: int) -> Iterator[ByteRanges]:
    """Splits a range of code points into pieces. The UTF-8 encodings of each piece are all
    combinations of one range per byte.
    """
    for last in _LAST_OF_SIZE:  # characters of one size
        if low <= last < high:
            yield from _split_code_points(low, last)
            yield from _split_code_points(last + 1, high)
            return
    for bits in range(6, 24, 6):  # bits of the last bytes
        if low >> bits != high >> bits and high > 0x7F:
            mask = (1 << bits) - 1
            if low & mask:
                yield from _split_code_points(low, low | mask)
                yield from _split_code_points((low | mask) + 1, high)
                return
            if high & mask != mask:
                yield from _split_code_points(low, (high & ~mask) - 1)
                yield from _split_code_points(high & ~mask, high)
                return
    yield tuple(zip(chr(low).encode(), chr(high).encode()))


@lru_cache(maxsize=512)
def character_set_pattern(ranges: Ranges) -> re.Pattern[bytes]:
    """Returns a bytes pattern that matches any number of characters of a set."""
    options = b"|".join(
        b"".join(b"[\\x%02x-\\x%02x]" % each for each in sequence)
        for sequence in byte_ranges(ranges)
    )
    return re.compile(b"(?:%b)*" % options) if options else re.compile(b"")
