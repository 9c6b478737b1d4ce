"""Torch twin of `kernels.rope_store`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang_lite.runtime.kernels.attention_metadata import DevicePlan
from sglang_lite.runtime.kernels.eight_bit_rows import Scales
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.reference.attention import store_kv
from sglang_lite.runtime.kernels.reference.eight_bits import apply_scales
from sglang_lite.runtime.kernels.reference.page_table import token_slots


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
    kv_heads, _, dim = cache.k[layer].shape
    queries = qkv.view(len(qkv), -1, dim)[:, : -2 * kv_heads]
    x = apply_scales(qkv, scales).to(qkv.dtype).view(len(qkv), -1, dim)
    q, k, v = x.split((queries.shape[1], kv_heads, kv_heads), 1)
    if q_norm is not None and k_norm is not None:
        q, k = (
            F.rms_norm(x.float(), (dim,), w.float(), eps).to(x.dtype)
            for x, w in ((q, q_norm), (k, k_norm))
        )
    at = (
        plan.positions.unsqueeze(1)
        if plan.rotary is None
        else plan.rotary.at.T[:, plan.rotary.axes]
    )
    cos, sin = (
        table.gather(0, at.long().expand(-1, table.shape[1])).float().unsqueeze(1) for table in rope
    )
    q = rotate_heads(q, cos, sin)
    k = rotate_heads(k, cos, sin)
    queries.copy_(store_kv(cache, layer, token_slots(plan, plan.slots, plan.positions), q, k, v))
    return queries


def rotate_heads(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns heads x [T, heads, head_dim] rotated by tables cos and sin [T, 1, dim]; elements
    beyond dim are unchanged.
    """
    rotated, remaining = x.float().split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), -1)
    first, second = rotated.chunk(2, -1)
    return torch.cat((rotated * cos + torch.cat((second, first), -1) * sin, remaining), -1).to(
        x.dtype
    )
