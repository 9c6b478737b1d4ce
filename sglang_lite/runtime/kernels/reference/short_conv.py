"""Torch twin of `kernels.short_conv`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.attention_metadata import DevicePlan
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.reference.page_table import token_slots


def short_conv(
    product: torch.Tensor, kernel: torch.Tensor, plan: DevicePlan, cache: KVCache, layer: int
) -> torch.Tensor:
    b, c, x = product.chunk(3, 1)
    plane: torch.Tensor = cache.k[layer][0]
    plane[token_slots(plan, plan.slots, plan.positions)] = (b * x).to(plane.dtype)
    *weights, bias = kernel
    total = bias.expand(len(product), -1).clone()
    for distance, weight in enumerate(reversed(weights)):
        at = plan.positions - distance
        before = plane[token_slots(plan, plan.slots, at.clamp(min=0))].float()
        total += torch.where((at >= 0).unsqueeze(1), before, 0.0) * weight
    out: torch.Tensor = total.to(product.dtype) * c
    return out
