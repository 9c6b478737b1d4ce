"""Gated delta rule (Gated DeltaNet, arXiv:2412.06464, and Kimi Delta Attention, arXiv:2510.26692)
over rows of any length, in chunks of 64 tokens.

    S <- exp(decay) S;  u = beta (v - S^T k);  S <- S + k u^T;  out = S^T q

With g the sum of the decays from a chunk's beginning on, and S the state before the chunk:

    A[i, j] = exp(g[i] - g[j]) (k[i] k[j])            for i > j
    B[i, j] = exp(g[i] - g[j]) (q[i] k[j])            for i >= j
    u = (I + diag(beta) A)^-1 diag(beta) (v - (exp(g) k) S)
    out = (exp(g) q) S + B u
    S <- exp(g[last]) S + (exp(g[last] - g) k)^T u

The inverse and B do not depend on the state. A first kernel computes them for all chunks in
parallel, and a second one goes through each row's chunks in order. Only differences of decays that
are at most 0 are exponentiated, so nothing overflows.
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
    count_slots,
    decay_between,
    dot_precision,
    find_chunk,
    invert_unit_triangle,
    multiply,
    normalise,
)
from sglang_lite.runtime.kernels.state_rows import StateRows
from sglang_lite.runtime.kernels.state_step import delta_step

_BLOCK_V = 32  # columns of the state in a program; in float32 half as many, which fill registers
_BLOCK_K = 64  # channels that are multiplied at the same time
_PART = 16  # tokens in whose pairs channels decay by factors of their own
_MIN_TILE = 16  # rows and columns that matrix units take


@triton.jit
def _load_part(x, stride, token, end, head, at, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Returns channels `at` to `at` + BLOCK of a head's vectors of some tokens in float32; zeros
    from token `end` and channel DIM on.
    """
    i = at + tl.arange(0, BLOCK)
    place = x + token.to(tl.int64)[:, None] * stride + head * DIM + i[None, :]
    inside = (token < end)[:, None] & (i < DIM)[None, :]
    return tl.load(place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _load_tokens(x, stride, token, end, head, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Returns a head's vectors of some tokens in float32; zeros from token `end` on."""
    return _load_part(x, stride, token, end, head, 0, DIM, BLOCK)


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
        norms += tl.sum(left * left, 1)
    return products, norms


@triton.jit
def _store_inverse(inverse, slot, head, strength, a, HEADS: tl.constexpr, CHUNK: tl.constexpr):
    """Stores (I + diag(beta) A)^-1 diag(beta) of a chunk."""
    i = tl.arange(0, CHUNK)
    a = tl.where(i[:, None] > i[None, :], a * strength[:, None], 0.0)
    solved = invert_unit_triangle(a) * strength[None, :]
    _store_chunk(inverse, slot, head, solved, HEADS, CHUNK)


@triton.jit
def _store_chunk(matrices, slot, head, matrix, HEADS: tl.constexpr, CHUNK: tl.constexpr):
    """Stores a matrix of a chunk and a head."""
    i = tl.arange(0, CHUNK)
    place = (slot.to(tl.int64) * HEADS + head) * CHUNK * CHUNK
    place += i[:, None] * CHUNK + i[None, :]
    tl.store(matrices + place, matrix.to(matrices.dtype.element_ty))


@cached_launch
@triton.jit(do_not_specialize=["count"])
def _prepare(
    q,
    k,
    decay,
    beta,
    offsets,
    inverse,
    scores,
    count,
    q_stride,
    k_stride,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    DK: tl.constexpr,
    BLOCK_K: tl.constexpr,
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
    token = first + tl.arange(0, CHUNK)
    of_head = token.to(tl.int64) * HEADS + head
    total = tl.cumsum(tl.load(decay + of_head, mask=token < end, other=0.0).to(tl.float64), 0)
    strength = tl.load(beta + of_head, mask=token < end, other=0.0)
    kept = decay_between(total)
    key_head = head // REPEATS
    products, norms = _products(
        k, k_stride, k, k_stride, token, end, key_head, DK, BLOCK_K, PRECISION, CHUNK
    )
    scale = tl.rsqrt(norms + 1e-6)
    a = products * scale[:, None] * scale[None, :] * kept
    _store_inverse(inverse, slot, head, strength, a, HEADS, CHUNK)
    products, norms = _products(
        q, q_stride, k, k_stride, token, end, key_head, DK, BLOCK_K, PRECISION, CHUNK
    )
    b = products * (tl.rsqrt(norms + 1e-6) * DK**-0.5)[:, None] * scale[None, :] * kept
    _store_chunk(scores, slot, head, b, HEADS, CHUNK)


@cached_launch
@triton.jit(do_not_specialize=["count"])
def _prepare_channels(
    q,
    k,
    decay,
    beta,
    offsets,
    inverse,
    scores,
    totals,
    count,
    q_stride,
    k_stride,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    DK: tl.constexpr,
    BLOCK_K: tl.constexpr,
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
    i = tl.arange(0, CHUNK)
    token = first + i
    key_head = head // REPEATS
    strength = tl.load(beta + token.to(tl.int64) * HEADS + head, mask=token < end, other=0.0)
    a = tl.zeros((CHUNK, CHUNK), tl.float32)
    b = tl.zeros((CHUNK, CHUNK), tl.float32)
    key_norms = tl.zeros((CHUNK,), tl.float32)
    query_norms = tl.zeros((CHUNK,), tl.float32)
    for channel in range(0, DK, BLOCK_K):
        total = tl.cumsum(_load_part(decay, HEADS * DK, token, end, head, channel, DK, BLOCK_K), 0)
        of_head = totals + head * DK + channel + tl.arange(0, BLOCK_K)
        has_channel = channel + tl.arange(0, BLOCK_K) < DK
        place = of_head[None, :] + token.to(tl.int64)[:, None] * HEADS * DK
        tl.store(place, total, mask=(token < end)[:, None] & has_channel[None, :])
        tl.debug_barrier()  # other threads read what one stores
        keys = _load_part(k, k_stride, token, end, key_head, channel, DK, BLOCK_K)
        queries = _load_part(q, q_stride, token, end, key_head, channel, DK, BLOCK_K)
        key_norms += tl.sum(keys * keys, 1)
        query_norms += tl.sum(queries * queries, 1)
        # Between two parts of the chunk, the decay is the product of those to and from the first
        # token of the later part. Neither is above 1.
        for part in range(1, CHUNK // PART):
            at = first + part * PART
            of_middle = of_head + at.to(tl.int64) * HEADS * DK
            middle = tl.load(of_middle, mask=has_channel & (at < end), other=0.0)
            later = ((i // PART) == part)[:, None]
            since = tl.exp(tl.where(later, total - middle[None, :], -float("inf")))
            sooner = ((i < part * PART) & (at < end))[:, None]
            until = tl.exp(tl.where(sooner, middle[None, :] - total, -float("inf")))
            earlier = tl.trans(keys * until)
            a += multiply(keys * since, earlier, PRECISION)
            b += multiply(queries * since, earlier, PRECISION)
        # Inside a part, the decay of each pair of tokens is computed by itself.
        for j in range(PART):
            other = (i // PART) * PART + j
            old = _load_part(k, k_stride, first + other, end, key_head, channel, DK, BLOCK_K)
            before = _load_part(totals, HEADS * DK, first + other, end, head, channel, DK, BLOCK_K)
            old *= tl.exp(tl.minimum(total - before, 0.0))
            here = (other[:, None] == i[None, :]) & (other <= i)[:, None]
            a += tl.where(here, tl.sum(keys * old, 1)[:, None], 0.0)
            b += tl.where(here, tl.sum(queries * old, 1)[:, None], 0.0)
    scale = tl.rsqrt(key_norms + 1e-6)
    b *= (tl.rsqrt(query_norms + 1e-6) * DK**-0.5)[:, None] * scale[None, :]
    _store_chunk(scores, slot, head, b, HEADS, CHUNK)
    a *= scale[:, None] * scale[None, :]
    _store_inverse(inverse, slot, head, strength, a, HEADS, CHUNK)


@cached_launch
@triton.jit
def _scan(
    q,
    k,
    v,
    decay,
    inverse,
    scores,
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
    j = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    of_state = head * DK * DV + channel[:, None] * DV + j[None, :]
    inside = (channel < DK)[:, None] & (j < DV)[None, :]
    state = tl.load(
        states + tl.maximum(source, 0) * state_stride + of_state,
        mask=inside & (source >= 0),
        other=0.0,
    ).to(tl.float32)
    chunk = ((begin // CHUNK + row).to(tl.int64) * HEADS + head) * CHUNK * CHUNK
    for first in range(begin, end, CHUNK):
        token = first + i
        wide = token.to(tl.int64)
        valid = (token < end)[:, None] & (j < DV)[None, :]
        keys = normalise(_load_tokens(k, k_stride, token, end, head // REPEATS, DK, BLOCK_K))
        queries = normalise(_load_tokens(q, q_stride, token, end, head // REPEATS, DK, BLOCK_K))
        values = tl.load(
            v + wide[:, None] * v_stride + head * DV + j[None, :], mask=valid, other=0.0
        ).to(tl.float32)
        if BY_CHANNEL:  # sums
            total = _load_tokens(decay, HEADS * DK, token, end, head, DK, BLOCK_K)
            last = tl.minimum(first + CHUNK, end) - 1
            place = decay + last.to(tl.int64) * HEADS * DK + head * DK + channel
            at_end = tl.load(place, mask=channel < DK, other=0.0)
            since = tl.exp(total)
            until = tl.exp(at_end[None, :] - total)
            kept = tl.exp(at_end)[:, None]
        else:
            of_head = decay + wide * HEADS + head
            own = tl.load(of_head, mask=token < end, other=0.0).to(tl.float64)
            total = tl.cumsum(own, 0)
            at_end = tl.sum(own, 0)
            since = tl.exp(total.to(tl.float32))[:, None]
            until = tl.exp(tl.minimum(at_end - total, 0.0).to(tl.float32))[:, None]
            kept = tl.exp(at_end.to(tl.float32))
        of_chunk = chunk + i[:, None] * CHUNK + i[None, :]
        solved = tl.load(inverse + of_chunk).to(tl.float32)
        weights = tl.load(scores + of_chunk).to(tl.float32)
        u = multiply(solved, values - multiply(keys * since, state, PRECISION), PRECISION)
        result = multiply(queries * since, state, PRECISION) * DK**-0.5
        result += multiply(weights, u, PRECISION)
        place = out + (wide[:, None] * HEADS + head) * DV + j[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=valid)
        state = state * kept + multiply(tl.trans(keys * until), u, PRECISION)
        chunk += HEADS * CHUNK * CHUNK
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
        products have the precision of the inputs. Longer rows move T (2 Dk + 128) Hv elements for
        every 32 columns of the values, and 2 T Hv Dv more.
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
    widest = _BLOCK_V // 2 if v.dtype == torch.float32 else _BLOCK_V
    block_v = min(max(round_up_to_power_of_2(dv), _MIN_TILE), widest)
    by_channel = decay.dim() == 3
    kept = torch.bfloat16 if precision == "bf16" else torch.float32
    slots = count_slots(tokens, count)
    inverse, scores = (v.new_empty((slots, heads, CHUNK, CHUNK), dtype=kept) for _ in range(2))
    shape = {
        "HEADS": heads,
        "REPEATS": heads // k.shape[1],
        "DK": dk,
        "PRECISION": precision,
        "CHUNK": CHUNK,
        **pdl_options(v.device),
    }
    strides = q.stride(0), k.stride(0)
    if by_channel:
        totals = torch.empty_like(decay)
        _prepare_channels[(slots, heads)](
            q,
            k,
            decay,
            beta,
            rows.offsets,
            inverse,
            scores,
            totals,
            count,
            *strides,
            BLOCK_K=min(block_k, 32),
            PART=_PART,
            num_warps=4,
            **shape,
        )
        decay = totals
    else:
        _prepare[(slots, heads)](
            q,
            k,
            decay,
            beta,
            rows.offsets,
            inverse,
            scores,
            count,
            *strides,
            BLOCK_K=min(block_k, _BLOCK_K),
            num_warps=4,
            **shape,
        )
    _scan[(count, heads, cdiv(dv, block_v))](
        q,
        k,
        v,
        decay,
        inverse,
        scores,
        states,
        rows.offsets,
        rows.read,
        rows.write,
        out,
        *strides,
        v.stride(0),
        states.stride(0),
        DV=dv,
        BY_CHANNEL=by_channel,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        num_warps=8 if block_k > 64 else 4,
        num_stages=1,
        **shape,
    )
    return out
