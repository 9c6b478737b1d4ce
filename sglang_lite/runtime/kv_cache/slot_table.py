"""The slot table: for each running request, its tokens and the pages that hold their keys and values."""

from __future__ import annotations

import numpy as np

from sglang_lite.runtime.kv_cache.pages import Ints


class SlotTable:
    """Arrays indexed by slot, so that a step over many rows is a few numpy operations.

    Attributes:
        tokens: int32 [slots, longest]; the first `known` are known.
        pages: int32 [slots, longest / page_size]; the first `held` are the request's, what is beyond is stale but a
            valid page.
        length: tokens that are to be computed; the last one may have been drawn without its id being known yet.
        known: tokens whose ids are known: one more where the last is only scored.
        computed: tokens that have keys and values, or will have when the steps that were launched are done.
        limit: length at which the request ends.
        look: uint8, which new tokens the host must look at: a `Look` of runtime/request.py.
        epoch: changes whenever the slot's request or the end of its tokens changes, so that what was launched for it
            before can be told apart.

    Args:
        slots: how many requests run at once.
        longest: longest sequence in tokens.
        page_size: tokens in a page.
    """

    def __init__(self, slots: int, longest: int, page_size: int) -> None:
        self.page_size = page_size
        self.tokens: Ints = np.zeros((slots, longest + 1), dtype=np.int32)
        self.pages: Ints = np.zeros((slots, -(-(longest + 1) // page_size)), dtype=np.int32)
        self.held: Ints = np.zeros(slots, dtype=np.int32)
        self.length: Ints = np.zeros(slots, dtype=np.int32)
        self.known: Ints = np.zeros(slots, dtype=np.int32)
        self.epoch: Ints = np.zeros(slots, dtype=np.int32)
        self.computed: Ints = np.zeros(slots, dtype=np.int32)
        self.limit: Ints = np.zeros(slots, dtype=np.int32)
        self.look = np.zeros(slots, dtype=np.uint8)
        self.paced = np.zeros(slots, dtype=np.uint8)
        self._free = list(range(slots - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        return self._free.pop()

    def release(self, slot: int) -> None:
        self.length[slot] = self.known[slot] = self.computed[slot] = self.held[slot] = 0
        self.epoch[slot] += 1
        self._free.append(slot)

    def token_slots(self, slot: int, start: int, end: int) -> Ints:
        """Token slots in the KV cache of positions start … end-1."""
        positions = np.arange(start, end, dtype=np.int32)
        slots: Ints = self.pages[slot, positions // self.page_size] * self.page_size + positions % self.page_size
        return slots
