"""Torch twin of `kernels.experts_packed`: decodes the matrices, and multiplies them like any
others.
"""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.experts_order import ExpertBlocks
from sglang_lite.runtime.kernels.packed_weight import PackedWeight
from sglang_lite.runtime.kernels.reference.experts_tiled import experts_down, experts_gate_up
from sglang_lite.runtime.kernels.reference.packed_products import decode_weight


def packed_gate_up(
    x: torch.Tensor,
    weight: PackedWeight,
    experts: int,
    blocks: ExpertBlocks,
    top: int,
    activation: str,
    *,
    bias: torch.Tensor | None = None,
    alpha: float = 1.0,
    limit: float = 0.0,
) -> torch.Tensor:
    wide = decode_experts(weight, experts, x.dtype)
    return experts_gate_up(x, wide, blocks, top, activation, bias=bias, alpha=alpha, limit=limit)


def packed_down(
    hidden: torch.Tensor,
    weight: PackedWeight,
    experts: int,
    blocks: ExpertBlocks,
    weights: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    partial: bool = False,
) -> torch.Tensor:
    wide = decode_experts(weight, experts, hidden.dtype)
    return experts_down(hidden, wide, blocks, weights, bias=bias, base=base, partial=partial)


def decode_experts(weight: PackedWeight, experts: int, dtype: torch.dtype) -> torch.Tensor:
    """Decodes the matrices of experts, [experts, N, K]."""
    return decode_weight(weight, dtype).view(experts, -1, weight.inputs)
