"""Matrix products on a GPU: our own kernels for few rows, cuBLAS for many."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang_lite.runtime.kernels.skinny import MOST_ROWS, FewRows, linear_one
from sglang_lite.runtime.models.layers.linear import Linear


class DeviceLinear:
    """
    Args:
        weight: [N, K] on the device.
        bias: [N] or None.
        few: for products of a few rows.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, few: FewRows) -> None:
        self.weight, self.bias = weight, bias
        self._few = few

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > MOST_ROWS:
            return F.linear(x, self.weight, self.bias)
        if len(x) > 1:
            return self._few(x, self.weight, self.bias)
        return linear_one(x, self.weight, self.bias)[0]

    def one(
        self, x: torch.Tensor, *, residual: torch.Tensor | None, norm: torch.Tensor, eps: float, gate: str = ""
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The product of a single row with what comes before and after; see `kernels.skinny.linear_one`."""
        return linear_one(x, self.weight, self.bias, residual=residual, norm=norm, eps=eps, gate=gate)


def matrix(linear: Linear) -> DeviceLinear:
    assert isinstance(linear, DeviceLinear)
    return linear
