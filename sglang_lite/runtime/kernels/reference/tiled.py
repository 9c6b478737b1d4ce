"""Torch twin of `kernels.tiled`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang_lite.runtime.kernels.lora_few import Shrunk
from sglang_lite.runtime.kernels.lora_own import OwnShrunk
from sglang_lite.runtime.kernels.reference.activation import apply_gated
from sglang_lite.runtime.kernels.reference.lora_few import expanded_products


def linear_by_tiles(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gate: str = "",
    out: torch.Tensor | None = None,
    shrunk: Shrunk | OwnShrunk | None = None,
) -> torch.Tensor:
    y = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    y = (y + expanded_products(shrunk) if isinstance(shrunk, Shrunk) else y).to(x.dtype)
    y = apply_gated(y, gate) if gate else y
    return y if out is None else out.copy_(y)


def linear_split_k(
    x: torch.Tensor, weight: torch.Tensor, parts: int, shrunk: Shrunk | OwnShrunk | None = None
) -> torch.Tensor:
    shares = zip(x.float().chunk(parts, 1), weight.float().chunk(parts, 1))
    y = torch.stack([F.linear(*share) for share in shares])
    if isinstance(shrunk, Shrunk):
        y[0] += expanded_products(shrunk)
    return y
