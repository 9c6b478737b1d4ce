"""Attention of a deterministic engine (`kernels.invariant_attention`). A token's result has the
same bits in every batch.
"""

from __future__ import annotations

import torch

from sglang_lite.runtime.attention.base import AttentionRequirements, StepAttention
from sglang_lite.runtime.attention.triton import TritonAttention
from sglang_lite.runtime.kernels.attention_metadata import AttentionRules, DevicePlan
from sglang_lite.runtime.kernels.device_properties import properties_of
from sglang_lite.runtime.kernels.invariant_attention import (
    InvariantWork,
    invariant_attention,
    piece_borders,
    plan_pieces,
    queries_per_prompt_program,
)
from sglang_lite.runtime.kernels.kv_cache import KVCache


class InvariantAttention:
    capturable = True
    shares_prefixes = True

    @staticmethod
    def unsupported_reason(requirements: AttentionRequirements) -> str | None:
        if requirements.latent:
            return "latent attention is not supported"
        if requirements.heads // requirements.kv_heads > queries_per_prompt_program(
            requirements.head_dim
        ):
            return "too many query heads share a KV head"
        if requirements.alibi:
            return "ALiBi is not supported"
        return TritonAttention.unsupported_reason(requirements)

    def __init__(self, requirements: AttentionRequirements) -> None:
        self._requirements = requirements
        self._max_pieces = len(piece_borders(requirements.longest)) - 1
        device = requirements.device
        kv_heads = requirements.kv_heads
        self._spare_items = 2 * properties_of(device).programs_to_fill // kv_heads
        # In larger steps, each row is read by one program and shares no prefix.
        self._max_rows = requirements.max_shared_rows
        parts = self._max_rows * self._max_pieces * requirements.heads
        self._acc = torch.empty((parts, requirements.head_dim), device=device)
        self._ml = torch.empty((parts, 2), device=device)
        self._counters = torch.zeros(
            (requirements.max_rows + 1, kv_heads), dtype=torch.int32, device=device
        )

    def plan_step(self, plan: DevicePlan) -> StepAttention:
        rows = plan.decoding
        device = self._requirements.device
        items = rows + (self._spare_items if rows <= self._max_rows else 0)
        work = InvariantWork(
            items=torch.empty((items, 4), dtype=torch.int32, device=device),
            row_items=torch.empty(max(rows, 1), dtype=torch.int32, device=device),
            acc=self._acc,
            ml=self._ml,
            counters=self._counters,
            max_pieces=self._max_pieces,
        )
        if rows:
            plan_pieces(plan, work)

        def attend(
            q: torch.Tensor, cache: KVCache, layer: int, out: torch.Tensor, rules: AttentionRules
        ) -> None:
            assert rules.sinks is None, "refused"
            seen = plan.in_layer(rules.window)
            invariant_attention(q, cache, layer, seen, work, out, rules)

        return StepAttention(attend)
