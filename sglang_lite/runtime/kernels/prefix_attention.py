"""Attention of decoding rows over a prefix that several of them share, read once for all (cascade
attention).

Results are partial: weighted values, highest scores and sums of weights, which `decode_attention`
merges with those of the rows' own tokens.
"""

from __future__ import annotations

from types import ModuleType

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.attention_metadata import AttentionRules, DecodeWork, DevicePlan
from sglang_lite.runtime.kernels.device_properties import DeviceProperties, properties_of
from sglang_lite.runtime.kernels.hopper import hopper_kernels
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.launch_config import choose_attention_launch, padded_head_size
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.softmax import attend_tokens, page_of

MAX_GROUP = 64  # maximum number of query heads per KV head


def queries_per_program(group: int, item: int) -> int:
    """Returns how many queries a program computes, counted over all its rows and query heads.

    Args:
        group: query heads per KV head.
        item: bytes of an element of queries.
    """
    return 64 if item < 4 else padded_head_size(group)


def hopper_prefix_module(
    properties: DeviceProperties,
    dim: int,
    compute: torch.dtype,
    cache: torch.dtype,
    page_size: int,
    *,
    plain: bool,
) -> ModuleType | None:
    """Returns the module of the Hopper kernel if it replaces this one, else None. The Hopper kernel
    takes items with more queries.

    Args:
        properties: properties of the GPU that the kernel runs on.
        dim: elements of a head.
        compute, cache: data type of queries, and of keys and values.
        page_size: tokens in a page.
        plain: whether scores are unmodified, as the Hopper kernel requires.
    """
    hopper = hopper_kernels(properties, "prefix_attention_hopper")
    supports = hopper is not None and plain and hopper.supports(dim, compute, cache, page_size)
    return hopper if supports else None


@cached_launch
@triton.jit
def _prefix(
    q,
    q_stride,
    k,
    v,
    head_stride,
    items,
    order,
    page_table,
    pages_per_slot,
    acc_buffer,
    ml_buffer,
    max_chunks,
    scale,
    softcap,
    slopes,
    G: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    start_next(PDL)  # not earlier: `decode_attention` reads queries and keys without waiting again
    kv_head = tl.program_id(0)
    item = items + tl.program_id(1) * 6
    count = tl.load(item + 1)
    if count == 0:
        return
    first = tl.load(item)
    slot = tl.load(item + 2).to(tl.int64)
    start = tl.load(item + 3)
    end = tl.load(item + 4)
    chunk = tl.load(item + 5)
    pages = page_table + slot * pages_per_slot
    k += kv_head.to(tl.int64) * head_stride
    v += kv_head.to(tl.int64) * head_stride
    query = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    real = query < count * G
    row = tl.load(order + first + query // G, mask=real, other=0).to(tl.int64)
    head = kv_head * G + query % G
    inside = real[:, None] & (d < DIM)[None, :]
    page = page_of(pages, start + n, end, PAGE)
    queries = tl.load(
        q + (row * q_stride + head * DIM)[:, None] + d[None, :], mask=inside, other=0.0
    )
    if k.dtype.element_ty == tl.float8e4nv:
        queries = queries.to(tl.float16)  # as in decode_attention
    if slopes is not None:
        slopes = tl.load(slopes + head, mask=real, other=0.0)
    m, total, acc = attend_tokens(
        queries,
        k,
        v,
        pages,
        page,
        start,
        end,
        scale,
        softcap,
        slopes,
        DIM,
        PAGE,
        SOFTCAP,
        BLOCK_D,
        BLOCK_N,
    )
    part = ((row * max_chunks + chunk) * KV_HEADS + kv_head) * G + query % G
    tl.store(acc_buffer + part[:, None] * DIM + d[None, :], acc, mask=inside)
    tl.store(ml_buffer + part * 2, m, mask=real)
    tl.store(ml_buffer + part * 2 + 1, total, mask=real)


def prefix_attention(
    q: torch.Tensor,
    cache: KVCache,
    layer: int,
    plan: DevicePlan,
    work: DecodeWork,
    rules: AttentionRules,
) -> None:
    """Computes the attention of the plan's decoding rows over their shared prefixes. Writes partial
    results to `work.partials`, which `decode_attention` merges. Not for layers with a window.
    Hopper GPUs have a separate kernel.

    Args:
        q: queries [T, heads, head_dim]; the heads of a token are contiguous.
        cache: KV cache.
        layer: index of the layer.
        plan: plan of the step, with shared prefixes.
        work: buffers for partial results.
        rules: rules of the layer, without a window or sinks.
    """
    shared = plan.shared
    partials = work.partials
    assert shared is not None
    heads = q.shape[1]
    dim = q.shape[2]
    keys = cache.k[layer]
    values = cache.v[layer]
    kv_heads = len(keys)
    item = q.element_size()
    hopper = hopper_prefix_module(
        properties_of(q.device), dim, q.dtype, keys.dtype, plan.page_size, plain=not rules.explicit
    )
    if hopper is not None:
        hopper.prefix_attention_hopper(q, cache, layer, plan, work, rules)
        return
    launch = choose_attention_launch(
        properties_of(q.device),
        "prefix",
        dim=dim,
        item=item,
        cached=keys.element_size(),
        queries=queries_per_program(heads // kv_heads, item),
    )
    assert launch is not None, "refused"
    assert plan.decoding * shared.max_chunks * heads * dim <= partials.prefix_acc.numel()
    _prefix[(kv_heads, len(shared.items))](
        q,
        q.stride(0),
        keys,
        values,
        keys.shape[1] * dim,
        shared.items,
        shared.order,
        plan.page_table,
        plan.page_table.shape[1],
        partials.prefix_acc,
        partials.prefix_ml,
        shared.max_chunks,
        rules.scale,
        rules.softcap or 0.0,
        rules.slopes,
        G=heads // kv_heads,
        DIM=dim,
        PAGE=plan.page_size,
        KV_HEADS=kv_heads,
        SOFTCAP=rules.softcap is not None,
        BLOCK_M=launch.queries,
        BLOCK_D=padded_head_size(dim),
        **launch.options,
        **pdl_options(q.device),
    )
