"""Packings of 4-bit floating point (e2m1): MXFP4, with a power-of-two scale per 32 numbers (OCP
Microscaling 1.0), and NVFP4, with an e4m3 scale per 16 numbers and one scale for the whole matrix.

A byte holds two numbers, the first in its low bits.
"""

from __future__ import annotations

import torch

from sglang_lite.runtime.models.weights.blocks import Blocks
from sglang_lite.runtime.models.weights.packing import (
    Packing,
    Parts,
    check_scales,
    columns_per_block,
    require_single_scale,
)
from sglang_lite.runtime.models.weights.source import EncodedStack

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def compressed_tensors_nvfp4_packing() -> Packing:
    """Returns the packing of NVFP4 with the inverse of the matrix's scale in `weight_global_scale`."""

    def read(parts: Parts) -> Blocks:
        scale = parts[".weight_scale"].float() / require_single_scale(parts[".weight_global_scale"])
        return _blocks(parts[".weight_packed"], scale, 16)

    return Packing(
        (".weight_global_scale", ".weight_packed", ".weight_scale"),
        read,
        9.0,
        ignored=(".input_global_scale",),
        gpu_bits=5.0,
    )


def modelopt_nvfp4_packing() -> Packing:
    """Returns the packing of NVFP4 with the matrix's scale in `weight_scale_2`."""

    def read(parts: Parts) -> Blocks:
        return _blocks(
            parts[".weight"],
            parts[".weight_scale"].float() * require_single_scale(parts[".weight_scale_2"]),
            16,
        )

    parts = ".weight_scale_2", ".weight", ".weight_scale"
    return Packing(parts, read, 9.0, ignored=(".input_scale",), gpu_bits=5.0)


def compressed_tensors_mxfp4_packing() -> Packing:
    return Packing(
        (".weight_packed", ".weight_scale"),
        lambda parts: _blocks(
            parts[".weight_packed"], _decode_exponents(parts[".weight_scale"]), 32
        ),
        8.5,
        ignored=(".input_global_scale",),
        gpu_bits=4.5,
    )


def mxfp4_experts_packing() -> Packing:
    """Returns the packing of MXFP4 in gpt-oss: `_blocks` uint8 [experts, outputs, groups, 16],
    `_scales` uint8 [experts, outputs, groups].
    """

    def read(parts: Parts) -> EncodedStack:
        return Mxfp4Experts(parts["_blocks"], parts["_scales"])

    return Packing(("_blocks", "_scales"), read, 8.5, weight="", gpu_bits=4.5)


class Mxfp4Experts(EncodedStack):
    """Matrices of experts in MXFP4. To the model, they are one tensor [experts, inputs, outputs].

    Raises:
        ValueError: the tensors have other dtypes or shapes.
    """

    def __init__(self, numbers: torch.Tensor, scales: torch.Tensor) -> None:
        if numbers.ndim != 4 or numbers.shape[3] != 16 or numbers.shape[:3] != scales.shape:
            raise ValueError(
                f"blocks of shape {tuple(numbers.shape)} and scales of {tuple(scales.shape)}"
            )
        super().__init__((numbers.shape[0], numbers.shape[2] * 32, numbers.shape[1]))
        self._numbers = numbers
        self._scales = scales

    def matrix(self, expert: int, outputs: slice) -> Blocks:
        return _blocks(
            self._numbers[expert, outputs].flatten(1),
            _decode_exponents(self._scales[expert, outputs]),
            32,
        )


def _blocks(numbers: torch.Tensor, scale: torch.Tensor, group: int) -> Blocks:
    if numbers.dtype != torch.uint8 or numbers.ndim != 2:
        raise ValueError(
            f"numbers of 4 bits are {numbers.dtype} of shape {tuple(numbers.shape)}, not uint8 [rows, N]"
        )
    q = torch.stack((numbers & 15, numbers >> 4), -1).flatten(1)
    if scale.ndim != 2 or len(scale) != len(q):
        raise ValueError(f"scales of shape {tuple(scale.shape)} for {len(q)} rows")
    columns_per_block(q.shape[1], scale.shape[1], group)
    check_scales(scale, zero=True)  # blocks of zeros have the scale 0
    return Blocks(q, scale, table=E2M1)


def _decode_exponents(exponents: torch.Tensor) -> torch.Tensor:
    if exponents.dtype != torch.uint8 or (exponents == 255).any():
        raise ValueError(
            f"scales are {exponents.dtype} with a largest value of {exponents.max()}, not uint8 up to 254"
        )
    return torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents.int() - 127)
