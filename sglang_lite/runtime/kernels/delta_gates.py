"""What the gated delta rule takes and gives besides its scan, each in one pass.

decay = rate * softplus(a + dt);  beta = scale * sigmoid(b)                         before it
out = (x * rsqrt(mean(x^2) + eps) * weight) * silu(z), of each head                 behind it
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2

_HEADS = 8  # of a program that normalises


@cached_launch
@triton.jit
def _delta_rates(
    b,
    a,
    rate,
    dt,
    decay,
    beta,
    stride,
    scale,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK)
    inside = head < HEADS
    x = tl.load(a + token * stride + head, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(dt + head, mask=inside, other=0.0)
    # log(1 + exp(x)) that doesn't overflow
    x = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    x *= tl.load(rate + head, mask=inside, other=0.0)
    tl.store(decay + token * HEADS + head, x, mask=inside)
    y = tl.load(b + token * stride + head, mask=inside, other=0.0).to(tl.float32)
    tl.store(beta + token * HEADS + head, scale * tl.sigmoid(y), mask=inside)


def delta_rates(
    b: torch.Tensor, a: torch.Tensor, rate: torch.Tensor, dt: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the decay of each head's state and the strength of its correction.

    Args:
        b: [T, heads], whose rows have the same stride as those of `a`.
        a: [T, heads].
        rate: float32 [heads], at most 0.
        dt: float32 [heads].
        scale: factor of the sigmoid.

    Returns:
        Decay, as a logarithm, and beta, float32 [T, heads] each. Moves 4 T heads elements.
    """
    tokens, heads = a.shape
    assert a.stride() == b.stride(), "columns of one product"
    decay, beta = (a.new_empty((tokens, heads), dtype=torch.float32) for _ in range(2))
    _delta_rates[(tokens,)](
        b,
        a,
        rate,
        dt,
        decay,
        beta,
        a.stride(0),
        scale,
        HEADS=heads,
        BLOCK=round_up_to_power_of_2(heads),
        num_warps=1,
        **pdl_options(a.device),
    )
    return decay, beta


@cached_launch
@triton.jit
def _gate_heads(
    x,
    z,
    weight,
    out,
    stride,
    eps,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    d = tl.arange(0, BLOCK)
    at = head[:, None] * SIZE + d[None, :]
    inside = (head < HEADS)[:, None] & (d < SIZE)[None, :]
    value = tl.load(x + token * HEADS * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 1) / SIZE + eps)[:, None]
    value *= tl.load(weight + d, mask=d < SIZE, other=0.0).to(tl.float32)[None, :]
    gate = tl.load(z + token * stride + at, mask=inside, other=0.0).to(tl.float32)
    value *= gate * tl.sigmoid(gate)
    tl.store(out + token * HEADS * SIZE + at, value.to(out.dtype.element_ty), mask=inside)


def gate_heads(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalises the outputs of each head, and multiplies them by an activated gate.

    Args:
        x: [T, heads, size], contiguous.
        z: gates [T, heads * size], whose columns are contiguous.
        weight: [size], of the norm.
        eps: epsilon of the norm.

    Returns:
        Gated outputs [T, heads * size]. Moves 3 T heads size elements.
    """
    tokens, heads, size = x.shape
    count = min(_HEADS, round_up_to_power_of_2(heads))
    out = x.new_empty((tokens, heads * size))
    _gate_heads[(tokens, cdiv(heads, count))](
        x,
        z,
        weight,
        out,
        z.stride(0),
        eps,
        HEADS=heads,
        SIZE=size,
        COUNT=count,
        BLOCK=round_up_to_power_of_2(size),
        num_warps=4,
        **pdl_options(x.device),
    )
    return out
