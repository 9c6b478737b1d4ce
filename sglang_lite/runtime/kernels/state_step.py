"""Recurrent states of rows with one token each: the gated delta rule, and Mamba 2.

    S <- exp(decay) S;  u = beta (v - S^T k);  S <- S + k u^T;  out = S^T q      delta rule
    S <- exp(dt a) S + dt x b^T;  out = S c + d x                                Mamba 2

A program has a row, a head and a block of the state, which it reads once and writes once. That is
nearly all that is moved.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2
from sglang_lite.runtime.kernels.state_rows import StateRows

_STATE = 1 << 12  # numbers of a state in a program


@cached_launch
@triton.jit
def _delta_step(
    q,
    k,
    v,
    decay,
    beta,
    states,
    offsets,
    read,
    write,
    out,
    q_stride,
    k_stride,
    v_stride,
    state_stride,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    row = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(offsets + row).to(tl.int64)
    if tl.load(offsets + row + 1) - token != 1:
        return
    source = tl.load(read + row).to(tl.int64)
    target = tl.load(write + row).to(tl.int64)
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    of_state = head * DK * DV + i[:, None] * DV + j[None, :]
    inside = (i < DK)[:, None] & (j < DV)[None, :]
    state = tl.load(
        states + tl.maximum(source, 0) * state_stride + of_state,
        mask=inside & (source >= 0),
        other=0.0,
    ).to(tl.float32)
    of_key = (head // REPEATS) * DK + i
    key = tl.load(k + token * k_stride + of_key, mask=i < DK, other=0.0).to(tl.float32)
    query = tl.load(q + token * q_stride + of_key, mask=i < DK, other=0.0).to(tl.float32)
    value = tl.load(v + token * v_stride + head * DV + j, mask=j < DV, other=0.0).to(tl.float32)
    key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
    query *= tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * DK**-0.5
    if BY_CHANNEL:
        kept = tl.exp(tl.load(decay + (token * HEADS + head) * DK + i, mask=i < DK, other=0.0))
        state *= kept[:, None]
    else:
        state *= tl.exp(tl.load(decay + token * HEADS + head))
    strength = tl.load(beta + token * HEADS + head)
    u = strength * (value - tl.sum(state * key[:, None], 0))
    state += key[:, None] * u[None, :]
    result = tl.sum(state * query[:, None], 0)
    place = out + (token * HEADS + head) * DV + j
    tl.store(place, result.to(out.dtype.element_ty), mask=j < DV)
    tl.store(
        states + tl.maximum(target, 0) * state_stride + of_state,
        state.to(states.dtype.element_ty),
        mask=inside & (target >= 0),
    )


def delta_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
    out: torch.Tensor,
) -> None:
    """Applies the gated delta rule to the rows that have one token, in float32. Others are left
    alone.

    Args:
        q: queries [T, Hk, Dk], whose heads are contiguous. They are L2-normalised and scaled by
            Dk ** -0.5.
        k: keys [T, Hk, Dk], likewise; L2-normalised. Value head h uses key head h // (Hv // Hk).
        v: values [T, Hv, Dv], whose heads are contiguous.
        decay: float32 [T, Hv], or [T, Hv, Dk] if each channel has its own; logarithms, at most 0.
        beta: float32 [T, Hv].
        states: pool [S, Hv, Dk, Dv] of float32 or bfloat16 (written).
        rows: rows of the step.
        out: outputs [T, Hv, Dv], contiguous (written). Moves 2 Hv Dk Dv numbers of states for each
            row.
    """
    _, heads, dv = v.shape
    dk = k.shape[2]
    block_k = round_up_to_power_of_2(dk)
    block_v = min(max(_STATE // block_k, 16), round_up_to_power_of_2(dv))
    _delta_step[(len(rows.read), heads, cdiv(dv, block_v))](
        q,
        k,
        v,
        decay,
        beta,
        states,
        rows.offsets,
        rows.read,
        rows.write,
        out,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        states.stride(0),
        HEADS=heads,
        REPEATS=heads // k.shape[1],
        DK=dk,
        DV=dv,
        BY_CHANNEL=decay.dim() == 3,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        num_warps=4,
        **pdl_options(q.device),
    )


@cached_launch
@triton.jit
def _mamba2_step(
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
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    row = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(offsets + row).to(tl.int64)
    if tl.load(offsets + row + 1) - token != 1:
        return
    source = tl.load(read + row).to(tl.int64)
    target = tl.load(write + row).to(tl.int64)
    i = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    j = tl.arange(0, BLOCK_N)
    of_state = head * P * N + i[:, None] * N + j[None, :]
    inside = (i < P)[:, None] & (j < N)[None, :]
    state = tl.load(
        states + tl.maximum(source, 0) * state_stride + of_state,
        mask=inside & (source >= 0),
        other=0.0,
    ).to(tl.float32)
    of_group = (head // REPEATS) * N + j
    enter = tl.load(b + token * b_stride + of_group, mask=j < N, other=0.0).to(tl.float32)
    leave = tl.load(c + token * c_stride + of_group, mask=j < N, other=0.0).to(tl.float32)
    value = tl.load(x + token * x_stride + head * P + i, mask=i < P, other=0.0).to(tl.float32)
    step = tl.load(dt + token * HEADS + head)
    state *= tl.exp(step * tl.load(a + head))
    state += (step * value)[:, None] * enter[None, :]
    result = tl.sum(state * leave[None, :], 1) + tl.load(d + head) * value
    place = out + (token * HEADS + head) * P + i
    tl.store(place, result.to(out.dtype.element_ty), mask=i < P)
    tl.store(
        states + tl.maximum(target, 0) * state_stride + of_state,
        state.to(states.dtype.element_ty),
        mask=inside & (target >= 0),
    )


def mamba2_step(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
    out: torch.Tensor,
) -> None:
    """Applies Mamba 2's state space to the rows that have one token, in float32. Others are left
    alone.

    Args:
        x: inputs [T, H, P], whose heads are contiguous.
        b: [T, G, N], whose groups are contiguous. Head h uses group h // (H // G).
        c: [T, G, N], likewise.
        dt: float32 [T, H], positive step sizes.
        a: float32 [H], negative.
        d: float32 [H], weight of the input in the output.
        states: pool [S, H, P, N] of float32 or bfloat16 (written).
        rows: rows of the step.
        out: outputs [T, H, P], contiguous (written). Moves 2 H P N numbers of states for each row.
    """
    _, heads, p = x.shape
    groups, n = b.shape[1:]
    block_n = round_up_to_power_of_2(n)
    block_p = min(max(_STATE // block_n, 16), round_up_to_power_of_2(p))
    _mamba2_step[(len(rows.read), heads, cdiv(p, block_p))](
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
        num_warps=4,
        **pdl_options(x.device),
    )
