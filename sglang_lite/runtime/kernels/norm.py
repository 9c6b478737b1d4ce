"""Root-mean-square normalisation (Zhang and Sennrich, arXiv:1910.07467), with the residual addition fused in."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.fp8 import Scales
from sglang_lite.runtime.kernels.pdl import overlapped, start_next, wait


@triton.jit
def _add_rms_norm(
    x, row_scales, scales, residual, weight, out, size, eps,
    SCALED: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    value = tl.load(x + row * size + at, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        value *= tl.load(row_scales + row) * tl.load(scales + at, mask=inside, other=0.0)
    if ADD:
        # Rounded to the stream's own format first: what is normalised is what later layers see.
        value += tl.load(residual + row * size + at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(x.dtype.element_ty)
        tl.store(residual + row * size + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / size + eps)
    tl.store(out + row * size + at, (value * scale * w).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, scales: Scales | None = None) -> torch.Tensor:
    """x [T, H], times its scales, over its root mean square, times weight [H]; in float32 inside. Moves 2 T H
    elements."""
    out = torch.empty_like(x)
    _add_rms_norm[(len(x),)](
        x, scales and scales.rows, scales and scales.columns, x, weight, out, x.shape[1], eps,
        SCALED=scales is not None, ADD=False, **_launch(x),
    )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scales: Scales | None = None
) -> torch.Tensor:
    """`rms_norm` of x, times its scales, + residual [T, H], which is left in `residual`. Moves 4 T H elements."""
    out = torch.empty_like(x)
    _add_rms_norm[(len(x),)](
        x, scales and scales.rows, scales and scales.columns, residual, weight, out, x.shape[1], eps,
        SCALED=scales is not None, ADD=True, **_launch(x),
    )  # fmt: skip
    return out


def _launch(x: torch.Tensor) -> dict[str, Any]:
    block = triton.next_power_of_2(x.shape[1])
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16), **overlapped(x.device)}
