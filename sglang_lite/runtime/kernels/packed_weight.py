"""Matrices of 4-bit numbers in the layout that the kernels of packed_products.py read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

NUMBERS = 8  # in a word
_SLICES = (32, 16)
Kind = Literal["integers", "e2m1", "table"]


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Matrix [N, K] of 4-bit numbers in groups of G columns: value = scale * (number - zero).

    Columns are cut into slices of S, of which eight make up a block; the last block is filled up with zeros.

    Attributes:
        inputs: columns, K.
        words: int32 [N, blocks * S]. In a block, bits 4 j … 4 j + 3 of word i are the number of column i of slice j.
        scales: [N, blocks * 8 * S / G], in 16 or 32 bits.
        zeros: uint8, like scales: the number that stands for 0; None if it is `zero` everywhere.
        zero: number that stands for 0 if `zeros` is None.
        kind: what numbers stand for: "integers" for themselves, "e2m1" for floating point with a sign, two bits of
            exponent and one of mantissa, "table" for an entry of `table`.
        slice: columns of a slice, S, which divide a group.
        group: columns of a group, G.
        table: float32 [16], or None.
    """

    inputs: int
    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    zero: int
    kind: Kind
    slice: int
    group: int
    table: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.words), self.inputs

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)


def packed_weight(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    *,
    zeros: torch.Tensor | None = None,
    zero: int = 0,
    kind: Kind = "integers",
    table: torch.Tensor | None = None,
) -> PackedWeight:
    """Packs a matrix, which needs groups that `can_pack`.

    Args:
        numbers: uint8 [N, K] in 0 … 15.
        scales: [N, K / G].
        zeros, zero, kind, table: as of PackedWeight; zeros [N, K / G].
    """
    rows, inputs = numbers.shape
    group = inputs // scales.shape[1]
    size = _slice(inputs, group)
    more = -inputs % (NUMBERS * size)
    parts = F.pad(numbers, (0, more)).view(rows, -1, NUMBERS, size).int()
    words = parts[:, :, 0].clone()
    for j in range(1, NUMBERS):
        words |= parts[:, :, j] << 4 * j
    last = (0, -(-(inputs + more) // group) - scales.shape[1])  # no input reaches a block's end
    return PackedWeight(
        inputs, words.flatten(1), F.pad(scales, last), None if zeros is None else F.pad(zeros, last), zero, kind,
        size, group, table,
    )  # fmt: skip


def can_pack(inputs: int, group: int) -> bool:
    """True if a matrix with so many columns, in groups of so many, can be packed."""
    return group % _SLICES[-1] == 0 and inputs % group == 0


def _slice(inputs: int, group: int) -> int:
    """Columns of a slice: the most that divide a group and fill up no block with much."""
    sizes = [size for size in _SLICES if group % size == 0]
    return next((size for size in sizes if -inputs % (NUMBERS * size) <= inputs // 16), sizes[-1])


def in_few_bits(scales: torch.Tensor) -> torch.dtype:
    """The shortest dtype that holds float32 scales exactly: float16, bfloat16 or float32."""
    exact = (dtype for dtype in (torch.float16, torch.bfloat16) if torch.equal(scales.to(dtype).float(), scales))
    return next(exact, torch.float32)
