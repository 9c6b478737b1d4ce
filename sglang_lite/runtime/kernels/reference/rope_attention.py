"""Torch twin of `kernels.rope_attention`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.attention_metadata import AttentionRules, DecodeWork, DevicePlan
from sglang_lite.runtime.kernels.eight_bit_rows import Scales
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.reference.decode_attention import decode_attention
from sglang_lite.runtime.kernels.reference.rope_store import rope_store


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
    plan = plan.in_layer(rules.window)
    q = rope_store(qkv.clone(), q_norm, k_norm, eps, rope, plan, cache, layer, scales)
    decode_attention(q, cache, layer, plan, work, out, rules)
