"""Torch twin of `kernels.prefix_attention`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.attention_metadata import (
    AttentionRules,
    DecodeWork,
    DevicePlan,
    Partials,
)
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.reference.page_table import token_slots
from sglang_lite.runtime.kernels.reference.softmax import PartialAttention, attend_tokens


def prefix_attention(
    q: torch.Tensor,
    cache: KVCache,
    layer: int,
    plan: DevicePlan,
    work: DecodeWork,
    rules: AttentionRules,
) -> None:
    assert plan.shared is not None
    k = cache.k[layer]
    v = cache.v[layer]
    for first, count, slot, start, end, chunk in plan.shared.items.tolist():
        at = token_slots(plan, slot, torch.arange(start, end, device=q.device))
        for row in plan.shared.order[first : first + count].tolist():
            part = attend_tokens(q[row], k, v, at, rules, start)
            buffer = prefix_partials(
                work.partials, row * plan.shared.max_chunks + chunk, q.shape[1]
            )
            for target, value in zip(buffer, part):
                target.copy_(value)


def prefix_partials(partials: Partials, index: int, heads: int) -> PartialAttention:
    """Returns the part of the buffers for result number `index`: one row's attention over one piece
    of a prefix.
    """
    here = slice(index * heads, (index + 1) * heads)
    return PartialAttention(
        partials.prefix_acc[here], partials.prefix_ml[here, 0], partials.prefix_ml[here, 1]
    )
