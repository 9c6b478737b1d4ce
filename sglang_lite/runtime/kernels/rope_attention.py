"""`rope_store` and `decode_attention` in one kernel: from the QKV projection of decoding rows to
the result of attention.

Everything except the QKV projection's output is available since the step's first kernel, so work
items, pages and the first keys and values are loaded while that output is computed. The program
with a row's last tokens adds the new token and stores its key and value; no other program reads
them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.attention_metadata import AttentionRules, DecodeWork, DevicePlan
from sglang_lite.runtime.kernels.decode_attention import merge_kernel_options, store_or_merge
from sglang_lite.runtime.kernels.device_properties import properties_of
from sglang_lite.runtime.kernels.eight_bit_rows import Scales
from sglang_lite.runtime.kernels.few_queries import (
    add_few,
    attend_few,
    clamped_page_of,
    columns,
    load_few,
)
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.launch_config import choose_attention_launch, padded_head_size
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.rope_store import rope_places, rotate_heads
from sglang_lite.runtime.kernels.softmax import first_visible


@triton.jit
def _pairs(d, ROPE_DIM: tl.constexpr):
    """Returns the index of the element that each element is rotated with, which is half the rotary
    part away.
    """
    half: tl.constexpr = ROPE_DIM // 2
    return tl.where(d < half, d + half, tl.where(d < ROPE_DIM, d - half, d))


@triton.jit
def _load_rope(
    position,
    row,
    rotary,
    rotary_stride,
    axes,
    q_norm,
    k_norm,
    cos,
    sin,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    NORM: tl.constexpr,
    AXES: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Loads cos and sin of a row's token and the weights of norms, each [1, BLOCK_D]; the weights
    also in the order of `_pairs`.
    """
    d = tl.arange(0, BLOCK_D)
    pair = _pairs(d, ROPE_DIM)
    at = rope_places(position, row, rotary, rotary_stride, axes, d, ROPE_DIM, AXES)
    c = tl.load(cos + at, mask=d < ROPE_DIM, other=1.0).to(tl.float32)
    s = tl.load(sin + at, mask=d < ROPE_DIM, other=0.0).to(tl.float32)
    q, q_pair, k, k_pair = c, c, c, c
    if NORM:
        q = tl.load(q_norm + d, mask=d < DIM, other=0.0).to(tl.float32)
        q_pair = tl.load(q_norm + pair, mask=d < DIM, other=0.0).to(tl.float32)
        k = tl.load(k_norm + d, mask=d < DIM, other=0.0).to(tl.float32)
        k_pair = tl.load(k_norm + pair, mask=d < DIM, other=0.0).to(tl.float32)
    return c[None, :], s[None, :], q[None, :], q_pair[None, :], k[None, :], k_pair[None, :]


@triton.jit
def _heads(
    qkv,
    row_scales,
    scales,
    k_scales,
    v_scales,
    row,
    kv_head,
    c,
    s,
    q_weight,
    q_weight_pair,
    k_weight,
    k_weight_pair,
    eps,
    G: tl.constexpr,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SCALED: tl.constexpr,
    NORM: tl.constexpr,
    KV_SCALED: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Computes the queries [BLOCK_G, BLOCK_D] of a KV head, and its new key and value [1, BLOCK_D],
    like `rope_store`.
    """
    d = tl.arange(0, BLOCK_D)
    pair = _pairs(d, ROPE_DIM)
    g = tl.arange(0, BLOCK_G)
    one = tl.arange(0, 1)
    product = qkv + row.to(tl.int64) * (G + 2) * KV_HEADS * DIM
    at_q = (kv_head * G + g)[:, None] * DIM
    at_k = (one + G * KV_HEADS + kv_head)[:, None] * DIM
    at_v = at_k + KV_HEADS * DIM
    is_q = (g < G)[:, None] & (d < DIM)[None, :]
    is_one = (d < DIM)[None, :]
    q = tl.load(product + at_q + d[None, :], mask=is_q, other=0.0)
    q_pair = tl.load(product + at_q + pair[None, :], mask=is_q, other=0.0)
    key = tl.load(product + at_k + d[None, :], mask=is_one, other=0.0)
    k_pair = tl.load(product + at_k + pair[None, :], mask=is_one, other=0.0)
    value = tl.load(product + at_v + d[None, :], mask=is_one, other=0.0)
    if SCALED:
        own = tl.load(row_scales + row)
        q = (q * own * tl.load(scales + at_q + d[None, :], mask=is_q, other=0.0)).to(q.dtype)
        q_pair = (q_pair * own * tl.load(scales + at_q + pair[None, :], mask=is_q, other=0.0)).to(
            q.dtype
        )
        key = (key * own * tl.load(scales + at_k + d[None, :], mask=is_one, other=0.0)).to(
            key.dtype
        )
        k_pair = (k_pair * own * tl.load(scales + at_k + pair[None, :], mask=is_one, other=0.0)).to(
            key.dtype
        )
        value = (value * own * tl.load(scales + at_v + d[None, :], mask=is_one, other=0.0)).to(
            value.dtype
        )
    q = rotate_heads(q, q_pair, q_weight, q_weight_pair, c, s, eps, DIM, NORM)
    key = rotate_heads(key, k_pair, k_weight, k_weight_pair, c, s, eps, DIM, NORM)
    if KV_SCALED:
        k_scale, v_scale = tl.load(k_scales + kv_head), tl.load(v_scales + kv_head)
        q = (q * k_scale).to(q.dtype)
        key = (key * (1.0 / k_scale)).to(key.dtype)
        value = (value * (1.0 / v_scale)).to(value.dtype)
    return q, key, value


@triton.jit
def _store(
    k, v, key, value, page, position, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Stores a key and value [1, BLOCK_D]."""
    d = tl.arange(0, BLOCK_D)[None, :]
    at = (page.to(tl.int64) * PAGE + position % PAGE) * DIM + d
    tl.store(k + at, key, mask=d < DIM)
    tl.store(v + at, value, mask=d < DIM)


@triton.jit
def _see_itself(queries, key, value, position, scale, softcap, slopes, SOFTCAP: tl.constexpr):
    """Returns the results m, total and acc of queries [BLOCK_G, BLOCK_D] that have seen only one
    key and value [1, BLOCK_D], at `position`.
    """
    score = tl.sum(queries.to(tl.float32) * key.to(queries.dtype).to(tl.float32), 1)
    if SOFTCAP:
        score = softcap * (2.0 * tl.sigmoid(2.0 * score * scale / softcap) - 1.0)
        scale = 1.0
    if slopes is not None:
        score = score * scale + slopes * position
        scale = 1.0
    acc = tl.broadcast_to(value.to(queries.dtype).to(tl.float32), queries.shape)
    return score * (scale * 1.4426950408889634), tl.full(score.shape, 1.0, tl.float32), acc


@cached_launch
@triton.jit(do_not_specialize=["window", "rotary_stride"])
def _rope_attention(
    qkv,
    row_scales,
    scales,
    q_norm,
    k_norm,
    cos,
    sin,
    rotary,
    rotary_stride,
    axes,
    eps,
    k,
    v,
    k_scales,
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
    scale,
    softcap,
    slopes,
    window,
    G: tl.constexpr,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SCALED: tl.constexpr,
    NORM: tl.constexpr,
    KV_SCALED: tl.constexpr,
    AXES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    row = tl.load(work + item * 4)
    if row < 0:
        return
    start = tl.load(work + item * 4 + 1)
    end = tl.load(work + item * 4 + 2)
    slot = tl.load(work + item * 4 + 3).to(tl.int64)
    position = tl.load(positions + row)
    first = tl.load(row_work + row * 2)
    count = tl.load(row_work + row * 2 + 1)
    if WINDOW:
        start = tl.maximum(start, first_visible(position, window, WINDOW))
    old = tl.minimum(end, position)
    pages = page_table + slot * pages_per_slot
    k += kv_head.to(tl.int64) * head_stride
    v += kv_head.to(tl.int64) * head_stride
    token = start + tl.arange(0, BLOCK_N)
    valid = token < old
    page = clamped_page_of(pages, token, old, PAGE)
    keys, values = load_few(k, v, page, token, valid, DIM, PAGE, True, BLOCK_D)
    next_page = clamped_page_of(pages, token + BLOCK_N, old, PAGE)
    last_page = tl.load(pages + position // PAGE)
    c, s, q_weight, q_pair, k_weight, k_pair = _load_rope(
        position,
        row,
        rotary,
        rotary_stride,
        axes,
        q_norm,
        k_norm,
        cos,
        sin,
        DIM,
        ROPE_DIM,
        NORM,
        AXES,
        BLOCK_D,
    )
    wait(PDL)
    queries, key, value = _heads(
        qkv,
        row_scales,
        scales,
        k_scales,
        v_scales,
        row,
        kv_head,
        c,
        s,
        q_weight,
        q_pair,
        k_weight,
        k_pair,
        eps,
        G,
        DIM,
        ROPE_DIM,
        KV_HEADS,
        SCALED,
        NORM,
        KV_SCALED,
        BLOCK_G,
        BLOCK_D,
    )
    key, value = key.to(k.dtype.element_ty), value.to(v.dtype.element_ty)
    if k.dtype.element_ty == tl.float8e4nv:
        # converting e4m3 to float16 takes half an instruction, to bfloat16 three
        queries = queries.to(tl.float16)
    if slopes is not None:
        g = tl.arange(0, BLOCK_G)
        slopes = tl.load(slopes + kv_head * G + g, mask=g < G, other=0.0)
    m = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    if end > position:
        _store(k, v, key, value, last_page, position, DIM, PAGE, BLOCK_D)
        m, total, acc = _see_itself(queries, key, value, position, scale, softcap, slopes, SOFTCAP)
    queries, acc = tl.trans(queries), tl.trans(acc)
    m, total, acc = add_few(
        queries,
        keys,
        values,
        token,
        valid,
        m,
        total,
        acc,
        scale,
        softcap,
        slopes,
        SOFTCAP,
    )
    m, total, acc = attend_few(
        queries,
        k,
        v,
        pages,
        next_page,
        start + BLOCK_N,
        old,
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
        acc_buffer,
        ml_buffer,
        0,
        0,
        G,
        DIM,
        KV_HEADS,
        KV_SCALED,
        False,
        GROUP,
        PARTS,
    )


def rope_attention(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    rope: tuple[torch.Tensor, torch.Tensor],
    cache: KVCache,
    layer: int,
    out: torch.Tensor,
    *,
    plan: DevicePlan,
    work: DecodeWork,
    scales: Scales | None = None,
    rules: AttentionRules,
) -> None:
    """Computes `rope_store` and `decode_attention` for a step in which each row has one token and
    no rows share a prefix.

    Args:
        qkv: [T, (heads + 2 kv_heads) head_dim], not changed.
        q_norm, k_norm, eps, rope, cache, layer, plan, scales: as for `rope_store`.
        work, out, rules: as for `decode_attention`.
    """
    plan = plan.in_layer(rules.window)
    cos, sin = rope
    keys = cache.k[layer]
    values = cache.v[layer]
    kv_heads, cache_slots, dim = keys.shape
    rows = len(qkv)
    group = qkv.shape[1] // dim // kv_heads - 2
    launch = choose_attention_launch(
        properties_of(qkv.device),
        "decode",
        dim=dim,
        item=qkv.element_size(),
        cached=keys.element_size(),
        queries=columns(group),
        rows=rows,
        heads=kv_heads,
        product=True,
    )
    assert launch is not None, "refused"
    partials = work.partials
    of_cache = cache.scales
    rotary = plan.rotary
    _rope_attention[(kv_heads, len(work.items))](
        qkv,
        scales and scales.rows,
        scales and scales.columns,
        q_norm,
        k_norm,
        cos,
        sin,
        rotary and rotary.at,
        0 if rotary is None else rotary.at.stride(0),
        rotary and rotary.axes,
        eps,
        keys,
        values,
        of_cache and of_cache.k[layer],
        of_cache and of_cache.v[layer],
        cache_slots * dim,
        out,
        work.items,
        work.rows,
        plan.positions,
        plan.page_table,
        plan.page_table.shape[1],
        partials.acc,
        partials.ml,
        partials.counters,
        rules.scale,
        rules.softcap or 0.0,
        rules.slopes,
        rules.window or 0,
        G=group,
        DIM=dim,
        ROPE_DIM=cos.shape[1],
        PAGE=plan.page_size,
        KV_HEADS=kv_heads,
        SCALED=scales is not None,
        NORM=q_norm is not None,
        KV_SCALED=of_cache is not None,
        AXES=rotary is not None,
        SOFTCAP=rules.softcap is not None,
        WINDOW=rules.window_kind,
        BLOCK_G=launch.queries,
        BLOCK_D=padded_head_size(dim),
        **launch.options,
        **merge_kernel_options(launch, group, dim),
        **pdl_options(qkv.device),
    )
