"""Quantisation of rows to 8-bit floating point (e4m3), with one scale per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.fp8_rows import Fp8Rows
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import power_of_2

LARGEST: tl.constexpr = tl.constexpr(448.0)  # largest number of e4m3


@cached_launch
@triton.jit
def _quantise(x, out, scales, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    value = tl.load(x + row * size + at, mask=at < size, other=0.0).to(tl.float32)
    store_fp8(value, row, at, size, out, scales)


@triton.jit
def store_fp8(value, row, at, size, out, scales):
    """Stores a whole row of float32 in 8 bits. `value` must be 0 beyond `size`."""
    scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-12) / LARGEST
    tl.store(scales + row, scale)
    tl.store(out + row * size + at, (value / scale).to(out.dtype.element_ty), mask=at < size)


def quantise_rows(x: torch.Tensor) -> Fp8Rows:
    """Returns x [M, K] in 8 bits. Moves 1.5 M K elements."""
    eight = Fp8Rows.empty(x, x.shape[1])
    block = power_of_2(x.shape[1])
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
