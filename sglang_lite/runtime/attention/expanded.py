"""Attention using keys and values that are expanded from latents, for rows without cached tokens.

With DeepSeek's sizes, a pair of tokens takes 320 multiplications per head, instead of 1,088 with
absorbed queries. Expanding keys and values takes as many as absorbing queries. Rows with cached
tokens use absorbed queries, as the cached tokens would have to be expanded again.
"""

from __future__ import annotations

import torch

from sglang_lite.runtime.attention.base import AttendExpanded, AttentionRequirements
from sglang_lite.runtime.kernels.attention_metadata import DevicePlan
from sglang_lite.runtime.kernels.device_properties import properties_of
from sglang_lite.runtime.kernels.hopper import hopper_kernels
from sglang_lite.runtime.kernels.kv_cache import KVCache, apply_latent_scales, gather_slots
from sglang_lite.runtime.kernels.reference.page_table import token_slots

# Tokens of a row above which the saved multiplications outweigh the additional launches.
MIN_EXPANDED_TOKENS = 1536


def make_expanded_attention(
    requirements: AttentionRequirements, plan: DevicePlan
) -> AttendExpanded | None:
    """Returns expanded attention for the non-decoding tokens of a plan. Returns None if these
    tokens attend to cached ones, if no kernel supports the plan, or if rows are too short to
    benefit.
    """
    hopper = hopper_kernels(properties_of(requirements.device), "prefill_attention_hopper")
    if (
        hopper is None
        or requirements.expanded is None
        or plan.longest_uncached < MIN_EXPANDED_TOKENS
    ):
        return None
    if not hopper.supports_uncached(plan, requirements.compute, *requirements.expanded):
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
        stored = gather_slots(cache.k[layer], at, q.dtype)[0]
        heads, _, rank = keys.shape
        if cache.scales is not None:
            stored = apply_latent_scales(stored, cache.scales.k[layer], rank)
        latents = stored[:, :rank].expand(heads, -1, -1)
        own = torch.bmm(latents, keys.transpose(1, 2)), stored, torch.bmm(latents, values)
        hopper.uncached_attention_hopper(q, *own, plan, out, scale=scale)

    return attend
