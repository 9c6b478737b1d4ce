"""Rounds matrices to few bits, in blocks of columns with one scale each. Can take the matrices'
inputs into account.

A value is scale * number, with numbers from -2**(bits - 1) to 2**(bits - 1) - 1. There is one more
negative number than positive ones, so a block whose largest number is positive has a negative
scale. Independent of models and files.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# tried multiples of the scale that maps a block's largest number to the limit
_SHARES = torch.arange(24, 11, -1) / 20
# elements of a block's rows, times all scales tried, that fit in a core's cache
_ELEMENTS = 1 << 20
# fraction of the mean square added to each square: with few inputs, moments have no inverse
_DAMPING = 0.0003


@dataclass(frozen=True, slots=True)
class RoundingGrid:
    """Values that a rounded matrix may have.

    Attributes:
        bits: bits of a number: 4 or 8.
        group: number of columns in a block, which must divide the matrix's.
        dtype: dtype of scales.
    """

    bits: int
    group: int
    dtype: torch.dtype

    def candidate_scales(self, block: torch.Tensor) -> torch.Tensor:
        """Returns several scales to try, float32 [tried, *], for blocks float32 [columns, *]."""
        least, most = block.aminmax(dim=0)
        outermost = torch.where(most > -least, most, least)
        full = -outermost / (1 << self.bits - 1)
        tried = (_SHARES.view(-1, *[1] * full.ndim) * full).to(self.dtype).float()
        tiny = torch.finfo(self.dtype).tiny
        return torch.where(tried.abs() < tiny, tiny, tried)

    def nearest_numbers(self, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Divides values by their scales and rounds the results to the grid's numbers, as float32."""
        half = 1 << self.bits - 1
        return (values / scale).round_().clamp_(-half, half - 1)


@dataclass(frozen=True, slots=True)
class Rounded:
    """Matrix rounded to a grid.

    Attributes:
        numbers: int8 [rows, columns].
        scale: [rows, blocks], in the grid's dtype.
    """

    numbers: torch.Tensor
    scale: torch.Tensor

    def values(self) -> torch.Tensor:
        """Returns the matrix as float32 [rows, columns]."""
        blocks = self.numbers.view(*self.scale.shape, -1).float()
        return blocks.mul_(self.scale.float().unsqueeze(-1)).view(self.numbers.shape)


def round_to_nearest(weight: torch.Tensor, grid: RoundingGrid) -> Rounded:
    """Rounds a matrix [rows, columns], each number to the nearest value. Each block gets the scale
    with the least squared error.
    """
    blocks = weight.float().view(len(weight), -1, grid.group)
    tried = grid.candidate_scales(blocks.movedim(-1, 0)).unsqueeze(-1)
    errors = [
        (grid.nearest_numbers(blocks, scale) * scale).sub_(blocks).square_().sum(-1)
        for scale in tried
    ]
    best = torch.stack(errors).argmin(0, keepdim=True)
    scale = tried.squeeze(-1).gather(0, best)[0]
    numbers = grid.nearest_numbers(blocks, scale.unsqueeze(-1)).to(torch.int8)
    return Rounded(numbers.view(weight.shape), scale.to(grid.dtype))


def round_with_feedback(weight: torch.Tensor, moments: torch.Tensor, grid: RoundingGrid) -> Rounded:
    """Rounds a matrix so that its products with inputs change little (GPTQ, Frantar et al.,
    arXiv:2210.17323).

    Columns are rounded one after another. The effect on the products is compensated as far as
    possible in the columns still to be rounded: with U the upper Cholesky factor of the inverse of
    the moments, in the order of rounding, an error of U[i, i] e in column i changes column j by
    -U[i, j] e and costs e**2. Blocks are rounded in the order of their inputs' squares, the largest
    first. Each block is rounded with every scale worth trying, and the cheapest one is kept.

    Args:
        weight: matrix [rows, columns].
        moments: finite float32 [columns, columns], the sum of x x^T over inputs x.
        grid: values that the result may have.
    """
    squares = moments.diagonal().view(-1, grid.group).sum(1)
    blocks = squares.argsort(descending=True)
    columns = torch.arange(len(moments)).view(-1, grid.group)[blocks].flatten()
    factor = _inverse_cholesky(moments[columns][:, columns])
    numbers = torch.empty(weight.shape, dtype=torch.int8)
    scale = torch.empty((len(weight), len(blocks)), dtype=grid.dtype)
    rows = max(1, _ELEMENTS // (grid.group * len(_SHARES)))
    for start in range(0, len(weight), rows):
        part = slice(start, start + rows)
        found, scales = _round_columns(weight[part, columns].float().t().contiguous(), factor, grid)
        numbers[part, columns] = found.t()
        scale[part, blocks] = scales.t()
    return Rounded(numbers, scale)


def _round_columns(
    left: torch.Tensor, factor: torch.Tensor, grid: RoundingGrid
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds the columns `left`, float32 [columns, rows], which are overwritten. Returns numbers
    int8 [columns, rows] and scales [blocks, rows].
    """
    numbers = torch.empty(left.shape, dtype=torch.int8)
    scales = list[torch.Tensor]()
    for first in range(0, len(left), grid.group):
        last = first + grid.group
        own = factor[first:last, first:last]
        later = factor[first:last, last:]
        tried = grid.candidate_scales(left[first:last])
        values = left[first:last].unsqueeze(1).repeat(1, len(tried), 1)  # [columns, tried, rows]
        rounded = torch.empty_like(values)
        errors = torch.empty_like(values)
        for i in range(grid.group):
            rounded[i] = grid.nearest_numbers(values[i], tried)
            errors[i] = (values[i] - rounded[i] * tried) / own[i, i]
            values[i + 1 :].flatten(1).addr_(own[i, i + 1 :], errors[i].flatten(), alpha=-1)
        best = errors.square().sum(0).argmin(0, keepdim=True)
        every = best.expand(grid.group, 1, -1)
        numbers[first:last] = rounded.gather(1, every)[:, 0].to(torch.int8)
        scales.append(tried.gather(0, best)[0])
        left[last:].addmm_(later.t(), errors.gather(1, every)[:, 0], alpha=-1)
    return numbers, torch.stack(scales).to(grid.dtype)


def _inverse_cholesky(moments: torch.Tensor) -> torch.Tensor:
    """Returns the upper Cholesky factor of the inverse of `moments`. Damps `moments` in place until
    they are invertible.
    """
    diagonal = moments.diagonal()
    step = diagonal.mean().item() * _DAMPING or 1.0  # inputs may all be 0
    while True:
        diagonal += step
        lower, failed = torch.linalg.cholesky_ex(moments)
        if not failed:
            upper: torch.Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and upper.isfinite().all():
                return upper
        step *= 10
