"""Attention for decoders whose sequences begin with a sound: text attends to the text before it and
to the sound.

The cache holds the sound's tokens like any others; their keys and values are those of each layer's
cross attention. Each of the two attentions therefore reads one part of a sequence: either the text
after the prefix, or the sound's frames. Attention outputs of the sound's own tokens are
meaningless.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sglang_lite.runtime.attention.base import ModelAttention, StepAttention
from sglang_lite.runtime.kernels.attention_metadata import (
    AttentionPlan,
    AttentionRules,
    DecodeGroup,
    DecodeRows,
    DevicePlan,
    ExtendRow,
)
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.kv_layout import SoundPrefix


class CrossAttention:
    """GPU attention over the text if `rules.causal` is true, and over the sound otherwise.

    Args:
        backend: attention that reads `DevicePlan.limits`.
        prefix: number of the sound's tokens, which fill whole pages.
    """

    shares_prefixes = False

    def __init__(self, backend: ModelAttention, prefix: SoundPrefix) -> None:
        self._backend = backend
        self._prefix = prefix
        self.capturable = backend.capturable

    def plan_step(self, plan: DevicePlan) -> StepAttention:
        over_text, over_sound = (
            self._backend.plan_step(each).attend for each in self._split_plan(plan)
        )

        def attend(
            q: torch.Tensor, cache: KVCache, layer: int, out: torch.Tensor, rules: AttentionRules
        ) -> None:
            (over_text if rules.causal else over_sound)(q, cache, layer, out, rules)

        return StepAttention(attend)

    def _split_plan(self, plan: DevicePlan) -> tuple[DevicePlan, DevicePlan]:
        frames, tokens = self._prefix
        first, count, slot, position = plan.blocks.unbind(1)
        skipped = (tokens - position).clamp(min=0).minimum(count)  # tokens of the sound
        first = first + skipped
        count = count - skipped
        position = position + skipped - tokens
        over_text, over_sound = (
            torch.stack((first, count, slot, at), 1) for at in (position, position * 0)
        )
        if not self.capturable:
            over_text = over_text[count > 0]
            over_sound = over_sound[count > 0]
        own = plan.positions - tokens
        plan = replace(plan, separate=False, longest_uncached=0)
        return (
            replace(
                plan,
                positions=own.clamp(min=0),
                limits=(own + 1).clamp(min=0),
                blocks=over_text,
                page_table=plan.page_table[:, tokens // plan.page_size :].contiguous(),
            ),
            replace(
                plan,
                positions=torch.full_like(own, frames - 1),
                limits=torch.full_like(own, frames),
                blocks=over_sound,
            ),
        )


def plan_text_attention(
    plan: AttentionPlan, text: torch.Tensor, prefix: SoundPrefix
) -> tuple[AttentionPlan, AttentionPlan]:
    """Returns two plans for the text tokens of a CPU step: one in which they attend to text, and
    one in which they attend to the sound.

    Args:
        plan: plan of the whole step.
        text: bool [T], True for tokens of text.
        prefix: number of the sound's tokens.
    """
    frames, tokens = prefix
    at = text.cumsum(0) - 1  # index among the tokens of text
    groups = list[tuple[DecodeGroup, DecodeGroup]]()
    rows = list[tuple[ExtendRow, ExtendRow]]()
    for group in plan.decode:
        own = text[group.tokens]
        read = group.rows.read_at
        if own.any():
            index = at[group.tokens][own]
            lengths = group.rows.lengths[own]
            behind = DecodeRows(read[own, tokens:], lengths - tokens, group.rows.ragged)
            heard = DecodeRows(read[own, :frames], torch.full_like(lengths, frames), ragged=False)
            groups.append((DecodeGroup(index, behind), DecodeGroup(index, heard)))
    for row in plan.extends:
        count = min(row.end - row.start, row.length - tokens)
        end = int(at[row.end - 1]) + 1
        if count > 0:
            read_text = _slots_between(row.read_at, tokens)
            read_sound = _slots_between(row.read_at, 0, frames)
            rows.append(
                (ExtendRow(end - count, end, read_text), ExtendRow(end - count, end, read_sound))
            )
    store_at = plan.store_at[text]
    over_text, over_sound = (
        AttentionPlan(store_at, tuple(each[i] for each in groups), tuple(each[i] for each in rows))
        for i in (0, 1)
    )
    return over_text, over_sound


def _slots_between(
    read_at: torch.Tensor | slice, first: int, end: int | None = None
) -> torch.Tensor | slice:
    """Returns the token slots of positions `first` to `end` - 1 of a sequence."""
    if isinstance(read_at, torch.Tensor):
        return read_at[first:end]
    return slice(read_at.start + first, read_at.stop if end is None else read_at.start + end)
