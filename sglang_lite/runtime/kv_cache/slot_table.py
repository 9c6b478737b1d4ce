"""The slot table: the tokens and pages of each running request."""

from __future__ import annotations

import numpy as np

from sglang_lite.runtime.kv_cache.pages import Ints


class SlotTable:
    """Arrays indexed by slot, so a step over many rows takes a few numpy operations.

    Attributes:
        tokens: int32 [slots, longest + 1]; token ids, of which the first `known` are valid.
        pages: int32 [slots, pages of longest + 1 tokens]; pages, of which the first `page_count`
            are the request's. The rest are stale, but valid page numbers.
        page_count: number of pages of the request.
        length: number of tokens to compute; the id of the last one may not be known yet if it was
            drawn.
        known: number of tokens with known ids; `length` + 1 if the last token is only scored.
        computed: number of tokens with keys and values, including those of steps that are still
            running.
        limit: length at which the request ends.
        watched: uint8; which new tokens the host must inspect: a `WatchedTokens`
            (runtime/requests/request.py).
        paced: uint8; which tokens to inspect for a stream: a `StreamPace`
            (runtime/requests/request.py).
        streamed: bool; True if the slot's request streams.
        scored: bool; True if draws report the model's log-probabilities of their tokens, as
            `TokenScores`.
        columns: int32 [slots] by name; other values that an engine's features keep for each
            request.
        epoch: counter that changes whenever the slot's request or its last tokens change, so that
            results of earlier launches are recognised and ignored.

    Args:
        slots: maximum number of running requests.
        longest: longest sequence in tokens.
        page_size: tokens in a page.
    """

    def __init__(self, slots: int, longest: int, page_size: int) -> None:
        self.page_size = page_size
        self.tokens: Ints = np.zeros((slots, longest + 1), dtype=np.int32)
        self.pages: Ints = np.zeros((slots, -(-(longest + 1) // page_size)), dtype=np.int32)
        self.page_count: Ints = np.zeros(slots, dtype=np.int32)
        self.length: Ints = np.zeros(slots, dtype=np.int32)
        self.known: Ints = np.zeros(slots, dtype=np.int32)
        self.epoch: Ints = np.zeros(slots, dtype=np.int32)
        self.computed: Ints = np.zeros(slots, dtype=np.int32)
        self.limit: Ints = np.zeros(slots, dtype=np.int32)
        self.columns: dict[str, Ints] = {}
        self.watched = np.zeros(slots, dtype=np.uint8)
        self.paced = np.zeros(slots, dtype=np.uint8)
        self.streamed = np.zeros(slots, dtype=bool)
        self.scored = np.zeros(slots, dtype=bool)
        self._free = list(range(slots - 1, -1, -1))

    def add_column(self, name: str, value: int) -> Ints:
        """Adds a column, filled with `value`, and returns it: int32 [slots], changed in place."""
        assert name not in self.columns, name
        column: Ints = np.full(len(self.length), value, dtype=np.int32)
        self.columns[name] = column
        return column

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate_slot(self) -> int:
        return self._free.pop()

    def release_slot(self, slot: int) -> None:
        self.length[slot] = self.known[slot] = self.computed[slot] = self.page_count[slot] = 0
        self.streamed[slot] = False
        self.epoch[slot] += 1
        self._free.append(slot)

    def slots_of_positions(self, slot: int, start: int, end: int) -> Ints:
        """Returns the token slots of positions start … end-1 in the KV cache."""
        positions = np.arange(start, end, dtype=np.int32)
        slots: Ints = (
            self.pages[slot, positions // self.page_size] * self.page_size
            + positions % self.page_size
        )
        return slots
