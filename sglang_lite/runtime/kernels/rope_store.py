"""Norms of queries and keys, rotary embedding and KV store, fused: the step between the QKV
projection and attention.

If the cache has scales, keys and values are divided by them, and queries multiplied by the scales
of their keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.attention_metadata import DevicePlan
from sglang_lite.runtime.kernels.eight_bit_rows import Scales
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2

_LAUNCH = {"BLOCK_H": 8, "num_warps": 2}


@triton.jit
def rotate_heads(x, y, wx, wy, c, s, eps, DIM: tl.constexpr, NORM: tl.constexpr):
    """Returns heads [N, BLOCK_D], normalised (with NORM) and rotated.

    Args:
        x, y: each element, and the element half the rotary part away that is rotated into it.
        wx, wy: weights of the norm for both, with NORM.
        c, s: cos and sin; 1 and 0 beyond the rotary part.
        eps: epsilon of the norm.
    """
    if NORM:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)[:, None]
        y = (y.to(tl.float32) * scale * wy.to(tl.float32)).to(x.dtype)
        x = (wide * scale * wx.to(tl.float32)).to(x.dtype)
    return (x.to(tl.float32) * c + y.to(tl.float32) * s).to(x.dtype)


@triton.jit
def rope_places(
    position, token, rotary, rotary_stride, axes, d, ROPE_DIM: tl.constexpr, AXES: tl.constexpr
):
    """Returns the places of cos and sin of a token in their tables, for elements d of a head.

    Args:
        position: position of the token, if it has one.
        token: index of the token.
        rotary, rotary_stride, axes: `RotaryPositions` of the plan, with AXES.
        d: elements.
    """
    if AXES:
        axis = tl.load(axes + d, mask=d < ROPE_DIM, other=0)
        position = tl.load(rotary + axis * rotary_stride + token)
    return position.to(tl.int64) * ROPE_DIM + d


@cached_launch
@triton.jit(do_not_specialize=["rotary_stride"])
def _rope_store(
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
    slots,
    positions,
    page_table,
    pages_per_slot,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    head_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SCALED: tl.constexpr,
    NORM: tl.constexpr,
    KV_SCALED: tl.constexpr,
    AXES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    exists = (head < HEADS + 2 * KV_HEADS)[:, None] & (d < DIM)[None, :]
    is_q = (head < HEADS)[:, None]
    is_rotated = (head < HEADS + KV_HEADS)[:, None]
    row = qkv + token * (HEADS + 2 * KV_HEADS) * DIM
    # Each element, and the one half the rotary part away that is rotated into it.
    half: tl.constexpr = ROPE_DIM // 2
    pair = tl.where(d < half, d + half, tl.where(d < ROPE_DIM, d - half, d))
    x = tl.load(row + head[:, None] * DIM + d[None, :], mask=exists, other=0.0)
    y = tl.load(row + head[:, None] * DIM + pair[None, :], mask=exists & is_rotated, other=0.0)
    if SCALED:
        own = tl.load(row_scales + token)
        x = (
            x * own * tl.load(scales + head[:, None] * DIM + d[None, :], mask=exists, other=0.0)
        ).to(x.dtype)
        y = (
            y * own * tl.load(scales + head[:, None] * DIM + pair[None, :], mask=exists, other=0.0)
        ).to(y.dtype)
    wx, wy = d[None, :], d[None, :]
    if NORM:
        wx = tl.where(
            is_q,
            tl.load(q_norm + d, mask=d < DIM, other=0.0)[None, :],
            tl.load(k_norm + d, mask=d < DIM, other=0.0)[None, :],
        )
        wy = tl.where(
            is_q,
            tl.load(q_norm + pair, mask=d < DIM, other=0.0)[None, :],
            tl.load(k_norm + pair, mask=d < DIM, other=0.0)[None, :],
        )
    position = tl.load(positions + token).to(tl.int64)
    in_rope = d < ROPE_DIM
    at = rope_places(position, token, rotary, rotary_stride, axes, d, ROPE_DIM, AXES)
    c = tl.load(cos + at, mask=in_rope, other=1.0).to(tl.float32)[None, :]
    s = tl.load(sin + at, mask=in_rope, other=0.0).to(tl.float32)[None, :]
    x = tl.where(is_rotated, rotate_heads(x, y, wx, wy, c, s, eps, DIM, NORM), x)
    if KV_SCALED:
        of_q, of_v = head < HEADS, head >= HEADS + KV_HEADS
        of = tl.where(of_q, head // (HEADS // KV_HEADS), (head - HEADS) % KV_HEADS)
        by = tl.load(k_scales + of, mask=~of_v, other=1.0) * tl.load(
            v_scales + of, mask=of_v, other=1.0
        )
        x = (x * tl.where(of_q, by, 1.0 / by)[:, None]).to(x.dtype)
    tl.store(row + head[:, None] * DIM + d[None, :], x, mask=exists & is_q)

    slot = tl.load(slots + token).to(tl.int64)
    page = tl.load(page_table + slot * pages_per_slot + position // PAGE).to(tl.int64)
    target = (page * PAGE + position % PAGE) * DIM
    kv_head = (head - HEADS).to(tl.int64)
    at = kv_head[:, None] * head_stride + target + d[None, :]
    tl.store(
        k_cache + at,
        x.to(k_cache.dtype.element_ty),
        mask=exists & is_rotated & (kv_head >= 0)[:, None],
    )
    at = (kv_head - KV_HEADS)[:, None] * head_stride + target + d[None, :]
    tl.store(
        v_cache + at, x.to(v_cache.dtype.element_ty), mask=exists & (kv_head >= KV_HEADS)[:, None]
    )


def rope_store(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    rope: tuple[torch.Tensor, torch.Tensor],
    plan: DevicePlan,
    cache: KVCache,
    layer: int,
    scales: Scales | None = None,
) -> torch.Tensor:
    """Normalises queries and keys (if the model does), rotates them by their positions, and stores
    keys and values.

    Args:
        qkv: [T, (heads + 2 kv_heads) head_dim]; its queries are changed in place.
        q_norm, k_norm: weights [head_dim] of the norms of queries and keys, or None.
        eps: epsilon of the norms.
        rope: cos and sin of every position [positions, rotary size], as in RotaryTable.
        plan: plan of the step.
        cache: KV cache (written).
        layer: index of the layer.
        scales: scales still to be applied to qkv after an 8-bit matmul, or None.

    Returns:
        The queries for attention, a view [T, heads, head_dim] of qkv. Moves 2 T (heads + 2
        kv_heads) head_dim elements.
    """
    cos, sin = rope
    kv_heads, cache_slots, dim = cache.k[layer].shape
    total = qkv.shape[1] // dim
    heads = total - 2 * kv_heads
    block = min(_LAUNCH["BLOCK_H"], round_up_to_power_of_2(total))
    of_cache = cache.scales
    rotary = plan.rotary
    _rope_store[(len(qkv), cdiv(total, block))](
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
        plan.slots,
        plan.positions,
        plan.page_table,
        plan.page_table.shape[1],
        cache.k[layer],
        cache.v[layer],
        of_cache and of_cache.k[layer],
        of_cache and of_cache.v[layer],
        cache_slots * dim,
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        ROPE_DIM=cos.shape[1],
        PAGE=plan.page_size,
        SCALED=scales is not None,
        NORM=q_norm is not None,
        KV_SCALED=of_cache is not None,
        AXES=rotary is not None,
        BLOCK_H=block,
        BLOCK_D=round_up_to_power_of_2(dim),
        num_warps=_LAUNCH["num_warps"],
        **pdl_options(qkv.device),
    )
    return qkv.view(len(qkv), total, dim)[:, :heads]
