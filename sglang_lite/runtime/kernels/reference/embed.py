"""Torch twin of `kernels.embed`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.attention_metadata import DevicePlan


def embed(plan: DevicePlan, table: torch.Tensor, scale: float, features: torch.Tensor | None = None) -> torch.Tensor:
    ids = torch.where(plan.ids == -1, plan.last_tokens[plan.slots], plan.ids)
    found = (table[ids.clamp(min=0)].float() * scale).to(table.dtype)
    if features is None:
        return found
    return torch.where((ids < 0)[:, None], features[(-2 - ids).clamp(min=0)].to(table.dtype), found)
