"""The interface of models, as runners see them: a decoder, or a script in its place."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import torch

from sglang_lite.runtime.kernels.attention_metadata import AttentionPlan

Cache: TypeAlias = Any  # of keys and values: each model's own, which its runner passes through


class Model(Protocol):
    fused: bool  # made of kernels that take a device plan

    @property
    def device(self) -> torch.device: ...

    def allocate_cache(self, slots: int) -> Cache:
        """A cache of keys and values for that many tokens."""
        ...

    def copy_slots(self, cache: Cache, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies keys and values from token slots to others; int64 [N] each. All are read before one is written."""
        ...

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan, cache: Cache) -> torch.Tensor:
        """Hidden states [T, …] of new tokens, whose keys and values it stores."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 logits [R, V] of hidden states [R, …]."""
        ...
