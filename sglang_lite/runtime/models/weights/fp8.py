"""Checkpoints whose matrices are in 8-bit floating point (e4m3), in the ways that they are published.

Each is `weight` with a `weight_scale` (one number, or one an output) or a `weight_scale_inv` (one a block, mostly of
128 by 128; DeepSeek, Qwen); whatever the name, the value is their product. Which matrices are in 8 bits, each tensor
says for itself. Scales of activations that a checkpoint brings (`input_scale`) are not used: activations are scaled row
by row as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sglang_lite.runtime.models.weights.source import EncodedMatrix, Weight

BLOCK = 128  # rows and columns of experts' matrices that have a scale in common


class ScaledRows(EncodedMatrix):
    """A matrix of 8-bit numbers: value = scale * number.

    Args:
        shape: (rows, columns).
        read: the numbers of rows from one to another, as they are stored.
        scales: of the whole matrix, of each row, or of each block.
        block: rows and columns of a block, where the checkpoint has such.

    Raises:
        ValueError: the scales are none of that.
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
        elif block is not None and tuple(scales.shape) == (-(-rows // block[0]), -(-columns // block[1])):
            self._block = block
        else:
            raise ValueError(f"scales of shape {tuple(scales.shape)} fit no matrix of {rows} by {columns}")
        self._scales = scales.float().reshape(-(-rows // self._block[0]), -1)

    @property
    def row_scales(self) -> torch.Tensor | None:
        """float32 [rows], where each row has one scale."""
        return self._of_rows(0, self.shape[0])[:, 0] if self._scales.shape[1] == 1 else None

    @property
    def block_scales(self) -> torch.Tensor | None:
        """float32 [rows / BLOCK, columns / BLOCK], where scales are by such blocks."""
        return self._scales if self._block == (BLOCK, BLOCK) else None

    def decode(self, start: int, end: int) -> torch.Tensor:
        numbers = self.read(start, end).float()
        scales = self._of_rows(start, start + len(numbers))
        if scales.shape[1] > 1:
            scales = scales[:, torch.arange(self.shape[1]) // self._block[1]]
        return numbers.mul_(scales)

    def _of_rows(self, start: int, end: int) -> torch.Tensor:
        return self._scales[torch.arange(start, end) // self._block[0]]


def in_blocks(weight: Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in 8 bits with a scale for each BLOCK by BLOCK of its numbers: as a checkpoint has it, else quantised.

    Args:
        weight: of multiples of BLOCK rows and columns.

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
