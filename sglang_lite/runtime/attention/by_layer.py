"""Attention for models whose layers differ in their heads, with one backend for each kind of layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sglang_lite.runtime.attention.base import ModelAttention, StepAttention
from sglang_lite.runtime.kernels.attention_metadata import AttentionRules, DevicePlan
from sglang_lite.runtime.kernels.kv_cache import KVCache


class AttentionByLayer:
    """Attention that uses each layer's own backend.

    Args:
        layers: backend of each layer; layers with the same heads have the same backend.
    """

    shares_prefixes = False  # shared prefixes are split into chunks for one kind of heads only

    def __init__(self, layers: Sequence[ModelAttention]) -> None:
        self._layers = layers
        self.capturable = all(backend.capturable for backend in layers)

    def plan_step(self, plan: DevicePlan) -> StepAttention:
        plan = replace(plan, longest_uncached=0)  # so that `attend` covers all tokens
        attends = {backend: backend.plan_step(plan).attend for backend in self._layers}

        def attend(
            q: torch.Tensor, cache: KVCache, layer: int, out: torch.Tensor, rules: AttentionRules
        ) -> None:
            attends[self._layers[layer]](q, cache, layer, out, rules)

        return StepAttention(attend)
