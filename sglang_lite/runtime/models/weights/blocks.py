"""Matrices of small numbers in blocks of columns with a scale per block, as most quantised
checkpoints store them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_lite.runtime.models.weights.source import EncodedMatrix


@dataclass(frozen=True, slots=True)
class Format:
    """Encoding of the numbers of a matrix.

    Attributes:
        bits: bits of a number: 4 or 8.
        group: columns of a block, which share a scale.
        minimum: whether blocks have a minimum.
        table: numbers that the integers 0 … 15 stand for, or None if they stand for themselves.
    """

    bits: int
    group: int
    minimum: bool
    table: tuple[float, ...] | None = None


class Blocks(EncodedMatrix):
    """Matrix in blocks of columns: value = scale * number + minimum.

    Args:
        q: integers [rows, columns]: uint8 in 0 … 15, which take 4 bits, or int8.
        scale: float32 [rows, blocks].
        minimum: float32 [rows, blocks], or None for 0.
        table: numbers that the integers 0 … 15 stand for; None for themselves.
        order: int64 [columns], the column of the matrix that each stored column holds; None if they
            are in order.
    """

    def __init__(
        self,
        q: torch.Tensor,
        scale: torch.Tensor,
        minimum: torch.Tensor | None = None,
        *,
        table: tuple[float, ...] | None = None,
        order: torch.Tensor | None = None,
    ) -> None:
        super().__init__(q.shape)
        self.q = q.contiguous()
        self.scale = scale.contiguous()
        self.table = table
        self.order = order
        self.minimum = None if minimum is None else minimum.contiguous()

    @property
    def format(self) -> Format:
        bits = 4 if self.q.dtype == torch.uint8 else 8
        return Format(
            bits, self.shape[1] // self.scale.shape[1], self.minimum is not None, self.table
        )

    def __getitem__(self, rows: slice | torch.Tensor) -> torch.Tensor:
        """Returns rows [N, columns] by index, as float32."""
        q = self.q[rows]
        scale = self.scale[rows].unsqueeze(-1)
        numbers = (
            q.float() if self.table is None else torch.tensor(self.table, device=q.device)[q.int()]
        )
        blocks = numbers.view(*scale.shape[:2], self.format.group)
        if self.minimum is None:
            values = blocks.mul_(scale).view(q.shape)
        else:
            values = torch.addcmul(self.minimum[rows].unsqueeze(-1), blocks, scale).view(q.shape)
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.order, values)

    def decode(self, start: int, end: int) -> torch.Tensor:
        return self[start:end]

    def slice_part(self, rows: slice, columns: slice = slice(None)) -> Blocks:
        start, stop, _ = columns.indices(self.shape[1])
        own = stop - start
        group = self.format.group
        if own < self.shape[1] and self.order is not None:
            raise ValueError("its columns are in an order of their own (g_idx)")
        if self.scale.shape[1] > 1 and (start % group or stop % group):
            raise ValueError(f"columns {start} to {stop} cut through its blocks of {group}")
        blocks = slice(start // group, -(-stop // group))
        minimum = None if self.minimum is None else self.minimum[rows, blocks]
        q = self.q[rows, columns]
        scale = self.scale[rows, blocks]
        return Blocks(q, scale, minimum, table=self.table, order=self.order)

    def as_integers(self) -> Blocks | None:
        """Returns the same matrix with integers instead of a table of numbers. Returns None if a
        number in the table is not a multiple of a half.
        """
        if self.table is None:
            return self
        doubled = torch.tensor(self.table) * 2
        if not torch.equal(doubled, doubled.round()):
            return None
        return Blocks(
            doubled.to(torch.int8)[self.q.int()], self.scale / 2, self.minimum, order=self.order
        )

    def split_into_groups(self, columns: int) -> Blocks | None:
        """Returns the same matrix in blocks of `columns` columns. Returns None if its block size is
        not a multiple of that.
        """
        times, left = divmod(self.format.group, columns)
        if left or times == 1:
            return None if left else self
        minimum = None if self.minimum is None else self.minimum.repeat_interleave(times, 1)
        return Blocks(
            self.q,
            self.scale.repeat_interleave(times, 1),
            minimum,
            table=self.table,
            order=self.order,
        )


def column_order_key(blocks: Blocks) -> tuple[int, ...] | None:
    """Returns the order of a matrix's columns as a value that can be compared."""
    return None if blocks.order is None else tuple(blocks.order.tolist())
