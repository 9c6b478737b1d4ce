"""`prefill_attention` by what Hopper GPUs alone have: bulk copies and asynchronous products of warp groups.

Written in Gluon, Triton's language for layouts and barriers, as Triton itself takes no pages by bulk copies. The plan
is FlashAttention-3's (Shah et al., arXiv:2407.08608): one warp copies, two warp groups compute, each for its own
queries; the products of a block run under the softmax of the next, and one group's under the softmax of the other.
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

from sglang_lite.runtime.kernels.attention_metadata import DevicePlan
from sglang_lite.runtime.kernels.kv_cache import KVCache

_QUERIES = gl.constexpr(64)  # of a warp group
_TOKENS = gl.constexpr(128)  # of a block
_COLUMNS = gl.constexpr(64)  # of a copy: as many as 128 bytes hold, over which shared memory is swizzled
_STAGES = gl.constexpr(2)  # blocks of keys, and of values, in shared memory
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
# Names that Triton has changed between 3.6 and 3.9.
_sync = getattr(gl, "thread_barrier", None) or gl.barrier
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_view = getattr(gl.shared_memory_descriptor, "_reinterpret", None) or gl.shared_memory_descriptor.reinterpret


@gluon.jit
def _as_pages(block, PAGE: gl.constexpr, DIM: gl.constexpr):
    """A block [_TOKENS, DIM] in shared memory as what copies fill: its first columns page by page, then the next."""
    PARTS: gl.constexpr = _TOKENS // PAGE * (DIM // _COLUMNS)
    return _view(block, block.dtype, [PARTS, PAGE, _COLUMNS], SHARED)


@gluon.jit
def _copy(desc, row, pages, token, end, buffers, stage, ready, PAGE: gl.constexpr, DIM: gl.constexpr):
    """Starts copies of a block of tokens, a page after another. Those from `end` on come from page 0."""
    PAGES: gl.constexpr = _TOKENS // PAGE
    CHUNKS: gl.constexpr = DIM // _COLUMNS
    parts = _as_pages(buffers.index(stage), PAGE, DIM)
    mbarrier.expect(ready.index(stage), _TOKENS * DIM * 2)
    for p in gl.static_range(PAGES):
        at = token + p * PAGE
        page = gl.load(pages + at // PAGE, mask=at < end, other=0)
        for c in gl.static_range(CHUNKS):
            _load(desc, [row + page * PAGE, c * _COLUMNS], ready.index(stage), parts.index(c * PAGES + p))


@gluon.jit
def _produce(
    keys, values, row, pages, end, blocks, k_buffers, v_buffers, k_ready, v_ready, k_free, v_free,
    PAGE: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """The copying warp: blocks from the last to the first."""
    for i in range(blocks):
        stage = i % _STAGES
        used = (i // _STAGES & 1) ^ 1
        token = (blocks - 1 - i) * _TOKENS
        mbarrier.wait(k_free.index(stage), used)
        _copy(keys, row, pages, token, end, k_buffers, stage, k_ready, PAGE, DIM)
        mbarrier.wait(v_free.index(stage), used)
        _copy(values, row, pages, token, end, v_buffers, stage, v_ready, PAGE, DIM)


@gluon.jit
def _softmax(scores, m, total, scale):
    """Weights, highest scores, sums, and by what older results shrink; as `softmax.attend_block`."""
    highest = gl.maximum(m, gl.max(scores, 1) * scale)
    shift = gl.where(highest == float("-inf"), 0.0, highest)  # a query may have seen nothing so far
    shrink = gl.exp2(m - shift)
    weights = gl.exp2(scores * scale - shift[:, None])
    return weights, highest, total * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def _compute(
    q, q_stride, out, first, count, position, end, blocks, clear, head, scale,
    q_buffers, k_buffers, v_buffers, k_ready, v_ready, k_free, v_free,
    GROUP: gl.constexpr, DIM: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """A warp group: all blocks for _QUERIES queries."""
    dtype: gl.constexpr = k_buffers.dtype
    BY_TOKEN: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _TOKENS, 16]
    )
    BY_COLUMN: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=BY_COLUMN, k_width=2)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])

    i = GROUP * _QUERIES + gl.arange(0, _QUERIES, layout=gl.SliceLayout(1, ROWS))
    d = gl.arange(0, DIM, layout=gl.SliceLayout(0, ROWS))
    at_queries = q + (first + i)[:, None] * q_stride + head * DIM + d[None, :]
    queries = q_buffers.index(GROUP)
    queries.store(gl.load(at_queries, mask=(i < count)[:, None], other=0.0))
    fence_async_shared()
    _sync()

    n = gl.arange(0, _TOKENS, layout=gl.SliceLayout(0, BY_TOKEN))
    seen_to = position + GROUP * _QUERIES + gl.arange(0, _QUERIES, layout=gl.SliceLayout(1, BY_TOKEN))
    m = gl.full([_QUERIES], float("-inf"), gl.float32, layout=gl.SliceLayout(1, BY_TOKEN))
    total = gl.full([_QUERIES], 0.0, gl.float32, layout=gl.SliceLayout(1, BY_TOKEN))
    acc = gl.zeros([_QUERIES, DIM], gl.float32, layout=BY_COLUMN)
    nothing = gl.zeros([_QUERIES, _TOKENS], gl.float32, layout=BY_TOKEN)

    mbarrier.wait(k_ready.index(0), 0)
    keys = k_buffers.index(0).permute((1, 0))
    scores = warpgroup_mma(queries, keys, nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_free.index(0), count=1)
    token = (blocks - 1) * _TOKENS + n
    scores = gl.where(token[None, :] <= seen_to[:, None], scores, float("-inf"))
    weights, m, total, shrink = _softmax(scores, m, total, scale)
    operand = gl.convert_layout(weights.to(dtype), OPERAND)
    mbarrier.wait(v_ready.index(0), 0)
    if end < blocks * _TOKENS:  # values behind the end may be no numbers, and 0 x NaN is NaN; both groups mend them
        values = v_buffers.index(0)
        there = (blocks - 1) * _TOKENS + gl.arange(0, _TOKENS, layout=gl.SliceLayout(1, ROWS)) < end
        found = values.load(ROWS)
        _sync()
        values.store(gl.where(there[:, None], found, gl.zeros([_TOKENS, DIM], dtype, layout=ROWS)))
        fence_async_shared()
        _sync()
    for i in range(1, blocks):
        stage = i % _STAGES
        before = (i - 1) % _STAGES
        mbarrier.wait(k_ready.index(stage), i // _STAGES & 1)
        keys = k_buffers.index(stage).permute((1, 0))
        scores = warpgroup_mma(queries, keys, nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(before), (i - 1) // _STAGES & 1)
        acc = warpgroup_mma(operand, v_buffers.index(before), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_free.index(stage), count=1)
        if i < blocks - clear:
            token = (blocks - 1 - i) * _TOKENS + n
            scores = gl.where(token[None, :] <= seen_to[:, None], scores, float("-inf"))
        weights, m, total, shrink = _softmax(scores, m, total, scale)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_free.index(before), count=1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, BY_COLUMN))[:, None]
        operand = gl.convert_layout(weights.to(dtype), OPERAND)
    last = (blocks - 1) % _STAGES
    mbarrier.wait(v_ready.index(last), (blocks - 1) // _STAGES & 1)
    acc = warpgroup_mma(operand, v_buffers.index(last), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])

    total = gl.convert_layout(gl.where(total > 0, total, 1.0), gl.SliceLayout(1, BY_COLUMN))
    row = GROUP * _QUERIES + gl.arange(0, _QUERIES, layout=gl.SliceLayout(1, BY_COLUMN))
    column = gl.arange(0, DIM, layout=gl.SliceLayout(0, BY_COLUMN))
    target = out + ((first + row) * HEADS + head)[:, None] * DIM + column[None, :]
    gl.store(target, (acc / total[:, None]).to(dtype), mask=(row < count)[:, None])


@gluon.jit
def prefill_kernel(
    q, q_stride, keys, values, token_slots, out, plan_blocks, page_table, pages_per_slot, scale,
    G: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    head = gl.program_id(0)
    block = plan_blocks + gl.program_id(1) * 4
    first = gl.load(block).to(gl.int64)
    count = gl.load(block + 1)
    slot = gl.load(block + 2).to(gl.int64)
    position = gl.load(block + 3)
    if count <= 0:
        return
    end = position + count
    blocks = (end + _TOKENS - 1) // _TOKENS
    clear = (position + 1) // _TOKENS  # blocks that every query sees whole
    pages = page_table + slot * pages_per_slot
    row = head // G * token_slots

    dtype: gl.constexpr = q.dtype.element_ty
    q_buffers = gl.allocate_shared_memory(dtype, [2, _QUERIES, DIM], SHARED)
    k_buffers = gl.allocate_shared_memory(dtype, [_STAGES, _TOKENS, DIM], SHARED)
    v_buffers = gl.allocate_shared_memory(dtype, [_STAGES, _TOKENS, DIM], SHARED)
    k_ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)  # by both groups
        mbarrier.init(v_free.index(i), count=2)
    fence_async_shared()
    _sync()
    gl.warp_specialize([
        (_compute, (q, q_stride, out, first, count, position, end, blocks, clear, head, scale, q_buffers, k_buffers,
                    v_buffers, k_ready, v_ready, k_free, v_free, 0, DIM, HEADS)),
        (_compute, (q, q_stride, out, first, count, position, end, blocks, clear, head, scale, q_buffers, k_buffers,
                    v_buffers, k_ready, v_ready, k_free, v_free, 1, DIM, HEADS)),
        (_produce, (keys, values, row, pages, end, blocks, k_buffers, v_buffers, k_ready, v_ready, k_free, v_free,
                    PAGE, DIM)),
    ], [4, 1], [240, 24])  # fmt: skip


def takes(q: torch.Tensor, cache: KVCache, plan: DevicePlan) -> bool:
    """Tells whether the kernel has a form for these heads, formats and pages. It knows no window and no soft cap."""
    sixteen_bits = q.dtype in (torch.bfloat16, torch.float16) and cache.k[0].dtype == q.dtype
    pages = plan.page_size % 8 == 0 and _TOKENS.value % plan.page_size == 0
    return sixteen_bits and pages and q.shape[2] in (64, 128) and plan.block_size == 2 * _QUERIES.value


def prefill_attention_hopper(
    q: torch.Tensor, cache: KVCache, layer: int, plan: DevicePlan, out: torch.Tensor, *, scale: float
) -> None:
    """Causal attention of the plan's blocks of queries.

    Reads, for each head and block, the keys and values of the tokens up to the block's end once, 4 bytes an element of
    the two; the heads of a group find them in the second cache. Shared memory: 160 KB for heads of 128.

    Args:
        q: [T, heads, head_dim] as `rope_store` returns them; a token's heads lie side by side.
        out: [T, heads, head_dim] (written there).
        scale: as `reference.attention.attention`.
    """
    heads, dim = q.shape[1], q.shape[2]
    keys, values = cache.k[layer], cache.v[layer]
    box = [plan.page_size, _COLUMNS.value]
    prefill_kernel[(heads, len(plan.blocks))](
        q, q.stride(0), TensorDescriptor.from_tensor(keys.view(-1, dim), box, SHARED.value),
        TensorDescriptor.from_tensor(values.view(-1, dim), box, SHARED.value), keys.shape[1], out, plan.blocks,
        plan.page_table, plan.page_table.shape[1], scale * 1.4426950408889634,
        G=heads // len(keys), DIM=dim, PAGE=plan.page_size, HEADS=heads, num_warps=4,
    )  # fmt: skip
