"""Norm of latents, rotary embedding and store: the way from the first product of latent attention to its cache.

plane[slot] = norm(latent), turned key        of each token
absorbed[h, rank:] = turned query             of each head"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.attention_metadata import DevicePlan
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.pdl import overlapped, start_next, wait

_BLOCK_H = 16  # heads of a program


@triton.jit
def _latent_store(
    product, width, q, q_stride, absorbed, norm, cos, sin, slots, positions, page_table, pages_per_slot, plane, eps,
    HEADS: tl.constexpr, RANK: tl.constexpr, NOPE: tl.constexpr, TURNED: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    t = tl.arange(0, BLOCK_T)
    # Each element, and the one half the turned part away that is turned into it.
    half: tl.constexpr = TURNED // 2
    pair = tl.where(t < half, t + half, t - half)
    c = tl.load(cos + position * TURNED + t, mask=t < TURNED, other=0.0).to(tl.float32)
    s = tl.load(sin + position * TURNED + t, mask=t < TURNED, other=0.0).to(tl.float32)
    if tl.program_id(1) == 0:
        row = product + token * width + (width - RANK - TURNED)
        r = tl.arange(0, BLOCK_R)
        latent = tl.load(row + r, mask=r < RANK, other=0.0).to(tl.float32)
        latent *= tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps)
        latent *= tl.load(norm + r, mask=r < RANK, other=0.0).to(tl.float32)
        x = tl.load(row + RANK + t, mask=t < TURNED, other=0.0).to(tl.float32)
        y = tl.load(row + RANK + pair, mask=t < TURNED, other=0.0).to(tl.float32)
        slot = tl.load(slots + token).to(tl.int64)
        page = tl.load(page_table + slot * pages_per_slot + position // PAGE).to(tl.int64)
        target = plane + (page * PAGE + position % PAGE) * (RANK + TURNED)
        tl.store(target + r, latent.to(plane.dtype.element_ty), mask=r < RANK)
        tl.store(target + RANK + t, (x * c + y * s).to(plane.dtype.element_ty), mask=t < TURNED)
    else:  # other names: a name has one type in both
        head = (tl.program_id(1) - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = (head < HEADS)[:, None] & (t < TURNED)[None, :]
        queries = q + token * q_stride + head[:, None] * (NOPE + TURNED) + NOPE
        x_q = tl.load(queries + t[None, :], mask=inside, other=0.0).to(tl.float32)
        y_q = tl.load(queries + pair[None, :], mask=inside, other=0.0).to(tl.float32)
        at = absorbed + (token * HEADS + head[:, None]) * (RANK + TURNED) + RANK + t[None, :]
        tl.store(at, (x_q * c[None, :] + y_q * s[None, :]).to(absorbed.dtype.element_ty), mask=inside)


def latent_store(
    product: torch.Tensor,
    q: torch.Tensor,
    absorbed: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    rope: tuple[torch.Tensor, torch.Tensor],
    plan: DevicePlan,
    cache: KVCache,
    layer: int,
) -> None:
    """Stores the normalised latents and turned keys of new tokens, and turns their queries.

    Args:
        product: [T, … + rank + turned], contiguous, whose last columns are latents and keys.
        q: [T, heads, nope_size + turned]; a token's heads lie side by side.
        absorbed: [T, heads, rank + turned], contiguous; the last `turned` numbers of each head are written.
        norm: [rank].
        rope: cos and sin of every position [positions, turned], as RotaryTable has them.

    Moves 2 T (rank + turned + heads turned) elements.
    """
    (cos, sin), heads, rank = rope, q.shape[1], len(norm)
    turned = cos.shape[1]
    _latent_store[(len(product), 1 + triton.cdiv(heads, _BLOCK_H))](
        product, product.shape[1], q, q.stride(0), absorbed, norm, cos, sin, plan.slots, plan.positions,
        plan.page_table, plan.page_table.shape[1], cache.k[layer], eps,
        HEADS=heads, RANK=rank, NOPE=q.shape[2] - turned, TURNED=turned, PAGE=plan.page_size,
        BLOCK_H=_BLOCK_H, BLOCK_R=triton.next_power_of_2(rank), BLOCK_T=triton.next_power_of_2(turned),
        num_warps=4, **overlapped(product.device),
    )  # fmt: skip
