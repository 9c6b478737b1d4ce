"""Selective state space of Mamba 2 (arXiv:2405.21060) over rows of any length, in chunks of 64
tokens.

    S <- exp(dt a) S + dt x b^T;  out = S c + d x

With g the sum of dt a from a chunk's beginning on, and S the state before the chunk:

    out[i] = exp(g[i]) S c[i] + sum over j <= i of exp(g[i] - g[j]) (c[i] b[j]) dt[j] x[j] + d x[i]
    S <- exp(g[last]) S + sum over j of exp(g[last] - g[j]) dt[j] x[j] b[j]^T

Only differences that are at most 0 are exponentiated, so nothing overflows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2
from sglang_lite.runtime.kernels.state_chunks import (
    CHUNK,
    count_columns,
    decay_between,
    dot_precision,
    multiply,
)
from sglang_lite.runtime.kernels.state_rows import StateRows
from sglang_lite.runtime.kernels.state_step import mamba2_step

_BLOCK_P = 16  # rows of the state in a program, in float32
_MIN_TILE = 16  # rows and columns that matrix units take


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
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    row = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(offsets + row)
    end = tl.load(offsets + row + 1)
    if end - begin == 1:
        return
    source = tl.load(read + row).to(tl.int64)
    target = tl.load(write + row).to(tl.int64)
    i = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    j = tl.arange(0, BLOCK_N)
    of_state = head * P * N + i[None, :] * N + j[:, None]  # transposed: [N, P]
    inside = (i < P)[None, :] & (j < N)[:, None]
    state = tl.load(
        states + tl.maximum(source, 0) * state_stride + of_state,
        mask=inside & (source >= 0),
        other=0.0,
    ).to(tl.float32)
    rate = tl.load(a + head)
    skip = tl.load(d + head)
    of_group = (head // REPEATS) * N + j[None, :]
    for first in range(begin, end, CHUNK):
        token = first + tl.arange(0, CHUNK)
        wide = token.to(tl.int64)
        valid = (token < end)[:, None]
        step = tl.load(dt + wide * HEADS + head, mask=token < end, other=0.0)
        has = valid & (j < N)[None, :]
        enter = tl.load(b + wide[:, None] * b_stride + of_group, mask=has, other=0.0)
        leave = tl.load(c + wide[:, None] * c_stride + of_group, mask=has, other=0.0)
        has = valid & (i < P)[None, :]
        values = tl.load(
            x + wide[:, None] * x_stride + head * P + i[None, :], mask=has, other=0.0
        ).to(tl.float32)
        enter = enter.to(tl.float32)
        leave = leave.to(tl.float32)
        own = (step * rate).to(tl.float64)
        total = tl.cumsum(own, 0)
        at_end = tl.sum(own, 0)
        since = tl.exp(total.to(tl.float32))[:, None]
        until = tl.exp(tl.minimum(at_end - total, 0.0).to(tl.float32))[:, None]
        scaled = values * step[:, None]
        weights = multiply(leave, tl.trans(enter), PRECISION) * decay_between(total)
        result = multiply(weights, scaled, PRECISION) + skip * values
        result += multiply(leave * since, state, PRECISION)
        place = out + (wide[:, None] * HEADS + head) * P + i[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=has)
        state *= tl.exp(at_end.to(tl.float32))
        state += multiply(tl.trans(enter * until), scaled, PRECISION)
    tl.store(
        states + tl.maximum(target, 0) * state_stride + of_state,
        state.to(states.dtype.element_ty),
        mask=inside & (target >= 0),
    )


def mamba2_scan(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """Applies Mamba 2's state space to each row. Rows of one token are computed by `mamba2_step`.

    Args:
        x: inputs [T, H, P], whose heads are contiguous.
        b: [T, G, N], whose groups are contiguous. Head h uses group h // (H // G).
        c: [T, G, N], likewise.
        dt: float32 [T, H], positive step sizes. Contiguous.
        a: float32 [H], negative.
        d: float32 [H], weight of the input in the output.
        states: pool [S, H, P, N] of float32 or bfloat16 (written).
        rows: rows of the step.

    Returns:
        Outputs [T, H, P], in the data type of `x`. States are float32 within a row; operands of
        products have the precision of the inputs. Longer rows move 2 T H N elements for every 32
        rows of the state, mostly from caches, and 2 T H P more.
    """
    tokens, heads, p = x.shape
    groups, n = b.shape[1:]
    out = x.new_empty((tokens, heads, p))
    mamba2_step(x, b, c, dt, a, d, states, rows, out)
    if rows.longest == 1:
        return out
    block_n = max(round_up_to_power_of_2(n), _MIN_TILE)
    # products of float32 in larger tiles overflow the registers
    whole = x.dtype == torch.float32
    precision = "ieee" if whole else dot_precision(x.dtype, x.device)
    block_p = _BLOCK_P if whole else count_columns(precision, x.device)
    _scan[(len(rows.read), heads, cdiv(p, block_p))](
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
        HEADS=heads,
        REPEATS=heads // groups,
        P=p,
        N=n,
        BLOCK_P=block_p,
        BLOCK_N=block_n,
        PRECISION=precision,
        CHUNK=CHUNK // 2 if whole else CHUNK,
        num_warps=8 if block_n > 64 else 4,
        num_stages=1,
        **pdl_options(x.device),
    )
    return out
