"""Linear layers on a GPU in which a row's bits do not depend on the batch."""

from __future__ import annotations

import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.kernels.eight_bit_rows import EightBitRows, Scales
from sglang_lite.runtime.kernels.invariant_product import invariant_linear, invariant_parts
from sglang_lite.runtime.kernels.tiled import can_tile
from sglang_lite.runtime.models.layers.gpu_linear import GpuProduct


class InvariantLinear(GpuProduct):
    """Linear layer that uses one order of summation for every number of rows.

    Args:
        weight: weight [N, K] on the device.
        bias: bias [N], or None.

    Raises:
        ModelError: the kernel can't multiply the matrix.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        if not can_tile(weight):
            raise ModelError(
                f"deterministic: a matrix {list(weight.shape)} has rows of no multiple of 8 elements.",
                hint="Leave deterministic out.",
            )
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return invariant_linear(x, self.weight, self.bias)

    def multiply_into(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return invariant_linear(x, self.weight, self.bias, out=out)

    def multiply_in_parts(
        self, x: torch.Tensor | EightBitRows
    ) -> tuple[torch.Tensor, Scales | None]:
        assert isinstance(x, torch.Tensor)
        return self(x) if self.bias is not None else invariant_parts(x, self.weight), None

    def multiply_gated(
        self, x: torch.Tensor | EightBitRows, activation: str, *, eight: torch.dtype | None
    ) -> torch.Tensor | EightBitRows:
        assert isinstance(x, torch.Tensor)
        return invariant_linear(x, self.weight, self.bias, activation)
