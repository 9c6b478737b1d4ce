"""Torch twin of `kernels.prefill_attention`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.attention_metadata import AttentionRules, DevicePlan, ExtendRow
from sglang_lite.runtime.kernels.kv_cache import KVCache, scale_by_kv_head
from sglang_lite.runtime.kernels.reference.attention import attend_rows
from sglang_lite.runtime.kernels.reference.page_table import token_slots


def prefill_attention(
    q: torch.Tensor,
    cache: KVCache,
    layer: int,
    plan: DevicePlan,
    out: torch.Tensor,
    rules: AttentionRules,
) -> None:
    k = cache.k[layer]
    v = cache.v[layer]
    for first, count, slot, position in plan.blocks.tolist():
        tokens = slice(first, first + count)
        limits = None if plan.limits is None else plan.limits[tokens].long()
        behind = 0 if limits is None else int(limits.max()) - position - count
        slots = token_slots(plan, slot, torch.arange(position + count + behind, device=q.device))
        row = ExtendRow(0, count, slots, limits, behind)
        result = attend_rows(q[tokens], k, v, row, rules)
        out[tokens] = (
            result if cache.scales is None else scale_by_kv_head(result, cache.scales.v[layer])
        )
