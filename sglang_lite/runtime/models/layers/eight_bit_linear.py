"""Linear layers with 8-bit weights on a GPU: floating point (e4m3) or integers, with one scale per
output.

Rows are multiplied in 8 bits, each with a scale found at run time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_lite.runtime.kernels.eight_bit_rows import FLOAT8, EightBitRows, Scales
from sglang_lite.runtime.kernels.eight_bits import quantise_rows
from sglang_lite.runtime.kernels.gemv import linear_single_row
from sglang_lite.runtime.kernels.int8_product import (
    MAX_SPLIT_ROWS,
    int8_linear,
    int8_parts,
    int8_reduction_splits,
)
from sglang_lite.runtime.models.layers.gpu_linear import GpuProduct
from sglang_lite.runtime.models.layers.linear import stacked_rows, stacked_shape
from sglang_lite.runtime.models.weights.blocks import Blocks, Format
from sglang_lite.runtime.models.weights.fp8 import ScaledRows
from sglang_lite.runtime.models.weights.source import Weight


class EightBitLinear(GpuProduct):
    """Linear layer with weights of an 8-bit type.

    Matrices that the checkpoint stores in that type, with one scale or one per row, are kept as
    they are. Others are quantised, including those with block scales. That changes an e4m3 number
    by up to 1/16 (3 bits after the leading one).

    Args:
        kind: the 8-bit type.
        parts: matrices [N_i, K] to be stacked along N; N and K are multiples of 16.
        bias: bias [N], or None.
        device: device of the weights.
    """

    def __init__(
        self,
        kind: torch.dtype,
        parts: Sequence[Weight],
        bias: torch.Tensor | None,
        device: torch.device,
    ) -> None:
        weight = torch.empty(stacked_shape(parts), dtype=kind, device=device)
        self.weight = weight
        self.bias = bias
        self.scales = torch.empty(len(weight), dtype=torch.float32, device=device)
        at = 0
        for part in parts:
            end = at + part.shape[0]
            if (stored := _find_eight_bit_rows(part, kind)) is not None:
                weight[at:end], self.scales[at:end] = stored
            else:
                for start, rows in stacked_rows([part]):
                    here = slice(at + start, at + start + len(rows))
                    eight = quantise_rows(rows.to(device), kind)
                    weight[here] = eight.values[: len(rows)]
                    self.scales[here] = eight.scales[: len(rows)]
            at = end

    def _quantise(self, x: torch.Tensor | EightBitRows) -> EightBitRows:
        return quantise_rows(x, self.weight.dtype) if isinstance(x, torch.Tensor) else x


class Fp8Linear(EightBitLinear):
    """Linear layer with weights in e4m3, multiplied by cuBLAS. A single row is multiplied
    unquantised, by a separate kernel.

    Whatever reads the result applies the scales: for fewer than a few hundred rows, cuBLAS takes up
    to twice as long to apply them as for the matmul itself.

    Args:
        parts, bias, device: as for EightBitLinear.
    """

    fuses_one = True

    def __init__(
        self, parts: Sequence[Weight], bias: torch.Tensor | None, device: torch.device
    ) -> None:
        super().__init__(FLOAT8, parts, bias, device)
        self._one = torch.ones((), device=device)

    def eight_bit_input_type(self, rows: int) -> torch.dtype | None:
        return None if rows == 1 else FLOAT8

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:
            return linear_single_row(x, self.weight, self.bias, scales=self.scales)[0]
        return self._apply_scales(*self._product(self._quantise(x)))

    def multiply_unscaled(
        self, x: torch.Tensor | EightBitRows
    ) -> tuple[torch.Tensor, Scales | None]:
        if isinstance(x, torch.Tensor) and len(x) == 1:
            return self(x), None
        y, scales = self._product(self._quantise(x))
        return (y, scales) if self.bias is None else (self._apply_scales(y, scales), None)

    def _apply_scales(self, y: torch.Tensor, scales: Scales) -> torch.Tensor:
        y = (y * scales.rows[: len(y)].unsqueeze(1) * scales.columns).to(y.dtype)
        return y if self.bias is None else y.add_(self.bias)

    def _product(self, x: EightBitRows) -> tuple[torch.Tensor, Scales]:
        y = torch._scaled_mm(  # noqa: SLF001 # torch has no other name for it
            x.values,
            self.weight.t(),
            scale_a=self._one,
            scale_b=self._one,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return y[: x.rows], Scales(x.scales, self.scales)

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
            x,
            self.weight,
            self.bias,
            scales=self.scales,
            residual=residual,
            norm=norm,
            eps=eps,
            gate=gate,
        )


class GpuInt8Linear(EightBitLinear):
    """Linear layer with weights in 8-bit integers. A single row is quantised, too.

    Otherwise the weights would have to be converted for an unquantised row, and a GPU is slow to
    convert integers.

    Args:
        parts, bias, device: as for EightBitLinear.
        dtype: data type of the results.
    """

    def __init__(
        self,
        parts: Sequence[Weight],
        bias: torch.Tensor | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(torch.int8, parts, bias, device)
        self._dtype = dtype
        self._split = int8_reduction_splits(self.weight) if bias is None else 1

    def eight_bit_input_type(self, rows: int) -> torch.dtype | None:
        return torch.int8

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply_unscaled(x)[0]

    def multiply_unscaled(
        self, x: torch.Tensor | EightBitRows
    ) -> tuple[torch.Tensor, Scales | None]:
        return int8_linear(
            self._quantise(x), self.weight, self.scales, self.bias, self._dtype
        ), None

    def multiply_in_parts(
        self, x: torch.Tensor | EightBitRows
    ) -> tuple[torch.Tensor, Scales | None]:
        count = len(x) if isinstance(x, torch.Tensor) else x.rows
        if self._split == 1 or count > MAX_SPLIT_ROWS:
            return self.multiply_unscaled(x)
        return int8_parts(self._quantise(x), self.weight, self.scales, self._split), None


def has_int8_rows(part: Weight) -> bool:
    """Returns whether a checkpoint stores a matrix as 8-bit integers with a scale per row."""
    return _find_eight_bit_rows(part, torch.int8) is not None


def _find_eight_bit_rows(
    part: Weight, kind: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns a matrix's numbers and the scale of each row, as stored. Returns None unless the
    checkpoint stores the matrix in this 8-bit type with one scale per row.
    """
    if kind == FLOAT8 and isinstance(part, ScaledRows) and part.row_scales is not None:
        return part.read(0, part.shape[0]), part.row_scales
    if kind == torch.int8 and isinstance(part, Blocks) and part.order is None:
        columns = part.shape[1]
        return (
            (part.q, part.scale[:, 0]) if part.format == Format(8, columns, minimum=False) else None
        )
    return None
