"""Twin of packed_products.py, by decoding."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang_lite.runtime.kernels.packed_weight import NUMBERS, PackedWeight
from sglang_lite.runtime.kernels.reference.activation import gated

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def decoded(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Returns the values [N, K] of a packed matrix, rounded to a dtype."""
    words = weight.words.view(len(weight.words), -1, 1, weight.slice)
    shifts = torch.arange(0, 4 * NUMBERS, 4, dtype=torch.int32, device=words.device).view(-1, 1)
    numbers = (words >> shifts & 15).flatten(1)[:, : weight.inputs]
    group = torch.arange(weight.inputs, device=words.device) // weight.group
    if weight.kind == "integers":
        values = (numbers - (weight.zero if weight.zeros is None else weight.zeros[:, group].int())).float()
    else:
        values = (torch.tensor(_E2M1, device=words.device) if weight.table is None else weight.table)[numbers]
    return values.mul_(weight.scales.float()[:, group]).to(dtype)


def packed_row(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, gate: str = "") -> torch.Tensor:
    y = packed_rows(x, weight, bias)
    return gated(y, gate) if gate else y


def packed_rows(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x.float(), decoded(weight, torch.float32), None if bias is None else bias.float()).to(x.dtype)


def packed_split_k(x: torch.Tensor, weight: PackedWeight, parts: int) -> torch.Tensor:
    """Every `parts`-th block of columns is of one part."""
    values, block = decoded(weight, torch.float32), torch.arange(weight.inputs) // (NUMBERS * weight.slice)
    own = [(block % parts == part).to(x.device) for part in range(parts)]
    return torch.stack([F.linear(x.float() * each, values) for each in own])
