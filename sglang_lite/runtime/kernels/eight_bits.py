"""Quantisation of rows to 8 bits, floating point (e4m3) or integers, with one scale per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.eight_bit_rows import FLOAT8, LARGEST, EightBitRows
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import round_up_to_power_of_2

_FLOATS: tl.constexpr = tl.constexpr(LARGEST[FLOAT8])
_INTEGERS: tl.constexpr = tl.constexpr(LARGEST[torch.int8])


@cached_launch
@triton.jit
def _quantise(x, out, scales, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    value = tl.load(x + row * size + at, mask=at < size, other=0.0).to(tl.float32)
    store_eight(value, row, at, size, out, scales)


@triton.jit
def store_eight(value, row, at, size, out, scales):
    """Stores a whole row of float32 in the 8-bit type of `out`. `value` must be 0 beyond `size`."""
    integers: tl.constexpr = out.dtype.element_ty == tl.int8
    scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-12) / (_INTEGERS if integers else _FLOATS)
    tl.store(scales + row, scale)
    value = value / scale
    if integers:
        value = tl.floor(value + 0.5)
    tl.store(out + row * size + at, value.to(out.dtype.element_ty), mask=at < size)


def quantise_rows(x: torch.Tensor, kind: torch.dtype) -> EightBitRows:
    """Returns x [M, K] quantised to an 8-bit type. Moves 1.5 M K elements."""
    eight = EightBitRows.allocate_eight_bit(x, x.shape[1], kind)
    block = round_up_to_power_of_2(x.shape[1])
    _quantise[(len(x),)](
        x,
        eight.values,
        eight.scales,
        x.shape[1],
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **pdl_options(x.device),
    )
    return eight
