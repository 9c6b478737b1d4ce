"""Builder of linear layers in a model's formats."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch

from sglang_lite.runtime.models.layers.linear import (
    Bf16Linear,
    DenseLinear,
    Float16Linear,
    Float32Linear,
    Int8Linear,
    Linear,
    PairedLinear,
    RowByRow,
    build_bf16_linear,
    build_block_head,
    build_block_linear,
    is_batch_invariant,
    stack_weights,
    stacked_shape,
)
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.weights.blocks import Blocks, column_order_key
from sglang_lite.runtime.models.weights.fp8 import ScaledRows
from sglang_lite.runtime.models.weights.rounding import round_unless_quantised
from sglang_lite.runtime.models.weights.source import Weight

if TYPE_CHECKING:
    from sglang_lite.runtime.models.layers.gpu_linear import GpuProduct  # needs Triton

logger = logging.getLogger("sglang_lite")


class LinearBuilder:
    """Builder of the linear layers of one model.

    Args:
        precision: numeric formats.
        device: device of the weights.
        fused: whether to build layers that run our GPU kernels, instead of torch's operators and
            CPU kernels.
    """

    def __init__(self, precision: Precision, device: torch.device, *, fused: bool) -> None:
        self._precision = precision
        self._device = device
        self._fused = fused
        self._few: Any = None
        self._told = False  # True once it is logged that matrices are decoded
        self._invariant_shapes: dict[tuple[int, int], bool] = {}

    def build_linear(
        self, parts: list[Weight], bias: torch.Tensor | None, *, quantise: bool = True
    ) -> Linear:
        p = self._precision
        if quantise and p.rounding is not None:
            parts = [round_unless_quantised(part, p.rounding, self._device) for part in parts]
        if self._fused:
            return self._build_on_gpu(
                parts, None if bias is None else bias.to(self._device, p.weights), quantise=quantise
            )
        linear = self._build_unfused(parts, None if bias is None else bias.to(p.compute))
        few = linear.few if isinstance(linear, Bf16Linear) else None
        if few is None and isinstance(linear, DenseLinear | Bf16Linear | PairedLinear):
            self._log_decoding(parts)
        return self._ensure_batch_invariance(linear, *stacked_shape(parts))

    def _build_unfused(self, parts: list[Weight], bias: torch.Tensor | None) -> Linear:
        """Builds a linear layer from torch's operators or a CPU's own kernels, whichever suits the
        formats best.
        """
        p = self._precision
        on_cpu = self._device.type == "cpu"
        if p.int8:
            return Int8Linear(parts, bias)  # its products are exact, so rows never depend on others
        bias = None if bias is None else bias.to(self._device, p.weights)
        linear: Linear
        if on_cpu and p.weights == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():  # noqa: SLF001 # torch has no other name for it
            linear = build_bf16_linear(parts, bias, blocks=p.blocks)
        elif p.blocks and (product := build_block_linear(parts, bias)) is not None:
            linear = product
        elif on_cpu and p.weights == torch.float32 and p.batch_invariant:
            linear = Float32Linear(parts, bias)
        else:
            linear = DenseLinear(stack_weights(parts, p.weights, self._device), bias)
        return PairedLinear(linear) if p.batch_invariant else linear

    def _build_on_gpu(
        self, parts: list[Weight], bias: torch.Tensor | None, *, quantise: bool
    ) -> GpuProduct:
        from sglang_lite.runtime.kernels.gemv import SmallBatchLinear
        from sglang_lite.runtime.models.layers.eight_bit_linear import (
            Fp8Linear,
            GpuInt8Linear,
            has_int8_rows,
        )
        from sglang_lite.runtime.models.layers.gpu_linear import GpuLinear, SideBySide
        from sglang_lite.runtime.models.layers.invariant_linear import InvariantLinear
        from sglang_lite.runtime.models.layers.packed_linear import build_packed_linear

        p = self._precision
        self._few = self._few or SmallBatchLinear(self._device)
        outputs, inputs = stacked_shape(parts)
        fp8 = p.fp8 or (p.keep_fp8 and all(isinstance(part, ScaledRows) for part in parts))
        if quantise and not (outputs % 16 or inputs % 16):
            if p.int8 and (not p.packed or all(map(has_int8_rows, parts))):
                return GpuInt8Linear(parts, bias, self._device, p.compute)
            if fp8:
                return Fp8Linear(parts, bias, self._device)
        if (p.packed or p.rounding) and (
            packed := build_packed_linear(parts, bias, self._device)
        ) is not None:
            return packed
        runs = [list(run) for _, run in itertools.groupby(parts, key=self._format_key)]
        if len(runs) > 1:
            sizes = [stacked_shape(run)[0] for run in runs]
            biases = [None] * len(runs) if bias is None else torch.split(bias, sizes)
            return SideBySide(
                tuple(
                    self._build_on_gpu(run, own, quantise=quantise)
                    for run, own in zip(runs, biases)
                )
            )
        self._log_decoding(parts)
        if p.batch_invariant:
            return InvariantLinear(stack_weights(parts, p.weights, self._device), bias)
        return GpuLinear(stack_weights(parts, p.weights, self._device), bias, self._few)

    def _format_key(self, part: Weight) -> Hashable:
        """Returns a key for a matrix that stays quantised on a GPU, or None if it is decoded.
        Matrices with the same key can be stacked.
        """
        if isinstance(part, ScaledRows):
            return ScaledRows if self._precision.keep_fp8 else None
        if not (isinstance(part, Blocks) and self._precision.packed):
            return None
        return (
            (part.format, column_order_key(part))
            if part.format.bits == 4 or self._precision.int8
            else None
        )

    def _log_decoding(self, parts: list[Weight]) -> None:
        if not self._told and any(isinstance(part, Blocks) for part in parts):
            self._told = True
            logger.info(
                "quantised matrices are decoded while they are loaded (docs/models.md, Formats of weights)."
            )

    def _ensure_batch_invariance(self, linear: Linear, outputs: int, inputs: int) -> Linear:
        """Returns the linear layer, or with `batch_invariant` a row-by-row version if its results
        depend on the number of rows.

        Each shape is tested once.
        """
        if not self._precision.batch_invariant:
            return linear
        if (outputs, inputs) not in self._invariant_shapes:
            invariant = is_batch_invariant(linear, inputs, self._precision.compute)
            self._invariant_shapes[outputs, inputs] = invariant
            if not invariant:
                logger.warning(
                    "deterministic: on this machine a product [%d, %d] in %s depends on how many rows it has, and is "
                    "computed row by row, which is slow.",
                    outputs,
                    inputs,
                    self._precision.compute,
                )
        return linear if self._invariant_shapes[outputs, inputs] else RowByRow(linear)

    def build_float32(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        """Builds a small but sensitive linear layer: always float32 on a CPU, and never quantised
        on a GPU.
        """
        if self._fused:
            return self.build_linear([weight], bias, quantise=False)
        bias = None if bias is None else bias.float()
        if self._precision.batch_invariant:
            return PairedLinear(Float32Linear([weight], bias))
        return DenseLinear(stack_weights([weight], torch.float32), bias)

    def build_head(
        self, weight: Weight, bias: torch.Tensor | None, kept: Weight | None = None
    ) -> Linear:
        """Builds the linear layer that computes logits.

        For a 16-bit model on a CPU, sums and results are float32: 16-bit logits are so coarse
        (steps of 0.125 between 16 and 32) that the largest ones are often equal.

        Args:
            weight: weight in the model's format.
            bias: bias, or None.
            kept: weight as stored in the checkpoint, if that is another format; None to use
                `weight`.
        """
        p = self._precision
        if (
            p.blocks
            and bias is None
            and (head := build_block_head(weight if kept is None else kept)) is not None
        ):
            return head
        if self._fused or p.int8 or p.weights == torch.float32 or bias is not None:
            return self.build_linear([weight], bias, quantise=False)
        if not p.batch_invariant and "fbgemm" in torch.backends.quantized.supported_engines:
            return Float16Linear([weight])
        return self._ensure_batch_invariance(
            self.build_float32(weight, None), *stacked_shape([weight])
        )
