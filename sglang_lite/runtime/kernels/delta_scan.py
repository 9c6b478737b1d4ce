"""Gated delta rule (Gated DeltaNet, arXiv:2412.06464, and Kimi Delta Attention, arXiv:2510.26692)
over rows of any length, in chunks of 64 tokens.

    S <- exp(decay) S;  u = beta (v - S^T k);  S <- S + k u^T;  out = S^T q

With g the sum of the decays from a chunk's beginning on, and S the state before the chunk:

    A[i, j] = exp(g[i] - g[j]) (k[i] k[j])            for i > j
    B[i, j] = exp(g[i] - g[j]) (q[i] k[j])            for i >= j
    T = (I + diag(beta) A)^-1 diag(beta)
    u = T v - T (exp(g) k) S
    out = (exp(g) q) S + B u
    S <- exp(g[last]) S + (exp(g[last] - g) k)^T u

B, T v and T (exp(g) k) do not depend on the state. A first kernel computes them for all chunks in
parallel, and a second one goes through each row's chunks in order. Only differences of decays that
are at most 0 are exponentiated, so nothing overflows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.device_properties import properties_of
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2
from sglang_lite.runtime.kernels.state_chunks import (
    CHUNK,
    count_columns,
    count_slots,
    decay_between,
    dot_precision,
    find_chunk,
    invert_unit_triangle,
    multiply,
)
from sglang_lite.runtime.kernels.state_rows import StateRows
from sglang_lite.runtime.kernels.state_step import delta_step

_BLOCK_K = 64  # channels that are multiplied at the same time
_PART = 16  # tokens in whose pairs channels decay by factors of their own
_MIN_TILE = 16  # rows and columns that matrix units take
_BESIDE = 24 << 10  # bytes of shared memory that a program takes besides its chunks


@triton.jit
def _load_part(x, stride, token, end, head, at, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Returns channels `at` to `at` + BLOCK of a head's vectors of some tokens; zeros from token
    `end` and channel DIM on.
    """
    i = at + tl.arange(0, BLOCK)
    place = x + token.to(tl.int64)[:, None] * stride + head * DIM + i[None, :]
    inside = (token < end)[:, None] & (i < DIM)[None, :]
    return tl.load(place, mask=inside, other=0.0)


@triton.jit
def _store_part(x, of_chunk, at, part, DIM: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Stores channels `at` to `at` + BLOCK of a chunk's vectors [CHUNK, DIM]."""
    i = at + tl.arange(0, BLOCK)
    place = x + (of_chunk * CHUNK + tl.arange(0, CHUNK)[:, None]) * DIM + i[None, :]
    tl.store(place, part.to(x.dtype.element_ty), mask=(i < DIM)[None, :])


@triton.jit
def _products(
    x,
    x_stride,
    y,
    y_stride,
    token,
    end,
    head,
    DK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Returns x @ y^T of a head's vectors of some tokens, and the squared norms of those of x."""
    products = tl.zeros((CHUNK, CHUNK), tl.float32)
    norms = tl.zeros((CHUNK,), tl.float32)
    for at in range(0, DK, BLOCK_K):
        left = _load_part(x, x_stride, token, end, head, at, DK, BLOCK_K)
        right = _load_part(y, y_stride, token, end, head, at, DK, BLOCK_K)
        products += multiply(left, tl.trans(right), PRECISION)
        left = left.to(tl.float32)
        norms += tl.sum(left * left, 1)
    return products, norms


@triton.jit
def _invert(a, strength, PRECISION: tl.constexpr, CHUNK: tl.constexpr):
    """Returns (I + diag(beta) A)^-1 diag(beta) of a chunk."""
    i = tl.arange(0, CHUNK)
    a = tl.where(i[:, None] > i[None, :], a * strength[:, None], 0.0)
    return invert_unit_triangle(a, PRECISION) * strength[None, :]


@triton.jit
def _store_solved_values(
    solved,
    v,
    v_stride,
    values,
    of_chunk,
    token,
    end,
    head,
    DV: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Stores T v of a chunk."""
    for at in range(0, DV, COLUMNS):
        part = _load_part(v, v_stride, token, end, head, at, DV, COLUMNS)
        part = multiply(solved, part, PRECISION)
        _store_part(values, of_chunk, at, part, DV, COLUMNS, CHUNK)


@cached_launch
@triton.jit(do_not_specialize=["count"])
def _prepare(
    q,
    k,
    v,
    decay,
    beta,
    offsets,
    keys,
    values,
    scores,
    factors,
    kept,
    count,
    q_stride,
    k_stride,
    v_stride,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    slot = tl.program_id(0)
    head = tl.program_id(1)
    _, begin, first, end = find_chunk(offsets, count, slot, CHUNK)
    if (first >= end) | (end - begin == 1):
        return
    of_chunk = slot.to(tl.int64) * HEADS + head
    i = tl.arange(0, CHUNK)
    token = first + i
    of_head = token.to(tl.int64) * HEADS + head
    own = tl.load(decay + of_head, mask=token < end, other=0.0).to(tl.float64)
    total = tl.cumsum(own, 0)
    at_end = tl.sum(own, 0)
    strength = tl.load(beta + of_head, mask=token < end, other=0.0)
    between = decay_between(total)
    since = tl.exp(total.to(tl.float32))
    until = tl.exp(tl.minimum(at_end - total, 0.0).to(tl.float32))
    tl.store(kept + of_chunk, tl.exp(at_end.to(tl.float32)))
    key_head = head // REPEATS
    products, norms = _products(
        q, q_stride, k, k_stride, token, end, key_head, DK, BLOCK_K, PRECISION, CHUNK
    )
    query_scale = tl.rsqrt(norms + 1e-6) * DK**-0.5
    b = products * query_scale[:, None] * between
    products, norms = _products(
        k, k_stride, k, k_stride, token, end, key_head, DK, BLOCK_K, PRECISION, CHUNK
    )
    scale = tl.rsqrt(norms + 1e-6)
    of_factors = factors + of_chunk * 2 * CHUNK + i
    tl.store(of_factors, since * query_scale)
    tl.store(of_factors + CHUNK, until * scale)
    _store_part(scores, of_chunk, 0, b * scale[None, :], CHUNK, CHUNK, CHUNK)
    solved = _invert(
        products * scale[:, None] * scale[None, :] * between, strength, PRECISION, CHUNK
    )
    _store_solved_values(
        solved, v, v_stride, values, of_chunk, token, end, head, DV, COLUMNS, PRECISION, CHUNK
    )
    solved *= (since * scale)[None, :]
    for at in range(0, DK, COLUMNS):
        part = _load_part(k, k_stride, token, end, key_head, at, DK, COLUMNS)
        part = multiply(solved, part, PRECISION)
        _store_part(keys, of_chunk, at, part, DK, COLUMNS, CHUNK)


@cached_launch
@triton.jit(do_not_specialize=["count"])
def _prepare_channels(
    q,
    k,
    v,
    decay,
    beta,
    offsets,
    keys,
    values,
    scores,
    queries_since,
    keys_until,
    kept,
    totals,
    count,
    q_stride,
    k_stride,
    v_stride,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    slot = tl.program_id(0)
    head = tl.program_id(1)
    _, begin, first, end = find_chunk(offsets, count, slot, CHUNK)
    if (first >= end) | (end - begin == 1):
        return
    of_chunk = slot.to(tl.int64) * HEADS + head
    i = tl.arange(0, CHUNK)
    token = first + i
    key_head = head // REPEATS
    strength = tl.load(beta + token.to(tl.int64) * HEADS + head, mask=token < end, other=0.0)
    a = tl.zeros((CHUNK, CHUNK), tl.float32)
    b = tl.zeros((CHUNK, CHUNK), tl.float32)
    key_norms = tl.zeros((CHUNK,), tl.float32)
    query_norms = tl.zeros((CHUNK,), tl.float32)
    for at in range(0, DK, BLOCK_K):
        total = tl.cumsum(_load_part(decay, HEADS * DK, token, end, head, at, DK, BLOCK_K), 0)
        of_head = totals + head * DK + at + tl.arange(0, BLOCK_K)
        has_channel = at + tl.arange(0, BLOCK_K) < DK
        place = of_head[None, :] + token.to(tl.int64)[:, None] * HEADS * DK
        tl.store(place, total, mask=(token < end)[:, None] & has_channel[None, :])
        tl.debug_barrier()  # other threads read what one stores
        own = _load_part(k, k_stride, token, end, key_head, at, DK, BLOCK_K).to(tl.float32)
        queries = _load_part(q, q_stride, token, end, key_head, at, DK, BLOCK_K).to(tl.float32)
        key_norms += tl.sum(own * own, 1)
        query_norms += tl.sum(queries * queries, 1)
        # Between two parts of the chunk, the decay is the product of those to and from the first
        # token of the later part. Neither is above 1.
        for part in range(1, CHUNK // PART):
            begun = first + part * PART
            of_middle = of_head + begun.to(tl.int64) * HEADS * DK
            middle = tl.load(of_middle, mask=has_channel & (begun < end), other=0.0)
            later = ((i // PART) == part)[:, None]
            since = tl.exp(tl.where(later, total - middle[None, :], -float("inf")))
            sooner = ((i < part * PART) & (begun < end))[:, None]
            until = tl.exp(tl.where(sooner, middle[None, :] - total, -float("inf")))
            earlier = tl.trans(own * until)
            a += multiply(own * since, earlier, PRECISION)
            b += multiply(queries * since, earlier, PRECISION)
        # Inside a part, the decay of each pair of tokens is computed by itself.
        for j in range(PART):
            other = (i // PART) * PART + j
            old = _load_part(k, k_stride, first + other, end, key_head, at, DK, BLOCK_K)
            before = _load_part(totals, HEADS * DK, first + other, end, head, at, DK, BLOCK_K)
            old = old.to(tl.float32) * tl.exp(tl.minimum(total - before, 0.0))
            here = (other[:, None] == i[None, :]) & (other <= i)[:, None]
            a += tl.where(here, tl.sum(own * old, 1)[:, None], 0.0)
            b += tl.where(here, tl.sum(queries * old, 1)[:, None], 0.0)
    scale = tl.rsqrt(key_norms + 1e-6)
    query_scale = tl.rsqrt(query_norms + 1e-6) * DK**-0.5
    _store_part(scores, of_chunk, 0, b * query_scale[:, None] * scale[None, :], CHUNK, CHUNK, CHUNK)
    solved = _invert(a * scale[:, None] * scale[None, :], strength, PRECISION, CHUNK)
    _store_solved_values(
        solved, v, v_stride, values, of_chunk, token, end, head, DV, COLUMNS, PRECISION, CHUNK
    )
    last = tl.minimum(first + CHUNK, end) - 1
    for at in range(0, DK, COLUMNS):
        channel = at + tl.arange(0, COLUMNS)
        total = _load_part(totals, HEADS * DK, token, end, head, at, DK, COLUMNS)
        of_end = totals + (last.to(tl.int64) * HEADS + head) * DK + channel
        at_end = tl.load(of_end, mask=channel < DK, other=0.0)
        tl.store(kept + of_chunk * DK + channel, tl.exp(at_end), mask=channel < DK)
        own = _load_part(k, k_stride, token, end, key_head, at, DK, COLUMNS).to(tl.float32)
        own *= scale[:, None]
        part = multiply(solved, own * tl.exp(total), PRECISION)
        _store_part(keys, of_chunk, at, part, DK, COLUMNS, CHUNK)
        own *= tl.exp(tl.minimum(at_end[None, :] - total, 0.0))
        _store_part(keys_until, of_chunk, at, own, DK, COLUMNS, CHUNK)
        queries = _load_part(q, q_stride, token, end, key_head, at, DK, COLUMNS).to(tl.float32)
        queries *= query_scale[:, None] * tl.exp(total)
        _store_part(queries_since, of_chunk, at, queries, DK, COLUMNS, CHUNK)


@cached_launch
@triton.jit
def _scan(
    q,
    k,
    keys,
    values,
    scores,
    factors,
    kept,
    states,
    offsets,
    read,
    write,
    out,
    q_stride,
    k_stride,
    state_stride,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
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
    i = tl.arange(0, CHUNK)
    channel = tl.arange(0, BLOCK_K)
    j = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    of_state = head * DK * DV + channel[:, None] * DV + j[None, :]
    inside = (channel < DK)[:, None] & (j < DV)[None, :]
    state = tl.load(
        states + tl.maximum(source, 0) * state_stride + of_state,
        mask=inside & (source >= 0),
        other=0.0,
    ).to(tl.float32)
    of_chunk = (begin // CHUNK + row).to(tl.int64) * HEADS + head
    has_channel = (channel < DK)[None, :]
    has_column = (j < DV)[None, :]
    for first in range(begin, end, CHUNK):
        token = first + i
        vectors = (of_chunk * CHUNK + i[:, None]) * DK + channel[None, :]
        before = tl.load(keys + vectors, mask=has_channel, other=0.0)
        place = (of_chunk * CHUNK + i[:, None]) * DV + j[None, :]
        u = tl.load(values + place, mask=has_column, other=0.0).to(tl.float32)
        u -= multiply(before, state, PRECISION)
        weights = tl.load(scores + of_chunk * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :])
        if BY_CHANNEL:  # q and k have been scaled
            queries = tl.load(q + vectors, mask=has_channel, other=0.0)
            own = tl.load(k + vectors, mask=has_channel, other=0.0)
            rest = tl.load(kept + of_chunk * DK + channel, mask=channel < DK, other=0.0)[:, None]
            result = multiply(queries, state, PRECISION) + multiply(weights, u, PRECISION)
        else:
            queries = _load_part(q, q_stride, token, end, head // REPEATS, 0, DK, BLOCK_K)
            own = _load_part(k, k_stride, token, end, head // REPEATS, 0, DK, BLOCK_K)
            rest = tl.load(kept + of_chunk)
            of_factors = factors + of_chunk * 2 * CHUNK + i
            result = multiply(queries, state, PRECISION) * tl.load(of_factors)[:, None]
            result += multiply(weights, u, PRECISION)
            u *= tl.load(of_factors + CHUNK)[:, None]
        place = out + (token.to(tl.int64)[:, None] * HEADS + head) * DV + j[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=(token < end)[:, None] & has_column)
        state = state * rest + multiply(tl.trans(own), u, PRECISION)
        of_chunk += HEADS
    tl.store(
        states + tl.maximum(target, 0) * state_stride + of_state,
        state.to(states.dtype.element_ty),
        mask=inside & (target >= 0),
    )


def delta_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """Applies the gated delta rule to each row. Rows of one token are computed by `delta_step`.

    Args:
        q: queries [T, Hk, Dk], whose heads are contiguous. They are L2-normalised and scaled by
            Dk ** -0.5.
        k: keys [T, Hk, Dk], likewise; L2-normalised. Value head h uses key head h // (Hv // Hk).
        v: values [T, Hv, Dv], whose heads are contiguous.
        decay: float32 [T, Hv], or [T, Hv, Dk] if each channel has its own; logarithms, at most 0.
            Contiguous.
        beta: float32 [T, Hv], contiguous.
        states: pool [S, Hv, Dk, Dv] of float32 or bfloat16 (written).
        rows: rows of the step.

    Returns:
        Outputs [T, Hv, Dv], in the data type of `v`. States are float32 within a row; operands of
        products have the precision of the inputs. The first kernel moves T (4 Dk + 2 Dv + 64) Hv
        elements; the second one T (3 Dk + 64) Hv for every 32 columns of the values (16 in
        float32; twice as many on Hopper), and 2 T Hv Dv more.
    """
    tokens, heads, dv = v.shape
    dk = k.shape[2]
    out = v.new_empty((tokens, heads, dv))
    delta_step(q, k, v, decay, beta, states, rows, out)
    if rows.longest == 1:
        return out
    count = len(rows.read)
    precision = dot_precision(v.dtype, v.device)
    block_k = max(round_up_to_power_of_2(dk), _MIN_TILE)
    columns = count_columns(precision, v.device)
    by_channel = decay.dim() == 3
    scratch = torch.bfloat16 if precision == "bf16" else torch.float32
    chunks = count_slots(tokens, count), heads, CHUNK
    keys, values, scores = (v.new_empty((*chunks, size), dtype=scratch) for size in (dk, dv, CHUNK))
    shape = {
        "HEADS": heads,
        "REPEATS": heads // k.shape[1],
        "DK": dk,
        "DV": dv,
        "COLUMNS": columns,
        "PRECISION": precision,
        "CHUNK": CHUNK,
        **pdl_options(v.device),
    }
    inputs = q, k, v, decay, beta, rows.offsets
    strides = q.stride(0), k.stride(0), v.stride(0)
    if by_channel:
        queries, until = (torch.empty_like(keys) for _ in range(2))
        factors = kept = decay.new_empty((*chunks[:2], dk))  # without factors of tokens
        _prepare_channels[chunks[:2]](
            *inputs,
            keys,
            values,
            scores,
            queries,
            until,
            kept,
            torch.empty_like(decay),
            count,
            *strides,
            BLOCK_K=min(block_k, 32),
            PART=_PART,
            num_warps=4,
            **shape,
        )
        q, k = queries, until
    else:
        factors = decay.new_empty((*chunks[:2], 2, CHUNK))
        kept = decay.new_empty(chunks[:2])
        _prepare[chunks[:2]](
            *inputs,
            keys,
            values,
            scores,
            factors,
            kept,
            count,
            *strides,
            BLOCK_K=min(block_k, _BLOCK_K),
            num_warps=4,
            **shape,
        )
    # what the second kernel reads of one: it reads the next one ahead where there is room
    chunk = CHUNK * (3 * block_k + columns + CHUNK) * keys.element_size()
    _scan[(count, heads, cdiv(dv, columns))](
        q,
        k,
        keys,
        values,
        scores,
        factors,
        kept,
        states,
        rows.offsets,
        rows.read,
        rows.write,
        out,
        *strides[:2],
        states.stride(0),
        BY_CHANNEL=by_channel,
        BLOCK_K=block_k,
        num_warps=8 if block_k > 64 else 4,
        num_stages=2 if 2 * chunk + _BESIDE <= properties_of(v.device).shared_memory else 1,
        **shape,
    )
    return out
