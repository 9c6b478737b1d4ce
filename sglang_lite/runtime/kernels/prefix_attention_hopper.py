"""`prefix_attention` with features of Hopper GPUs, designed as `prefill_attention_hopper`: one warp
copies, and two warp groups compute, each for 64 queries of the rows that share a prefix.

There is one program per multiprocessor, which processes items until none are left. It leaves room
for some programs of `decode_attention`, which read the rows' own tokens at the same time.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sglang_lite.runtime.kernels.attention_metadata import AttentionRules, DecodeWork, DevicePlan
from sglang_lite.runtime.kernels.descriptors import tensor_descriptor
from sglang_lite.runtime.kernels.device_properties import DeviceProperties, properties_of
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.prefill_attention_hopper import (
    BY_ROW,
    COLUMNS,
    QUERIES,
    SHARED,
    STAGES,
    attend_blocks,
    copy_blocks,
    sync,
    take_queries,
)

MAX_QUERIES = 128  # queries of an item
_TOKENS = gl.constexpr(64)  # tokens of a block
# Leaves a quarter of a multiprocessor's registers and half of its shared memory to other kernels.
OPTIONS = {"TOKENS": 64, "REGISTERS": 176, "maxnreg": 128}


@gluon.jit
def _next_item(items, number, item_count):
    """Loads the number of rows of an item; 0 after the last item."""
    return gl.load(items + number * 6 + 1, mask=number < item_count, other=0)


@gluon.jit
def _copy_items(
    items,
    item_count,
    keys,
    values,
    row,
    page_table,
    pages_per_slot,
    k_buffers,
    v_buffers,
    k_ready,
    v_ready,
    k_free,
    v_free,
    PAGE: gl.constexpr,
):
    TOKENS: gl.constexpr = k_buffers.shape[1]
    number = gl.program_id(1)
    before = 0
    count = _next_item(items, number, item_count)
    while count > 0:
        item = items + number * 6
        slot, start, end = gl.load(item + 2).to(gl.int64), gl.load(item + 3), gl.load(item + 4)
        blocks = (end - start + TOKENS - 1) // TOKENS
        copy_blocks(
            keys,
            keys,
            values,
            row,
            0,
            0,
            page_table + slot * pages_per_slot,
            start,
            end,
            blocks,
            before,
            k_buffers,
            k_buffers,
            v_buffers,
            k_ready,
            v_ready,
            k_free,
            v_free,
            PAGE,
            0,
        )
        before += blocks
        number += gl.num_programs(1)
        count = _next_item(items, number, item_count)


@gluon.jit
def _compute_items(
    items,
    item_count,
    order,
    q,
    q_stride,
    kv_head,
    acc_buffer,
    ml_buffer,
    max_chunks,
    scale,
    q_buffers,
    k_buffers,
    v_buffers,
    k_ready,
    v_ready,
    k_free,
    v_free,
    GROUP: gl.constexpr,
    G: gl.constexpr,
    KV_HEADS: gl.constexpr,
):
    DIM: gl.constexpr = v_buffers.shape[2]
    queries = q_buffers.index(GROUP)
    query = GROUP * QUERIES + gl.arange(0, QUERIES, layout=gl.SliceLayout(1, BY_ROW))
    TOKENS: gl.constexpr = k_buffers.shape[1]
    number = gl.program_id(1)
    before = 0
    count = _next_item(items, number, item_count)
    while count > 0:
        item = items + number * 6
        first, start, end, chunk = (
            gl.load(item),
            gl.load(item + 3),
            gl.load(item + 4),
            gl.load(item + 5),
        )
        blocks = (end - start + TOKENS - 1) // TOKENS
        real = query < count * G
        row = gl.load(order + first + query // G, mask=real, other=0).to(gl.int64)
        sync()  # all warps have finished the previous item's products
        take_queries(q + row * q_stride + (kv_head * G + query % G) * DIM, real, queries)
        fence_async_shared()
        sync()
        m, total, acc = attend_blocks(
            queries,
            queries,
            gl.zeros_like(query) + end - 1,
            start,
            end,
            blocks,
            (end - start) // TOKENS,
            before,
            scale,
            k_buffers,
            k_buffers,
            v_buffers,
            k_ready,
            v_ready,
            k_free,
            v_free,
            0,
        )
        part = ((row * max_chunks + chunk) * KV_HEADS + kv_head) * G + query % G
        of_total = gl.convert_layout(part, total.type.layout)
        is_real = gl.convert_layout(real, total.type.layout)
        gl.store(ml_buffer + of_total * 2, m, mask=is_real)
        gl.store(ml_buffer + of_total * 2 + 1, total, mask=is_real)
        of_acc = gl.convert_layout(part, gl.SliceLayout(1, acc.type.layout))
        is_real = gl.convert_layout(real, gl.SliceLayout(1, acc.type.layout))
        column = gl.arange(0, DIM, layout=gl.SliceLayout(0, acc.type.layout))
        gl.store(acc_buffer + of_acc[:, None] * DIM + column[None, :], acc, mask=is_real[:, None])
        before += blocks
        number += gl.num_programs(1)
        count = _next_item(items, number, item_count)


@cached_launch
@gluon.jit(do_not_specialize=["token_slots", "item_count", "max_chunks"])
def prefix_kernel(
    q,
    q_stride,
    keys,
    values,
    token_slots,
    items,
    item_count,
    order,
    page_table,
    pages_per_slot,
    acc_buffer,
    ml_buffer,
    max_chunks,
    scale,
    G: gl.constexpr,
    DIM: gl.constexpr,
    PAGE: gl.constexpr,
    KV_HEADS: gl.constexpr,
    PDL: gl.constexpr,
    TOKENS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    kv_head = gl.program_id(0)
    dtype: gl.constexpr = q.dtype.element_ty
    q_buffers = gl.allocate_shared_memory(dtype, [2, QUERIES, DIM], SHARED)
    k_buffers = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, DIM], SHARED)
    v_buffers = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, DIM], SHARED)
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
    wait(PDL)
    start_next(PDL)  # not earlier: `decode_attention` reads queries and keys without waiting again
    sync()
    gl.warp_specialize([
        (_compute_items, (items, item_count, order, q, q_stride, kv_head, acc_buffer, ml_buffer, max_chunks, scale,
                          q_buffers, k_buffers, v_buffers, k_ready, v_ready, k_free, v_free, 0, G, KV_HEADS)),
        (_compute_items, (items, item_count, order, q, q_stride, kv_head, acc_buffer, ml_buffer, max_chunks, scale,
                          q_buffers, k_buffers, v_buffers, k_ready, v_ready, k_free, v_free, 1, G, KV_HEADS)),
        (_copy_items, (items, item_count, keys, values, kv_head * token_slots, page_table, pages_per_slot, k_buffers,
                       v_buffers, k_ready, v_ready, k_free, v_free, PAGE)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip


def supports(dim: int, compute: torch.dtype, cache: torch.dtype, page_size: int) -> bool:
    """Returns whether the kernel supports these heads, data types and pages. It supports no
    softcap.
    """
    pages = page_size % 8 == 0 and _TOKENS.value % page_size == 0
    return (
        dim in (64, 128)
        and compute in (torch.bfloat16, torch.float16)
        and cache == compute
        and pages
    )


def programs(properties: DeviceProperties, kv_heads: int) -> int:
    """Returns how many programs run per KV head. This is also how many items are needed to keep
    them all busy.
    """
    return max(1, properties.multiprocessors // kv_heads)


def prefix_attention_hopper(
    q: torch.Tensor,
    cache: KVCache,
    layer: int,
    plan: DevicePlan,
    work: DecodeWork,
    rules: AttentionRules,
) -> None:
    """Computes `prefix_attention` for items with at most MAX_QUERIES queries, with the same
    arguments.

    Args:
        q: queries [T, heads, head_dim] as `rope_store` returns them; the heads of a token are
            contiguous.
    """
    shared = plan.shared
    partials = work.partials
    assert shared is not None
    keys = cache.k[layer]
    values = cache.v[layer]
    kv_heads, token_slots, dim = keys.shape
    planes = [
        tensor_descriptor(x, dim, (plan.page_size, COLUMNS.value), SHARED.value)
        for x in (keys, values)
    ]
    prefix_kernel[(kv_heads, programs(properties_of(q.device), kv_heads))](
        q,
        q.stride(0),
        *planes,
        token_slots,
        shared.items,
        len(shared.items),
        shared.order,
        plan.page_table,
        plan.page_table.shape[1],
        partials.prefix_acc,
        partials.prefix_ml,
        shared.max_chunks,
        rules.scale * 1.4426950408889634,
        G=q.shape[1] // kv_heads,
        DIM=dim,
        PAGE=plan.page_size,
        KV_HEADS=kv_heads,
        num_warps=4,
        **pdl_options(q.device),
        **OPTIONS,
    )
