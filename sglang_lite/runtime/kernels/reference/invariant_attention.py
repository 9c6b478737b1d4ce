"""Torch twin of `kernels.invariant_attention`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.attention_metadata import AttentionRules, DevicePlan
from sglang_lite.runtime.kernels.invariant_attention import InvariantWork, piece_borders
from sglang_lite.runtime.kernels.kv_cache import KVCache, scale_by_kv_head
from sglang_lite.runtime.kernels.reference.page_table import token_slots
from sglang_lite.runtime.kernels.reference.prefill_attention import prefill_attention
from sglang_lite.runtime.kernels.reference.softmax import attend_tokens, merge_parts


def plan_pieces(plan: DevicePlan, work: InvariantWork) -> None:
    rows = plan.decoding
    items = list[tuple[int, int, int, int]]()
    shared = [0] * rows if plan.shared is None else plan.shared.lengths.tolist()
    ends = [len(piece_borders(position + 1)) - 1 for position in plan.positions[:rows].tolist()]
    starts = [len(piece_borders(length)) - 1 for length in shared[:rows]]
    spare = len(work.items) - rows
    share = max(-(-(sum(ends) - sum(starts)) // spare), 1) if spare else 1 << 20
    for row, (start, end, slot) in enumerate(zip(starts, ends, plan.slots.tolist())):
        own = [(row, at, min(at + share, end), slot) for at in range(start, end, share)]
        work.row_items[row] = len(own)
        items += own
    work.items[:, 0] = -1
    work.items[: len(items)] = torch.tensor(items)


def invariant_attention(
    q: torch.Tensor,
    cache: KVCache,
    layer: int,
    plan: DevicePlan,
    work: InvariantWork,
    out: torch.Tensor,
    rules: AttentionRules,
) -> None:
    for row in range(plan.decoding):
        end = int(plan.positions[row]) + 1
        seen = torch.arange(
            0 if rules.window is None else max(int(rules.first_visible(plan.positions[row])), 0),
            end,
            device=q.device,
        )
        at = token_slots(plan, int(plan.slots[row]), seen)
        result = merge_parts([attend_tokens(q[row], cache.k[layer], cache.v[layer], at, rules)])
        out[row] = (
            result
            if cache.scales is None
            else scale_by_kv_head(result[None], cache.scales.v[layer])[0]
        )
    prefill_attention(q, cache, layer, plan, out, rules)
