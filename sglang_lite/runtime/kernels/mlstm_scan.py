"""Matrix memories of xLSTM (mLSTM, arXiv:2405.04517) over rows of any length, in chunks of 32
or 64 tokens.

    m' = max(f + m, i);  C <- e^(f + m - m') C + e^(i - m') k v^T;  n likewise with v = 1
    out = C^T q / (max(|n q|, e^-m') + eps)

With g the sum of f from a chunk's beginning on, and C, n and m those before the chunk:

    m[t] = the largest of g[t] + m and of g[t] - g[s] + i[s] for s <= t
    C[t]^T q[t] = e^(g[t] + m - m[t]) C^T q[t]
        + sum over s <= t of e^(g[t] - g[s] + i[s] - m[t]) (q[t] k[s]) v[s]

Exponents are at most 0, except -m', which the cap of the gates bounds, so nothing overflows. Each
program computes some columns of C, and all of n and m. It reads and writes only the copies of n and
m that belong to its columns, so no program reads what another one overwrites.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.kv_layout import PANEL
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2
from sglang_lite.runtime.kernels.state_chunks import (
    CHUNK,
    count_columns,
    dot_precision,
    multiply,
)
from sglang_lite.runtime.kernels.state_rows import StateRows

_STEP_STATE = 1 << 12  # numbers of C in a program, if rows have one token
_MIN_ROWS = 16  # that matrix units take


@triton.jit
def _store_state(
    base,
    memory,
    norm,
    peak,
    of_memory,
    inside,
    i,
    PART,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PANELS: tl.constexpr,
    COPIES: tl.constexpr,
):
    """Stores a program's columns of C, and its copies of n and m.

    Args:
        base: where the head's numbers begin.
        memory, norm, peak: columns of C, n and m.
        of_memory, inside: places of `memory` after `base`, and which of them exist.
        i: numbers of the rows.
        PART: number of the program among those of the head.
    """
    tl.debug_barrier()  # all threads have read the state before one overwrites it
    tl.store(base + of_memory, memory.to(base.dtype.element_ty), mask=inside)
    for copy in tl.static_range(COPIES):
        panel = PART * COPIES + copy
        has = panel < PANELS
        place = base + DK * DV + panel * DK + i
        tl.store(place, norm.to(base.dtype.element_ty), mask=(i < DK) & has)
        place = base + DK * DV + PANELS * DK + panel
        tl.store(place, peak.to(base.dtype.element_ty), mask=has)


@cached_launch
@triton.jit
def _step(
    q,
    k,
    v,
    enter,
    decay,
    states,
    offsets,
    read,
    write,
    out,
    q_stride,
    k_stride,
    v_stride,
    state_stride,
    eps,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PANELS: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    row = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    token = tl.load(offsets + row).to(tl.int64)
    if tl.load(offsets + row + 1) - token != 1:
        return
    source = tl.load(read + row).to(tl.int64)
    target = tl.load(write + row).to(tl.int64)
    i = tl.arange(0, BLOCK_K)
    j = part * BLOCK_V + tl.arange(0, BLOCK_V)
    of_memory = i[:, None] * DV + j[None, :]
    inside = (i < DK)[:, None] & (j < DV)[None, :]
    of_head = head * (DK * DV + PANELS * (DK + 1))
    old = states + tl.maximum(source, 0) * state_stride + of_head
    has = source >= 0
    memory = tl.load(old + of_memory, mask=inside & has, other=0.0).to(tl.float32)
    copy = old + DK * DV + part * COPIES * DK
    norm = tl.load(copy + i, mask=(i < DK) & has, other=0.0).to(tl.float32)
    copy = old + DK * DV + PANELS * DK + part * COPIES
    peak = tl.load(copy, mask=has, other=0.0).to(tl.float32)
    key = tl.load(k + token * k_stride + head * DK + i, mask=i < DK, other=0.0).to(tl.float32)
    query = tl.load(q + token * q_stride + head * DK + i, mask=i < DK, other=0.0).to(tl.float32)
    value = tl.load(v + token * v_stride + head * DV + j, mask=j < DV, other=0.0).to(tl.float32)
    query *= DK**-0.5
    gate = tl.load(enter + token * HEADS + head)
    level = tl.load(decay + token * HEADS + head) + peak
    peak = tl.maximum(level, gate)
    kept = tl.exp(level - peak)
    key *= tl.exp(gate - peak)
    memory = memory * kept + key[:, None] * value[None, :]
    norm = norm * kept + key
    weight = tl.abs(tl.sum(norm * query, 0))
    result = tl.sum(memory * query[:, None], 0) / (tl.maximum(weight, tl.exp(-peak)) + eps)
    place = out + (token * HEADS + head) * DV + j
    tl.store(place, result.to(out.dtype.element_ty), mask=j < DV)
    if target >= 0:
        base = states + target * state_stride + of_head
        _store_state(base, memory, norm, peak, of_memory, inside, i, part, DK, DV, PANELS, COPIES)


@cached_launch
@triton.jit
def _scan(
    q,
    k,
    v,
    enter,
    decay,
    states,
    offsets,
    read,
    write,
    out,
    q_stride,
    k_stride,
    v_stride,
    state_stride,
    eps,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PANELS: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    row = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    begin = tl.load(offsets + row)
    end = tl.load(offsets + row + 1)
    if end - begin == 1:
        return
    source = tl.load(read + row).to(tl.int64)
    target = tl.load(write + row).to(tl.int64)
    i = tl.arange(0, BLOCK_K)
    j = part * BLOCK_V + tl.arange(0, BLOCK_V)
    of_memory = i[:, None] * DV + j[None, :]
    inside = (i < DK)[:, None] & (j < DV)[None, :]
    of_head = head * (DK * DV + PANELS * (DK + 1))
    old = states + tl.maximum(source, 0) * state_stride + of_head
    has = source >= 0
    memory = tl.load(old + of_memory, mask=inside & has, other=0.0).to(tl.float32)
    copy = old + DK * DV + part * COPIES * DK
    norm = tl.load(copy + i, mask=(i < DK) & has, other=0.0).to(tl.float32)
    copy = old + DK * DV + PANELS * DK + part * COPIES
    peak = tl.load(copy, mask=has, other=0.0).to(tl.float32)
    t = tl.arange(0, CHUNK)
    for first in range(begin, end, CHUNK):
        token = first + t
        wide = token.to(tl.int64)
        valid = token < end
        gate = tl.load(enter + wide * HEADS + head, mask=valid, other=-float("inf"))
        own = tl.load(decay + wide * HEADS + head, mask=valid, other=0.0).to(tl.float64)
        of_key = valid[:, None] & (i < DK)[None, :]
        place = wide[:, None] * k_stride + head * DK + i[None, :]
        key = tl.load(k + place, mask=of_key, other=0.0)
        place = wide[:, None] * q_stride + head * DK + i[None, :]
        query = tl.load(q + place, mask=of_key, other=0.0)
        of_value = valid[:, None] & (j < DV)[None, :]
        place = wide[:, None] * v_stride + head * DV + j[None, :]
        value = tl.load(v + place, mask=of_value, other=0.0).to(tl.float32)
        total = tl.cumsum(own, 0)
        at_end = tl.sum(own, 0)
        between = (total[:, None] - total[None, :]).to(tl.float32) + gate[None, :]
        levels = tl.where(t[:, None] >= t[None, :], between, -float("inf"))
        since = total.to(tl.float32) + peak
        top = tl.maximum(tl.max(levels, 1), since)
        weights = multiply(query, tl.trans(key), PRECISION) * tl.exp(levels - top[:, None])
        kept = tl.exp(since - top)
        weight = tl.sum(weights, 1) + tl.sum(query.to(tl.float32) * norm[None, :], 1) * kept
        result = multiply(query, memory, PRECISION) * kept[:, None]
        result += multiply(weights, value, PRECISION)
        weight = tl.maximum(tl.abs(weight) * DK**-0.5, tl.exp(-top)) + eps
        result *= (DK**-0.5 / weight)[:, None]
        place = out + (wide[:, None] * HEADS + head) * DV + j[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=of_value)
        until = (at_end - total).to(tl.float32) + gate
        level = at_end.to(tl.float32) + peak
        peak = tl.maximum(level, tl.max(until, 0))
        new = tl.exp(until - peak)[:, None]
        memory *= tl.exp(level - peak)
        memory += multiply(tl.trans(key), value * new, PRECISION)
        norm = norm * tl.exp(level - peak) + tl.sum(key.to(tl.float32) * new, 0)
    if target >= 0:
        base = states + target * state_stride + of_head
        _store_state(base, memory, norm, peak, of_memory, inside, i, part, DK, DV, PANELS, COPIES)


def mlstm_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    enter: torch.Tensor,
    decay: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
    *,
    eps: float,
) -> torch.Tensor:
    """Reads and updates the memories of each row, in float32.

    Args:
        q: queries [T, H, Dk], whose heads are contiguous. They are scaled by Dk ** -0.5.
        k: keys [T, H, Dk], likewise, but not scaled.
        v: values [T, H, Dv], whose heads are contiguous.
        enter: i, float32 [T, H]. Contiguous.
        decay: f, float32 [T, H], at most 0. Contiguous.
        states: pool [S, H, numbers of a memory], float32 (written), laid out as `MlstmSpec`
            describes. A state of zeros is empty.
        rows: rows of the step.
        eps: added to divisors.

    Returns:
        Outputs [T, H, Dv], in the data type of `v`. The scan includes the division. Operands of
        products have the precision of the inputs. A row of one token moves 2 H Dk Dv numbers of
        states, and 1 / 16 more for the copies of n. Longer rows also move 2 T H Dk elements for each
        block of 16 to 64 columns, mostly from caches, and 2 T H Dv more.
    """
    tokens, heads, dv = v.shape
    dk = k.shape[2]
    out = v.new_empty((tokens, heads, dv))
    block_k = round_up_to_power_of_2(dk)
    columns = min(max(_STEP_STATE // block_k, PANEL), max(round_up_to_power_of_2(dv), PANEL))
    shape = {"HEADS": heads, "DK": dk, "DV": dv, "PANELS": cdiv(dv, PANEL)}
    arguments = (
        q,
        k,
        v,
        enter,
        decay,
        states,
        rows.offsets,
        rows.read,
        rows.write,
        out,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        states.stride(0),
        eps,
    )
    _step[(len(rows.read), heads, cdiv(dv, columns))](
        *arguments,
        **shape,
        COPIES=columns // PANEL,
        BLOCK_K=block_k,
        BLOCK_V=columns,
        num_warps=4,
        **pdl_options(v.device),
    )
    if rows.longest == 1:
        return out
    # products of float32 in larger tiles overflow the registers
    whole = v.dtype == torch.float32
    precision = "ieee" if whole else dot_precision(v.dtype, v.device)
    columns = PANEL if whole else count_columns(precision, v.device)
    block_k = max(block_k, _MIN_ROWS)
    _scan[(len(rows.read), heads, cdiv(dv, columns))](
        *arguments,
        **shape,
        COPIES=columns // PANEL,
        BLOCK_K=block_k,
        BLOCK_V=columns,
        PRECISION=precision,
        CHUNK=max(columns, CHUNK // 2),  # sums of keys overflow the registers in larger chunks
        num_warps=8 if block_k > 64 else 4,
        num_stages=1,
        **pdl_options(v.device),
    )
    return out
