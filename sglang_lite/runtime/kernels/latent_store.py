"""Norm of latents, rotary embedding and cache store, fused: the step between the first linear layer
of latent attention and its cache.

    plane[slot] = norm(latent), rotated key     of each token
    out = rotated query                         of each head

If the cache has scales, latents and keys are divided by them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.attention_metadata import DevicePlan
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2

_BLOCK_H = 16  # heads of a program


@cached_launch
@triton.jit
def _latent_store(
    product,
    width,
    q,
    q_token,
    q_head,
    out,
    out_token,
    out_head,
    norm,
    cos,
    sin,
    slots,
    positions,
    page_table,
    pages_per_slot,
    plane,
    scales,
    eps,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    t = tl.arange(0, BLOCK_T)
    # Index of the element that is rotated into each one: half the rotary part away.
    half: tl.constexpr = ROPE_DIM // 2
    pair = tl.where(t < half, t + half, t - half)
    c = tl.load(cos + position * ROPE_DIM + t, mask=t < ROPE_DIM, other=0.0).to(tl.float32)
    s = tl.load(sin + position * ROPE_DIM + t, mask=t < ROPE_DIM, other=0.0).to(tl.float32)
    if tl.program_id(1) == 0:
        row = product + token * width + (width - RANK - ROPE_DIM)
        r = tl.arange(0, BLOCK_R)
        latent = tl.load(row + r, mask=r < RANK, other=0.0).to(tl.float32)
        latent *= tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps)
        latent *= tl.load(norm + r, mask=r < RANK, other=0.0).to(tl.float32)
        x = tl.load(row + RANK + t, mask=t < ROPE_DIM, other=0.0).to(tl.float32)
        y = tl.load(row + RANK + pair, mask=t < ROPE_DIM, other=0.0).to(tl.float32)
        key = x * c + y * s
        if SCALED:
            latent *= 1.0 / tl.load(scales)
            key *= 1.0 / tl.load(scales + 1)
        slot = tl.load(slots + token).to(tl.int64)
        page = tl.load(page_table + slot * pages_per_slot + position // PAGE).to(tl.int64)
        target = plane + (page * PAGE + position % PAGE) * (RANK + ROPE_DIM)
        tl.store(target + r, latent.to(plane.dtype.element_ty), mask=r < RANK)
        tl.store(target + RANK + t, key.to(plane.dtype.element_ty), mask=t < ROPE_DIM)
    else:  # separate names, as a name has one type in both branches
        head = (tl.program_id(1) - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = (head < HEADS)[:, None] & (t < ROPE_DIM)[None, :]
        queries = q + token * q_token + head[:, None] * q_head
        x_q = tl.load(queries + t[None, :], mask=inside, other=0.0).to(tl.float32)
        y_q = tl.load(queries + pair[None, :], mask=inside, other=0.0).to(tl.float32)
        at = out + token * out_token + head[:, None] * out_head + t[None, :]
        tl.store(at, (x_q * c[None, :] + y_q * s[None, :]).to(out.dtype.element_ty), mask=inside)


def latent_store(
    product: torch.Tensor,
    q: torch.Tensor,
    out: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    rope: tuple[torch.Tensor, torch.Tensor],
    plan: DevicePlan,
    cache: KVCache,
    layer: int,
) -> None:
    """Stores the normalised latents and rotated keys of new tokens, and rotates their queries.

    Args:
        product: [T, … + rank + rotary size], contiguous; its last columns are latents and keys.
        q: [T, heads, rotary size], the rotary part of queries; the elements of a head are
            contiguous.
        out: tensor of the shape and layout of q for the rotated queries (written), or q itself.
        norm: weight [rank] of the RMS norm of latents.
        eps: epsilon of the norm.
        rope: cos and sin of every position [positions, rotary size], as in RotaryTable.
        plan: plan of the step.
        cache: cache of latents (written).
        layer: index of the layer.

    Moves 2 T (rank + rotary size + heads * rotary size) elements.
    """
    (cos, sin), heads, rank = rope, q.shape[1], len(norm)
    rope_dim = cos.shape[1]
    _latent_store[(len(product), 1 + cdiv(heads, _BLOCK_H))](
        product,
        product.shape[1],
        q,
        q.stride(0),
        q.stride(1),
        out,
        out.stride(0),
        out.stride(1),
        norm,
        cos,
        sin,
        plan.slots,
        plan.positions,
        plan.page_table,
        plan.page_table.shape[1],
        cache.k[layer],
        cache.scales and cache.scales.k[layer],
        eps,
        HEADS=heads,
        RANK=rank,
        ROPE_DIM=rope_dim,
        PAGE=plan.page_size,
        SCALED=cache.scales is not None,
        BLOCK_H=_BLOCK_H,
        BLOCK_R=round_up_to_power_of_2(rank),
        BLOCK_T=round_up_to_power_of_2(rope_dim),
        num_warps=4,
        **pdl_options(product.device),
    )
