"""Matrices of 4-bit numbers in the layout that the kernels of packed_products.py read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

NUMBERS = 8  # numbers in a word
SLICES = 4  # slices in a block
_SIZES = (64, 32, 16)  # possible columns of a slice
Kind = Literal["integers", "e2m1", "table"]


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Matrix [N, K] of 4-bit numbers in groups of G columns: value = scale * (number - zero).

    Columns are cut into slices of S, of which four make up a block. The last block is padded with
    zeros.

    Attributes:
        inputs: columns, K.
        words: int32 [N, blocks * S / 2]. In a block, bits 4 j … 4 j + 3 of word i are the number of
            column 2 i of slice j, and the number of column 2 i + 1 is 16 bits above them: a shift
            and a mask leave a pair, each in 16 bits.
        scales: [groups, N], with groups up to the end of the last block. float32, or int32 if each
            group has its own zero: the zero, in float16, in the upper 16 bits, the scale below it.
        half: dtype of such a 16-bit scale; None if scales are float32.
        zero: number that stands for 0 if scales are float32.
        kind: what numbers stand for: "integers" for themselves, "e2m1" for floating point with a
            sign, two bits of exponent and one of mantissa, "table" for an entry of `table`.
        slice: columns of a slice, S, which divide a group.
        group: columns of a group, G.
        table: float32 [16], or None.
    """

    inputs: int
    words: torch.Tensor
    scales: torch.Tensor
    half: torch.dtype | None
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
        return self.words.nbytes + self.scales.nbytes


def pack_weight(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    *,
    zeros: torch.Tensor | None = None,
    zero: int = 0,
    kind: Kind = "integers",
    table: torch.Tensor | None = None,
) -> PackedWeight:
    """Packs a matrix of 4-bit numbers. Its columns and groups must satisfy `can_pack`.

    Args:
        numbers: uint8 [N, K] in 0 … 15.
        scales: [N, K / G]; in 16 bits if `zeros` is given.
        zeros: [N, K / G], the number that stands for 0 in each group, rounded to float16. It need
            not be an integer, nor in 0 … 15. None if it is `zero` everywhere.
        zero, kind, table: as for PackedWeight.
    """
    rows, inputs = numbers.shape
    group = inputs // scales.shape[1]
    size = _columns_per_slice(inputs, group)
    more = -inputs % (SLICES * size)
    padded = F.pad(numbers, (0, more)) if more else numbers
    parts = padded.view(rows, -1, SLICES // 2, 2, size // 2, 2)
    # A word's bytes from the lowest: slices 0 and 1, then 2 and 3 of column 2 i, then both of the
    # column after it.
    pairs = parts[:, :, :, 1].bitwise_left_shift(4).bitwise_or_(parts[:, :, :, 0])
    words = (
        pairs.permute(0, 1, 3, 4, 2).reshape(rows, -1, NUMBERS // 2).view(torch.int32).squeeze(-1)
    )
    if zeros is None:
        half = None
        by_group = scales.float()
    else:
        half = scales.dtype
        above = zeros.half().view(torch.int16).int() << 16
        by_group = scales.view(torch.int16).int() & 0xFFFF | above
    last = -(-(inputs + more) // group) - scales.shape[1]  # no input reaches a block's end
    by_group = F.pad(by_group, (0, last)).t().contiguous()
    return PackedWeight(inputs, words, by_group, half, zero, kind, size, group, table)


def can_pack(inputs: int, group: int) -> bool:
    """Returns whether a matrix with `inputs` columns, in groups of `group` columns, can be packed."""
    return group % _SIZES[-1] == 0 and inputs % group == 0


def _columns_per_slice(inputs: int, group: int) -> int:
    """Returns the number of columns in a slice: the largest that divides a group and adds little
    padding to the last block.
    """
    sizes = [size for size in _SIZES if group % size == 0]
    return next((size for size in sizes if -inputs % (SLICES * size) <= inputs // 16), sizes[-1])


def shortest_exact_dtype(scales: torch.Tensor) -> torch.dtype:
    """Returns the shortest dtype that holds float32 scales exactly: float16, bfloat16 or float32.
    Returns float16 for scales without memory.
    """
    if scales.is_meta:
        return torch.float16
    exact = (
        dtype
        for dtype in (torch.float16, torch.bfloat16)
        if torch.equal(scales.to(dtype).float(), scales)
    )
    return next(exact, torch.float32)
