"""Twin of packed_products.py, by decoding."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.packed_weight import NUMBERS, PackedWeight

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
