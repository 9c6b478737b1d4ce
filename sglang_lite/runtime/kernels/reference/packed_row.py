"""Torch twin of `kernels.packed_row`, which decodes the matrix first."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.packed_weight import PackedWeight
from sglang_lite.runtime.kernels.reference.gemv import linear_single_row
from sglang_lite.runtime.kernels.reference.packed_products import decode_weight


def packed_row(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    *,
    residual: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gate: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    values = decode_weight(weight, torch.float32)
    return linear_single_row(x, values, bias, residual=residual, norm=norm, eps=eps, gate=gate)
