"""Torch twin of `kernels.page_table`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.attention_metadata import DevicePlan


def update_pages(table: torch.Tensor, at: torch.Tensor, values: torch.Tensor) -> None:
    table.view(-1)[at] = values


def token_slots(
    plan: DevicePlan, slots: torch.Tensor | int, positions: torch.Tensor
) -> torch.Tensor:
    """Returns the token slots, int64 [N], of positions [N]. `slots` is the slot of all positions,
    or one for each of them.
    """
    size = plan.page_size
    return plan.page_table[slots, positions // size].long() * size + positions % size
