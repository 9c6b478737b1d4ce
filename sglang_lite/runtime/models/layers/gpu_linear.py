"""Linear layers on a GPU: our own kernels for few rows, cuBLAS for many."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from sglang_lite.runtime.kernels import tiled
from sglang_lite.runtime.kernels.activation import gated, gated_fp8, ungated, ungated_fp8
from sglang_lite.runtime.kernels.fp8 import quantise_rows
from sglang_lite.runtime.kernels.fp8_rows import Fp8Rows, Scales
from sglang_lite.runtime.kernels.gemv import MAX_ROWS, SPLIT_OUTPUTS, SmallBatchLinear, linear_single_row
from sglang_lite.runtime.models.layers.linear import Linear, stacked_rows, stacked_shape
from sglang_lite.runtime.models.weights.fp8 import ScaledRows
from sglang_lite.runtime.models.weights.source import Weight


class GpuLinear:
    """Linear layer that uses the fastest kernel for the number of rows.

    Args:
        weight: weight [N, K] on the device.
        bias: bias [N], or None.
        few: kernel for products of a few rows.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, few: SmallBatchLinear) -> None:
        self.weight, self.bias = weight, bias
        self._few = few
        outputs, inputs = weight.shape
        # Numbers of rows for which the tiled kernel is used.
        self._tiled = range(2 if outputs > SPLIT_OUTPUTS and inputs >= 2048 else MAX_ROWS + 1, tiled.MAX_ROWS + 1)
        if not tiled.can_tile(weight):
            self._tiled = range(0)
        self._parts = tiled.split_k_of(weight) if self._tiled and bias is None else 1

    @property
    def takes_fp8(self) -> bool:
        """True if the layer takes input rows in 8 bits."""
        return False

    @property
    def fuses_one(self) -> bool:
        """True if the layer has `one`."""
        return True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) in self._tiled:
            return tiled.linear_tiled(x, self.weight, self.bias)
        if len(x) > MAX_ROWS:
            return F.linear(x, self.weight, self.bias)
        if len(x) > 1:
            return self._few(x, self.weight, self.bias)
        return linear_single_row(x, self.weight, self.bias)[0]

    def into(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Writes the product into `out` and returns it; products of many rows need no copy."""
        if len(x) in self._tiled:
            return tiled.linear_tiled(x, self.weight, self.bias, out=out)
        if len(x) <= MAX_ROWS or self.takes_fp8:
            return out.copy_(self(x))
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)

    def unscaled(self, x: torch.Tensor | Fp8Rows) -> tuple[torch.Tensor, Scales | None]:
        """Returns the product, and the scales that it has yet to be multiplied with, or None."""
        assert isinstance(x, torch.Tensor)
        return self(x), None

    def parts(self, x: torch.Tensor | Fp8Rows) -> tuple[torch.Tensor, Scales | None]:
        """`unscaled` for a following `add_norm`: if faster, returns parts [P, M, N] whose sum is the product."""
        if isinstance(x, torch.Tensor) and len(x) in self._tiled and self._parts > 1:
            return tiled.linear_split_k(x, self.weight, self._parts), None
        return self.unscaled(x)

    def gated(self, x: torch.Tensor | Fp8Rows, activation: str, *, eight: bool) -> torch.Tensor | Fp8Rows:
        """Returns act(gate) * up, if this matrix stacks gates and ups, gates first.

        Args:
            x: input rows.
            activation: "silu", "gelu" or "gelu_tanh".
            eight: whether to return 8-bit rows.
        """
        if isinstance(x, torch.Tensor) and len(x) in self._tiled and not eight:
            return tiled.linear_tiled(x, self.weight, self.bias, activation)
        y, scales = self.unscaled(x)
        return (gated_fp8 if eight else gated)(y, activation, scales)

    def ungated(self, x: torch.Tensor | Fp8Rows, activation: str, *, eight: bool) -> torch.Tensor | Fp8Rows:
        """Returns act(up). Takes the arguments of `gated`; the activation may also be "relu2"."""
        y, scales = self.unscaled(x)
        return (ungated_fp8 if eight else ungated)(y, activation, scales)

    def one(
        self, x: torch.Tensor, *, residual: torch.Tensor | None, norm: torch.Tensor, eps: float, gate: str = ""
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Product of a single row, fused with the preceding residual sum and norm and the following gate.

        The arguments are those of `kernels.gemv.linear_single_row`.
        """
        return linear_single_row(x, self.weight, self.bias, residual=residual, norm=norm, eps=eps, gate=gate)


class Fp8Linear(GpuLinear):
    """Linear layer with weights in 8-bit floating point and one scale per output.

    Several rows are multiplied in 8 bits, each with a scale found at run time. A single row is multiplied as it is, as
    its time is that of reading the weights.

    The reader of a product applies the scales: for less than a few hundred rows, cuBLAS takes up to twice as long to
    apply them as for the product itself.

    8-bit matrices of a checkpoint are kept if their scales are per row or per matrix. Matrices with block scales are
    quantised again, which changes an element by up to 1/16 (3 bits after the leading one are kept).

    Args:
        parts: matrices [N_i, K] to be stacked along N; N and K are multiples of 16.
        bias: bias [N], or None.
        few: kernel for products of a few rows.
        device: device of the weights.
    """

    def __init__(
        self, parts: Sequence[Weight], bias: torch.Tensor | None, few: SmallBatchLinear, device: torch.device
    ) -> None:
        weight = torch.empty(stacked_shape(parts), dtype=torch.float8_e4m3fn, device=device)
        super().__init__(weight, bias, few)
        self._one = torch.ones((), device=device)
        self.scales = torch.empty(len(weight), dtype=torch.float32, device=device)
        at = 0
        for part in parts:
            end = at + part.shape[0]
            if isinstance(part, ScaledRows) and part.row_scales is not None:
                weight[at:end], self.scales[at:end] = part.read(0, part.shape[0]), part.row_scales
            else:
                for start, rows in stacked_rows([part]):
                    here = slice(at + start, at + start + len(rows))
                    eight = quantise_rows(rows.to(device))
                    weight[here], self.scales[here] = eight.values[: len(rows)], eight.scales[: len(rows)]
            at = end

    @property
    def takes_fp8(self) -> bool:
        return True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:
            return linear_single_row(x, self.weight, self.bias, scales=self.scales)[0]
        y, scales = self._product(quantise_rows(x))
        return self._scaled(y, scales)

    def _scaled(self, y: torch.Tensor, scales: Scales) -> torch.Tensor:
        y = (y * scales.rows[: len(y)].unsqueeze(1) * scales.columns).to(y.dtype)
        return y if self.bias is None else y.add_(self.bias)

    def unscaled(self, x: torch.Tensor | Fp8Rows) -> tuple[torch.Tensor, Scales | None]:
        if isinstance(x, torch.Tensor):
            if len(x) == 1:
                return self(x), None
            x = quantise_rows(x)
        y, scales = self._product(x)
        return (y, scales) if self.bias is None else (self._scaled(y, scales), None)

    def _product(self, x: Fp8Rows) -> tuple[torch.Tensor, Scales]:
        y = torch._scaled_mm(  # noqa: SLF001 # torch has no other name for it
            x.values, self.weight.t(), scale_a=self._one, scale_b=self._one, out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )  # fmt: skip
        return y[: x.rows], Scales(x.scales, self.scales)

    def one(
        self, x: torch.Tensor, *, residual: torch.Tensor | None, norm: torch.Tensor, eps: float, gate: str = ""
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return linear_single_row(
            x, self.weight, self.bias, scales=self.scales, residual=residual, norm=norm, eps=eps, gate=gate
        )


def matrix(linear: Linear) -> GpuLinear:
    assert isinstance(linear, GpuLinear)
    return linear
