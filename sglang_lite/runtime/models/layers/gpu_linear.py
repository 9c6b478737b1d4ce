"""Linear layers on a GPU: our own kernels for few rows, cuBLAS for many."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F

from sglang_lite.runtime.kernels import tiled
from sglang_lite.runtime.kernels.activation import (
    apply_gated,
    apply_gated_eight,
    apply_ungated,
    apply_ungated_eight,
)
from sglang_lite.runtime.kernels.eight_bit_rows import EightBitRows, Scales
from sglang_lite.runtime.kernels.gemv import (
    MAX_ROWS,
    SPLIT_OUTPUTS,
    SmallBatchLinear,
    linear_single_row,
)
from sglang_lite.runtime.models.layers.linear import Linear


class GpuProduct(ABC):
    """Base for linear layers on a GPU. By default, its methods call the layer with 16-bit rows.

    Attributes:
        tiles: True if `kernels.tiled` can multiply few rows by the weight.
        fuses_one: True if the layer implements `multiply_single_row`.
    """

    tiles = False
    fuses_one = False

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies 16-bit rows by the weight matrix."""

    def eight_bit_input_type(self, rows: int) -> torch.dtype | None:
        """Returns the 8-bit type in which the layer multiplies this many input rows, or None if it
        multiplies them in 16 bits.
        """
        return None

    def multiply_into(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Writes the layer's output for x into `out`, and returns `out`."""
        return out.copy_(self(x))

    def multiply_unscaled(
        self, x: torch.Tensor | EightBitRows
    ) -> tuple[torch.Tensor, Scales | None]:
        """Returns the layer's output, and the scales by which it must still be multiplied. The
        scales are None if there are none.
        """
        assert isinstance(x, torch.Tensor)
        return self(x), None

    def multiply_in_parts(
        self, x: torch.Tensor | EightBitRows
    ) -> tuple[torch.Tensor, Scales | None]:
        """Returns the layer's output and scales for `add_norm` to read, like `multiply_unscaled`.
        The output may be in parts [P, M, N], which `add_norm` adds up, if that is faster.
        """
        return self.multiply_unscaled(x)

    def multiply_gated(
        self, x: torch.Tensor | EightBitRows, activation: str, *, eight: torch.dtype | None
    ) -> torch.Tensor | EightBitRows:
        """Returns act(gate) * up for a matrix that stacks gates and ups, gates first.

        Args:
            x: input rows.
            activation: "silu", "gelu" or "gelu_tanh".
            eight: 8-bit type of the rows to return, or None.
        """
        y, scales = self.multiply_unscaled(x)
        return (
            apply_gated(y, activation, scales)
            if eight is None
            else apply_gated_eight(y, activation, scales, eight)
        )

    def multiply_ungated(
        self, x: torch.Tensor | EightBitRows, activation: str, *, eight: torch.dtype | None
    ) -> torch.Tensor | EightBitRows:
        """Returns act(up). Takes the arguments of `multiply_gated`; the activation may also be
        "relu2".
        """
        y, scales = self.multiply_unscaled(x)
        return (
            apply_ungated(y, activation, scales)
            if eight is None
            else apply_ungated_eight(y, activation, scales, eight)
        )

    def multiply_single_row(
        self,
        x: torch.Tensor,
        *,
        residual: torch.Tensor | None,
        norm: torch.Tensor,
        eps: float,
        gate: str = "",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the layer's output for a single row, fused with the preceding residual sum and
        norm, and with the following gate.

        The arguments are those of `kernels.gemv.linear_single_row`.
        """
        raise NotImplementedError


class GpuLinear(GpuProduct):
    """Linear layer that uses the fastest kernel for the number of rows.

    Args:
        weight: weight [N, K] on the device.
        bias: bias [N], or None.
        few: kernel that multiplies a few rows.
    """

    fuses_one = True

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, few: SmallBatchLinear
    ) -> None:
        self.weight = weight
        self.bias = bias
        self._few = few
        outputs, inputs = weight.shape
        self.tiles = tiled.can_tile(weight)
        # Numbers of rows for which the tiled kernel is used.
        first = 2 if outputs > SPLIT_OUTPUTS and inputs >= 2048 else MAX_ROWS + 1
        self._tiled = range(first, tiled.MAX_ROWS + 1) if self.tiles else range(0)
        self._parts = tiled.tiled_reduction_splits(weight) if self.tiles and bias is None else 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) in self._tiled:
            return tiled.linear_by_tiles(x, self.weight, self.bias)
        if len(x) > MAX_ROWS:
            return F.linear(x, self.weight, self.bias)
        if len(x) > 1:
            return self._few(x, self.weight, self.bias)
        return linear_single_row(x, self.weight, self.bias)[0]

    def multiply_into(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if len(x) in self._tiled:
            return tiled.linear_by_tiles(x, self.weight, self.bias, out=out)
        if len(x) <= MAX_ROWS:
            return out.copy_(self(x))
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)

    def multiply_in_parts(
        self, x: torch.Tensor | EightBitRows
    ) -> tuple[torch.Tensor, Scales | None]:
        if isinstance(x, torch.Tensor) and len(x) in self._tiled and self._parts > 1:
            return tiled.linear_split_k(x, self.weight, self._parts), None
        return self.multiply_unscaled(x)

    def multiply_gated(
        self, x: torch.Tensor | EightBitRows, activation: str, *, eight: torch.dtype | None
    ) -> torch.Tensor | EightBitRows:
        if isinstance(x, torch.Tensor) and len(x) in self._tiled and eight is None:
            return tiled.linear_by_tiles(x, self.weight, self.bias, activation)
        return super().multiply_gated(x, activation, eight=eight)

    def multiply_single_row(
        self,
        x: torch.Tensor,
        *,
        residual: torch.Tensor | None,
        norm: torch.Tensor,
        eps: float,
        gate: str = "",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return linear_single_row(
            x, self.weight, self.bias, residual=residual, norm=norm, eps=eps, gate=gate
        )


class SideBySide(GpuProduct):
    """Linear layer over matrices in several formats, with a separate matmul for each format.

    Args:
        products: a linear layer for each format, in the order of their outputs.
    """

    def __init__(self, products: tuple[GpuProduct, ...]) -> None:
        self.products = products
        self.fuses_one = all(product.fuses_one for product in products)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([product(x) for product in self.products], 1)

    def multiply_single_row(
        self,
        x: torch.Tensor,
        *,
        residual: torch.Tensor | None,
        norm: torch.Tensor,
        eps: float,
        gate: str = "",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = [
            product.multiply_single_row(x, residual=residual, norm=norm, eps=eps)
            for product in self.products
        ]
        y = torch.cat([each for each, _ in found], 1)
        total = found[0][1]
        return (apply_gated(y, gate, None) if gate else y), total


class SumOfProducts(GpuProduct):
    """Linear layer whose outputs are the sum of two layers' outputs.

    Args:
        linear: one of the layers.
        addition: the other one.
    """

    def __init__(self, linear: Linear, addition: Linear) -> None:
        self._linear = linear
        self._addition = addition

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x).add_(self._addition(x))


def as_gpu_product(linear: Linear) -> GpuProduct:
    assert isinstance(linear, GpuProduct)
    return linear
