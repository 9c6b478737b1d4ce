"""Torch twin of `kernels.invariant_product`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang_lite.runtime.kernels.reference.tiled import linear_by_tiles


def invariant_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gate: str = "",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    return linear_by_tiles(x, weight, bias, gate, out)


def invariant_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x.float(), weight.float()).unsqueeze(0)
