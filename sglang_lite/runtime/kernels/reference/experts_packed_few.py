"""Torch twin of `kernels.experts_packed_few`: decodes the matrices, and multiplies them like any
others.
"""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.packed_weight import PackedWeight
from sglang_lite.runtime.kernels.reference.experts_few import experts_down_few, experts_gate_up_few
from sglang_lite.runtime.kernels.reference.experts_packed import decode_experts


def packed_gate_up_few(
    x: torch.Tensor,
    weight: PackedWeight,
    experts: int,
    ids: torch.Tensor,
    activation: str,
    *,
    bias: torch.Tensor | None = None,
    alpha: float = 1.0,
    limit: float = 0.0,
) -> torch.Tensor:
    wide = decode_experts(weight, experts, torch.float32)
    return experts_gate_up_few(x, wide, ids, activation, bias=bias, alpha=alpha, limit=limit)


def packed_down_few(
    hidden: torch.Tensor,
    weight: PackedWeight,
    experts: int,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
) -> torch.Tensor:
    return experts_down_few(
        hidden, decode_experts(weight, experts, torch.float32), ids, weights, bias=bias, base=base
    )
