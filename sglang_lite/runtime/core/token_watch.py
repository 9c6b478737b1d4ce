"""Choice of the drawn tokens that the host looks at: a few array operations for all rows of a step."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.slot_table import SlotTable
from sglang_lite.runtime.request import Request, StreamPace, WatchedTokens

# As plain numbers: comparing an array with a member of an enumeration is slow.
_, STOPS, TEXT, GRAMMAR, DRAWS = map(int, WatchedTokens)
_AT_ONCE, _NOW_AND_THEN = map(int, (StreamPace.AT_ONCE, StreamPace.NOW_AND_THEN))


class TokenWatch:
    """
    Args:
        table: the slots.
        eos_ids: tokens that may end a generation.
        vocab_size: of the model.
        stream_interval_s: least time between two looks at tokens that are looked at for a stream alone.
    """

    def __init__(self, table: SlotTable, eos_ids: frozenset[int], vocab_size: int, *, stream_interval_s: float) -> None:
        self._table = table
        self._stop_tokens = np.zeros((len(table.length), vocab_size), dtype=bool)  # by slot, where it looks at STOPS
        self._eos = np.array(sorted(eos_ids), dtype=np.int32)
        self._stream_interval_s = stream_interval_s
        self._streams_told = 0.0  # when, by the monotonic clock

    def begin(self, request: Request) -> None:
        """A request has got its slot."""
        if self._table.look[request.slot] == STOPS:
            stop_tokens = request.output.stop_tokens()
            self._stop_tokens[request.slot, : len(stop_tokens)] = stop_tokens

    def looked_at(self, slots: Ints, tokens: Ints, full: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The rows whose token has to be looked at.

        Args:
            slots, tokens: of the rows.
            full: rows that have their last token now.
        """
        kinds, paces = self._table.look[slots], self._table.paced[slots]
        look = full | (kinds >= TEXT) | (tokens[:, None] == self._eos).any(1)
        look |= (kinds == STOPS) & self._stop_tokens[slots, tokens]
        if paces.any():
            look |= (paces == _AT_ONCE) | ((paces == _NOW_AND_THEN) & self._streams_due())
            self._table.paced[slots[look & (paces == _AT_ONCE)]] = _NOW_AND_THEN
        rows: NDArray[np.int64] = look.nonzero()[0]
        return rows

    def _streams_due(self) -> bool:
        """Tells whether it is time to look at streams again, and begins to wait anew."""
        now = time.monotonic()
        if now - self._streams_told < self._stream_interval_s:
            return False
        self._streams_told = now
        return True
