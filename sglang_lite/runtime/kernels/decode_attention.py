"""Attention of one new token per row over paged keys and values (flash decoding, Dao et al. 2023).

    out[row, h] = sum over the row's tokens t of softmax(q[row, h] · k[t] * scale) v[t]

Work is split by tokens, not by rows: each row's tokens are divided among programs so that every
program reads about as many, however ragged the batch. The split is computed on the device, so a
captured graph stays valid while rows grow. The last program of a row to finish merges the partial
results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.attention_metadata import (
    AttentionRules,
    DecodeWork,
    DevicePlan,
    SharedPrefixes,
)
from sglang_lite.runtime.kernels.device_properties import properties_of
from sglang_lite.runtime.kernels.few_queries import attend_few, clamped_page_of, columns
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.launch_config import (
    Launch,
    choose_attention_launch,
    padded_head_size,
)
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2
from sglang_lite.runtime.kernels.softmax import first_visible

_ITEMS = 16  # items that one program of _split writes
# Tokens of an item; more are worth another program even if it has to wait, as that balances ragged
# rows.
_LONG = 1024
_WARP = 32  # minimum block of rows: fewer are no faster, and each power of two is compiled


@cached_launch
@triton.jit(do_not_specialize=["rows", "items"])
def _split(
    positions,
    slots,
    shared,
    work,
    row_work,
    rows,
    items,
    MIN_TOKENS: tl.constexpr,
    CONCURRENT_PROGRAMS: tl.constexpr,
    LONG: tl.constexpr,
    ROUND_UP: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    ITEMS: tl.constexpr,
):
    r = tl.arange(0, BLOCK)
    length = tl.load(positions + r, mask=r < rows, other=-1) + 1
    if SHARED:
        length -= tl.load(shared + r, mask=r < rows, other=0)
    # Splits each row evenly into about length / chunk pieces, so that no piece is small. All pieces
    # find room, as max(round(x), 1) <= x + 1, and likewise rounded up.
    tokens = tl.sum(length)
    chunk = tl.maximum(tl.cdiv(tokens, items - rows), MIN_TOKENS)
    if CONCURRENT_PROGRAMS > 0:
        chunk = tl.maximum(chunk, tl.minimum(tl.cdiv(tokens, CONCURRENT_PROGRAMS), LONG))
    about = tl.cdiv(length, chunk) if ROUND_UP else (2 * length + chunk) // (2 * chunk)
    about = tl.maximum(about, 1)
    even = tl.maximum(tl.cdiv(tl.cdiv(length, about), 64) * 64, 64)
    splits = tl.cdiv(length, even)
    ends = tl.cumsum(splits, 0)
    if tl.program_id(0) == 0:
        tl.store(row_work + r * 2, ends - splits, mask=r < rows)
        tl.store(row_work + r * 2 + 1, splits, mask=r < rows)
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    before = ends[None, :] <= item[:, None]
    row = tl.sum(before.to(tl.int32), 1)
    first = tl.sum(tl.where(before, splits[None, :], 0), 1)
    real = (row < rows) & (item < items)
    piece = tl.sum(tl.where(r[None, :] == row[:, None], even[None, :], 0), 1)
    start = (item - first) * piece
    if SHARED:
        start += tl.load(shared + row, mask=real, other=0)
    end = tl.minimum(start + piece, tl.load(positions + row, mask=real, other=0) + 1)
    tl.store(work + item * 4, tl.where(real, row, -1), mask=item < items)
    tl.store(work + item * 4 + 1, start, mask=item < items)
    tl.store(work + item * 4 + 2, end, mask=item < items)
    tl.store(work + item * 4 + 3, tl.load(slots + row, mask=real, other=0), mask=item < items)


def split_work(
    positions: torch.Tensor,
    slots: torch.Tensor,
    shared: SharedPrefixes | None,
    work: torch.Tensor,
    row_work: torch.Tensor,
    *,
    min_tokens: int,
    concurrent_programs: int = 0,
    round_up: bool = False,
) -> None:
    """Divides the tokens of decoding rows into work items, each processed by one program.

    Args:
        positions, slots: int32 [rows], position and slot of each row's new token.
        shared: shared prefixes, whose tokens are left out.
        work: `DecodeWork.items`, int32 [items, 4] (written); there must be more items than rows.
        row_work: `DecodeWork.rows`, int32 [rows, 2] (written).
        min_tokens: minimum number of tokens in an item, unless its row has fewer.
        concurrent_programs: number of programs that run concurrently. If `work` has more items than
            that, items are only as short as needed to give each of these programs one, but have at
            most about 1,024 tokens. 0 to use all items.
        round_up: whether to round the number of items up: no item has more than `min_tokens` tokens
            if there are enough items.
    """
    rows = len(positions)
    items = len(work)
    _split[(cdiv(items, _ITEMS),)](
        positions,
        slots,
        positions if shared is None else shared.lengths,
        work,
        row_work,
        rows,
        items,
        MIN_TOKENS=min_tokens,
        CONCURRENT_PROGRAMS=concurrent_programs,
        LONG=_LONG,
        ROUND_UP=round_up,
        SHARED=shared is not None,
        BLOCK=max(_WARP, round_up_to_power_of_2(rows)),
        ITEMS=_ITEMS,
        num_warps=4,
    )


@triton.jit
def _merge_all(
    acc_buffer,
    ml_buffer,
    first,
    step,
    count,
    m,
    total,
    acc,
    G: tl.constexpr,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Adds `count` partial results, `step` apart in the buffers, to m, total and acc. Loads PARTS
    of them at once, as one after the other each would wait for its loads.
    """
    p, g, d = tl.arange(0, PARTS), tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
    for at in range(0, count, PARTS):
        valid = (at + p < count)[:, None] & (g < G)[None, :]
        part = first + (at + p).to(tl.int64)[:, None] * step + g[None, :]
        m_part = tl.load(
            ml_buffer + part * 2, mask=valid, other=float("-inf"), cache_modifier=".cg"
        )
        total_part = tl.load(ml_buffer + part * 2 + 1, mask=valid, other=0.0, cache_modifier=".cg")
        acc_part = tl.load(
            acc_buffer + part[:, :, None] * DIM + d[None, None, :],
            mask=valid[:, :, None] & (d < DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        highest = tl.maximum(m, tl.max(m_part, 0))
        # all parts were outside the window
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        old, new = tl.exp2(m - shift), tl.exp2(m_part - shift[None, :])
        total = total * old + tl.sum(total_part * new, 0)
        acc = acc * old[:, None] + tl.sum(acc_part * new[:, :, None], 0)
        m = highest
    return m, total, acc


@triton.jit
def _first_heads(x, HEADS: tl.constexpr):
    """Returns the first HEADS rows of [N, D], without the padding that products need."""
    blocks: tl.constexpr = x.shape[0] // HEADS
    if blocks == 1:
        return x
    real = (tl.arange(0, blocks) == 0)[:, None, None]
    return tl.sum(tl.where(real, tl.reshape(x, (blocks, HEADS, x.shape[1])), 0.0), 0)


@triton.jit
def _complete(
    m,
    total,
    acc,
    row,
    kv_head,
    out,
    v_scales,
    prefix_acc,
    prefix_ml,
    chunks,
    max_chunks,
    G: tl.constexpr,
    DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SCALED: tl.constexpr,
    PREFIX: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Stores the final result of a row, merged with that of its prefix."""
    g, d = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
    if PREFIX:
        start = ((row * max_chunks * KV_HEADS + kv_head) * G).to(tl.int64)
        m, total, acc = _merge_all(
            prefix_acc, prefix_ml, start, KV_HEADS * G, chunks, m, total, acc, G, DIM, PARTS
        )
    if SCALED:
        acc *= tl.load(v_scales + kv_head)
    target = out + ((row * KV_HEADS + kv_head) * G + g).to(tl.int64)[:, None] * DIM + d[None, :]
    tl.store(
        target,
        (acc / total[:, None]).to(out.dtype.element_ty),
        mask=(g < G)[:, None] & (d < DIM)[None, :],
    )


@triton.jit
def store_or_merge(
    m,
    total,
    acc,
    row,
    item,
    kv_head,
    first,
    count,
    out,
    v_scales,
    acc_buffer,
    ml_buffer,
    counters,
    prefix_acc,
    prefix_ml,
    chunks,
    max_chunks,
    G: tl.constexpr,
    DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SCALED: tl.constexpr,
    PREFIX: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Stores the results of an item's program. The last program of a row merges all of the row's
    items and the pieces of its prefix.
    """
    g, d = tl.arange(0, GROUP), tl.arange(0, acc.shape[1])
    is_head = (g < G)[:, None] & (d < DIM)[None, :]
    m = tl.reshape(_first_heads(tl.expand_dims(m, 1), GROUP), (GROUP,))
    total = tl.reshape(_first_heads(tl.expand_dims(total, 1), GROUP), (GROUP,))
    acc = _first_heads(acc, GROUP)
    if count > 1:
        part = ((item * KV_HEADS + kv_head) * G + g).to(tl.int64)
        tl.store(acc_buffer + part[:, None] * DIM + d[None, :], acc, mask=is_head)
        tl.store(ml_buffer + part * 2, m, mask=g < G)
        tl.store(ml_buffer + part * 2 + 1, total, mask=g < G)
        tl.debug_barrier()  # all threads have stored before one signals
        if tl.atomic_add(counters + row * KV_HEADS + kv_head, 1, sem="acq_rel") == count - 1:
            tl.store(counters + row * KV_HEADS + kv_head, 0)
            start = ((first * KV_HEADS + kv_head) * G).to(tl.int64)
            none = tl.where(g < G, float("-inf"), 0.0)
            own_m, own_total, own_acc = _merge_all(
                acc_buffer,
                ml_buffer,
                start,
                KV_HEADS * G,
                count,
                none,
                tl.where(g < G, 0.0, 1.0),
                tl.zeros(acc.shape, tl.float32),
                G,
                DIM,
                PARTS,
            )
            _complete(
                own_m,
                own_total,
                own_acc,
                row,
                kv_head,
                out,
                v_scales,
                prefix_acc,
                prefix_ml,
                chunks,
                max_chunks,
                G,
                DIM,
                KV_HEADS,
                SCALED,
                PREFIX,
                PARTS,
            )
    else:
        _complete(
            m,
            total,
            acc,
            row,
            kv_head,
            out,
            v_scales,
            prefix_acc,
            prefix_ml,
            chunks,
            max_chunks,
            G,
            DIM,
            KV_HEADS,
            SCALED,
            PREFIX,
            PARTS,
        )


def merge_kernel_options(launch: Launch, group: int, dim: int) -> dict[str, int]:
    """Returns keyword arguments for kernels that call `store_or_merge`. They include the number of
    parts merged together, for which registers set a limit.

    Args:
        launch: launch parameters of the kernel.
        group: query heads per KV head.
        dim: elements of a head.
    """
    heads: int = round_up_to_power_of_2(group)
    # Adding up parts across many warps takes longer.
    max_parts = 1 if launch.exclusive else 1024 * launch.warps // (heads * padded_head_size(dim))
    return {"GROUP": heads, "PARTS": max(max_parts, 1)}


@cached_launch
@triton.jit(do_not_specialize=["max_chunks", "window"])
def _decode(
    q,
    q_stride,
    k,
    v,
    v_scales,
    head_stride,
    out,
    work,
    row_work,
    positions,
    page_table,
    pages_per_slot,
    acc_buffer,
    ml_buffer,
    counters,
    prefix_acc,
    prefix_ml,
    prefix_chunks,
    max_chunks,
    scale,
    softcap,
    slopes,
    window,
    G: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    PREFIX: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    # with PREFIX, the first reads were written before the prefix kernel, which has waited
    if not PREFIX:
        wait(PDL)
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    row = tl.load(work + item * 4)
    if row < 0:
        return
    start = tl.load(work + item * 4 + 1)
    end = tl.load(work + item * 4 + 2)
    if WINDOW:
        start = tl.maximum(start, first_visible(tl.load(positions + row), window, WINDOW))
    slot = tl.load(work + item * 4 + 3).to(tl.int64)
    pages = page_table + slot * pages_per_slot
    k += kv_head.to(tl.int64) * head_stride
    v += kv_head.to(tl.int64) * head_stride
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    page = clamped_page_of(pages, start + n, end, PAGE)
    first = tl.load(row_work + row * 2)
    count = tl.load(row_work + row * 2 + 1)
    chunks = 0
    if PREFIX:
        chunks = tl.load(prefix_chunks + row)
    is_head = (g < G)[:, None] & (d < DIM)[None, :]
    queries = tl.load(
        q + row.to(tl.int64) * q_stride + (kv_head * G + g)[:, None] * DIM + d[None, :],
        mask=is_head,
        other=0.0,
        cache_modifier=".cg",
    )
    if k.dtype.element_ty == tl.float8e4nv:
        # e4m3 becomes float16 in half an instruction, bfloat16 in three
        queries = queries.to(tl.float16)
    if slopes is not None:
        slopes = tl.load(slopes + kv_head * G + g, mask=g < G, other=0.0)
    m = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    acc = tl.zeros((BLOCK_D, BLOCK_G), tl.float32)
    m, total, acc = attend_few(
        tl.trans(queries),
        k,
        v,
        pages,
        page,
        start,
        end,
        m,
        total,
        acc,
        scale,
        softcap,
        slopes,
        DIM,
        PAGE,
        SOFTCAP,
        BLOCK_D,
        BLOCK_N,
    )
    if PREFIX:
        wait(PDL)
    store_or_merge(
        m,
        total,
        tl.trans(acc),
        row,
        item,
        kv_head,
        first,
        count,
        out,
        v_scales,
        acc_buffer,
        ml_buffer,
        counters,
        prefix_acc,
        prefix_ml,
        chunks,
        max_chunks,
        G,
        DIM,
        KV_HEADS,
        SCALED,
        PREFIX,
        GROUP,
        PARTS,
    )


def decode_attention(
    q: torch.Tensor,
    cache: KVCache,
    layer: int,
    plan: DevicePlan,
    work: DecodeWork,
    out: torch.Tensor,
    rules: AttentionRules,
) -> None:
    """Computes the attention of the plan's decoding rows.

    Args:
        q: queries [T, heads, head_dim] as `rope_store` returns them, of which the first
            `plan.decoding` are used; the heads of a token are contiguous.
        cache: KV cache, with the keys and values of the rows' tokens.
        layer: index of the layer.
        plan: plan of the step.
        work: items that `split_work` has made of the rows' tokens.
        out: [T, heads, head_dim] (the first `plan.decoding` are written).
        rules: rules of the layer, without sinks.

    Each key and value of a row is read once, by one program for all query heads of its KV head.
    Tokens in `plan.shared` are read by `prefix_attention`, which must run before.
    """
    rows = plan.decoding
    heads = q.shape[1]
    dim = q.shape[2]
    keys = cache.k[layer]
    values = cache.v[layer]
    kv_heads = len(keys)
    group = heads // kv_heads
    launch = choose_attention_launch(
        properties_of(q.device),
        "decode",
        dim=dim,
        item=q.element_size(),
        cached=keys.element_size(),
        queries=columns(group),
        rows=rows,
        heads=kv_heads,
        shared=plan.shared is not None,
    )
    assert launch is not None, "refused"
    partials = work.partials
    shared = plan.shared
    assert rows <= len(partials.counters)
    assert len(work.items) * heads * dim <= partials.acc.numel()
    _decode[(kv_heads, len(work.items))](
        q,
        q.stride(0),
        keys,
        values,
        cache.scales and cache.scales.v[layer],
        keys.shape[1] * dim,
        out,
        work.items,
        work.rows,
        plan.positions,
        plan.page_table,
        plan.page_table.shape[1],
        partials.acc,
        partials.ml,
        partials.counters,
        partials.prefix_acc,
        partials.prefix_ml,
        plan.slots if shared is None else shared.chunks,
        0 if shared is None else shared.max_chunks,
        rules.scale,
        rules.softcap or 0.0,
        rules.slopes,
        rules.window or 0,
        G=group,
        DIM=dim,
        PAGE=plan.page_size,
        KV_HEADS=kv_heads,
        SCALED=cache.scales is not None,
        SOFTCAP=rules.softcap is not None,
        WINDOW=rules.window_kind,
        PREFIX=shared is not None,
        BLOCK_G=launch.queries,
        BLOCK_D=padded_head_size(dim),
        **launch.options,
        **merge_kernel_options(launch, group, dim),
        **pdl_options(q.device),
    )
