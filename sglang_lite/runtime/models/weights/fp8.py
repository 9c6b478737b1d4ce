"""Matrices in 8-bit floating point (e4m3), in the forms in which checkpoints publish them.

A matrix is a `weight` with a `weight_scale` (one number, or one per output) or a `weight_scale_inv`
(one per block, usually 128 by 128; DeepSeek, Qwen). Whatever the name, a value is number * scale.
The dtype of each tensor shows which matrices are in 8 bits. A checkpoint's scales of activations
(`input_scale`) are not used: activations are scaled row by row at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sglang_lite.runtime.models.weights.source import EncodedMatrix, Weight

BLOCK = 128  # rows and columns of a block of experts' matrices that share a scale


class ScaledRows(EncodedMatrix):
    """Matrix of 8-bit numbers: value = scale * number.

    Args:
        shape: (rows, columns).
        read: function that returns the numbers of rows start … end-1 as stored.
        scales: scale of the whole matrix, or of each row or block.
        block: rows and columns of a block, or None if the checkpoint has no block scales.

    Raises:
        ValueError: the shape of the scales fits neither the matrix, its rows nor its blocks.
    """

    def __init__(
        self,
        shape: Sequence[int],
        read: Callable[[int, int], torch.Tensor],
        scales: torch.Tensor,
        block: tuple[int, int] | None,
    ) -> None:
        super().__init__(shape)
        self.read = read
        rows, columns = self.shape
        if scales.numel() == 1:
            self._block = rows, columns
        elif tuple(scales.shape) in ((rows,), (rows, 1)):
            self._block = 1, columns
        elif block is not None and tuple(scales.shape) == (
            -(-rows // block[0]),
            -(-columns // block[1]),
        ):
            self._block = block
        else:
            raise ValueError(
                f"scales of shape {tuple(scales.shape)} fit no matrix of {rows} by {columns}"
            )
        self._scales = scales.float().reshape(-(-rows // self._block[0]), -1)

    @property
    def row_scales(self) -> torch.Tensor | None:
        """Scales float32 [rows], or None if a row has several scales."""
        return (
            self._block_scales_of_rows(0, self.shape[0])[:, 0]
            if self._scales.shape[1] == 1
            else None
        )

    @property
    def block_scales(self) -> torch.Tensor | None:
        """Scales float32 [rows / BLOCK, columns / BLOCK], or None if the scales are not per block
        of that size.
        """
        return self._scales if self._block == (BLOCK, BLOCK) else None

    def decode(self, start: int, end: int) -> torch.Tensor:
        numbers = self.read(start, end).float()
        scales = self._block_scales_of_rows(start, start + len(numbers))
        if scales.shape[1] > 1:
            scales = scales[:, torch.arange(self.shape[1]) // self._block[1]]
        return numbers.mul_(scales)

    def slice_part(self, rows: slice, columns: slice = slice(None)) -> ScaledRows:
        own, (start, stop, _) = range(self.shape[0])[rows], columns.indices(self.shape[1])
        high, wide = self._block
        if self._scales.shape[1] == 1:
            blocks = slice(None)
            wide = stop - start
        elif start % wide or (stop % wide and stop < self.shape[1]):
            raise ValueError(f"columns {start} to {stop} cut through its blocks of {wide}")
        else:
            blocks = slice(start // wide, -(-stop // wide))

        def read_part_rows(first: int, end: int) -> torch.Tensor:
            part = own[first:end]
            return self.read(part.start, part.stop)[:, columns]

        shape = len(own), stop - start
        if own.start % high == 0 and high < self.shape[0]:
            return ScaledRows(
                shape,
                read_part_rows,
                self._scales[own.start // high : -(-own.stop // high), blocks],
                (high, wide),
            )
        return ScaledRows(
            shape,
            read_part_rows,
            self._block_scales_of_rows(own.start, own.stop)[:, blocks],
            (1, wide),
        )

    def _block_scales_of_rows(self, start: int, end: int) -> torch.Tensor:
        return self._scales[torch.arange(start, end) // self._block[0]]


def quantise_blocks(weight: Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a matrix in 8 bits with one scale per block of BLOCK by BLOCK. Uses the stored
    numbers and scales if they have this form. Otherwise quantises the matrix.

    Args:
        weight: matrix whose numbers of rows and columns are multiples of BLOCK.

    Returns:
        e4m3 [rows, columns] and float32 [rows / BLOCK, columns / BLOCK].
    """
    rows, columns = weight.shape
    if isinstance(weight, ScaledRows) and weight.block_scales is not None:
        return weight.read(0, rows), weight.block_scales
    numbers = weight.decode(0, rows) if isinstance(weight, EncodedMatrix) else weight.float()
    blocks = numbers.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3)).clamp_min(1e-12) / torch.finfo(torch.float8_e4m3fn).max
    eight = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return eight.view(rows, columns), scales
