"""Attention with torch operations: slower, but for any head size and data type.

The keys and values of each row are gathered from its pages. Their number is read from the device at
every step, so no CUDA graph can contain a step.
"""

from __future__ import annotations

import torch

from sglang_lite.runtime.attention.base import AttentionRequirements, StepAttention
from sglang_lite.runtime.kernels.attention_metadata import (
    AttentionRules,
    DecodeRows,
    DevicePlan,
    ExtendRow,
)
from sglang_lite.runtime.kernels.kv_cache import KVCache, apply_latent_scales, scale_by_kv_head
from sglang_lite.runtime.kernels.reference.attention import attend_rows

# Most elements of keys, and of values, gathered for one product of several rows.
MAX_GATHERED_ELEMENTS = 1 << 26


class TorchAttention:
    capturable = False
    shares_prefixes = False

    @staticmethod
    def unsupported_reason(requirements: AttentionRequirements) -> str | None:
        return None

    def __init__(self, requirements: AttentionRequirements) -> None:
        self._tokens = MAX_GATHERED_ELEMENTS // (requirements.kv_heads * requirements.head_dim)
        self._latent = requirements.latent

    def plan_step(self, plan: DevicePlan) -> StepAttention:
        lengths = [position + 1 for position in plan.positions[: plan.decoding].tolist()]
        parts = self._token_ranges(plan, lengths)
        windowed = (
            parts if plan.window_table is None else self._token_ranges(plan.in_layer(1), lengths)
        )

        def attend(
            q: torch.Tensor, cache: KVCache, layer: int, out: torch.Tensor, rules: AttentionRules
        ) -> None:
            if self._latent and cache.scales is not None:
                q = apply_latent_scales(q, cache.scales.k[layer], self._latent)
            for first, end, part in parts if rules.window is None else windowed:
                out[first:end] = attend_rows(
                    q[first:end], cache.k[layer], cache.v[layer], part, rules
                )
            if cache.scales is not None:
                out.copy_(scale_by_kv_head(out, cache.scales.v[layer]))

        return StepAttention(attend)

    def _token_ranges(
        self, plan: DevicePlan, lengths: list[int]
    ) -> list[tuple[int, int, DecodeRows | ExtendRow]]:
        """Splits the batch into ranges of tokens that are computed together. Returns (first, end,
        rows) for each range, where the rows specify what its tokens read from the cache. `lengths`
        are the sequence lengths of the decoding rows.
        """
        parts: list[tuple[int, int, DecodeRows | ExtendRow]] = [
            (first, end, _decode_rows(plan, first, end, lengths[first:end]))
            for first, end in _group_neighbours(lengths, self._tokens)
        ]
        for first, count, slot, position in plan.blocks.tolist():
            limits = None if plan.limits is None else plan.limits[first : first + count].long()
            behind = 0 if limits is None else int(limits.max()) - position - count
            read_at = _token_slots(
                plan, torch.tensor([slot], device=plan.slots.device), position + count + behind
            )[0]
            parts.append((first, first + count, ExtendRow(0, count, read_at, limits, behind)))
        return parts


def _group_neighbours(lengths: list[int], max_tokens: int) -> list[tuple[int, int]]:
    """Groups neighbouring rows that are computed together. All rows of a group are padded to the
    longest one. Returns the groups as (first, end).

    Args:
        lengths: number of tokens that each row reads.
        max_tokens: maximum number of tokens in a group of several rows, including padding.
    """
    groups: list[tuple[int, int]] = []
    longest = 0
    for row, length in enumerate(lengths):
        longest = max(longest, length)
        if groups and (row + 1 - groups[-1][0]) * longest <= max_tokens:
            groups[-1] = groups[-1][0], row + 1
        else:
            groups.append((row, row + 1))
            longest = length
    return groups


def _decode_rows(plan: DevicePlan, first: int, end: int, lengths: list[int]) -> DecodeRows:
    longest = max(lengths)
    read_at = _token_slots(plan, plan.slots[first:end], longest)
    of_rows = plan.positions[first:end] + 1
    ragged = min(lengths) < longest
    if ragged:  # slots beyond a row's end may hold NaN, and 0 x NaN is NaN
        at = torch.arange(longest, device=read_at.device)
        read_at = torch.where(at < of_rows.unsqueeze(1), read_at, read_at[:, :1])
    return DecodeRows(read_at, of_rows, ragged)


def _token_slots(plan: DevicePlan, slots: torch.Tensor, longest: int) -> torch.Tensor:
    """Returns the places in the KV cache of the first `longest` tokens of each slot's sequence, as
    indices of shape [slots, longest].
    """
    size = plan.page_size
    pages = plan.page_table[slots, : -(-longest // size)]
    offsets = torch.arange(size, dtype=pages.dtype, device=pages.device)
    return (pages.unsqueeze(2) * size + offsets).flatten(1)[:, :longest]
