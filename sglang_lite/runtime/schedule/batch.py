"""One step's work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.cache.pages import Ints
from sglang_lite.runtime.request import Request


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows with one new token first, then rows with several.

    Attributes:
        step: its number.
        requests: one a row.
        slots: of the slot table.
        starts, ends: positions to compute, per row.
        singles: how many rows compute one token.
        samples: bool per row: the row reaches its last known token, so its next token is drawn.
        admitted: requests that got their slot for this step.
    """

    step: int
    requests: tuple[Request, ...]
    slots: Ints
    starts: Ints
    ends: Ints
    singles: int
    samples: NDArray[np.bool_]
    admitted: tuple[Request, ...]

    @property
    def tokens(self) -> int:
        return int((self.ends - self.starts).sum())
