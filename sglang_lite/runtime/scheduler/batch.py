"""The work of one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.request import Request


@dataclass(frozen=True, slots=True)
class Batch:
    """Decoding rows first, then rows that prefill: those with one token, then those with several.

    Attributes:
        step: its number.
        requests: one a row.
        slots: of the slot table.
        epochs: of the slots, when this was planned.
        starts, ends: positions to compute, per row.
        decoding: how many rows decode.
        singles: how many rows compute one token.
        samples: bool per row: the row reaches its last token, so its next one is drawn.
        unknown: bool per row: its last token was drawn by a step whose result has not been read.
        fresh: requests that got their slot since the last step.
        copies: token slots to copy before anything else: from where, and where to.
    """

    step: int
    requests: tuple[Request, ...]
    slots: Ints
    epochs: Ints
    starts: Ints
    ends: Ints
    decoding: int
    singles: int
    samples: NDArray[np.bool_]
    unknown: NDArray[np.bool_]
    fresh: tuple[Request, ...]
    copies: tuple[Ints, Ints]

    @property
    def streams(self) -> int:
        """Number of decoding rows whose tokens somebody reads as they come."""
        return sum(request.output.stream for request in self.requests[: self.decoding])

    @property
    def tokens(self) -> int:
        return int((self.ends - self.starts).sum())
