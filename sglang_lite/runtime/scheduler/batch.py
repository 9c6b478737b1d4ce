"""Work of one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.requests.request import Request


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one step: decoding rows first, then prefill rows with one token, then prefill rows with several tokens.

    Attributes:
        step: number of the step.
        requests: request of each row.
        slots: slot of each row, int32 [R].
        epochs: epoch of each slot when the batch was planned, int32 [R].
        starts, ends: positions start … end-1 to compute, per row, int32 [R].
        decoding: number of decoding rows.
        singles: number of rows that compute one token, including the decoding rows.
        draws: bool [R]; True if the row reaches its last token, so that its next one is drawn.
        pending: bool [R]; True if its last token was drawn by a step whose result has not been read yet.
        started: requests that were given their slot since the last step.
        copies: (source, destination) token slots to copy before anything else.
        streams: number of decoding rows of requests that stream.
    """

    step: int
    requests: tuple[Request, ...]
    slots: Ints
    epochs: Ints
    starts: Ints
    ends: Ints
    decoding: int
    singles: int
    draws: NDArray[np.bool_]
    pending: NDArray[np.bool_]
    started: tuple[Request, ...]
    copies: tuple[Ints, Ints]
    streams: int = 0

    @property
    def tokens(self) -> int:
        return int((self.ends - self.starts).sum())
