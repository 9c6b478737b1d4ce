"""Attention by keys and values that are made of a step's own latents: of rows that begin in it.

A pair of tokens and a head takes 320 products, in DeepSeek's models, where it takes 1,088 absorbed. What makes keys and
values takes as many as what absorbs queries. Tokens that are cached would have to be expanded anew, so rows that see
such are absorbed.
"""

from __future__ import annotations

import torch

from sglang_lite.runtime.attention.base import AttendExpanded, AttentionRequirements
from sglang_lite.runtime.kernels.attention_metadata import DevicePlan
from sglang_lite.runtime.kernels.card import card_of
from sglang_lite.runtime.kernels.hopper import hopper_kernels
from sglang_lite.runtime.kernels.kv_cache import KVCache, gather, scaled_by_latents
from sglang_lite.runtime.kernels.reference.page_table import token_slots

LEAST = 1536  # tokens of a row, from which on products take longer than the launches that there are more of


def attend_expanded(needs: AttentionRequirements, plan: DevicePlan) -> AttendExpanded | None:
    """Attention of the plan's tokens but the decoding ones; None where some see others, or no kernel is faster so."""
    hopper = hopper_kernels(card_of(needs.device), "prefill_attention_hopper")
    if hopper is None or needs.expanded is None or plan.fresh < LEAST:
        return None
    if not hopper.takes_fresh(plan, needs.compute, *needs.expanded):
        return None
    first = plan.decoding
    at = token_slots(plan, plan.slots[first:], plan.positions[first:])

    def attend(
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        cache: KVCache,
        layer: int,
        out: torch.Tensor,
        *,
        scale: float,
    ) -> None:
        stored = gather(cache.k[layer], at, q.dtype)[0]
        heads, _, rank = keys.shape
        if cache.scales is not None:
            stored = scaled_by_latents(stored, cache.scales.k[layer], rank)
        latents = stored[:, :rank].expand(heads, -1, -1)
        own = torch.bmm(latents, keys.transpose(1, 2)), stored, torch.bmm(latents, values)
        hopper.fresh_attention_hopper(q, *own, plan, out, scale=scale)

    return attend
