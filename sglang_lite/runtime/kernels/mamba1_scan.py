"""Selective state space of Mamba (arXiv:2312.00752) over rows of any length.

    S <- exp(dt a) S + dt x b^T;  out = S c + d x

Each number of a state decays on its own, so a program goes through a row's tokens one by one, with
the states of some channels in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2
from sglang_lite.runtime.kernels.state_rows import StateRows

_BLOCK_C = 32  # channels of a program


@cached_launch
@triton.jit
def _scan(
    x,
    b,
    c,
    dt,
    a,
    d,
    states,
    offsets,
    read,
    write,
    out,
    x_stride,
    b_stride,
    c_stride,
    state_stride,
    C: tl.constexpr,
    N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    row = tl.program_id(0)
    begin = tl.load(offsets + row)
    end = tl.load(offsets + row + 1)
    source = tl.load(read + row).to(tl.int64)
    target = tl.load(write + row).to(tl.int64)
    i = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    j = tl.arange(0, BLOCK_N)
    of_state = i[:, None] * N + j[None, :]
    inside = (i < C)[:, None] & (j < N)[None, :]
    state = tl.load(
        states + tl.maximum(source, 0) * state_stride + of_state,
        mask=inside & (source >= 0),
        other=0.0,
    ).to(tl.float32)
    rate = tl.load(a + of_state, mask=inside, other=0.0)
    skip = tl.load(d + i, mask=i < C, other=0.0)
    token = begin.to(tl.int64)
    for _ in range(begin, end):
        value = tl.load(x + token * x_stride + i, mask=i < C, other=0.0).to(tl.float32)
        step = tl.load(dt + token * C + i, mask=i < C, other=0.0)
        enter = tl.load(b + token * b_stride + j, mask=j < N, other=0.0).to(tl.float32)
        leave = tl.load(c + token * c_stride + j, mask=j < N, other=0.0).to(tl.float32)
        state = state * tl.exp(step[:, None] * rate) + (step * value)[:, None] * enter[None, :]
        result = tl.sum(state * leave[None, :], 1) + skip * value
        tl.store(out + token * C + i, result.to(out.dtype.element_ty), mask=i < C)
        token += 1
    tl.store(
        states + tl.maximum(target, 0) * state_stride + of_state,
        state.to(states.dtype.element_ty),
        mask=inside & (target >= 0),
    )


def mamba1_scan(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """Applies Mamba's state space to each row, in float32.

    Args:
        x: inputs [T, C], whose channels are contiguous.
        b: [T, N], likewise.
        c: [T, N], likewise.
        dt: float32 [T, C], positive step sizes. Contiguous.
        a: float32 [C, N], negative.
        d: float32 [C], weight of the input in the output.
        states: pool [S, C, N] of float32 or bfloat16 (written).
        rows: rows of the step.

    Returns:
        Outputs [T, C], in the data type of `x`. Moves 2 C N numbers of states for each row, and 3 C
        elements for each token.
    """
    tokens, channels = x.shape
    n = b.shape[1]
    out = x.new_empty((tokens, channels))
    _scan[(len(rows.read), cdiv(channels, _BLOCK_C))](
        x,
        b,
        c,
        dt,
        a,
        d,
        states,
        rows.offsets,
        rows.read,
        rows.write,
        out,
        x.stride(0),
        b.stride(0),
        c.stride(0),
        states.stride(0),
        C=channels,
        N=n,
        BLOCK_C=_BLOCK_C,
        BLOCK_N=round_up_to_power_of_2(n),
        num_warps=1,
        **pdl_options(x.device),
    )
    return out
