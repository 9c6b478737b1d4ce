"""Torch twin of `kernels.packed_products`, which decodes the matrix first."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang_lite.runtime.kernels.packed_weight import SLICES, PackedWeight
from sglang_lite.runtime.kernels.reference.activation import apply_gated

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def decode_weight(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Returns the values [N, K] of a packed matrix, rounded to a dtype."""
    words = weight.words.view(len(weight.words), -1, 1, weight.slice // 2, 1)
    shifts = torch.arange(0, 4 * SLICES, 4, dtype=torch.int32, device=words.device).view(-1, 1, 1)
    halves = torch.tensor([0, 16], dtype=torch.int32, device=words.device)
    numbers = (words >> shifts + halves & 15).flatten(1)[:, : weight.inputs]
    scales = weight.scales[torch.arange(weight.inputs, device=words.device) // weight.group].t()
    zeros: torch.Tensor | int = weight.zero
    if weight.half is not None:
        zeros = _floats_from_bits(scales >> 16, torch.float16)
        scales = _floats_from_bits(scales, weight.half)
    if weight.kind == "integers":
        values = (numbers - zeros).float()
    else:
        values = (
            torch.tensor(_E2M1, device=words.device) if weight.table is None else weight.table
        )[numbers]
    return values.mul_(scales).to(dtype)


def _floats_from_bits(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Interprets the low 16 bits of integers as numbers of a 16-bit dtype. Returns float32."""
    return bits.to(torch.int16).view(dtype).float()


def packed_rows(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    gate: str = "",
    *,
    parts: int = 1,
) -> torch.Tensor:
    """Returns x times the decoded matrix. With several parts, returns partial sums: each part has
    the sums over some blocks of columns, assigned to the parts in turn.
    """
    values = decode_weight(weight, torch.float32)
    if parts == 1:
        y = F.linear(x.float(), values, None if bias is None else bias.float()).to(x.dtype)
        return apply_gated(y, gate) if gate else y
    block = torch.arange(weight.inputs) // (SLICES * weight.slice)
    own = [(block % parts == part).to(x.device) for part in range(parts)]
    return torch.stack([F.linear(x.float() * each, values) for each in own])


def add_parts(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return parts.sum(0).to(dtype)
