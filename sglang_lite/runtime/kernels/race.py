"""Draws tokens on a CPU by the race of `sampling.py`: with the same seed and the same logits, a CPU
and a GPU draw the same token, except where two scores differ only by rounding. Compiled from
`race.cpp`; without a compiler, numpy runs instead.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_lite.runtime.host.cache_folder import cache_folder
from sglang_lite.runtime.host.cpu_library import load_cpu_library

Ints = NDArray[np.int32]
Words = NDArray[np.uint64]

_POINTER = ctypes.c_void_p
_LONG = ctypes.c_int64
_BLOCK = 4096  # as in `sampling.py`
_WORD = np.uint64(0xFFFFFFFF)


def draw_tokens(
    logits: torch.Tensor,
    rows: NDArray[np.int64],
    temperatures: NDArray[np.float32],
    seeds: Words,
    positions: Ints,
) -> NDArray[np.int64]:
    """Draws one token for each of some rows: the one with the largest logit / temperature - log(E),
    where E is an exponential variable of the seed, the position and the token.

    A token that is removed from the race doesn't change the order of the others. So if a drawn
    token is rejected, drawing again without it has the distribution of a new draw among the others.

    Reads each row once (4 V bytes).

    Args:
        logits: float32 [N, V], each row contiguous; -inf for tokens that must not be drawn.
        rows: indices [R] of the rows to draw from.
        temperatures: temperature of each of them, float32 [R], above 0.
        seeds: uint64 [R].
        positions: int32 [R], position of the drawn token.

    Returns:
        The tokens [R]. 0 for a row in which no token may be drawn.
    """
    run = compile_race()
    if run is None:
        drawn = [
            _draw_token(logits[row].numpy(), *key)
            for row, *key in zip(rows.tolist(), temperatures, seeds, positions, strict=True)
        ]
        return np.array(drawn, dtype=np.int64)
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1 or logits.shape[1] == 1
    tokens = np.empty(len(rows), dtype=np.int64)
    # The arrays must not be freed before the call returns.
    arrays = (
        np.ascontiguousarray(rows, np.int64),
        np.ascontiguousarray(temperatures, np.float32),
        np.ascontiguousarray(seeds, np.uint64),
        np.ascontiguousarray(positions, np.int32),
    )
    # `array.ctypes` would take several calls in Python.
    rows_at, *keys_at = [array.__array_interface__["data"][0] for array in arrays]
    run(
        logits.data_ptr(),
        logits.stride(0),
        rows_at,
        len(rows),
        logits.shape[1],
        *keys_at,
        tokens.__array_interface__["data"][0],
    )
    return tokens


@cache
def compile_race() -> Callable[..., None] | None:
    """Returns the compiled function, or None if there is no compiler. The first call on a machine
    compiles it, which takes about a second.
    """
    library = load_cpu_library(Path(__file__).with_suffix(".cpp"), cache_folder() / "compiled")
    if library is None:
        return None
    function: Any = library["draw_tokens"]
    function.argtypes = [_POINTER, _LONG, _POINTER, _LONG, _LONG, *[_POINTER] * 4]
    function.restype = None
    return function  # type: ignore[no-any-return] # ctypes' functions have no types


def draw_exponentials(seed: int, position: int, size: int) -> NDArray[np.float64]:
    """Returns the exponential variables of tokens 0 to size - 1, float64 [size].

    Args:
        seed: unsigned 64-bit integer.
        position: position of the draw.
        size: number of tokens.
    """
    blocks = -(-size // _BLOCK)
    counters = np.arange(blocks * _BLOCK // 4, dtype=np.uint64).reshape(blocks, -1)
    bits = np.stack(_philox(seed, counters, position), axis=1).ravel()[:size].astype(np.float32)
    uniforms = (bits + np.float32(0.5)) * np.float32(2.0**-32)
    noise: NDArray[np.float64] = -np.log1p(
        -np.minimum(uniforms, np.float32(0.99999994)).astype(np.float64)
    )
    return noise


def _draw_token(
    logits: NDArray[np.float32], temperature: np.float32, seed: np.uint64, position: np.int32
) -> int:
    noise = np.log(draw_exponentials(int(seed), int(position), len(logits)))
    return int((logits / np.float64(temperature) - noise).argmax())


def _philox(seed: int, counters: Words, position: int) -> tuple[Words, ...]:
    """Returns four 32-bit random numbers for each counter (Philox4x32-10: Salmon et al., SC 2011)."""
    low, high = seed & 0xFFFFFFFF, seed >> 32
    half = np.uint64(32)
    a, b, c, d = counters, np.full_like(counters, position), counters * 0, counters * 0
    for _ in range(10):
        left, right = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        a, b, c, d = (
            right >> half ^ b ^ np.uint64(low),
            right & _WORD,
            left >> half ^ d ^ np.uint64(high),
            left & _WORD,
        )
        low = low + 0x9E3779B9 & 0xFFFFFFFF
        high = high + 0xBB67AE85 & 0xFFFFFFFF
    return a, b, c, d
