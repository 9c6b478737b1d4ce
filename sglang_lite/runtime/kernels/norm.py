"""Root-mean-square norm (Zhang and Sennrich, arXiv:1910.07467) and layer norm (Ba et al.,
arXiv:1607.06450) of rows [T, H], with the residual addition fused in.

    out = x / sqrt(mean(x²) + eps) * weight          RMS norm: weight [H]
    out = the same of x - mean(x), plus bias         layer norm: weight [2, H], factors and biases
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.all_reduce import CHANNELS, Peers, summed, warps_per_exchange
from sglang_lite.runtime.kernels.eight_bit_rows import EightBitRows, Scales
from sglang_lite.runtime.kernels.eight_bits import store_eight
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import round_up_to_power_of_2


@cached_launch
@triton.jit(do_not_specialize=["rank", "channels", "words"])
def _add_norm(
    x,
    row_scales,
    scales,
    residual,
    weight,
    out,
    eight,
    eight_scales,
    size,
    eps,
    addresses,
    epochs,
    rank,
    channels,
    words,
    SCALED: tl.constexpr,
    ADD: tl.constexpr,
    CENTRED: tl.constexpr,
    WIDE: tl.constexpr,
    EIGHT: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    bias = w
    if CENTRED:
        bias = tl.load(weight + size + at, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    value = tl.load(x + row * size + at, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 1:
        for part in tl.static_range(1, PARTS):
            value += tl.load(
                x + (part * tl.num_programs(0) + row) * size + at, mask=inside, other=0.0
            )
        # rounded as the result of a single product would be
        value = value.to(residual.dtype.element_ty).to(tl.float32)
    if SCALED:
        value *= tl.load(row_scales + row) * tl.load(scales + at, mask=inside, other=0.0)
    if RANKS > 1:
        value = summed(
            value,
            size,
            addresses,
            epochs,
            rank,
            channels,
            words,
            weight.dtype.element_ty,
            BLOCK,
            RANKS,
        )
    if ADD:
        # Rounded to the data type of the residual stream first, so that the norm sees the same
        # values as later layers.
        value += tl.load(residual + row * size + at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + row * size + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if CENTRED:
        value = tl.where(inside, value - tl.sum(value) / size, 0.0)
    value = value * tl.rsqrt(tl.sum(value * value) / size + eps) * w
    if CENTRED:
        value += bias
    if EIGHT:
        store_eight(value, row, at, size, eight, eight_scales)
    if WIDE:
        tl.store(out + row * size + at, value.to(out.dtype.element_ty), mask=inside)


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scales: Scales | None = None,
    ranks: Peers | None = None,
) -> torch.Tensor:
    """Returns the norm of x [T, H] after multiplying it by its scales, computed in float32. Moves 2
    T H elements.

    Args:
        x: [T, H].
        weight: [H] for an RMS norm, [2, H] for a layer norm.
        eps: epsilon of the norm.
        scales: scales still to be applied to x after an 8-bit matmul, or None.
        ranks: ranks whose x are added up first, in the weight's type; x must satisfy
            `Peers.can_exchange_rows`.
    """
    out = x.new_empty(x.shape)
    _launch(x, None, weight, eps, scales, ranks, out=out)
    return out


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scales: Scales | None = None,
    ranks: Peers | None = None,
) -> torch.Tensor:
    """Adds x, times its scales, to `residual` [T, H] in place, and returns the norm of the sum.
    Moves 4 T H elements.

    Args:
        x: [T, H], or parts [P, T, H] that add up to it, from `kernels.tiled.linear_split_k`.
        residual: [T, H] (written).
        weight, eps, scales, ranks: as for `norm`.
    """
    out = residual.new_empty(residual.shape)
    _launch(x, residual, weight, eps, scales, ranks, out=out)
    return out


def norm_eight(
    x: torch.Tensor, weight: torch.Tensor, eps: float, kind: torch.dtype
) -> EightBitRows:
    """Returns the norm of x in an 8-bit type."""
    eight = EightBitRows.allocate_eight_bit(x, x.shape[1], kind)
    _launch(x, None, weight, eps, None, None, eight=eight)
    return eight


def add_norm_eight(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scales: Scales | None,
    kind: torch.dtype,
    ranks: Peers | None = None,
    *,
    unquantised: bool = False,
) -> EightBitRows:
    """Adds x to the residual like `add_norm`, and returns the norm of the sum in an 8-bit type.

    Args:
        x, residual, weight, eps, scales, ranks: as for `add_norm`.
        kind: the type.
        unquantised: whether to return the rows before quantisation, too.
    """
    eight = EightBitRows.allocate_eight_bit(
        residual, residual.shape[1], kind, unquantised=unquantised
    )
    _launch(x, residual, weight, eps, scales, ranks, out=eight.unquantised, eight=eight)
    return eight


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    scales: Scales | None,
    ranks: Peers | None,
    *,
    out: torch.Tensor | None = None,
    eight: EightBitRows | None = None,
) -> None:
    rows, size = x.shape[-2:]
    block = round_up_to_power_of_2(size)
    warps = min(max(block // 512, 1), 16)
    exchange: tuple[Any, ...] = (None, None, 0, 0, 0)
    if ranks is not None:
        exchange = ranks.addresses, ranks.epochs, ranks.rank, CHANNELS, ranks.words
        warps = max(warps, warps_per_exchange(size * weight.element_size() // 4))
    _add_norm[(rows,)](
        x,
        scales and scales.rows,
        scales and scales.columns,
        residual,
        weight,
        out,
        eight and eight.values,
        eight and eight.scales,
        size,
        eps,
        *exchange,
        SCALED=scales is not None,
        ADD=residual is not None,
        CENTRED=weight.dim() == 2,
        WIDE=out is not None,
        EIGHT=eight is not None,
        RANKS=1 if ranks is None else ranks.count,
        BLOCK=block,
        PARTS=len(x) if x.dim() == 3 else 1,
        num_warps=warps,
        **pdl_options(x.device),
    )
