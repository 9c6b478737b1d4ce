"""Rows and factors of products in 8-bit floating point, as every kernel takes them, those of CPUs too."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_LEAST_ROWS = 16  # of a product in 8 bits


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Rows [M, K] in 8 bits.

    Attributes:
        values: e4m3 [max(M, 16), K]; what is beyond M rows means nothing.
        scales: float32, as many: a row is about its values times its scale.
        rows: M.
        wide: [M, K], the rows as they were before, for whoever needs them so; or None.
    """

    values: torch.Tensor
    scales: torch.Tensor
    rows: int
    wide: torch.Tensor | None = None

    @staticmethod
    def empty(x: torch.Tensor, columns: int, *, wide: bool = False) -> Fp8Rows:
        """Room for as many rows as x has; with `wide` also in the format of x."""
        rows = max(len(x), _LEAST_ROWS)
        values = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=x.device)
        scales = torch.empty(rows, dtype=torch.float32, device=x.device)
        return Fp8Rows(values, scales, len(x), x.new_empty((len(x), columns)) if wide else None)


@dataclass(frozen=True, slots=True)
class Scales:
    """Factors that a product [M, N] of 8-bit numbers has yet to be multiplied with, by the kernel that reads it.

    Attributes:
        rows: float32 [M].
        columns: float32 [N].
    """

    rows: torch.Tensor
    columns: torch.Tensor
