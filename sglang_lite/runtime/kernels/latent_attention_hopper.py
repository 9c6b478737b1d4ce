"""`latent_attention` with features of Hopper GPUs: bulk copies (TMA) and asynchronous matmuls of
warp groups.

A program has 64 queries of a row: heads (some models have fewer), or pairs of a new token and a
head. The accumulators [64, 512] fill the registers of two warp groups, one for each half of a
latent. The first group also computes scores and weights, and passes the weights to the second
through shared memory; a separate warp copies. A block's latents are copied to shared memory once,
and used as keys and as values. FlashMLA (DeepSeek, 2025) splits the accumulators in the same way.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sglang_lite.runtime.kernels.attention_metadata import DecodeWork, DevicePlan
from sglang_lite.runtime.kernels.descriptors import tensor_descriptor
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.sizes import cdiv

_QUERIES = gl.constexpr(64)  # queries of a program: heads, or pairs of a new token and a head
_TOKENS = gl.constexpr(64)  # tokens of a block
_HALF = gl.constexpr(256)  # half of a latent, which one warp group accumulates
_ROPE_DIM = gl.constexpr(64)
_SIZE = gl.constexpr(576)
_COLUMNS = gl.constexpr(64)  # columns of a copy: 128 bytes, the width of shared memory's swizzle
_STAGES = gl.constexpr(2)  # blocks in shared memory
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
_BY_TOKEN = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
)
_BY_COLUMN = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
)
# for tiles of _COLUMNS columns
_BY_ROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_MERGED_QUERIES = gl.constexpr(16)  # queries whose parts are merged together
_TOGETHER = gl.constexpr(4)  # parts that are loaded together
_MERGED = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
# Names that changed between Triton 3.6 and 3.9.
_sync = getattr(gl, "thread_barrier", None) or gl.barrier
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_view = (
    getattr(gl.shared_memory_descriptor, "_reinterpret", None)
    or gl.shared_memory_descriptor.reinterpret
)


@gluon.jit
def _pages_of(pages, token, end, PAGE: gl.constexpr):
    """Loads the pages of a block of tokens; 0 from `end` on."""
    found = ()  # mypy and ruff don't support Gluon's way of growing tuples
    for p in gl.static_range(_TOKENS // PAGE):
        at = token + p * PAGE
        page = gl.load(pages + at // PAGE, mask=at < end, other=0)
        found = found + (page,)  # type: ignore[assignment] # noqa: RUF005 # as above
    return found


@gluon.jit
def _copy(latents, found, FIRST: gl.constexpr, buffer, ready, PAGE: gl.constexpr):
    """Starts copies of a block's columns from FIRST on: as many as `buffer` [_TOKENS, columns] has."""
    PAGES: gl.constexpr = _TOKENS // PAGE
    CHUNKS: gl.constexpr = buffer.shape[1] // _COLUMNS
    parts = _view(buffer, buffer.dtype, [CHUNKS * PAGES, PAGE, _COLUMNS], SHARED)
    for p in gl.static_range(PAGES):  # the rows of a page are contiguous
        for c in gl.static_range(CHUNKS):
            _load(
                latents, [found[p] * PAGE, FIRST + c * _COLUMNS], ready, parts.index(c * PAGES + p)
            )


@gluon.jit
def _produce(
    latents,
    pages,
    start,
    end,
    blocks,
    left,
    right,
    rope_part,
    left_ready,
    right_ready,
    left_free,
    right_free,
    PAGE: gl.constexpr,
):
    """Runs the copying warp: copies blocks from the last to the first."""
    last = start + (blocks - 1) * _TOKENS
    for i in range(blocks):
        stage = i % _STAGES
        used = (i // _STAGES & 1) ^ 1
        found = _pages_of(pages, last - i * _TOKENS, end, PAGE)
        mbarrier.wait(left_free.index(stage), used)
        mbarrier.expect(left_ready.index(stage), _TOKENS * (_HALF + _ROPE_DIM) * 2)
        _copy(latents, found, 0, left.index(stage), left_ready.index(stage), PAGE)
        _copy(latents, found, 2 * _HALF, rope_part.index(stage), left_ready.index(stage), PAGE)
        mbarrier.wait(right_free.index(stage), used)
        mbarrier.expect(right_ready.index(stage), _TOKENS * _HALF * 2)
        _copy(latents, found, _HALF, right.index(stage), right_ready.index(stage), PAGE)


@gluon.jit
def _place(order, i, queries, heads, TOGETHER: gl.constexpr):
    """Returns the places of queries i. They are contiguous or, with TOGETHER, those of the rows
    listed in `order`.
    """
    if TOGETHER:
        return gl.load(order + i // heads, mask=i < queries, other=0) * heads + i % heads
    else:
        return i


@gluon.jit
def _take_queries(q, order, count, heads, FIRST: gl.constexpr, buffer, TOGETHER: gl.constexpr):
    """Copies the first `count` queries into shared memory, starting at column FIRST, and fills the
    remaining rows with zeros.
    """
    i = gl.arange(0, _QUERIES, layout=gl.SliceLayout(1, _BY_ROW))
    place = _place(order, i, count, heads, TOGETHER)
    column = gl.arange(0, _COLUMNS, layout=gl.SliceLayout(0, _BY_ROW))
    CHUNKS: gl.constexpr = buffer.shape[1] // _COLUMNS
    parts = _view(buffer, buffer.dtype, [CHUNKS, _QUERIES, _COLUMNS], SHARED)
    for c in gl.static_range(CHUNKS):
        at = q + place[:, None] * _SIZE + (FIRST + c * _COLUMNS + column)[None, :]
        parts.index(c).store(gl.load(at, mask=(i < count)[:, None], other=0.0))


@gluon.jit
def _mend(values, count):
    """Zeroes the values from token `count` on: data behind the end may be NaN, and 0 x NaN is NaN."""
    valid = gl.arange(0, _TOKENS, layout=gl.SliceLayout(1, _BY_ROW)) < count
    parts = _view(values, values.dtype, [_HALF // _COLUMNS, _TOKENS, _COLUMNS], SHARED)
    for c in gl.static_range(_HALF // _COLUMNS):
        found = parts.index(c).load(_BY_ROW)
        parts.index(c).store(gl.where(valid[:, None], found, gl.zeros_like(found)))
    fence_async_shared()
    _sync()


@gluon.jit
def _softmax(scores, m, total, scale):
    """Returns weights, highest scores, sums of weights, and the factor for older results, as in
    `softmax.attend_block`."""
    highest = gl.maximum(m, gl.max(scores, 1) * scale)
    # a query may not have seen any token yet
    shift = gl.where(highest == float("-inf"), 0.0, highest)
    shrink = gl.exp2(m - shift)
    weights = gl.exp2(scores * scale - shift[:, None])
    return weights, highest, total * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def _finish(
    acc,
    m,
    total,
    out,
    order,
    queries,
    heads,
    parts,
    FIRST: gl.constexpr,
    PARTED: gl.constexpr,
    TOGETHER: gl.constexpr,
):
    """Stores one half of the results. With PARTED, the last program of a row merges the row's
    parts.
    """
    i = gl.arange(0, _QUERIES, layout=gl.SliceLayout(1, _BY_COLUMN))
    if TOGETHER:
        acc_buffer, ml_buffer, chunk, max_chunks = parts
        place = _place(order, i, queries, heads, True)
        _keep(
            acc,
            m,
            total,
            acc_buffer,
            ml_buffer,
            (place // heads * max_chunks + chunk) * heads + i % heads,
            i < queries,
            FIRST,
        )
    elif PARTED:
        (
            acc_buffer,
            ml_buffer,
            counters,
            part,
            first,
            count,
            prefix_acc,
            prefix_ml,
            prefix_first,
            chunks,
        ) = parts
        if count + chunks == 1:
            _store(acc, total, out, queries, FIRST)
        else:
            _keep(acc, m, total, acc_buffer, ml_buffer, part + i, i < queries, FIRST)
            _sync()  # all threads have stored before one signals
            counter = counters + FIRST // _HALF
            if gl.atomic_add(counter, 1, sem="acq_rel") == count - 1:
                gl.store(counter, 0)
                _merge(
                    out,
                    queries,
                    heads,
                    acc_buffer,
                    ml_buffer,
                    first,
                    count,
                    prefix_acc,
                    prefix_ml,
                    prefix_first,
                    chunks,
                    FIRST,
                )
    else:
        # padding queries may see no token
        _store(acc, gl.where(total > 0, total, 1.0), out, queries, FIRST)


@gluon.jit
def _keep(acc, m, total, acc_buffer, ml_buffer, part, valid, FIRST: gl.constexpr):
    """Stores one half of the results of parts [_QUERIES], not yet divided by the sum of weights."""
    column = FIRST + gl.arange(0, _HALF, layout=gl.SliceLayout(0, _BY_COLUMN))
    at = part.to(gl.int64)
    gl.store(acc_buffer + at[:, None] * (2 * _HALF) + column[None, :], acc, mask=valid[:, None])
    gl.store(ml_buffer + at * 2, m, mask=valid)  # both warp groups store the same
    gl.store(ml_buffer + at * 2 + 1, total, mask=valid)


@gluon.jit
def _store(acc, total, out, queries, FIRST: gl.constexpr):
    i = gl.arange(0, _QUERIES, layout=gl.SliceLayout(1, _BY_COLUMN))
    column = FIRST + gl.arange(0, _HALF, layout=gl.SliceLayout(0, _BY_COLUMN))
    target = out + i[:, None] * _SIZE + column[None, :]
    gl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=(i < queries)[:, None])


@gluon.jit
def _add_parts(highest, total, acc, acc_buffer, ml_buffer, i, valid, column, first, count, stride):
    """Adds parts of a row to the results of queries i. Loads bypass the L1 cache, which doesn't see
    the stores of other programs.

    Args:
        highest, total, acc: running results.
        first, stride: place of the first part, and distance from one part to the next.
        count: number of parts.
    """
    for n in range(0, count, _TOGETHER):
        for p in gl.static_range(_TOGETHER):
            valid_part = valid & (n + p < count)
            part = (first + (n + p) * stride + i).to(gl.int64)
            m = gl.load(
                ml_buffer + part * 2, mask=valid_part, other=float("-inf"), cache_modifier=".cg"
            )
            weight = gl.load(
                ml_buffer + part * 2 + 1, mask=valid_part, other=0.0, cache_modifier=".cg"
            )
            at = acc_buffer + part[:, None] * (2 * _HALF) + column[None, :]
            found = gl.load(at, mask=valid_part[:, None], other=0.0, cache_modifier=".cg")
            higher = gl.maximum(highest, m)
            shift = gl.where(higher == float("-inf"), 0.0, higher)
            old, new = gl.exp2(highest - shift), gl.exp2(m - shift)
            total = total * old + weight * new
            acc = acc * old[:, None] + found * new[:, None]
            highest = higher
    return highest, total, acc


@gluon.jit
def _merge(
    out,
    queries,
    heads,
    acc_buffer,
    ml_buffer,
    first,
    count,
    prefix_acc,
    prefix_ml,
    prefix_first,
    chunks,
    FIRST: gl.constexpr,
):
    """Merges one half of a row's parts and of those of its prefix, and stores the result."""
    column = FIRST + gl.arange(0, _HALF, layout=gl.SliceLayout(0, _MERGED))
    for lowest in range(0, gl.minimum(queries, _QUERIES), _MERGED_QUERIES):
        i = lowest + gl.arange(0, _MERGED_QUERIES, layout=gl.SliceLayout(1, _MERGED))
        valid = i < queries
        highest = gl.full(
            [_MERGED_QUERIES], float("-inf"), gl.float32, layout=gl.SliceLayout(1, _MERGED)
        )
        total = gl.full([_MERGED_QUERIES], 0.0, gl.float32, layout=gl.SliceLayout(1, _MERGED))
        acc = gl.zeros([_MERGED_QUERIES, _HALF], gl.float32, layout=_MERGED)
        highest, total, acc = _add_parts(
            highest, total, acc, acc_buffer, ml_buffer, i, valid, column, first, count, heads
        )
        highest, total, acc = _add_parts(
            highest,
            total,
            acc,
            prefix_acc,
            prefix_ml,
            i,
            valid,
            column,
            prefix_first,
            chunks,
            heads,
        )
        target = out + i[:, None] * _SIZE + column[None, :]
        gl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=valid[:, None])


@gluon.jit
def _start_scores(q_left, q_right, q_rope, left, right, rope_part, left_ready, right_ready, i):
    """Starts the products of all queries with block i's latents as they arrive in shared memory;
    returns them while they are running.
    """
    stage = i % _STAGES
    phase = i // _STAGES & 1
    nothing = gl.zeros([_QUERIES, _TOKENS], gl.float32, layout=_BY_TOKEN)
    mbarrier.wait(left_ready.index(stage), phase)
    scores = warpgroup_mma(
        q_left, left.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True
    )
    scores = warpgroup_mma(q_rope, rope_part.index(stage).permute((1, 0)), scores, is_async=True)
    mbarrier.wait(right_ready.index(stage), phase)
    return warpgroup_mma(q_right, right.index(stage).permute((1, 0)), scores, is_async=True)


@gluon.jit
def _share(weights, shrink, shared_weights, stats):
    """Stores a block's weights, and the factor for older results, for the second warp group."""
    shared_weights.store(weights)
    stats.index(0).store(shrink)
    fence_async_shared()
    _sync()


@gluon.jit
def _first(
    q,
    out,
    order,
    queries,
    start,
    end,
    blocks,
    masked,
    position,
    lowest,
    scale,
    parts,
    q_left,
    q_right,
    q_rope,
    left,
    right,
    rope_part,
    shared_weights,
    stats,
    left_ready,
    right_ready,
    left_free,
    weights_ready,
    weights_free,
    heads,
    PARTED: gl.constexpr,
    TOGETHER: gl.constexpr,
    LATE: gl.constexpr,
):
    """Runs the first warp group, which computes scores and weights of all blocks, and the first
    half of the results. With LATE, the second group starts its products during this group's softmax
    instead of during its next scores. That is faster if latents are in the L2 cache. It is slower
    if they come from memory, because they stay longer in shared memory.
    """
    dtype: gl.constexpr = left.dtype
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=_BY_COLUMN, k_width=2)
    by_query: gl.constexpr = gl.SliceLayout(1, _BY_TOKEN)
    _take_queries(q, order, queries, heads, 0, q_left, TOGETHER)
    _take_queries(q, order, queries, heads, _HALF, q_right, TOGETHER)
    _take_queries(q, order, queries, heads, 2 * _HALF, q_rope, TOGETHER)
    fence_async_shared()
    _sync()
    n = gl.arange(0, _TOKENS, layout=gl.SliceLayout(0, _BY_TOKEN))
    seen_to = position + (lowest + gl.arange(0, _QUERIES, layout=by_query)) // heads
    m = gl.full([_QUERIES], float("-inf"), gl.float32, layout=by_query)
    total = gl.full([_QUERIES], 0.0, gl.float32, layout=by_query)
    acc = gl.zeros([_QUERIES, _HALF], gl.float32, layout=_BY_COLUMN)

    scores = _start_scores(
        q_left, q_right, q_rope, left, right, rope_part, left_ready, right_ready, 0
    )
    scores = warpgroup_mma_wait(0, deps=[scores])
    token = start + (blocks - 1) * _TOKENS + n
    seen = (token[None, :] <= seen_to[:, None]) & (token < end)[None, :]
    weights, m, total, shrink = _softmax(gl.where(seen, scores, float("-inf")), m, total, scale)
    weights = weights.to(dtype)
    _share(weights, shrink, shared_weights, stats)
    if not LATE:
        mbarrier.arrive(weights_ready.index(0), count=1)
    if end < start + blocks * _TOKENS:
        _mend(left.index(0), end - start - (blocks - 1) * _TOKENS)
    for i in range(1, blocks):
        before = (i - 1) % _STAGES
        acc = warpgroup_mma(
            gl.convert_layout(weights, OPERAND), left.index(before), acc, is_async=True
        )
        scores = _start_scores(
            q_left, q_right, q_rope, left, right, rope_part, left_ready, right_ready, i
        )
        acc = warpgroup_mma_wait(3, deps=[acc])
        mbarrier.arrive(left_free.index(before), count=1)
        scores = warpgroup_mma_wait(0, deps=[scores])
        if LATE:  # the second group's products overlap with this one's softmax
            mbarrier.arrive(weights_ready.index(0), count=1)
        if i < masked:
            token = start + (blocks - 1 - i) * _TOKENS + n
            scores = gl.where(token[None, :] <= seen_to[:, None], scores, float("-inf"))
        weights, m, total, shrink = _softmax(scores, m, total, scale)
        weights = weights.to(dtype)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, _BY_COLUMN))[:, None]
        mbarrier.wait(weights_free.index(0), (i - 1) & 1)
        _share(weights, shrink, shared_weights, stats)
        if not LATE:
            mbarrier.arrive(weights_ready.index(0), count=1)
    if LATE:
        mbarrier.arrive(weights_ready.index(0), count=1)
    acc = warpgroup_mma(
        gl.convert_layout(weights, OPERAND), left.index((blocks - 1) % _STAGES), acc, is_async=True
    )
    mbarrier.wait(weights_free.index(0), (blocks - 1) & 1)
    stats.index(0).store(m)
    stats.index(1).store(total)
    _sync()
    mbarrier.arrive(weights_ready.index(0), count=1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    m = gl.convert_layout(m, gl.SliceLayout(1, _BY_COLUMN))
    total = gl.convert_layout(total, gl.SliceLayout(1, _BY_COLUMN))
    _finish(acc, m, total, out, order, queries, heads, parts, 0, PARTED, TOGETHER)


@gluon.jit
def _second(
    out,
    order,
    queries,
    start,
    end,
    blocks,
    parts,
    right,
    shared_weights,
    stats,
    right_ready,
    right_free,
    weights_ready,
    weights_free,
    heads,
    PARTED: gl.constexpr,
    TOGETHER: gl.constexpr,
):
    """Runs the second warp group, which computes the second half of the results with the first
    group's weights.
    """
    by_query: gl.constexpr = gl.SliceLayout(1, _BY_COLUMN)
    acc = gl.zeros([_QUERIES, _HALF], gl.float32, layout=_BY_COLUMN)
    if end < start + blocks * _TOKENS:
        mbarrier.wait(weights_ready.index(0), 0)  # after the first group has read the keys
        mbarrier.wait(right_ready.index(0), 0)
        _mend(right.index(0), end - start - (blocks - 1) * _TOKENS)
    for i in range(blocks):
        stage = i % _STAGES
        mbarrier.wait(weights_ready.index(0), i & 1)
        acc = acc * stats.index(0).load(by_query)[:, None]
        mbarrier.wait(right_ready.index(stage), i // _STAGES & 1)
        acc = warpgroup_mma(shared_weights, right.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(right_free.index(stage), count=1)
        mbarrier.arrive(weights_free.index(0), count=1)
    mbarrier.wait(weights_ready.index(0), blocks & 1)
    m, total = stats.index(0).load(by_query), stats.index(1).load(by_query)
    _finish(acc, m, total, out, order, queries, heads, parts, _HALF, PARTED, TOGETHER)


@gluon.jit
def _attend(
    q,
    out,
    order,
    queries,
    latents,
    pages,
    start,
    end,
    masked,
    position,
    lowest,
    scale,
    parts,
    heads,
    PAGE: gl.constexpr,
    PARTED: gl.constexpr,
    TOGETHER: gl.constexpr,
    LATE: gl.constexpr,
):
    """Computes the attention of up to _QUERIES contiguous queries over the tokens from `start` to
    `end` of their row.

    Args:
        q, out: first query, and its result.
        order: with TOGETHER, numbers of the rows that the queries belong to; q is then the first
            query of row 0.
        queries: number of queries.
        latents, pages: descriptor of the layer's latents, and pages of the row.
        masked: number of last blocks of which some query doesn't see all tokens.
        position, lowest: position of the row's first new token, and index of the first query
            counted from that token; each token has `heads` queries.
        parts: with PARTED: buffers for results and weights of parts, counters of finished parts
            (one per half), places of this part and of the row's first one, number of parts; then
            buffers, first place and number of parts of the row's prefix. With TOGETHER: buffers for
            results and weights of prefixes, index of this piece, and maximum number of pieces.
    """
    blocks = (end - start + _TOKENS - 1) // _TOKENS
    dtype: gl.constexpr = q.dtype.element_ty
    q_left = gl.allocate_shared_memory(dtype, [_QUERIES, _HALF], SHARED)
    q_right = gl.allocate_shared_memory(dtype, [_QUERIES, _HALF], SHARED)
    q_rope = gl.allocate_shared_memory(dtype, [_QUERIES, _ROPE_DIM], SHARED)
    left = gl.allocate_shared_memory(dtype, [_STAGES, _TOKENS, _HALF], SHARED)
    right = gl.allocate_shared_memory(dtype, [_STAGES, _TOKENS, _HALF], SHARED)
    rope_part = gl.allocate_shared_memory(dtype, [_STAGES, _TOKENS, _ROPE_DIM], SHARED)
    weights = gl.allocate_shared_memory(dtype, [_QUERIES, _TOKENS], SHARED)
    stats = gl.allocate_shared_memory(gl.float32, [2, _QUERIES], _PLAIN)
    left_ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    right_ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    left_free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    right_free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    weights_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    weights_free = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_STAGES):
        mbarrier.init(left_ready.index(i), count=1)
        mbarrier.init(right_ready.index(i), count=1)
        mbarrier.init(left_free.index(i), count=1)
        mbarrier.init(right_free.index(i), count=1)
    mbarrier.init(weights_ready.index(0), count=1)
    mbarrier.init(weights_free.index(0), count=1)
    fence_async_shared()
    _sync()
    gl.warp_specialize([
        (_first, (q, out, order, queries, start, end, blocks, masked, position, lowest, scale, parts, q_left, q_right,
                  q_rope, left, right, rope_part, weights, stats, left_ready, right_ready, left_free, weights_ready,
                  weights_free, heads, PARTED, TOGETHER, LATE)),
        (_second, (out, order, queries, start, end, blocks, parts, right, weights, stats, right_ready, right_free,
                   weights_ready, weights_free, heads, PARTED, TOGETHER)),
        (_produce, (latents, pages, start, end, blocks, left, right, rope_part, left_ready, right_ready, left_free,
                    right_free, PAGE)),
    ], [4, 1], [208, 40])  # fmt: skip


@cached_launch
@gluon.jit(do_not_specialize=["max_chunks"])
def latent_decode_kernel(
    q,
    latents,
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
    heads,
    PAGE: gl.constexpr,
    PREFIX: gl.constexpr,
):
    item = gl.program_id(1)
    row = gl.load(work + item * 4)
    if row < 0:
        return
    start = gl.load(work + item * 4 + 1)
    end = gl.load(work + item * 4 + 2)
    pages = page_table + gl.load(work + item * 4 + 3).to(gl.int64) * pages_per_slot
    first = gl.load(row_work + row * 2)
    count = gl.load(row_work + row * 2 + 1)
    head = gl.program_id(0) * _QUERIES
    chunks = 0
    if PREFIX:
        chunks = gl.load(prefix_chunks + row)
    target = (row.to(gl.int64) * heads + head) * _SIZE
    _attend(
        q + target,
        out + target,
        work,
        heads - head,
        latents,
        pages,
        start,
        end,
        1,
        end - 1,
        0,
        scale,
        (
            acc_buffer,
            ml_buffer,
            counters + (row * gl.num_programs(0) + gl.program_id(0)) * 2,
            item * heads + head,
            first * heads + head,
            count,
            prefix_acc,
            prefix_ml,
            row * max_chunks * heads + head,
            chunks,
        ),
        heads,
        PAGE,
        True,
        False,
        False,
    )


@cached_launch
@gluon.jit(do_not_specialize=["max_chunks"])
def latent_prefix_kernel(
    q,
    latents,
    items,
    order,
    page_table,
    pages_per_slot,
    acc_buffer,
    ml_buffer,
    max_chunks,
    scale,
    heads,
    PAGE: gl.constexpr,
):
    item = items + gl.program_id(0) * 6
    rows = gl.load(item + 1)
    if rows == 0:
        return
    pages = page_table + gl.load(item + 2).to(gl.int64) * pages_per_slot
    start = gl.load(item + 3)
    end = gl.load(item + 4)
    _attend(
        q,
        q,
        order + gl.load(item),
        rows * heads,
        latents,
        pages,
        start,
        end,
        1,
        end - 1,
        0,
        scale,
        (acc_buffer, ml_buffer, gl.load(item + 5), max_chunks),
        heads,
        PAGE,
        True,
        True,
        False,
    )


@cached_launch
@gluon.jit
def latent_prefill_kernel(
    q,
    latents,
    out,
    plan_blocks,
    page_table,
    pages_per_slot,
    scale,
    heads,
    parts,
    PAGE: gl.constexpr,
):
    block = plan_blocks + gl.program_id(0) // parts * 4
    lowest = gl.program_id(0) % parts * _QUERIES
    queries = gl.load(block + 1) * heads - lowest
    if queries <= 0:
        return
    pages = page_table + gl.load(block + 2).to(gl.int64) * pages_per_slot
    position = gl.load(block + 3)
    end = position + (lowest + gl.minimum(queries, _QUERIES) - 1) // heads + 1
    clear = (position + lowest // heads + 1) // _TOKENS  # blocks that every query sees fully
    target = (gl.load(block).to(gl.int64) * heads + lowest) * _SIZE
    _attend(
        q + target,
        out + target,
        plan_blocks,
        queries,
        latents,
        pages,
        0,
        end,
        (end + _TOKENS - 1) // _TOKENS - clear,
        position,
        lowest,
        scale,
        (),
        heads,
        PAGE,
        False,
        False,
        True,
    )


def supports(dtype: torch.dtype, rank: int, size: int, page: int) -> bool:
    """Returns whether the kernels support latents of `size` elements, `rank` of them without the
    rotary part, in pages of `page` tokens.
    """
    sizes = (rank, size) == (2 * _HALF.value, _SIZE.value)
    return (
        sizes
        and page % 8 == 0
        and _TOKENS.value % page == 0
        and dtype in (torch.bfloat16, torch.float16)
    )


def latent_decode_hopper(
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
    """Computes the attention of the plan's decoding rows. Arguments as for `latent_decode`; items
    must start at a page boundary.

    Reads each latent once per 64 heads. Uses 225 KB of shared memory.
    """
    heads = q.shape[1]
    blocks = cdiv(heads, _QUERIES.value)
    partials = work.partials
    shared = plan.shared
    assert plan.decoding * blocks * 2 <= partials.counters.numel()
    assert len(work.items) * heads * rank <= partials.acc.numel()
    latent_decode_kernel[(blocks, len(work.items))](
        q,
        _describe_latents(cache, layer, plan),
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
        scale * 1.4426950408889634,
        heads,
        PAGE=plan.page_size,
        PREFIX=shared is not None,
        num_warps=4,
    )


def latent_prefix_hopper(
    q: torch.Tensor,
    cache: KVCache,
    layer: int,
    plan: DevicePlan,
    work: DecodeWork,
    *,
    rank: int,
    scale: float,
) -> None:
    """Computes the attention of the plan's decoding rows over their shared prefixes. Arguments as
    for `latent_prefix`; pieces must start at a page boundary and have at most 64 queries.
    """
    heads = q.shape[1]
    shared = plan.shared
    partials = work.partials
    assert shared is not None
    assert plan.decoding * shared.max_chunks * heads * rank <= partials.prefix_acc.numel()
    latent_prefix_kernel[(len(shared.items),)](
        q,
        _describe_latents(cache, layer, plan),
        shared.items,
        shared.order,
        plan.page_table,
        plan.page_table.shape[1],
        partials.prefix_acc,
        partials.prefix_ml,
        shared.max_chunks,
        scale * 1.4426950408889634,
        heads,
        PAGE=plan.page_size,
        num_warps=4,
    )


def latent_prefill_hopper(
    q: torch.Tensor,
    cache: KVCache,
    layer: int,
    plan: DevicePlan,
    out: torch.Tensor,
    *,
    rank: int,
    scale: float,
) -> None:
    """Computes the causal attention of the plan's blocks of new tokens. Arguments as for
    `latent_prefill`.
    """
    heads = q.shape[1]
    parts = cdiv(plan.block_size * heads, _QUERIES.value)
    latent_prefill_kernel[(len(plan.blocks) * parts,)](
        q,
        _describe_latents(cache, layer, plan),
        out,
        plan.blocks,
        plan.page_table,
        plan.page_table.shape[1],
        scale * 1.4426950408889634,
        heads,
        parts,
        PAGE=plan.page_size,
        num_warps=4,
    )


def _describe_latents(cache: KVCache, layer: int, plan: DevicePlan) -> TensorDescriptor:
    box = plan.page_size, _COLUMNS.value
    return tensor_descriptor(cache.k[layer], _SIZE.value, box, SHARED.value)
