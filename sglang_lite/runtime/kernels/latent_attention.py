"""Latent attention of new tokens over paged latents. Queries are absorbed, so all heads read a
single plane.

    score = (absorbed[h, :rank] · latent + absorbed[h, rank:] · rotary part) * scale
    out[h] = sum of softmax(score) latent

A token's latent is also its value and is read once for both. Decoding is split by tokens as in
`decode_attention`, whose `split_work` gives each program a part of a row for a block of heads. For
blocks of several new tokens, a program computes pairs of a token and a head.

Matrix units multiply 64 rows at a time by few or many columns. So if a program has fewer than 64
queries, its products are transposed (TRANSPOSED): tokens and latent elements are the rows, queries
the columns, and large operands stay in shared memory.

Hopper GPUs have separate kernels for latents of DeepSeek's size (`latent_attention_hopper`).
"""

from __future__ import annotations

from types import ModuleType

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.attention_metadata import DecodeWork, DevicePlan
from sglang_lite.runtime.kernels.device_properties import properties_of
from sglang_lite.runtime.kernels.hopper import hopper_kernels
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.launch_config import Launch, latent_launch, padded_head_size
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv
from sglang_lite.runtime.kernels.softmax import page_of

PAIRS_PER_PROGRAM = 64  # pairs of a new token and a head in a program


@triton.jit
def _merge(acc_buffer, ml_buffer, part, m, total, acc, G, DIM: tl.constexpr):
    """Adds the results of a part that another program has stored. Loads bypass the L1 cache, which
    doesn't see those stores.
    """
    g, d = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
    m_part = tl.load(ml_buffer + part * 2, mask=g < G, other=0.0, cache_modifier=".cg")
    total_part = tl.load(ml_buffer + part * 2 + 1, mask=g < G, other=1.0, cache_modifier=".cg")
    acc_part = tl.load(
        acc_buffer + part[:, None] * DIM + d[None, :],
        mask=(g < G)[:, None] & (d < DIM)[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    highest = tl.maximum(m, m_part)
    shift = tl.where(highest == float("-inf"), 0.0, highest)  # neither has seen a token
    old, new = tl.exp2(m - shift), tl.exp2(m_part - shift)
    return highest, total * old + total_part * new, acc * old[:, None] + acc_part * new[:, None]


@triton.jit
def _load_queries(
    q,
    at,
    valid,
    plane,
    scales,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    SCALED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Loads absorbed queries [M, BLOCK_R] and their rotary parts [M, BLOCK_T] from offsets `at`
    [M]; with TRANSPOSED [BLOCK_R, M] and [BLOCK_T, M].

    With SCALED, they are multiplied by the scales of the latents and of the keys' rotary parts.
    """
    r, t = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_T)
    absorbed = tl.load(
        q + at[:, None] + r[None, :], mask=valid[:, None] & (r < RANK)[None, :], other=0.0
    )
    rope_part = tl.load(
        q + (at + RANK)[:, None] + t[None, :],
        mask=valid[:, None] & (t < ROPE_DIM)[None, :],
        other=0.0,
    )
    # As in decode_attention, for a cheaper conversion.
    MET: tl.constexpr = (
        tl.float16 if plane.dtype.element_ty == tl.float8e4nv else q.dtype.element_ty
    )
    if SCALED:
        absorbed, rope_part = (
            (absorbed * tl.load(scales)).to(MET),
            (rope_part * tl.load(scales + 1)).to(MET),
        )
    if TRANSPOSED:
        return tl.trans(absorbed), tl.trans(rope_part)
    else:
        return absorbed, rope_part


@triton.jit
def _attend_block(
    q,
    q_rope,
    plane,
    page,
    token,
    valid,
    visible,
    m,
    total,
    acc,
    scale,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Adds a block of N tokens to the running results of M queries.

    Arguments as for `softmax.attend_block`. With TRANSPOSED, q, q_rope, visible and acc are
    transposed.
    """
    TOKENS: tl.constexpr = 0 if TRANSPOSED else 1  # axis of the tokens in the scores
    r, t = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_T)
    offset = (page.to(tl.int64) * PAGE + token % PAGE) * (RANK + ROPE_DIM)
    at_latents = plane + offset[:, None] + r[None, :]
    at_rope = plane + offset[:, None] + (RANK + t)[None, :]
    if MASKED:
        latents = tl.load(at_latents, mask=valid[:, None] & (r < RANK)[None, :], other=0.0)
        rope_part = tl.load(at_rope, mask=valid[:, None] & (t < ROPE_DIM)[None, :], other=0.0)
    elif RANK < BLOCK_R or ROPE_DIM < BLOCK_T:
        latents = tl.load(at_latents, mask=(r < RANK)[None, :], other=0.0)
        rope_part = tl.load(at_rope, mask=(t < ROPE_DIM)[None, :], other=0.0)
    else:
        latents = tl.load(at_latents)
        rope_part = tl.load(at_rope)
    latents, rope_part = latents.to(q.dtype), rope_part.to(q.dtype)
    if TRANSPOSED:
        scores = tl.dot(latents, q, input_precision="ieee")
        scores = tl.dot(rope_part, q_rope, scores, input_precision="ieee")
    else:
        scores = tl.dot(q, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(rope_part), scores, input_precision="ieee")
    scores *= scale * 1.4426950408889634
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(m, tl.max(scores, TOKENS))
    shift = highest
    if MASKED:  # a query may not have seen any token yet
        shift = tl.where(highest == float("-inf"), 0.0, highest)
    shrink = tl.exp2(m - shift)
    weights = tl.exp2(scores - tl.expand_dims(shift, TOKENS))
    total = total * shrink + tl.sum(weights, TOKENS)
    acc *= tl.expand_dims(shrink, TOKENS)
    if TRANSPOSED:
        acc = tl.dot(tl.trans(latents), weights.to(q.dtype), acc, input_precision="ieee")
    else:
        acc = tl.dot(weights.to(q.dtype), latents, acc, input_precision="ieee")
    return highest, total, acc


@triton.jit
def _attend_all(
    queries,
    rope_part,
    plane,
    pages,
    page,
    start,
    end,
    scale,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Computes the attention of M queries over the tokens from `start` to `end`, all of which they
    see.

    Args:
        queries, rope_part: absorbed queries and their rotary parts, from `_load_queries`.
        plane: latents of the layer.
        pages: pages of the sequence.
        page: [BLOCK_N], `page_of` the first block.

    Returns:
        m, total and acc [M, BLOCK_R], as in `softmax.attend_block`.
    """
    M: tl.constexpr = queries.shape[1] if TRANSPOSED else queries.shape[0]
    n = tl.arange(0, BLOCK_N)
    m = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((BLOCK_R, M) if TRANSPOSED else (M, BLOCK_R), tl.float32)
    clear = start + (end - start) // BLOCK_N * BLOCK_N
    for at in range(start, clear, BLOCK_N):
        next_page = page_of(pages, at + BLOCK_N + n, end, PAGE)
        m, total, acc = _attend_block(
            queries,
            rope_part,
            plane,
            page,
            at + n,
            None,
            None,
            m,
            total,
            acc,
            scale,
            RANK,
            ROPE_DIM,
            PAGE,
            False,
            TRANSPOSED,
            BLOCK_R,
            BLOCK_T,
        )
        page = next_page
    if clear < end:
        valid = clear + n < end
        m, total, acc = _attend_block(
            queries,
            rope_part,
            plane,
            page,
            clear + n,
            valid,
            tl.expand_dims(valid, 1 if TRANSPOSED else 0),
            m,
            total,
            acc,
            scale,
            RANK,
            ROPE_DIM,
            PAGE,
            True,
            TRANSPOSED,
            BLOCK_R,
            BLOCK_T,
        )
    return m, total, tl.trans(acc) if TRANSPOSED else acc


@cached_launch
@triton.jit
def _prefix(
    q,
    plane,
    scales,
    items,
    order,
    page_table,
    pages_per_slot,
    acc_buffer,
    ml_buffer,
    max_chunks,
    scale,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    item = items + tl.program_id(1) * 6
    pairs = tl.load(item + 1) * HEADS
    pair = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    if tl.program_id(0) * BLOCK_M >= pairs:
        return
    pages = page_table + tl.load(item + 2).to(tl.int64) * pages_per_slot
    start = tl.load(item + 3)
    end = tl.load(item + 4)
    page = page_of(pages, start + tl.arange(0, BLOCK_N), end, PAGE)
    real = pair < pairs
    row = tl.load(order + tl.load(item) + pair // HEADS, mask=real, other=0).to(tl.int64)
    head = pair % HEADS
    target = (row * HEADS + head) * (RANK + ROPE_DIM)
    queries, rope_part = _load_queries(
        q, target, real, plane, scales, RANK, ROPE_DIM, SCALED, False, BLOCK_R, BLOCK_T
    )
    m, total, acc = _attend_all(
        queries,
        rope_part,
        plane,
        pages,
        page,
        start,
        end,
        scale,
        RANK,
        ROPE_DIM,
        PAGE,
        False,
        BLOCK_R,
        BLOCK_T,
        BLOCK_N,
    )
    part = (row * max_chunks + tl.load(item + 5)) * HEADS + head
    r = tl.arange(0, BLOCK_R)
    tl.store(
        acc_buffer + part[:, None] * RANK + r[None, :],
        acc,
        mask=real[:, None] & (r < RANK)[None, :],
    )
    tl.store(ml_buffer + part * 2, m, mask=real)
    tl.store(ml_buffer + part * 2 + 1, total, mask=real)


@cached_launch
@triton.jit(do_not_specialize=["max_chunks"])
def _decode(
    q,
    plane,
    scales,
    out,
    work,
    row_work,
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
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SCALED: tl.constexpr,
    PREFIX: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    item = tl.program_id(1)
    row = tl.load(work + item * 4)
    if row < 0:
        return
    start = tl.load(work + item * 4 + 1)
    end = tl.load(work + item * 4 + 2)
    pages = page_table + tl.load(work + item * 4 + 3).to(tl.int64) * pages_per_slot
    first_head = tl.program_id(0) * BLOCK_H
    h, n, r = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    is_head = first_head + h < HEADS
    page = page_of(pages, start + n, end, PAGE)
    first = tl.load(row_work + row * 2)
    count = tl.load(row_work + row * 2 + 1)
    target = (row.to(tl.int64) * HEADS + first_head + h) * (RANK + ROPE_DIM)
    queries, rope_part = _load_queries(
        q, target, is_head, plane, scales, RANK, ROPE_DIM, SCALED, TRANSPOSED, BLOCK_R, BLOCK_T
    )
    m, total, acc = _attend_all(
        queries,
        rope_part,
        plane,
        pages,
        page,
        start,
        end,
        scale,
        RANK,
        ROPE_DIM,
        PAGE,
        TRANSPOSED,
        BLOCK_R,
        BLOCK_T,
        BLOCK_N,
    )
    inside = is_head[:, None] & (r < RANK)[None, :]
    last = True
    if count > 1:
        part = (item * HEADS + first_head + h).to(tl.int64)
        tl.store(acc_buffer + part[:, None] * RANK + r[None, :], acc, mask=inside)
        tl.store(ml_buffer + part * 2, m, mask=is_head)
        tl.store(ml_buffer + part * 2 + 1, total, mask=is_head)
        tl.debug_barrier()  # all threads have stored before one signals
        counter = counters + row * tl.num_programs(0) + tl.program_id(0)
        last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
        if last:
            tl.store(counter, 0)
            m = tl.full((BLOCK_H,), float("-inf"), tl.float32)
            total = tl.zeros((BLOCK_H,), tl.float32)
            acc = tl.zeros((BLOCK_H, BLOCK_R), tl.float32)
            for i in range(first, first + count):
                part = (i * HEADS + first_head + h).to(tl.int64)
                m, total, acc = _merge(
                    acc_buffer, ml_buffer, part, m, total, acc, HEADS - first_head, RANK
                )
    if last:
        if PREFIX:
            for i in range(0, tl.load(prefix_chunks + row)):
                part = ((row * max_chunks + i) * HEADS + first_head + h).to(tl.int64)
                m, total, acc = _merge(
                    prefix_acc, prefix_ml, part, m, total, acc, HEADS - first_head, RANK
                )
        if SCALED:
            acc *= tl.load(scales)
        tl.store(
            out + target[:, None] + r[None, :],
            (acc / total[:, None]).to(out.dtype.element_ty),
            mask=inside,
        )


@cached_launch
@triton.jit
def _prefill(
    q,
    plane,
    scales,
    out,
    blocks,
    page_table,
    pages_per_slot,
    scale,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SCALED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    block = blocks + tl.program_id(0) // PARTS * 4
    pair = tl.program_id(0) % PARTS * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.load(block).to(tl.int64)
    pairs = tl.load(block + 1) * HEADS
    lowest = tl.program_id(0) % PARTS * BLOCK_M
    if lowest >= pairs:
        return
    pages = page_table + tl.load(block + 2).to(tl.int64) * pages_per_slot
    position = tl.load(block + 3)
    n, r = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    real = pair < pairs
    target = (first * HEADS + pair) * (RANK + ROPE_DIM)
    queries, rope_part = _load_queries(
        q, target, real, plane, scales, RANK, ROPE_DIM, SCALED, False, BLOCK_R, BLOCK_T
    )
    at_position = position + pair // HEADS
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    # blocks that all queries see need no mask
    clear = (position + lowest // HEADS) // BLOCK_N * BLOCK_N
    end = position + (tl.minimum(lowest + BLOCK_M, pairs) - 1) // HEADS + 1
    page = page_of(pages, n, end, PAGE)
    for at in range(0, clear, BLOCK_N):
        next_page = page_of(pages, at + BLOCK_N + n, end, PAGE)
        m, total, acc = _attend_block(
            queries,
            rope_part,
            plane,
            page,
            at + n,
            None,
            None,
            m,
            total,
            acc,
            scale,
            RANK,
            ROPE_DIM,
            PAGE,
            False,
            False,
            BLOCK_R,
            BLOCK_T,
        )
        page = next_page
    for at in range(clear, end, BLOCK_N):
        next_page = page_of(pages, at + BLOCK_N + n, end, PAGE)
        token = at + n
        m, total, acc = _attend_block(
            queries,
            rope_part,
            plane,
            page,
            token,
            token < end,
            token[None, :] <= at_position[:, None],
            m,
            total,
            acc,
            scale,
            RANK,
            ROPE_DIM,
            PAGE,
            True,
            False,
            BLOCK_R,
            BLOCK_T,
        )
        page = next_page
    total = tl.where(total > 0, total, 1.0)  # padding rows may see no token
    inside = real[:, None] & (r < RANK)[None, :]
    if SCALED:
        acc *= tl.load(scales)
    tl.store(
        out + target[:, None] + r[None, :],
        (acc / total[:, None]).to(out.dtype.element_ty),
        mask=inside,
    )


def heads_per_program(heads: int) -> int:
    """Returns the number of query heads of a row that one decoding program computes."""
    return 16 if heads <= 16 else 32 if heads <= 32 else 64


def hopper_module(
    device: torch.device, dtype: torch.dtype, rank: int, size: int, page: int = 16
) -> ModuleType | None:
    """Returns the module of kernels for Hopper GPUs, or None if the device is not a Hopper GPU or
    the kernels don't support this format.

    Args:
        device: device of the cache.
        dtype: data type of the cache.
        rank: elements of a latent.
        size: elements of a latent and its rotary part.
        page: tokens in a page.
    """
    module = hopper_kernels(properties_of(device), "latent_attention_hopper")
    return module if module is not None and module.supports(dtype, rank, size, page) else None


def latent_decode(
    q: torch.Tensor,
    cache: KVCache,
    layer: int,
    plan: DevicePlan,
    work: DecodeWork,
    out: torch.Tensor,
    *,
    rank: int,
    scale: float,
) -> None:
    """Computes the attention of the plan's decoding rows over latents.

    Args:
        q: absorbed queries [T, heads, rank + rotary size], contiguous, of which the first
            `plan.decoding` are used.
        cache: cache of latents.
        layer: index of the layer.
        plan: plan of the step.
        work: items that `decode_attention.split_work` has made of the rows' tokens; the counters of
            its partials are by row, block of heads and half of a latent.
        out: tensor of the shape of q, of which the first `rank` elements of each head are written.
        rank: elements of a latent.
        scale: factor of the scores.

    Reads each latent once for each block of heads. Tokens in `plan.shared` are read by
    `latent_prefix`, which must run before.
    """
    rows, heads, size = plan.decoding, *q.shape[1:]
    hopper = hopper_module(q.device, cache.k[layer].dtype, rank, size, plan.page_size)
    if hopper is not None:
        hopper.latent_decode_hopper(q, cache, layer, plan, work, out, rank=rank, scale=scale)
        return
    launch = _launch_parameters(q, heads_per_program(heads))
    partials = work.partials
    shared = plan.shared
    block = launch.queries
    blocks = cdiv(heads, block)
    assert rows * blocks <= partials.counters.numel()
    assert len(work.items) * heads * rank <= partials.acc.numel()
    _decode[(blocks, len(work.items))](
        q,
        cache.k[layer],
        cache.scales and cache.scales.k[layer],
        out,
        work.items,
        work.rows,
        plan.page_table,
        plan.page_table.shape[1],
        partials.acc,
        partials.ml,
        partials.counters,
        partials.prefix_acc,
        partials.prefix_ml,
        plan.slots if shared is None else shared.chunks,
        0 if shared is None else shared.max_chunks,
        scale,
        HEADS=heads,
        RANK=rank,
        ROPE_DIM=size - rank,
        PAGE=plan.page_size,
        SCALED=cache.scales is not None,
        PREFIX=shared is not None,
        TRANSPOSED=block < 64,
        BLOCK_H=block,
        **_blocks(rank, size - rank),
        **launch.options,
        **pdl_options(q.device),
    )


def latent_prefix(
    q: torch.Tensor,
    cache: KVCache,
    layer: int,
    plan: DevicePlan,
    work: DecodeWork,
    *,
    rank: int,
    scale: float,
) -> None:
    """Computes the attention of the plan's decoding rows over their shared prefixes. Writes partial
    results to `work.partials`, which `latent_decode` merges. Arguments as for `latent_decode`.

    Reads each latent once for up to 64 pairs of a row and a head.
    """
    heads, size = q.shape[1:]
    hopper = hopper_module(q.device, cache.k[layer].dtype, rank, size, plan.page_size)
    if hopper is not None:
        hopper.latent_prefix_hopper(q, cache, layer, plan, work, rank=rank, scale=scale)
        return
    shared = plan.shared
    partials = work.partials
    launch = _launch_parameters(q, PAIRS_PER_PROGRAM)
    assert shared is not None
    assert plan.decoding * shared.max_chunks * heads * rank <= partials.prefix_acc.numel()
    _prefix[(cdiv(PAIRS_PER_PROGRAM, launch.queries), len(shared.items))](
        q,
        cache.k[layer],
        cache.scales and cache.scales.k[layer],
        shared.items,
        shared.order,
        plan.page_table,
        plan.page_table.shape[1],
        partials.prefix_acc,
        partials.prefix_ml,
        shared.max_chunks,
        scale,
        HEADS=heads,
        RANK=rank,
        ROPE_DIM=size - rank,
        PAGE=plan.page_size,
        SCALED=cache.scales is not None,
        BLOCK_M=launch.queries,
        **_blocks(rank, size - rank),
        **launch.options,
        **pdl_options(q.device),
    )


def latent_prefill(
    q: torch.Tensor,
    cache: KVCache,
    layer: int,
    plan: DevicePlan,
    out: torch.Tensor,
    *,
    rank: int,
    scale: float,
) -> None:
    """Computes the causal attention of the plan's blocks of new tokens over latents. Arguments as
    for `latent_decode`.
    """
    heads, size = q.shape[1:]
    hopper = hopper_module(q.device, cache.k[layer].dtype, rank, size, plan.page_size)
    if hopper is not None:
        hopper.latent_prefill_hopper(q, cache, layer, plan, out, rank=rank, scale=scale)
        return
    launch = _launch_parameters(q, PAIRS_PER_PROGRAM)
    parts = cdiv(plan.block_size * heads, launch.queries)
    _prefill[(len(plan.blocks) * parts,)](
        q,
        cache.k[layer],
        cache.scales and cache.scales.k[layer],
        out,
        plan.blocks,
        plan.page_table,
        plan.page_table.shape[1],
        scale,
        HEADS=heads,
        RANK=rank,
        ROPE_DIM=size - rank,
        PAGE=plan.page_size,
        SCALED=cache.scales is not None,
        PARTS=parts,
        BLOCK_M=launch.queries,
        **_blocks(rank, size - rank),
        **launch.options,
    )


def _blocks(rank: int, rope_dim: int) -> dict[str, int]:
    return {"BLOCK_R": padded_head_size(rank), "BLOCK_T": padded_head_size(rope_dim)}


def _launch_parameters(q: torch.Tensor, queries: int) -> Launch:
    launch = latent_launch(
        properties_of(q.device), size=q.shape[2], item=q.element_size(), queries=queries
    )
    assert launch is not None, "refused"
    return launch
