"""`prefill_attention` with features of Hopper GPUs: bulk copies (TMA) and asynchronous matmuls of
warp groups.

Written in Gluon, Triton's language for layouts and barriers, as Triton itself can't copy pages in
bulk. The design is FlashAttention-3's (Shah et al., arXiv:2407.08608): one warp copies, and two
warp groups compute, each for its own queries. The matmuls of a block overlap with the softmax of
the next block, and those of one group with the softmax of the other group.

Keys may end with a rotary part that all heads share, if they are expanded from latents.
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

from sglang_lite.runtime.kernels.attention_metadata import AttentionRules, DevicePlan
from sglang_lite.runtime.kernels.descriptors import tensor_descriptor
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.launcher import cached_launch

QUERIES = gl.constexpr(64)  # queries of a warp group
_TOKENS_PER_BLOCK = 128  # of heads up to 128
COLUMNS = gl.constexpr(64)  # columns of a copy: 128 bytes, the width of shared memory's swizzle
STAGES = gl.constexpr(2)  # blocks of keys, and of values, in shared memory
# for tiles of COLUMNS columns
BY_ROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
# Names that changed between Triton 3.6 and 3.9.
sync = getattr(gl, "thread_barrier", None) or gl.barrier
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_view = (
    getattr(gl.shared_memory_descriptor, "_reinterpret", None)
    or gl.shared_memory_descriptor.reinterpret
)


@gluon.jit
def _copy(desc, row, column, pages, token, end, buffer, ready, PAGE: gl.constexpr):
    """Starts copies of a block of tokens, page by page. Tokens from `end` on are read from the last
    token's page.

    Shared memory holds the first COLUMNS columns of the block page by page, then the next COLUMNS.
    """
    PAGES: gl.constexpr = buffer.shape[0] // PAGE
    CHUNKS: gl.constexpr = buffer.shape[1] // COLUMNS
    parts = _view(buffer, buffer.dtype, [CHUNKS * PAGES, PAGE, COLUMNS], SHARED)
    for p in gl.static_range(PAGES):
        page = gl.load(pages + gl.minimum(token + p * PAGE, end - 1) // PAGE)
        for c in gl.static_range(CHUNKS):
            _load(
                desc, [row + page * PAGE, column + c * COLUMNS], ready, parts.index(c * PAGES + p)
            )


@gluon.jit
def copy_blocks(
    keys,
    rope_parts,
    values,
    row,
    rope_row,
    rope_column,
    pages,
    start,
    end,
    blocks,
    before,
    k_buffers,
    rope_buffers,
    v_buffers,
    k_ready,
    v_ready,
    k_free,
    v_free,
    PAGE: gl.constexpr,
    ROPE_DIM: gl.constexpr,
):
    """Runs the copying warp: copies blocks from the last to the first. `before` blocks have been
    copied by earlier calls.
    """
    TOKENS: gl.constexpr = k_buffers.shape[1]
    for i in range(before, before + blocks):
        stage = i % STAGES
        used = (i // STAGES & 1) ^ 1
        token = start + (before + blocks - 1 - i) * TOKENS
        mbarrier.wait(k_free.index(stage), used)
        mbarrier.expect(k_ready.index(stage), TOKENS * (k_buffers.shape[2] + ROPE_DIM) * 2)
        _copy(keys, row, 0, pages, token, end, k_buffers.index(stage), k_ready.index(stage), PAGE)
        if ROPE_DIM:
            rope_part = rope_buffers.index(stage)
            _copy(
                rope_parts,
                rope_row,
                rope_column,
                pages,
                token,
                end,
                rope_part,
                k_ready.index(stage),
                PAGE,
            )
        mbarrier.wait(v_free.index(stage), used)
        mbarrier.expect(v_ready.index(stage), TOKENS * v_buffers.shape[2] * 2)
        _copy(values, row, 0, pages, token, end, v_buffers.index(stage), v_ready.index(stage), PAGE)


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
def take_queries(rows, real, buffer):
    """Copies queries into shared memory, with zeros for those that are not real.

    Args:
        rows: start of each query [QUERIES].
        real: bool [QUERIES].
        buffer: shared memory [QUERIES, columns].
    """
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, BY_ROW))
    CHUNKS: gl.constexpr = buffer.shape[1] // COLUMNS
    parts = _view(buffer, buffer.dtype, [CHUNKS, QUERIES, COLUMNS], SHARED)
    for c in gl.static_range(CHUNKS):
        at = rows[:, None] + (c * COLUMNS + column)[None, :]
        parts.index(c).store(gl.load(at, mask=real[:, None], other=0.0))


@gluon.jit
def _start_scores(queries, q_rope, keys, rope_part, nothing, ROPE_DIM: gl.constexpr):
    """Starts the products of queries with a block's keys; returns them while they are running."""
    scores = warpgroup_mma(queries, keys.permute((1, 0)), nothing, use_acc=False, is_async=True)
    if ROPE_DIM:
        scores = warpgroup_mma(q_rope, rope_part.permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def attend_blocks(
    queries,
    q_rope,
    seen_to,
    start,
    end,
    blocks,
    clear,
    before,
    scale,
    k_buffers,
    rope_buffers,
    v_buffers,
    k_ready,
    v_ready,
    k_free,
    v_free,
    ROPE_DIM: gl.constexpr,
):
    """Runs a computing warp group: computes the attention of the queries in shared memory over the
    blocks that `copy_blocks` copies.

    Args:
        queries, q_rope: queries and their rotary parts in shared memory.
        seen_to: last token that each query sees [QUERIES].
        start, end: first token, and end of the tokens.
        blocks: number of blocks.
        clear: number of blocks that every query sees fully.
        before: number of blocks that the warps have processed before.
        scale: factor of the scores, in base 2.

    Returns:
        Highest scores, sums of weights, and weighted values not yet divided by them.
    """
    TOKENS: gl.constexpr = k_buffers.shape[1]
    DIM: gl.constexpr = v_buffers.shape[2]
    dtype: gl.constexpr = k_buffers.dtype
    BY_TOKEN: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TOKENS, 16]
    )
    BY_COLUMN: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DIM, 16]
    )
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=BY_COLUMN, k_width=2)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])

    n = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, BY_TOKEN))
    seen_to = gl.convert_layout(seen_to, gl.SliceLayout(1, BY_TOKEN))
    m = gl.full([QUERIES], float("-inf"), gl.float32, layout=gl.SliceLayout(1, BY_TOKEN))
    total = gl.full([QUERIES], 0.0, gl.float32, layout=gl.SliceLayout(1, BY_TOKEN))
    acc = gl.zeros([QUERIES, DIM], gl.float32, layout=BY_COLUMN)
    nothing = gl.zeros([QUERIES, TOKENS], gl.float32, layout=BY_TOKEN)

    first = before % STAGES
    mbarrier.wait(k_ready.index(first), before // STAGES & 1)
    scores = _start_scores(
        queries, q_rope, k_buffers.index(first), rope_buffers.index(first), nothing, ROPE_DIM
    )
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_free.index(first), count=1)
    token = start + (blocks - 1) * TOKENS + n
    scores = gl.where(token[None, :] <= seen_to[:, None], scores, float("-inf"))
    weights, m, total, shrink = _softmax(scores, m, total, scale)
    operand = gl.convert_layout(weights.to(dtype), OPERAND)
    mbarrier.wait(v_ready.index(first), before // STAGES & 1)
    # values behind the end may be NaN, and 0 x NaN is NaN; both groups do this
    if end < start + blocks * TOKENS:
        values = v_buffers.index(first)
        valid = (
            start + (blocks - 1) * TOKENS + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, ROWS))
            < end
        )
        found = values.load(ROWS)
        sync()
        values.store(gl.where(valid[:, None], found, gl.zeros([TOKENS, DIM], dtype, layout=ROWS)))
        fence_async_shared()
        sync()
    for i in range(before + 1, before + blocks):
        stage = i % STAGES
        last = (i - 1) % STAGES
        mbarrier.wait(k_ready.index(stage), i // STAGES & 1)
        scores = _start_scores(
            queries, q_rope, k_buffers.index(stage), rope_buffers.index(stage), nothing, ROPE_DIM
        )
        mbarrier.wait(v_ready.index(last), (i - 1) // STAGES & 1)
        acc = warpgroup_mma(operand, v_buffers.index(last), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_free.index(stage), count=1)
        if i < before + blocks - clear:
            token = start + (before + blocks - 1 - i) * TOKENS + n
            scores = gl.where(token[None, :] <= seen_to[:, None], scores, float("-inf"))
        weights, m, total, shrink = _softmax(scores, m, total, scale)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_free.index(last), count=1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, BY_COLUMN))[:, None]
        operand = gl.convert_layout(weights.to(dtype), OPERAND)
    at = before + blocks - 1
    mbarrier.wait(v_ready.index(at % STAGES), at // STAGES & 1)
    acc = warpgroup_mma(operand, v_buffers.index(at % STAGES), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_free.index(at % STAGES), count=1)
    return m, total, acc


@gluon.jit
def _compute(
    q,
    q_stride,
    out,
    first,
    count,
    position,
    end,
    blocks,
    clear,
    head,
    scale,
    q_buffers,
    q_ropes,
    k_buffers,
    rope_buffers,
    v_buffers,
    k_ready,
    v_ready,
    k_free,
    v_free,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    ROPE_DIM: gl.constexpr,
):
    """Runs a computing warp group: computes the attention of QUERIES queries over all blocks."""
    KEY: gl.constexpr = q_buffers.shape[2]
    queries, q_rope = q_buffers.index(GROUP), q_ropes.index(GROUP)
    i = gl.arange(0, QUERIES, layout=gl.SliceLayout(1, BY_ROW))
    rows = q + (first + GROUP * QUERIES) * q_stride + head * (KEY + ROPE_DIM) + i * q_stride
    take_queries(rows, i < count - GROUP * QUERIES, queries)
    if ROPE_DIM:
        take_queries(rows + KEY, i < count - GROUP * QUERIES, q_rope)
    fence_async_shared()
    sync()
    _, total, acc = attend_blocks(
        queries,
        q_rope,
        position + GROUP * QUERIES + i,
        0,
        end,
        blocks,
        clear,
        0,
        scale,
        k_buffers,
        rope_buffers,
        v_buffers,
        k_ready,
        v_ready,
        k_free,
        v_free,
        ROPE_DIM,
    )
    total = gl.convert_layout(gl.where(total > 0, total, 1.0), gl.SliceLayout(1, acc.type.layout))
    row = GROUP * QUERIES + gl.arange(0, QUERIES, layout=gl.SliceLayout(1, acc.type.layout))
    column = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
    target = out + ((first + row) * HEADS + head)[:, None] * acc.shape[1] + column[None, :]
    gl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=(row < count)[:, None])


@cached_launch
@gluon.jit(do_not_specialize=["token_slots", "before"])
def prefill_kernel(
    q,
    q_stride,
    keys,
    rope_parts,
    rope_column,
    values,
    token_slots,
    out,
    plan_blocks,
    page_table,
    pages_per_slot,
    before,
    scale,
    G: gl.constexpr,
    KEY: gl.constexpr,
    ROPE_DIM: gl.constexpr,
    VALUE: gl.constexpr,
    PAGE: gl.constexpr,
    HEADS: gl.constexpr,
    TOKENS: gl.constexpr,
    OWN: gl.constexpr,
):
    head = gl.program_id(0)
    block = plan_blocks + gl.program_id(1) * 4
    first = gl.load(block).to(gl.int64)
    count = gl.load(block + 1)
    slot = gl.load(block + 2).to(gl.int64)
    position = gl.load(block + 3)
    if count <= 0:
        return
    end = position + count
    blocks = (end + TOKENS - 1) // TOKENS
    clear = (position + 1) // TOKENS  # blocks that every query sees fully
    pages = page_table + slot * pages_per_slot
    row = head // G * token_slots
    own = 0
    if OWN:
        own = first.to(gl.int32) - position - before
        row += own

    dtype: gl.constexpr = q.dtype.element_ty
    q_buffers = gl.allocate_shared_memory(dtype, [2, QUERIES, KEY], SHARED)
    k_buffers = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, KEY], SHARED)
    q_ropes, rope_buffers = q_buffers, k_buffers
    if ROPE_DIM:
        q_ropes = gl.allocate_shared_memory(dtype, [2, QUERIES, ROPE_DIM], SHARED)
        rope_buffers = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, ROPE_DIM], SHARED)
    v_buffers = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, VALUE], SHARED)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)  # both groups arrive
        mbarrier.init(v_free.index(i), count=2)
    fence_async_shared()
    sync()
    gl.warp_specialize([
        (_compute, (q, q_stride, out, first, count, position, end, blocks, clear, head, scale, q_buffers, q_ropes,
                    k_buffers, rope_buffers, v_buffers, k_ready, v_ready, k_free, v_free, 0, HEADS, ROPE_DIM)),
        (_compute, (q, q_stride, out, first, count, position, end, blocks, clear, head, scale, q_buffers, q_ropes,
                    k_buffers, rope_buffers, v_buffers, k_ready, v_ready, k_free, v_free, 1, HEADS, ROPE_DIM)),
        (copy_blocks, (keys, rope_parts, values, row, own, rope_column, pages, 0, end, blocks, 0, k_buffers,
                       rope_buffers, v_buffers, k_ready, v_ready, k_free, v_free, PAGE, ROPE_DIM)),
    ], [4, 1], [240, 24])  # fmt: skip


def _tokens_per_block(dim: int) -> int:
    """Returns the number of tokens in a block. Blocks for heads of 256 have half as many, because
    no more fit into shared memory.
    """
    return _TOKENS_PER_BLOCK if dim <= 128 else 64


def supports(q: torch.Tensor, cache: KVCache, plan: DevicePlan) -> bool:
    """Returns whether the kernel supports these heads, data types and pages. It supports no window
    and no softcap.
    """
    dim = q.shape[2]
    sixteen_bits = q.dtype in (torch.bfloat16, torch.float16) and cache.k[0].dtype == q.dtype
    pages = plan.page_size % 8 == 0 and _tokens_per_block(dim) % plan.page_size == 0
    return sixteen_bits and pages and dim in (64, 128, 256) and plan.block_size == 2 * QUERIES.value


def prefill_attention_hopper(
    q: torch.Tensor,
    cache: KVCache,
    layer: int,
    plan: DevicePlan,
    out: torch.Tensor,
    rules: AttentionRules,
) -> None:
    """Computes the causal attention of the plan's blocks of queries.

    Reads, for each head and block, the keys and values of all tokens up to the block's end once: 4
    bytes for an element of both. The heads of a group find them in the L2 cache. Uses 160 KB of
    shared memory for heads of 128, and 192 KB for those of 256, whose blocks have 64 tokens.

    Args:
        q: queries [T, heads, head_dim] as `rope_store` returns them; the heads of a token are
            contiguous.
        cache: KV cache, with the keys and values of the step's tokens.
        layer: index of the layer.
        plan: plan of the step.
        out: [T, heads, head_dim] (the tokens of the blocks are written).
        rules: rules of the layer, which are plain.
    """
    _launch(
        q,
        cache.k[layer],
        None,
        cache.v[layer],
        plan.page_size,
        plan.page_table,
        plan.blocks,
        out,
        rules.scale,
    )


def supports_uncached(
    plan: DevicePlan, dtype: torch.dtype, key: int, rope_part: int, value: int
) -> bool:
    """Returns whether `uncached_attention_hopper` supports the plan's blocks, the data type, and
    these sizes of keys, rotary parts and values.
    """
    sizes = key in (64, 128) and rope_part == COLUMNS.value and value in (64, 128)
    return (
        sizes and dtype in (torch.bfloat16, torch.float16) and plan.block_size == 2 * QUERIES.value
    )


def uncached_attention_hopper(
    q: torch.Tensor,
    keys: torch.Tensor,
    rope_parts: torch.Tensor,
    values: torch.Tensor,
    plan: DevicePlan,
    out: torch.Tensor,
    *,
    scale: float,
) -> None:
    """Computes the causal attention of the plan's blocks of queries, for rows whose first token is
    also in the batch.

    Args:
        q: queries [T, heads, key size + rotary size]; the heads of a token are contiguous.
        keys, values: [heads, T - plan.decoding, size], contiguous, of the non-decoding tokens of
            the batch.
        rope_parts: [T - plan.decoding, …, rotary size]: the last columns are the end of the keys of
            all heads.
        plan: plan of the step.
        out: [T, heads, value size] (the tokens of the blocks are written).
        scale: factor of the scores.

    Reads as much as `prefill_attention_hopper`. Uses 208 KB of shared memory for keys of 192.
    """
    blocks = torch.arange(
        -(-keys.shape[1] // _TOKENS_PER_BLOCK), dtype=torch.int32, device=q.device
    ).view(1, -1)
    _launch(
        q,
        keys,
        rope_parts,
        values,
        _TOKENS_PER_BLOCK,
        blocks,
        plan.blocks,
        out,
        scale,
        before=plan.decoding,
    )


def _launch(
    q: torch.Tensor,
    keys: torch.Tensor,
    rope_parts: torch.Tensor | None,
    values: torch.Tensor,
    page_size: int,
    page_table: torch.Tensor,
    blocks: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    before: int = 0,
) -> None:
    """Launches the kernel. Keys and values are either in pages or contiguous.

    Args:
        rope_parts: None if keys and values are in pages; else the ends of keys, and keys and values
            are contiguous.
        before: number of tokens at the start of the batch that keys and values leave out.
    """
    heads = q.shape[1]
    box = (page_size, COLUMNS.value)
    of_keys, of_values = (
        tensor_descriptor(x, x.shape[2], box, SHARED.value) for x in (keys, values)
    )
    rope_part = 0
    of_rope_parts = of_keys
    column = 0
    if rope_parts is not None:
        rope_part = q.shape[2] - keys.shape[2]
        of_rope_parts = TensorDescriptor.from_tensor(rope_parts, [*box], SHARED.value)
        column = rope_parts.shape[1] - rope_part
    prefill_kernel[(heads, len(blocks))](
        q,
        q.stride(0),
        of_keys,
        of_rope_parts,
        column,
        of_values,
        keys.shape[1],
        out,
        blocks,
        page_table,
        page_table.shape[1] if rope_parts is None else 0,
        before,
        scale * 1.4426950408889634,
        G=heads // len(keys),
        KEY=keys.shape[2],
        ROPE_DIM=rope_part,
        VALUE=values.shape[2],
        PAGE=page_size,
        HEADS=heads,
        TOKENS=_tokens_per_block(keys.shape[2]),
        OWN=rope_parts is not None,
        num_warps=4,
    )
