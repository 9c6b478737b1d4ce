"""Torch twin of `kernels.experts_order`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.experts_order import ExpertBlocks


def experts_order(ids: torch.Tensor, experts: int, size: int) -> ExpertBlocks:
    blocks = ExpertBlocks.allocate_expert_blocks(ids, experts, size)
    blocks.experts.fill_(-1)
    at = 0
    for expert in range(experts):
        pairs = (ids.flatten() == expert).nonzero()[:, 0].int()
        end = at + -(-len(pairs) // size)
        blocks.experts[at:end] = expert
        rows = blocks.pairs[at * size : end * size]
        rows.fill_(ids.numel())
        rows[: len(pairs)] = pairs
        at = end
    return blocks
