"""Selects the drawn tokens that the host inspects, with a few array operations for all rows of a
step.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.slot_table import SlotTable
from sglang_lite.runtime.requests.request import Request, StreamPace, WatchedTokens

# Plain integers: comparing an array with a member of an enumeration is slow.
_, STOPS, TEXT, GRAMMAR, DRAWS = map(int, WatchedTokens)
_FIRST_TOKEN, _INTERVAL = map(int, (StreamPace.FIRST_TOKEN, StreamPace.INTERVAL))


class TokenWatch:
    """Selects the drawn tokens that the host inspects.

    Args:
        table: slot table.
        eos_ids: tokens that may end a generation.
        vocab_size: size of the vocabulary.
        stream_interval_s: minimum time between two looks at tokens that only streams need, in
            seconds.
    """

    def __init__(
        self,
        table: SlotTable,
        eos_ids: frozenset[int],
        vocab_size: int,
        *,
        stream_interval_s: float,
    ) -> None:
        self._table = table
        # stop tokens by slot; used only for STOPS
        self._stop_tokens = np.zeros((len(table.length), vocab_size), dtype=bool)
        self._eos = np.array(sorted(eos_ids), dtype=np.int32)
        self._stream_interval_s = stream_interval_s
        self._streams_told = 0.0  # time of the last look at streams, monotonic clock

    def watch_request(self, request: Request) -> None:
        """Stores the stop tokens of a request that has just been given a slot."""
        if self._table.watched[request.slot] == STOPS:
            stop_tokens = request.output.build_stop_string_mask()
            self._stop_tokens[request.slot, : len(stop_tokens)] = stop_tokens

    def select_rows_to_inspect(
        self, slots: Ints, tokens: Ints, full: NDArray[np.bool_]
    ) -> NDArray[np.int64]:
        """Returns the indices of the rows whose token the host must inspect.

        Args:
            slots: slot of each row [R].
            tokens: drawn token of each row [R].
            full: True for rows that have reached their limit [R].
        """
        kinds = self._table.watched[slots]
        paces = self._table.paced[slots]
        watch = full | (kinds >= TEXT) | (tokens[:, None] == self._eos).any(1)
        watch |= (kinds == STOPS) & self._stop_tokens[slots, tokens]
        if paces.any():
            watch |= (paces == _FIRST_TOKEN) | (
                (paces == _INTERVAL) & self._start_interval_if_due()
            )
            self._table.paced[slots[watch & (paces == _FIRST_TOKEN)]] = _INTERVAL
        rows: NDArray[np.int64] = watch.nonzero()[0]
        return rows

    def _start_interval_if_due(self) -> bool:
        """Returns whether the stream interval has passed; if so, starts the next one."""
        now = time.monotonic()
        if now - self._streams_told < self._stream_interval_s:
            return False
        self._streams_told = now
        return True
