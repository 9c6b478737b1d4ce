"""Packings of bitsandbytes: 4-bit indices into a code book (nf4 of arXiv:2305.14314, or fp4), and
8-bit integers.

`weight` uint8 [numbers / 2, 1] holds two numbers per byte, the first in its high bits, row after
row; `weight.absmax` has a scale per block, itself in 8 bits with `weight.nested_absmax` if it is
quantised twice; `weight.quant_map` is the code book, and `weight.quant_state.bitsandbytes__nf4` or
`…fp4` is JSON as bytes. In 8 bits, `weight` int8 has `SCB`, 127 times the scale of each row.
"""

from __future__ import annotations

import json

import torch

from sglang_lite.runtime.models.weights.blocks import Blocks
from sglang_lite.runtime.models.weights.packing import (
    Packing,
    Parts,
    build_scaled_blocks,
    check_scales,
)
from sglang_lite.runtime.models.weights.source import EncodedMatrix

_NESTED = (".weight.nested_absmax", ".weight.nested_quant_map")


def four_bit_packing(kind: str) -> Packing:
    """Returns the packing of 4-bit indices into a code book: "nf4" or "fp4"."""
    state = f".weight.quant_state.bitsandbytes__{kind}"
    return Packing(
        (state, ".weight", ".weight.absmax", ".weight.quant_map"),
        lambda parts: _read(parts, state),
        None,
        optional=_NESTED,
        gpu_bits=4.25,
    )


def eight_bit_packing() -> Packing:
    return Packing((".SCB", ".weight"), _read_8_bits, 9.0, ignored=(".weight_format",))


def _read(parts: Parts, state: str) -> EncodedMatrix:
    try:
        about = json.loads(bytes(parts[state].tolist()))
        rows, columns = map(int, about["shape"])
        block = int(about["blocksize"])
        offset = float(about.get("nested_offset", 0.0))
        nested = int(about.get("nested_blocksize", 1))
        if min(rows, columns, block, nested) < 1:
            raise ValueError("a size is none")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"quant_state can't be understood: {error!r}") from error
    packed = parts[".weight"]
    absmax = parts[".weight.absmax"]
    table = parts[".weight.quant_map"].float()
    if (
        packed.dtype != torch.uint8
        or packed.numel() != -(-rows * columns // 2)
        or table.shape != (16,)
    ):
        raise ValueError(
            f"weight is {packed.dtype} of {packed.numel()} bytes, and quant_state says {rows} x {columns}"
        )
    if not table.isfinite().all():
        raise ValueError("quant_map has a number that is infinite, or none")
    if absmax.numel() != -(-rows * columns // block):
        raise ValueError(
            f"absmax has {absmax.numel()} scales, not one for {block} of {rows} x {columns} numbers"
        )
    scale = absmax.flatten()
    if _NESTED[0] in parts:
        if _NESTED[1] not in parts or scale.dtype != torch.uint8:
            raise ValueError(
                "absmax is quantised, and nested_quant_map is missing or absmax is not uint8"
            )
        if parts[_NESTED[1]].shape != (256,) or parts[_NESTED[0]].numel() != -(
            -len(scale) // nested
        ):
            raise ValueError(
                "nested_absmax or nested_quant_map has another length than absmax asks for"
            )
        outer = parts[_NESTED[0]].float().repeat_interleave(nested)[: len(scale)]
        scale = parts[_NESTED[1]].float()[scale.int()] * outer + offset
    check_scales(scale, zero=True)  # blocks of zeros have the scale 0
    q = torch.stack((packed.flatten() >> 4, packed.flatten() & 15), -1).flatten()[: rows * columns]
    if columns % block == 0:
        return Blocks(
            q.view(rows, columns), scale.view(rows, -1).float(), table=tuple(table.tolist())
        )
    return _Decoded(q, scale.float(), table, block, rows)


class _Decoded(EncodedMatrix):
    """Matrix that is decoded when it is loaded. Its blocks may continue from one row into the next."""

    def __init__(
        self, q: torch.Tensor, scale: torch.Tensor, table: torch.Tensor, block: int, rows: int
    ) -> None:
        super().__init__((rows, len(q) // rows))
        self._values = (table[q.int()] * scale.repeat_interleave(block)[: len(q)]).view(self.shape)

    def decode(self, start: int, end: int) -> torch.Tensor:
        return self._values[start:end]


def _read_8_bits(parts: Parts) -> Blocks:
    weight = parts[".weight"]
    scale = parts[".SCB"].float()
    if weight.dtype != torch.int8 or weight.ndim != 2 or scale.shape != (len(weight),):
        raise ValueError(
            f"weight is {weight.dtype} of shape {tuple(weight.shape)}, and SCB of {tuple(scale.shape)}"
        )
    return build_scaled_blocks(
        (weight.to(torch.int16) + 128).to(torch.uint8), 8, (scale / 127).unsqueeze(1), 128
    )
