"""Torch twin of `kernels.latent_store`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang_lite.runtime.kernels.attention_metadata import DevicePlan
from sglang_lite.runtime.kernels.kv_cache import KVCache, apply_latent_scales, view_as_indexable
from sglang_lite.runtime.kernels.reference.page_table import token_slots
from sglang_lite.runtime.kernels.reference.rope_store import rotate_heads


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
    rank, (cos, sin) = len(norm), (table[plan.positions].float().unsqueeze(1) for table in rope)
    size = cos.shape[2]
    latent, key = product[:, -rank - size :].float().split((rank, size), 1)
    latent = F.rms_norm(latent, norm.shape, norm.float(), eps)
    stored = torch.cat((latent, rotate_heads(key.unsqueeze(1), cos, sin).squeeze(1)), 1)
    if cache.scales is not None:
        stored = apply_latent_scales(stored, 1 / cache.scales.k[layer], rank)
    plane = view_as_indexable(cache.k[layer][0])
    at = token_slots(plan, plan.slots, plan.positions)
    plane[at] = view_as_indexable(stored.to(cache.k[layer].dtype))
    out.copy_(rotate_heads(q, cos, sin))
