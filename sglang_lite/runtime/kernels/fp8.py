"""Rows in 8-bit floating point (e4m3), each with its own scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.pdl import overlapped, start_next, wait

LARGEST: tl.constexpr = tl.constexpr(448.0)  # of e4m3


@dataclass(frozen=True, slots=True)
class Scales:
    """What a product [M, N] of 8-bit numbers has yet to be multiplied with: the kernel that reads it does so.

    Attributes:
        rows: float32 [M].
        columns: float32 [N].
    """

    rows: torch.Tensor
    columns: torch.Tensor


@triton.jit
def _quantise(x, out, scales, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    value = tl.load(x + row * size + at, mask=at < size, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-12) / LARGEST
    tl.store(scales + row, scale)
    tl.store(out + row * size + at, (value / scale).to(out.dtype.element_ty), mask=at < size)


def quantise_rows(x: torch.Tensor, *, least: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] as e4m3 [M, K] and float32 scales [M]: x is about their product. Moves 1.5 M K elements.

    Args:
        least: rows of the results, those beyond M undefined.
    """
    rows = max(len(x), least)
    out = torch.empty((rows, x.shape[1]), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    _quantise[(len(x),)](
        x, out, scales, x.shape[1], BLOCK=block, num_warps=min(max(block // 512, 1), 16), **overlapped(x.device)
    )
    return out, scales
