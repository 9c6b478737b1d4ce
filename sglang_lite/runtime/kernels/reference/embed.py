"""Torch twins of `kernels.embed`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.attention_metadata import DevicePlan


def embed(
    plan: DevicePlan, table: torch.Tensor, scale: float, features: torch.Tensor | None = None
) -> torch.Tensor:
    ids = torch.where(plan.ids == -1, plan.last_tokens[plan.slots], plan.ids)
    out = (table[ids.clamp(min=0)].float() * scale).to(table.dtype)
    at = ids < 0
    if features is not None:
        out[at] = features[-2 - ids[at], : table.shape[1]]
    return out


def add_features(plan: DevicePlan, features: torch.Tensor, plane: int, out: torch.Tensor) -> None:
    at = plan.ids < -1
    size = out.shape[1]
    out[at] += features[-2 - plan.ids[at], plane * size : (plane + 1) * size]
