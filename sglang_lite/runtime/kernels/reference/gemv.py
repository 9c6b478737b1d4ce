"""Torch twin of `kernels.gemv`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang_lite.runtime.kernels.reference.activation import apply_activation


def linear_single_row(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    scales: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gate: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    value = (
        total.float() if norm is None else F.rms_norm(total.float(), norm.shape, norm.float(), eps)
    )
    y = F.linear(value, weight.float())
    if scales is not None:
        y = y * scales
    if bias is not None:
        y = y + bias.float()
    if gate:
        first, second = y.chunk(2, -1)
        y = apply_activation(first, gate) * second
    return y.to(x.dtype), total


class SmallBatchLinear:
    def __init__(self, device: torch.device) -> None: ...

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        y = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        return y.to(x.dtype)
