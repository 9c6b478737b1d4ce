"""Packings of torchao (https://github.com/pytorch/ao), as it flattens its tensors into safetensors.

Int8Tensor and IntxUnpackedToInt8Tensor: `_weight_qdata` int8 [outputs, inputs], `_weight_scale`
[outputs, groups] and `_weight_zero_point` int8 of the same shape: value = scale * (number - zero).
Float8Tensor: e4m3, with a scale per row.
"""

from __future__ import annotations

import torch

from sglang_lite.runtime.models.weights.fp8 import ScaledRows
from sglang_lite.runtime.models.weights.packing import (
    Packing,
    Parts,
    build_scaled_blocks,
    check_scales,
    columns_per_block,
)
from sglang_lite.runtime.models.weights.source import EncodedMatrix

INTEGERS = frozenset(
    {  # configs whose tensors have one of the first two classes
        "Int8WeightOnlyConfig",
        "Int8DynamicActivationInt8WeightConfig",
        "IntxWeightOnlyConfig",
        "Int8DynamicActivationIntxWeightConfig",
    }
)
# of the third
FLOATS = frozenset({"Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig"})


def torchao(cpu_bits: float | None) -> Packing:
    """Returns the packing of one integer per byte, and of 8-bit floats. `cpu_bits` as in `Packing`."""
    return Packing(
        ("._weight_qdata", "._weight_scale"),
        _read,
        cpu_bits,
        ("._weight_zero_point", "._weight_act_pre_scale"),
        ("._weight_act_quant_scale", "._weight_act_quant_zero_point"),
    )


def _read(parts: Parts) -> EncodedMatrix:
    numbers = parts["._weight_qdata"]
    scale = parts["._weight_scale"]
    if numbers.ndim != 2 or numbers.dtype not in (torch.int8, torch.float8_e4m3fn):
        raise ValueError(
            f"_weight_qdata is {numbers.dtype} of shape {tuple(numbers.shape)}, which has no reader"
        )
    if "._weight_act_pre_scale" in parts:
        raise ValueError("_weight_act_pre_scale multiplies activations, which has no reader")
    if numbers.dtype != torch.int8:
        check_scales(scale)
        return ScaledRows(numbers.shape, lambda start, end: numbers[start:end], scale, None)
    rows, columns = numbers.shape
    if scale.numel() == 1:
        scale = scale.expand(rows, 1)
    elif scale.ndim != 2 or len(scale) != rows:
        raise ValueError(
            f"_weight_scale has shape {tuple(scale.shape)} for a matrix of {rows} by {columns}"
        )
    columns_per_block(columns, scale.shape[1], None)
    zero = parts.get("._weight_zero_point", torch.zeros((), dtype=torch.int8)).short()
    if zero.numel() != 1 and zero.shape != parts["._weight_scale"].shape:
        raise ValueError(
            f"_weight_zero_point has shape {tuple(zero.shape)}, and _weight_scale {tuple(scale.shape)}"
        )
    zero = zero.expand(scale.shape)
    bits = 4 if int(numbers.min()) >= -8 and int(numbers.max()) < 8 and int(zero.min()) >= -8 else 8
    half = 1 << bits - 1
    return build_scaled_blocks((numbers.short() + half).to(torch.uint8), bits, scale, zero + half)
