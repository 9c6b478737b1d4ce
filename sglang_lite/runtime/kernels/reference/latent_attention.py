"""Torch twin of `kernels.latent_attention`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.attention_metadata import (
    AttentionRules,
    DecodeWork,
    DevicePlan,
    ExtendRow,
)
from sglang_lite.runtime.kernels.kv_cache import KVCache, apply_latent_scales
from sglang_lite.runtime.kernels.reference.attention import attend_rows
from sglang_lite.runtime.kernels.reference.page_table import token_slots
from sglang_lite.runtime.kernels.reference.prefix_attention import prefix_partials
from sglang_lite.runtime.kernels.reference.softmax import (
    PartialAttention,
    attend_tokens,
    merge_parts,
)


def latent_decode(
    q: torch.Tensor,
    cache: KVCache,
    layer: int,
    plan: DevicePlan,
    work: DecodeWork,
    out: torch.Tensor,
    *,
    rank: int,
    scale: float,
) -> None:
    q, plane, by = _undo_scales(q, cache, layer, rank)
    for row in range(plan.decoding):
        first, count = work.rows[row].tolist()
        parts = [
            attend_tokens(
                q[row], plane, plane, _slots(plan, slot, start, end), AttentionRules(scale)
            )
            for _, start, end, slot in work.items[first : first + count].tolist()
        ]
        if plan.shared is not None:
            first = row * plan.shared.max_chunks
            chunks = int(plan.shared.chunks[row])
            parts += [prefix_partials(work.partials, first + i, q.shape[1]) for i in range(chunks)]
        out[row, :, :rank] = (
            merge_parts([PartialAttention(acc[:, :rank], *ml) for acc, *ml in parts]) * by
        )


def latent_prefix(
    q: torch.Tensor,
    cache: KVCache,
    layer: int,
    plan: DevicePlan,
    work: DecodeWork,
    *,
    rank: int,
    scale: float,
) -> None:
    assert plan.shared is not None
    q, plane, _ = _undo_scales(q, cache, layer, rank)
    for first, count, slot, start, end, chunk in plan.shared.items.tolist():
        for row in plan.shared.order[first : first + count].tolist():
            acc, *ml = attend_tokens(
                q[row], plane, plane, _slots(plan, slot, start, end), AttentionRules(scale)
            )
            buffer = prefix_partials(
                work.partials, row * plan.shared.max_chunks + chunk, q.shape[1]
            )
            for target, value in zip(buffer, (acc[:, :rank], *ml)):
                target.copy_(value)


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
    q, plane, by = _undo_scales(q, cache, layer, rank)
    for first, count, slot, position in plan.blocks.tolist():
        row = ExtendRow(0, count, _slots(plan, slot, 0, position + count))
        visible = attend_rows(q[first : first + count], plane, plane, row, AttentionRules(scale))
        out[first : first + count, :, :rank] = visible[..., :rank] * by


def _undo_scales(
    q: torch.Tensor, cache: KVCache, layer: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | float]:
    """Returns three values: queries scaled to match the stored latents, the stored latents, and the
    factor that results must be multiplied by.
    """
    plane = cache.k[layer]
    if cache.scales is None:
        return q, plane, 1.0
    scales = cache.scales.k[layer]
    return apply_latent_scales(q, scales, rank), plane, scales[0]


def _slots(plan: DevicePlan, slot: int, start: int, end: int) -> torch.Tensor:
    return token_slots(plan, slot, torch.arange(start, end, device=plan.page_table.device))
