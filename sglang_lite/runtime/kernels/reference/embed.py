"""Torch twin of `kernels.embed`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.attention_metadata import DevicePlan


def embed(plan: DevicePlan, table: torch.Tensor, scale: float) -> torch.Tensor:
    ids = torch.where(plan.ids < 0, plan.last_tokens[plan.slots], plan.ids)
    return (table[ids].float() * scale).to(table.dtype)
