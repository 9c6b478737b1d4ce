"""Builds the matrices of a layer's experts in the form that GPU kernels take. Needs Triton."""

from __future__ import annotations

import logging

import torch

from sglang_lite.runtime.kernels.experts import ExpertMatrices
from sglang_lite.runtime.kernels.packed_weight import PackedWeight
from sglang_lite.runtime.models.layers.linear import stacked_rows, stacked_shape
from sglang_lite.runtime.models.layers.packed_linear import pack_experts
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.weights.blocks import Blocks
from sglang_lite.runtime.models.weights.fp8 import BLOCK, ScaledRows, quantise_blocks
from sglang_lite.runtime.models.weights.rounding import can_round_in_blocks, round_unless_quantised
from sglang_lite.runtime.models.weights.source import Weight

logger = logging.getLogger("sglang_lite")


class ExpertStacker:
    """Builder of the stacked matrices of experts.

    Args:
        precision: numeric formats.
        device: device of the weights.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self._precision = precision
        self._device = device
        # True once it is logged that experts stay in 16 bits although 8 were requested
        self._stay_wide = False
        self._told = False  # True once it is logged that experts are decoded

    def build_matrices(
        self,
        gate_up: list[list[Weight]],
        down: list[list[Weight]],
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        of: int | None = None,
    ) -> ExpertMatrices:
        """Builds the matrices of a layer's experts.

        Args:
            gate_up, down: matrices of each expert, to be stacked along their outputs.
            gate_up_bias, down_bias: biases [experts, outputs], or None.
            of: as for ExpertMatrices.
        """
        p = self._precision
        parts = [part for expert in (*gate_up, *down) for part in expert]
        if p.fp8 or (p.keep_fp8 and all(isinstance(part, ScaledRows) for part in parts)):
            if not any(size % BLOCK for part in parts for size in part.shape):
                (gate_up_8, gate_up_scales), (down_8, down_scales) = map(
                    self._quantise_in_blocks, (gate_up, down)
                )
                return ExpertMatrices(
                    gate_up_8, down_8, gate_up_bias, down_bias, gate_up_scales, down_scales, of
                )
            if not self._stay_wide:
                self._stay_wide = True
                logger.warning(
                    "experts of %d by %d stay in 16 bits: no multiples of %d.",
                    *parts[0].shape,
                    BLOCK,
                )
        if (packed := self._pack_experts(gate_up)) is not None and (
            packed_down := self._pack_experts(down)
        ) is not None:
            return ExpertMatrices(packed, packed_down, gate_up_bias, down_bias, of=of)
        if (p.int8 or p.rounding is not None) and not self._stay_wide:
            self._stay_wide = True
            logger.warning(
                "experts stay in 16 bits: a GPU has no kernel for them in %s.", p.rounding or "int8"
            )
        if not self._told and any(isinstance(part, Blocks) for part in parts):
            self._told = True
            logger.info(
                "quantised experts are decoded while they are loaded (docs/models.md, Formats of weights)."
            )
        return ExpertMatrices(
            self._stack_experts(gate_up), self._stack_experts(down), gate_up_bias, down_bias, of=of
        )

    def _pack_experts(self, experts: list[list[Weight]]) -> PackedWeight | None:
        """Packs the matrices of all experts in 4 bits. Returns None if 4 bits are not requested or
        the matrices can't be packed.
        """
        p = self._precision
        rounding = p.rounding
        if rounding is None or not all(can_round_in_blocks(part.shape[1]) for part in experts[0]):
            return (
                pack_experts(experts, len(experts), self._device) if p.packed or rounding else None
            )
        rounded = (
            [round_unless_quantised(part, rounding, self._device) for part in parts]
            for parts in experts
        )
        return pack_experts(rounded, len(experts), self._device)

    def _stack_experts(self, experts: list[list[Weight]]) -> torch.Tensor:
        """Returns the matrices [experts, outputs, inputs] of all experts, with each expert's parts
        stacked along their outputs.
        """
        shape = (len(experts), *stacked_shape(experts[0]))
        whole = torch.empty(shape, dtype=self._precision.weights, device=self._device)
        for matrix, parts in zip(whole, experts):
            for start, rows in stacked_rows(parts):
                matrix[start : start + len(rows)] = rows
        return whole

    def _quantise_in_blocks(self, experts: list[list[Weight]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the stacked matrices in 8-bit floating point, and the scale of each block."""
        outputs, inputs = stacked_shape(experts[0])
        whole = torch.empty(
            (len(experts), outputs, inputs), dtype=torch.float8_e4m3fn, device=self._device
        )
        scales = torch.empty((len(experts), outputs // BLOCK, inputs // BLOCK), device=self._device)
        for matrix, of_matrix, parts in zip(whole, scales, experts):
            at = 0
            for part in parts:
                end = at + part.shape[0]
                matrix[at:end], of_matrix[at // BLOCK : end // BLOCK] = quantise_blocks(part)
                at = end
        return whole, scales
