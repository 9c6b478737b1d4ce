"""Torch twin of `kernels.prefill_attention_hopper`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.attention_metadata import DevicePlan
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.reference.prefill_attention import prefill_attention


def prefill_attention_hopper(
    q: torch.Tensor, cache: KVCache, layer: int, plan: DevicePlan, out: torch.Tensor, *, scale: float
) -> None:
    prefill_attention(q, cache, layer, plan, out, scale=scale)
