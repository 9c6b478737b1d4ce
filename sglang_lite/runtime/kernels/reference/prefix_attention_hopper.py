"""Torch twin of `kernels.prefix_attention_hopper`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.attention_metadata import DecodeWork, DevicePlan
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.reference.prefix_attention import prefix_attention


def prefix_attention_hopper(
    q: torch.Tensor, cache: KVCache, layer: int, plan: DevicePlan, work: DecodeWork, *, scale: float
) -> None:
    prefix_attention(q, cache, layer, plan, work, scale=scale)
