"""Quantisation of plain matrices during loading, by rounding to the nearest number."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.weights.blocks import Blocks
from sglang_lite.runtime.models.weights.fp8 import ScaledRows
from sglang_lite.runtime.models.weights.source import Weight

Rounding: TypeAlias = Literal["int4", "int8", "nf4"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
_NARROWEST = 32  # fewest columns of a block; a matrix must have a multiple of it
_SMALLEST = 2.0**-24  # scale of a block of zeros; 16 bits can hold it
_AT_ONCE = 1 << 21  # numbers that are rounded together: each takes some 16 bytes meanwhile
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip  # quantiles of the normal distribution (arXiv:2305.14314)


def round_matrix(weight: torch.Tensor, to: Rounding, group: int) -> Blocks:
    """Returns a matrix whose numbers are rounded to 4 or 8 bits.

    Args:
        weight: float [rows, columns].
        to: "int4" or "int8" for integers with a scale (and, in 4 bits, a minimum) per block; "nf4"
            for numbers of a code book.
        group: columns of a block, which divide a row.
    """
    rows = max(_AT_ONCE // weight.shape[1], 1)
    found = [_round_rows(weight[at : at + rows], to, group) for at in range(0, len(weight), rows)]
    minima = [minimum for _, _, minimum in found if minimum is not None]
    return Blocks(
        torch.cat([q for q, _, _ in found]),
        torch.cat([scale for _, scale, _ in found]),
        torch.cat(minima) if minima else None,
        table=NF4 if to == "nf4" else None,
    )


def round_unless_quantised(part: Weight, to: Rounding, device: torch.device) -> Weight:
    """Quantises a matrix on a device and returns it. Matrices that are stored quantised are
    returned unchanged.
    """
    if isinstance(part, Blocks | ScaledRows):
        return part
    rows = part if isinstance(part, torch.Tensor) else part.decode(0, part.shape[0])
    return round_matrix(rows.to(device), to, choose_block_columns(part.shape[1], device))


def _round_rows(
    weight: torch.Tensor, to: Rounding, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Rounds a matrix in blocks of `group` columns. Returns the numbers, scales and minima that
    `Blocks` takes.
    """
    blocks = weight.float().view(len(weight), -1, group)
    most = blocks.abs().amax(-1).clamp_min(1e-8)
    if to == "nf4":
        scale = most.half().float()
        table = torch.tensor(NF4, device=weight.device)
        between = (table[1:] + table[:-1]) / 2
        numbers = torch.bucketize(blocks / scale.unsqueeze(-1), between).to(torch.uint8)
        return numbers.view(weight.shape), scale, None
    if to == "int8":
        scale = (most / 127).half().float().clamp_min(_SMALLEST)
        numbers = (blocks / scale.unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8)
        return numbers.view(weight.shape), scale, None
    low = blocks.amin(-1).clamp(max=0)
    high = blocks.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).half().float().clamp_min(_SMALLEST)
    zero = (-low / scale).round().clamp(0, 15)
    numbers = (
        ((blocks / scale.unsqueeze(-1)).round() + zero.unsqueeze(-1)).clamp(0, 15).to(torch.uint8)
    )
    return numbers.view(weight.shape), scale, -zero * scale


def can_round_in_blocks(columns: int) -> bool:
    """Returns whether a matrix with this many columns can be rounded in blocks."""
    return columns % _NARROWEST == 0


def choose_block_columns(columns: int, device: torch.device) -> int:
    """Returns the number of columns in a block of a matrix: on a CPU the smallest supported one,
    which costs no time there, and on a GPU the largest supported one that divides a row.

    Raises:
        ModelError: no size divides a row.
    """
    if not can_round_in_blocks(columns):
        raise ModelError(
            f"a matrix with {columns} inputs can't be quantised: no multiple of {_NARROWEST}.",
            hint="Leave quantization out.",
        )
    return next(
        group
        for group in ((_NARROWEST,) if device.type == "cpu" else (128, 64, _NARROWEST))
        if columns % group == 0
    )
