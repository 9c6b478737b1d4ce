"""Packings of compressed-tensors (https://github.com/vllm-project/compressed-tensors), which
llm-compressor writes.

- pack-quantized: `weight_packed` int32 [outputs, inputs * bits / 32], `weight_scale` [outputs,
  groups] and `weight_zero_point` int32 [outputs * bits / 32, groups], numbers packed consecutively,
  up to 8 bits;
- int-quantized and naive-quantized: `weight` int8 [outputs, inputs], `weight_scale`,
  `weight_zero_point`;
- nvfp4-pack-quantized and mxfp4-pack-quantized: read by fp4.py;
- float-quantized: read by fp8.py, by the dtype of `weight`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_lite.runtime.models.weights.blocks import Blocks
from sglang_lite.runtime.models.weights.gptq import inputs_sorted_by_group
from sglang_lite.runtime.models.weights.packing import (
    Packing,
    Parts,
    build_scaled_blocks,
    columns_per_block,
    count_bits_with_scales,
    unpack_integers,
)
from sglang_lite.runtime.models.weights.source import EncodedMatrix

# bits of a number, and columns of a group or None for one group a row
Scheme = tuple[int, int | None]


def word_packing(schemes: Sequence[Scheme]) -> Packing:
    """Returns the packing of integers in words (pack-quantized). `schemes` are the schemes that the
    config declares.
    """

    def read(parts: Parts) -> Blocks:
        shape = parts[".weight_shape"].tolist()
        scale = parts[".weight_scale"]
        if len(shape) != 2 or scale.ndim != 2 or len(scale) not in (1, shape[0]):
            raise ValueError(
                f"weight_scale has shape {tuple(scale.shape)} for weight_shape {shape}"
            )
        rows, columns = shape
        words = parts[".weight_packed"]
        bits = _find_declared_bits(schemes, columns, scale.shape[1], words.shape[-1])
        scale = scale.expand(rows, -1)
        index = parts.get(".weight_g_idx")
        order = None
        if index is not None and (index != -1).any():  # -1: as llm-compressor initialises it
            order = inputs_sorted_by_group(index, columns, scale.shape[1])
        numbers = unpack_integers(words, bits, columns)
        if len(numbers) != rows:
            raise ValueError(f"weight_packed has {len(numbers)} rows, and weight_shape says {rows}")
        zero: torch.Tensor | int = 1 << bits - 1
        if ".weight_zero_point" in parts:
            zero = unpack_integers(parts[".weight_zero_point"].t(), bits, rows).t().to(torch.int16)
            if zero.shape != scale.shape:
                raise ValueError(
                    f"weight_zero_point is of {zero.shape[1]} groups, and weight_scale of {scale.shape[1]}"
                )
        return build_scaled_blocks(
            numbers if order is None else numbers[:, order], bits, scale, zero, order
        )

    few = all(bits <= 4 for bits, _ in schemes)
    return Packing(
        (".weight_packed", ".weight_scale", ".weight_shape"),
        read,
        5.0 if few else 9.0,
        (".weight_zero_point", ".weight_g_idx"),
        (".input_scale", ".output_scale"),
        gpu_bits=max(count_bits_with_scales(group) for _, group in schemes) if few else None,
    )


def byte_packing(*, integer_inputs: bool) -> Packing:
    """Returns the packing of one integer per byte (int-quantized). `integer_inputs` as in Matrices."""

    def read(parts: Parts) -> EncodedMatrix:
        weight = parts[".weight"]
        scale = parts[".weight_scale"]
        if weight.dtype != torch.int8:
            raise ValueError(f"weight is {weight.dtype}, and quantization_config declares int8")
        scale = scale.reshape(-1, 1) if scale.ndim < 2 else scale
        if scale.ndim != 2 or len(scale) not in (1, len(weight)):
            raise ValueError(
                f"weight_scale has shape {tuple(scale.shape)}, and weight {tuple(weight.shape)}"
            )
        scale = scale.expand(len(weight), -1)
        columns_per_block(weight.shape[1], scale.shape[1], None)
        zero = (
            parts[".weight_zero_point"].to(torch.int16) + 128
            if ".weight_zero_point" in parts
            else 128
        )
        if isinstance(zero, torch.Tensor):
            zero = zero.reshape(-1, 1 if zero.ndim < 2 else zero.shape[-1])
            if len(zero) not in (1, len(scale)) or zero.shape[1] not in (1, scale.shape[1]):
                raise ValueError(
                    f"weight_zero_point has shape {tuple(parts['.weight_zero_point'].shape)}"
                )
            zero = zero.expand(scale.shape)
        return build_scaled_blocks((weight.to(torch.int16) + 128).to(torch.uint8), 8, scale, zero)

    return Packing(
        (".weight_scale", ".weight"),
        read,
        9.0,
        (".weight_zero_point",),
        (".input_scale", ".input_zero_point"),
        gpu_bits=8.0 if integer_inputs else None,
    )


def _find_declared_bits(schemes: Sequence[Scheme], columns: int, groups: int, words: int) -> int:
    """Returns how many bits a number has, from the declared scheme that fits the tensors. Raises
    ValueError if no scheme fits.
    """
    for bits, group in schemes:
        if words == -(-columns * bits // 32) and groups == (
            1 if group in (None, -1) else columns // group
        ):
            columns_per_block(columns, groups, group or -1)
            return bits
    declared = " or ".join(
        f"{bits} bits in groups of {group or 'a row'}" for bits, group in schemes
    )
    raise ValueError(
        f"{words} words and {groups} scales hold no row of {columns} numbers of {declared}"
    )
