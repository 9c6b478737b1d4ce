"""Causal attention over paged keys and values, in which the bits of a token's result do not depend
on the batch. They are the same whatever the other rows are, whichever chunk the token is computed
in, and whether or not rows read a shared prefix together.

    out[t, h] = sum over the tokens s <= t of its row of softmax(q[t, h] · k[s] * scale) v[s]

Tokens are divided at fixed positions into pieces (`_piece_start`). Each piece is computed
independently, and results are merged from left to right. So it does not matter which program
computes a piece: that of a decoding row, that of all rows that share the piece, or that of a block
of a prompt, which merges in registers.

Sums over tokens, including the sum of weights, are matrix products, because Hopper's matrix units
add up in the same order whatever the shape, the layout and the number of warps of a product
(measured on an H200). Everything else is done element by element, so programs with few queries can
have them as columns, as in `few_queries`, and those with many as rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from sglang_lite.runtime.kernels.attention_metadata import AttentionRules, DevicePlan
from sglang_lite.runtime.kernels.device_properties import properties_of
from sglang_lite.runtime.kernels.few_queries import clamped_page_of, columns
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.launch_config import padded_head_size
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2
from sglang_lite.runtime.kernels.softmax import first_visible

_TOKENS = 64  # tokens of a step of the running softmax, on which the bits depend
_PIECE: tl.constexpr = tl.constexpr(512)  # tokens of each of the first 16 pieces
_ITEMS = 16  # items that one program of `_plan` writes


@triton.jit
def _piece_start(piece):
    """Returns the first token of a piece: 0, 512, …, 8,192, 9,216, …, 16,384, 18,432, …"""
    after = tl.maximum(piece - 16, 0)
    return tl.where(piece < 16, piece * _PIECE, ((8 + after % 8) * (2 * _PIECE)) << (after // 8))


@triton.jit
def _pieces_of(length):
    """Returns the number of pieces that cover the first `length` tokens."""
    doubled = 0 * length
    for i in tl.static_range(1, 18):
        doubled += (length > (16 * _PIECE << i)).to(tl.int32)
    longer = 8 + 8 * doubled + tl.cdiv(length, 2 * _PIECE << doubled)
    return tl.where(length <= 16 * _PIECE, tl.cdiv(length, _PIECE), longer)


def piece_borders(tokens: int) -> NDArray[np.int32]:
    """Returns the fixed positions, int32, at which a row of `tokens` tokens is divided into pieces:
    the first token of each piece, and the end of the last one.
    """
    starts = [512 * i for i in range(17)]
    while starts[-1] < tokens:
        starts += [starts[-1] + (starts[-1] >> 3) * i for i in range(1, 9)]
    borders = np.array(starts, dtype=np.int32)
    return borders[: int(np.searchsorted(borders, tokens)) + 1]


@triton.jit
def _by_query(x, FEW: tl.constexpr):
    return x[None, :] if FEW else x[:, None]


@triton.jit
def _by_element(x, FEW: tl.constexpr):
    return x[:, None] if FEW else x[None, :]


@triton.jit
def _merge(m, total, acc, m_piece, total_piece, acc_piece, FEW: tl.constexpr):
    """Adds the result of a piece to that of the pieces before it."""
    highest = tl.maximum(m, m_piece)
    shift = tl.where(highest == float("-inf"), 0.0, highest)  # all tokens are outside the window
    old, new = tl.exp2(m - shift), tl.exp2(m_piece - shift)
    total = tl.fma(total, old, total_piece * new)
    acc = tl.fma(
        acc, tl.broadcast_to(_by_query(old, FEW), acc.shape), acc_piece * _by_query(new, FEW)
    )
    return highest, total, acc


@triton.jit
def _attend_piece(
    queries,
    k,
    v,
    pages,
    at_position,
    start,
    end,
    window,
    scale,
    softcap,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Computes the attention of queries over the tokens from `start` to `end`. Returns m [Q], total
    [Q], and acc [BLOCK_D, Q] (FEW) or [Q, BLOCK_D]. With MASKED, a query sees the tokens up to its
    position.
    """
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    m = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    acc = tl.zeros((BLOCK_D, BLOCK_Q) if FEW else (BLOCK_Q, BLOCK_D), tl.float32)
    # sixteen times the sums of weights
    sums = tl.zeros((16, BLOCK_Q) if FEW else (BLOCK_Q, 16), tl.float32)
    ones = tl.full((16, BLOCK_N) if FEW else (BLOCK_N, 16), 1.0, queries.dtype)
    factor = 1.4426950408889634
    if not SOFTCAP:
        factor *= scale
    page = clamped_page_of(pages, start + n, end, PAGE)
    for at in range(start, end, BLOCK_N):
        next_page = clamped_page_of(pages, at + BLOCK_N + n, end, PAGE)
        token = at + n
        offset = (page.to(tl.int64) * PAGE + tl.minimum(token, end - 1) % PAGE) * DIM
        # Keys [N, D] or [D, N], and values [D, N] or [N, D].
        at_keys = k + (offset[:, None] + d[None, :] if FEW else offset[None, :] + d[:, None])
        at_values = v + (offset[None, :] + d[:, None] if FEW else offset[:, None] + d[None, :])
        if DIM < BLOCK_D:
            keys = tl.load(
                at_keys, mask=(d < DIM)[None, :] if FEW else (d < DIM)[:, None], other=0.0
            )
            values = tl.load(at_values, mask=_by_element(d < DIM, FEW), other=0.0)
        else:
            keys = tl.load(at_keys)
            values = tl.load(at_values)
        keys, values = keys.to(queries.dtype), values.to(queries.dtype)
        if FEW:
            scores = tl.dot(keys, queries, input_precision="ieee")
        else:
            scores = tl.dot(queries, keys, input_precision="ieee")
        if SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores * scale / softcap) - 1.0)
        if MASKED:
            of_token, seen_to = token[None, :], at_position[:, None]
            if FEW:
                of_token, seen_to = token[:, None], at_position[None, :]
            visible = of_token <= seen_to
            if WINDOW:
                visible = visible & (of_token >= first_visible(seen_to, window, WINDOW))
            scores = tl.where(visible, scores, float("-inf"))
        highest = tl.maximum(m, tl.max(scores, 0 if FEW else 1) * factor)
        shift = highest
        if MASKED:  # a query may not have seen any token yet
            shift = tl.where(highest == float("-inf"), 0.0, highest)
        shrink = _by_query(tl.exp2(m - shift), FEW)
        weights = tl.exp2(
            tl.fma(
                scores,
                tl.full(scores.shape, factor, tl.float32),
                tl.broadcast_to(_by_query(-shift, FEW), scores.shape),
            )
        ).to(queries.dtype)
        if FEW:
            sums = tl.dot(ones, weights, sums * shrink, input_precision="ieee")
            acc = tl.dot(values, weights, acc * shrink, input_precision="ieee")
        else:
            sums = tl.dot(weights, ones, sums * shrink, input_precision="ieee")
            acc = tl.dot(weights, values, acc * shrink, input_precision="ieee")
        m = highest
        page = next_page
    return m, tl.max(sums, 0 if FEW else 1), acc


@triton.jit
def _load_part(
    acc_buffer, ml_buffer, part, real, DIM: tl.constexpr, FEW: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Loads the stored result of a piece. `part` [Q] are the queries' places in the buffers."""
    d = tl.arange(0, BLOCK_D)
    inside = _by_query(real, FEW) & _by_element(d < DIM, FEW)
    m = tl.load(ml_buffer + part * 2, mask=real, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(ml_buffer + part * 2 + 1, mask=real, other=0.0, cache_modifier=".cg")
    at = _by_query(part * DIM, FEW) + _by_element(d, FEW)
    return m, total, tl.load(acc_buffer + at, mask=inside, other=0.0, cache_modifier=".cg")


@cached_launch
@triton.jit(do_not_specialize=["max_pieces", "window"])
def _attention(
    q,
    q_stride,
    k,
    v,
    v_scales,
    head_stride,
    out,
    items,
    order,
    row_items,
    positions,
    page_table,
    pages_per_slot,
    acc_buffer,
    ml_buffer,
    counters,
    max_pieces,
    scale,
    softcap,
    window,
    G: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    KIND: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    # What the host or `plan_pieces` wrote was there before the step's first kernel, so it is read
    # without waiting.
    start_next(PDL)
    kv_head = tl.program_id(0)
    query = tl.arange(0, BLOCK_Q)
    d = tl.arange(0, BLOCK_D)
    FEW: tl.constexpr = KIND == "row"
    clear = 0  # pieces before this one are seen by every query
    if KIND == "block":  # of a prompt: several programs compute its tokens
        item = items + tl.program_id(1) // PER_BLOCK * 4
        skipped = tl.program_id(1) % PER_BLOCK * (BLOCK_Q // G)
        first = tl.load(item) + skipped
        count = tl.minimum(tl.load(item + 1) - skipped, BLOCK_Q // G)
        slot = tl.load(item + 2).to(tl.int64)
        if count <= 0:
            return
        position = tl.load(item + 3) + skipped
        end = position + count
        begin_piece = 0
        end_piece = _pieces_of(end)
        if not WINDOW:
            clear = _pieces_of(position + 1) - 1
    elif KIND == "prefix":  # that several rows share
        item = items + tl.program_id(1) * 6
        first = tl.load(item)
        count = tl.load(item + 1)
        slot = tl.load(item + 2).to(tl.int64)
        if count <= 0:
            return
        end = tl.load(item + 4)
        begin_piece = _pieces_of(tl.load(item + 3))
        end_piece = _pieces_of(end)
        clear = end_piece
    else:  # one decoding row
        item = items + tl.program_id(1) * 4
        first = tl.load(item)
        if first < 0:
            return
        count = 1
        begin_piece = tl.load(item + 1)
        end_piece = tl.load(item + 2)
        slot = tl.load(item + 3).to(tl.int64)
        end = tl.load(positions + first) + 1
    token = first + query // G
    real = query < count * G
    if KIND == "prefix":
        token = tl.load(order + token, mask=real, other=0)
    at_position = tl.load(positions + token, mask=real, other=-1)
    pages = page_table + slot * pages_per_slot
    k += kv_head.to(tl.int64) * head_stride
    v += kv_head.to(tl.int64) * head_stride
    head = kv_head * G + query % G
    inside = _by_query(real, FEW) & _by_element(d < DIM, FEW)
    of_row = 1  # programs that compute the queries' pieces
    if KIND == "row":
        of_row = tl.load(row_items + first)
    wait(PDL)
    queries = tl.load(
        q + _by_query(token.to(tl.int64) * q_stride + head * DIM, FEW) + _by_element(d, FEW),
        mask=inside,
        other=0.0,
    )
    if k.dtype.element_ty == tl.float8e4nv:
        queries = queries.to(tl.float16)  # as in decode_attention
    m = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_D, BLOCK_Q) if FEW else (BLOCK_Q, BLOCK_D), tl.float32)
    # of piece 0 in the buffers
    part = (token.to(tl.int64) * max_pieces * KV_HEADS + kv_head) * G + query % G
    step: tl.constexpr = KV_HEADS * G
    whole = KIND == "block"
    if KIND == "row":
        whole = of_row == 1
        if whole and not WINDOW:
            for piece in tl.range(0, begin_piece, loop_unroll_factor=4):  # of the shared prefix
                m_piece, total_piece, acc_piece = _load_part(
                    acc_buffer, ml_buffer, part + piece * step, real, DIM, FEW, BLOCK_D
                )
                m, total, acc = _merge(m, total, acc, m_piece, total_piece, acc_piece, FEW)
    lowest = 0
    lowest_piece = 0
    if WINDOW:
        lowest = tl.min(tl.where(real, at_position, 1 << 30), 0)
        lowest = tl.maximum(first_visible(lowest, window, WINDOW), 0)
        lowest_piece = _pieces_of(lowest + 1) - 1
        begin_piece = tl.maximum(begin_piece, lowest_piece)
    for piece in range(begin_piece, end_piece):
        start = _piece_start(piece)
        until = tl.minimum(_piece_start(piece + 1), end)
        if WINDOW:
            start = tl.maximum(start, lowest // BLOCK_N * BLOCK_N)
        if KIND != "row" and piece < clear:
            m_piece, total_piece, acc_piece = _attend_piece(
                queries,
                k,
                v,
                pages,
                at_position,
                start,
                until,
                window,
                scale,
                softcap,
                DIM,
                PAGE,
                SOFTCAP,
                False,
                WINDOW,
                FEW,
                BLOCK_Q,
                BLOCK_D,
                BLOCK_N,
            )
        else:
            m_piece, total_piece, acc_piece = _attend_piece(
                queries,
                k,
                v,
                pages,
                at_position,
                start,
                until,
                window,
                scale,
                softcap,
                DIM,
                PAGE,
                SOFTCAP,
                True,
                WINDOW,
                FEW,
                BLOCK_Q,
                BLOCK_D,
                BLOCK_N,
            )
        if whole:
            m, total, acc = _merge(m, total, acc, m_piece, total_piece, acc_piece, FEW)
        else:
            place = part + piece * step
            tl.store(ml_buffer + place * 2, m_piece, mask=real)
            tl.store(ml_buffer + place * 2 + 1, total_piece, mask=real)
            tl.store(
                acc_buffer + _by_query(place * DIM, FEW) + _by_element(d, FEW),
                acc_piece,
                mask=inside,
            )
    if KIND == "prefix":
        return
    heads = count * G
    if of_row > 1:
        tl.debug_barrier()  # all threads have stored before one signals
        counter = counters + first * KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") + 1 < of_row:
            heads *= 0
        else:
            tl.store(counter, 0)
            for piece in tl.range(lowest_piece, _pieces_of(end), loop_unroll_factor=4):
                m_piece, total_piece, acc_piece = _load_part(
                    acc_buffer, ml_buffer, part + piece * step, real, DIM, FEW, BLOCK_D
                )
                m, total, acc = _merge(m, total, acc, m_piece, total_piece, acc_piece, FEW)
    total = tl.where(total > 0, total, 1.0)  # padding may see no token
    if SCALED:
        acc *= tl.load(v_scales + kv_head)
    target = (
        out
        + _by_query((token.to(tl.int64) * (KV_HEADS * G) + head) * DIM, FEW)
        + _by_element(d, FEW)
    )
    written = _by_query(query < heads, FEW) & _by_element(d < DIM, FEW)
    tl.store(target, (acc / _by_query(total, FEW)).to(out.dtype.element_ty), mask=written)


@cached_launch
@triton.jit(do_not_specialize=["rows", "items"])
def _plan(
    positions,
    slots,
    shared,
    work,
    row_items,
    rows,
    items,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    ITEMS: tl.constexpr,
):
    r = tl.arange(0, BLOCK)
    before = 0 * r
    if SHARED:
        before = _pieces_of(tl.load(shared + r, mask=r < rows, other=0))
    pieces = tl.where(
        r < rows, _pieces_of(tl.load(positions + r, mask=r < rows, other=0) + 1) - before, 0
    )
    per_item = tl.cdiv(tl.sum(pieces), tl.maximum(items - rows, 1))  # so that all items find room
    per_item = tl.where(items > rows, tl.maximum(per_item, 1), 1 << 20)
    count = tl.cdiv(pieces, per_item)
    ends = tl.cumsum(count, 0)
    if tl.program_id(0) == 0:
        tl.store(row_items + r, count, mask=r < rows)
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    is_before = ends[None, :] <= item[:, None]
    row = tl.sum(is_before.to(tl.int32), 1)
    first = tl.sum(tl.where(is_before, count[None, :], 0), 1)
    own = r[None, :] == row[:, None]
    start = tl.sum(tl.where(own, before[None, :], 0), 1) + (item - first) * per_item
    end = tl.minimum(start + per_item, tl.sum(tl.where(own, (before + pieces)[None, :], 0), 1))
    real = (row < rows) & (item < items)
    tl.store(work + item * 4, tl.where(real, row, -1), mask=item < items)
    tl.store(work + item * 4 + 1, start, mask=item < items)
    tl.store(work + item * 4 + 2, end, mask=item < items)
    tl.store(work + item * 4 + 3, tl.load(slots + row, mask=real, other=0), mask=item < items)


@dataclass(frozen=True, slots=True)
class InvariantWork:
    """Work items for a step's decoding rows: which pieces of rows each program reads. Includes
    buffers for the results.

    Attributes:
        items: int32 [items, 4]: row (-1 for an unused item), first piece, end, slot. The items of a
            row are contiguous.
        row_items: int32 [rows], number of a row's items.
        acc: weighted values, float32, by row, piece and head.
        ml: highest score (base 2) and sum of weights, float32, interleaved.
        counters: int32, number of finished items by row and KV head; zero between kernels.
        max_pieces: number of pieces of a row for which the buffers have room.
    """

    items: torch.Tensor
    row_items: torch.Tensor
    acc: torch.Tensor
    ml: torch.Tensor
    counters: torch.Tensor
    max_pieces: int


def plan_pieces(plan: DevicePlan, work: InvariantWork) -> None:
    """Fills `work.items` with the pieces that the plan's decoding rows read, except pieces of
    shared prefixes. If there are only as many items as rows, each row is one item.
    """
    rows = plan.decoding
    items = len(work.items)
    shared = plan.positions if plan.shared is None else plan.shared.lengths
    _plan[(cdiv(items, _ITEMS),)](
        plan.positions,
        plan.slots,
        shared,
        work.items,
        work.row_items,
        rows,
        items,
        SHARED=plan.shared is not None,
        BLOCK=max(32, round_up_to_power_of_2(rows)),
        ITEMS=_ITEMS,
        num_warps=4,
    )


def queries_per_prompt_program(dim: int) -> int:
    """Returns how many queries a program for prompts or shared prefixes computes, counted over all
    its tokens and query heads.
    """
    return 64 if dim <= 128 else 32


def invariant_attention(
    q: torch.Tensor,
    cache: KVCache,
    layer: int,
    plan: DevicePlan,
    work: InvariantWork,
    out: torch.Tensor,
    rules: AttentionRules,
) -> None:
    """Computes the attention of all tokens of the plan.

    Args:
        q: queries [T, heads, head_dim] as `rope_store` returns them; the heads of a token are
            contiguous.
        cache: KV cache, with the keys and values of the step's tokens.
        layer: index of the layer.
        plan: plan of the step. Shared prefixes, and the chunks of their items, must end at
            `piece_borders`.
        work: work that `plan_pieces` has distributed.
        out: [T, heads, head_dim] (written).
        rules: rules of the layer, without sinks.
    """
    heads = q.shape[1]
    dim = q.shape[2]
    keys = cache.k[layer]
    values = cache.v[layer]
    scales = cache.scales
    kv_heads = len(keys)
    wide = queries_per_prompt_program(dim)
    group = heads // kv_heads
    shared = plan.shared

    def launch(kind: str, items: torch.Tensor, queries: int, per_block: int, warps: int) -> None:
        _attention[(kv_heads, len(items) * per_block)](
            q,
            q.stride(0),
            keys,
            values,
            scales and scales.v[layer],
            keys.shape[1] * dim,
            out,
            items,
            plan.slots if shared is None else shared.order,
            work.row_items,
            plan.positions,
            plan.page_table,
            plan.page_table.shape[1],
            work.acc,
            work.ml,
            work.counters,
            work.max_pieces,
            rules.scale,
            rules.softcap or 0.0,
            rules.window or 0,
            G=group,
            DIM=dim,
            PAGE=plan.page_size,
            KV_HEADS=kv_heads,
            SCALED=scales is not None,
            SOFTCAP=rules.softcap is not None,
            WINDOW=rules.window_kind,
            KIND=kind,
            PER_BLOCK=per_block,
            BLOCK_Q=queries,
            BLOCK_D=padded_head_size(dim),
            BLOCK_N=_TOKENS,
            num_warps=warps,
            num_stages=2,
            **pdl_options(q.device),
        )

    if plan.decoding:
        if shared is not None:
            launch("prefix", shared.items, wide, 1, 4)
        # Programs of one warp are faster if there are many.
        few = plan.decoding * kv_heads <= properties_of(q.device).multiprocessors
        launch("row", work.items, columns(group), 1, 4 if few else 1)
    if len(plan.blocks):
        launch("block", plan.blocks, wide, cdiv(plan.block_size, wide // group), 4)
