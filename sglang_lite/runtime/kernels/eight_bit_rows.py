"""Rows and scales of 8-bit matmuls, for GPU and CPU kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FLOAT8 = torch.float8_e4m3fn
LARGEST = {FLOAT8: 448.0, torch.int8: 127.0}  # largest number of each 8-bit type
_MIN_ROWS = 16  # minimum number of rows of an 8-bit product


@dataclass(frozen=True, slots=True)
class EightBitRows:
    """Rows [M, K] in 8 bits.

    Attributes:
        values: e4m3 or int8 [max(M, 16), K]; rows beyond M are undefined.
        scales: float32 [max(M, 16)]; a row is approximately its values times its scale.
        rows: number of rows, M.
        unquantised: [M, K], the rows before quantisation; None if not kept.
    """

    values: torch.Tensor
    scales: torch.Tensor
    rows: int
    unquantised: torch.Tensor | None = None

    @staticmethod
    def allocate_eight_bit(
        x: torch.Tensor, columns: int, kind: torch.dtype, *, unquantised: bool = False
    ) -> EightBitRows:
        """Allocates uninitialised 8-bit rows, as many as x has. With `unquantised`, also allocates
        the rows in the data type of x.
        """
        rows = max(len(x), _MIN_ROWS)
        values = torch.empty((rows, columns), dtype=kind, device=x.device)
        scales = torch.empty(rows, dtype=torch.float32, device=x.device)
        return EightBitRows(
            values, scales, len(x), x.new_empty((len(x), columns)) if unquantised else None
        )


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales that still have to be applied to the result [M, N] of an 8-bit matmul. The kernel that
    reads the result applies them.

    Attributes:
        rows: float32 [M].
        columns: float32 [N].
    """

    rows: torch.Tensor
    columns: torch.Tensor
