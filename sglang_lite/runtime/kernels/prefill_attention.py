"""Causal attention of rows with several new tokens over their pages, which already contain the new
keys and values.

out[t, h] = sum over the tokens s <= t of the row of softmax(q[t, h] · k[s] * scale) v[s]; with
limits, s < limits[t]
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.attention_metadata import AttentionRules, DevicePlan
from sglang_lite.runtime.kernels.device_properties import properties_of
from sglang_lite.runtime.kernels.hopper import hopper_kernels
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.launch_config import choose_attention_launch, padded_head_size
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.softmax import attend_block, first_visible, page_of


@cached_launch
@triton.jit(do_not_specialize=["window"])
def _prefill(
    q,
    q_stride,
    k,
    v,
    v_scales,
    head_stride,
    out,
    blocks,
    limits,
    page_table,
    pages_per_slot,
    scale,
    softcap,
    slopes,
    window,
    G: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    LIMITS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    head = tl.program_id(0)
    block = blocks + tl.program_id(1) // PARTS * 4
    skipped = tl.program_id(1) % PARTS * BLOCK_M  # queries of the block that other programs compute
    first = tl.load(block).to(tl.int64) + skipped
    count = tl.minimum(tl.load(block + 1) - skipped, BLOCK_M)
    if count <= 0:
        return
    slot = tl.load(block + 2).to(tl.int64)
    position = tl.load(block + 3) + skipped
    pages = page_table + slot * pages_per_slot
    kv_head = (head // G).to(tl.int64)
    k += kv_head * head_stride
    v += kv_head * head_stride
    i = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    inside = (i < count)[:, None] & (d < DIM)[None, :]
    queries = tl.load(
        q + (first + i)[:, None] * q_stride + head * DIM + d[None, :], mask=inside, other=0.0
    )
    if k.dtype.element_ty == tl.float8e4nv:
        queries = queries.to(tl.float16)  # as in decode_attention
    if slopes is not None:  # the same for all queries of the head
        slopes = tl.full((BLOCK_M,), 1.0, tl.float32) * tl.load(slopes + head)
    at_position = position + i
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    start = 0
    if WINDOW:
        start = tl.maximum(first_visible(position, window, WINDOW), 0) // BLOCK_N * BLOCK_N
    # Tokens that every query of the block sees need no mask.
    clear = start
    if not WINDOW:
        clear = position // BLOCK_N * BLOCK_N
    end = position + count
    limit = at_position + 1
    if LIMITS:
        limit = tl.load(limits + first + i, mask=i < count, other=0)
        end = tl.maximum(end, tl.max(limit))
    page = page_of(pages, start + n, end, PAGE)
    for at in range(start, clear, BLOCK_N):
        next_page = page_of(pages, at + BLOCK_N + n, end, PAGE)
        m, total, acc = attend_block(
            queries,
            k,
            v,
            page,
            at + n,
            None,
            None,
            m,
            total,
            acc,
            scale,
            softcap,
            slopes,
            DIM,
            PAGE,
            False,
            SOFTCAP,
            BLOCK_D,
        )
        page = next_page
    for at in range(clear, end, BLOCK_N):
        next_page = page_of(pages, at + BLOCK_N + n, end, PAGE)
        token = at + n
        visible = token[None, :] < limit[:, None]
        if WINDOW:
            visible = visible & (
                token[None, :] >= first_visible(at_position, window, WINDOW)[:, None]
            )
        m, total, acc = attend_block(
            queries,
            k,
            v,
            page,
            token,
            token < end,
            visible,
            m,
            total,
            acc,
            scale,
            softcap,
            slopes,
            DIM,
            PAGE,
            True,
            SOFTCAP,
            BLOCK_D,
        )
        page = next_page
    target = out + ((first + i) * HEADS + head)[:, None] * DIM + d[None, :]
    total = tl.where(total > 0, total, 1.0)  # padding rows may see no token
    if SCALED:
        acc *= tl.load(v_scales + kv_head)
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


def prefill_attention(
    q: torch.Tensor,
    cache: KVCache,
    layer: int,
    plan: DevicePlan,
    out: torch.Tensor,
    rules: AttentionRules,
) -> None:
    """Computes the causal attention of the plan's blocks of queries. Hopper GPUs have a separate
    kernel for blocks of 128.

    Args:
        q: queries [T, heads, head_dim] as `rope_store` returns them; the heads of a token are
            contiguous.
        cache: KV cache, with the keys and values of the step's tokens.
        layer: index of the layer.
        plan: plan of the step.
        out: [T, heads, head_dim] (the tokens of the blocks are written).
        rules: rules of the layer, without sinks.
    """
    hopper = hopper_kernels(properties_of(q.device), "prefill_attention_hopper")
    limits = plan.limits
    if hopper is not None and rules.plain and limits is None and hopper.supports(q, cache, plan):
        hopper.prefill_attention_hopper(q, cache, layer, plan, out, rules)
        return
    heads = q.shape[1]
    dim = q.shape[2]
    keys = cache.k[layer]
    values = cache.v[layer]
    launch = choose_attention_launch(
        properties_of(q.device),
        "prefill",
        dim=dim,
        item=q.element_size(),
        cached=keys.element_size(),
        queries=plan.block_size,
    )
    assert launch is not None, "refused"
    parts = plan.block_size // launch.queries
    _prefill[(heads, len(plan.blocks) * parts)](
        q,
        q.stride(0),
        keys,
        values,
        cache.scales and cache.scales.v[layer],
        keys.shape[1] * dim,
        out,
        plan.blocks,
        limits,
        plan.page_table,
        plan.page_table.shape[1],
        rules.scale,
        rules.softcap or 0.0,
        rules.slopes,
        rules.window or 0,
        G=heads // len(keys),
        DIM=dim,
        PAGE=plan.page_size,
        HEADS=heads,
        SCALED=cache.scales is not None,
        SOFTCAP=rules.softcap is not None,
        WINDOW=rules.window_kind,
        LIMITS=limits is not None,
        PARTS=parts,
        BLOCK_M=launch.queries,
        BLOCK_D=padded_head_size(dim),
        **launch.options,
    )
