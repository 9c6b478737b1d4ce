"""Computes checksums of pages, and can read the pages from a file in the same pass.

page_sums.cpp computes the checksums while it reads, in one pass over memory, and takes the
interpreter's lock only once per call. Without a compiler, numpy computes them more slowly.

A checksum is a sum modulo 2^64 over a page's words of 8 bytes, in lines of 512. Each word is
multiplied by two factors: one for the word's position in its line, and one for the line. The last
line is padded with zeros. All factors are odd, so a change to one word changes the sum. But a
word's top bit, which may be a sign, would only affect the sum's top bit, so flipping it in two
words would not change the sum. Therefore the upper half of each word is first xored into its lower
half.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.host.cache_folder import cache_folder
from sglang_lite.runtime.host.cpu_library import load_cpu_library
from sglang_lite.runtime.kv_cache.pages import Ints

_WORDS: Final = 512  # per line
_LINE: Final = 8 * _WORDS  # bytes
_POINTER = ctypes.c_void_p
_LONG = ctypes.c_int64
SUM: Final = np.dtype("<u8")
ENDS_EARLY: Final = "it ends too early"

Rows = NDArray[np.uint8]


class DamagedFileError(ValueError):
    """Error: a file is not a file of pages, is incomplete, or was altered."""


def compute_page_sums(
    rows: Rows, slots: Ints, descriptor: int = -1, at: int = 0
) -> NDArray[np.uint64]:
    """Returns the checksum of each page, uint64 [N]. With a descriptor, first reads the pages from
    that file into the rows.

    Args:
        rows: uint8 [slots, bytes of a page].
        slots: int32 [N], rows of the pages.
        descriptor: descriptor of the file; -1 if the rows already hold the pages.
        at: offset of the first page in the file.

    Raises:
        OSError: the file can't be read.
        DamagedFileError: it ends before the last page.
    """
    function = compile_sum_pages()
    size = rows.shape[1]
    sums = np.empty(len(slots), SUM)
    if function is None:
        for i, slot in enumerate(slots.tolist()):
            if descriptor >= 0 and os.preadv(descriptor, [rows[slot].data], at + i * size) != size:
                raise DamagedFileError(ENDS_EARLY)
            sums[i] = _sum_page(rows[slot])
        return sums
    slots = np.ascontiguousarray(slots, np.int32)
    factors = _odd_factors(_WORDS - (-size // _LINE))
    error = function(
        descriptor,
        at,
        rows.ctypes.data,
        size,
        slots.ctypes.data,
        len(slots),
        factors.ctypes.data,
        sums.ctypes.data,
    )
    if error < 0:
        raise DamagedFileError(ENDS_EARLY)
    if error:
        raise OSError(error, os.strerror(error))
    return sums


@cache
def compile_sum_pages() -> Callable[..., int] | None:
    """Returns the compiled `sum_pages`, or None if it can't be compiled, for example because no
    compiler is installed. The first call on a machine compiles it, which takes about a second.
    """
    library = load_cpu_library(Path(__file__).with_suffix(".cpp"), cache_folder() / "compiled")
    if library is None:
        return None
    function: Any = library["sum_pages"]
    function.argtypes = [ctypes.c_int, _LONG, _POINTER, _LONG, _POINTER, _LONG, _POINTER, _POINTER]
    return function  # type: ignore[no-any-return] # ctypes' functions have no types


def _sum_page(page: Rows) -> np.uint64:
    """Computes the checksum of a page, uint8 [bytes]."""
    whole = page if len(page) % _LINE == 0 else np.pad(page, (0, -len(page) % _LINE))
    words = whole.view(SUM).reshape(-1, _WORDS)
    factors = _odd_factors(_WORDS + len(words))
    lines = np.einsum("lw,w->l", words ^ words >> np.uint64(32), factors[:_WORDS])
    return np.dot(lines, factors[_WORDS:])  # type: ignore[no-any-return] # numpy's dot has no types


@cache
def _odd_factors(count: int) -> NDArray[np.uint64]:
    """Returns odd pseudo-random numbers, the same in every process: uint64 [count]. (SplitMix64:
    Steele et al., 2014.)
    """
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ mixed >> np.uint64(shift)) * np.uint64(factor)
    return mixed ^ mixed >> np.uint64(31) | np.uint64(1)
