"""Torch twin of `kernels.latent_attention`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.attention_metadata import DevicePlan, ExtendRow, Work
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.reference.attention import Scoring, attend_rows
from sglang_lite.runtime.kernels.reference.page_table import token_slots
from sglang_lite.runtime.kernels.reference.softmax import attend_tokens, merged


def latent_decode(
    q: torch.Tensor,
    cache: KVCache,
    layer: int,
    plan: DevicePlan,
    work: Work,
    out: torch.Tensor,
    *,
    rank: int,
    scale: float,
) -> None:
    plane = cache.k[layer]
    for row in range(plan.decoding):
        first, count = work.rows[row].tolist()
        parts = [
            attend_tokens(q[row], plane, plane, _slots(plan, slot, start, end), scale=scale, softcap=None)
            for _, start, end, slot in work.items[first : first + count].tolist()
        ]
        out[row, :, :rank] = merged(parts)[:, :rank]


def latent_prefill(
    q: torch.Tensor,
    cache: KVCache,
    layer: int,
    plan: DevicePlan,
    out: torch.Tensor,
    *,
    rank: int,
    scale: float,
) -> None:
    plane = cache.k[layer]
    for first, count, slot, position in plan.blocks.tolist():
        row = ExtendRow(0, count, _slots(plan, slot, 0, position + count))
        out[first : first + count, :, :rank] = attend_rows(q[first : first + count], plane, plane, row, Scoring(scale))[
            ..., :rank
        ]


def _slots(plan: DevicePlan, slot: int, start: int, end: int) -> torch.Tensor:
    return token_slots(plan, slot, torch.arange(start, end, device=plan.page_table.device))
