"""Torch twin of `uncached_attention_hopper`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.attention_metadata import AttentionRules, DevicePlan, ExtendRow
from sglang_lite.runtime.kernels.reference.attention import attend_rows


def uncached_attention_hopper(
    q: torch.Tensor,
    keys: torch.Tensor,
    rope_parts: torch.Tensor,
    values: torch.Tensor,
    plan: DevicePlan,
    out: torch.Tensor,
    *,
    scale: float,
) -> None:
    rope_part = rope_parts[:, keys.shape[2] - q.shape[2] :].expand(len(keys), -1, -1)
    whole = torch.cat((keys, rope_part), 2)
    for first, count, _, position in plan.blocks.tolist():
        start = first - position - plan.decoding  # first token of the row
        row = ExtendRow(0, count, slice(start, start + position + count))
        out[first : first + count] = attend_rows(
            q[first : first + count], whole, values, row, AttentionRules(scale)
        )
