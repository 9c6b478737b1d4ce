"""Reads a state from its file into the host's memory, with the pages before it that only files
have. The state and the pages arrive together or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from sglang_lite.runtime.kv_cache.disk_tier import DiskTier, StateRow
from sglang_lite.runtime.kv_cache.host_tier import HostTier
from sglang_lite.runtime.kv_cache.page_names import name_state_file
from sglang_lite.runtime.kv_cache.page_source import PromisedPages
from sglang_lite.runtime.kv_cache.pages import Ints


@dataclass(eq=False, slots=True)
class StateRead(PromisedPages):
    """Read of the last state of a sequence that has a file, and of the pages before that state.

    Attributes:
        host, states: tiers of pages and of states in the host's memory.
        run: number of pages in a file of pages.
        names: names of all pages of the sequence.
        available: number of these that the device or the host has.
        usable: number of these that can be reused without the read.
        found: number of pages up to the state; 0 if there is none.
        patience_s: how many seconds a request waits for the read.
        slots, state_slots: host slots for pages and state; empty until they are reserved.
        copies: numbers of the last copies of pages and of states that may use the slots.
        filled: whether the slots of each file have been filled; set once the copies have completed.
        began: when `filled` was set.
        read: number of pages that have been read.
        page_s: seconds a page has taken, including its share of the state; 0 if nothing was read.
        asked: when the read was requested.
        dropped: True if the pages and the state may no longer be used.
    """

    host: HostTier
    states: HostTier
    run: int
    names: Sequence[bytes]
    available: int
    usable: int
    found: Future[int]
    patience_s: float
    slots: Ints = field(default_factory=lambda: _NONE)
    state_slots: Ints = field(default_factory=lambda: _NONE)
    copies: tuple[int, int] = (0, 0)
    filled: Sequence[Future[bool]] = ()
    began: float = 0.0
    read: int = 0
    page_s: float = 0.0
    asked: float = field(default_factory=lambda: time.perf_counter())
    dropped: bool = False

    def advance(self, disk: DiskTier, copies: tuple[int, int]) -> bool:
        """Performs the next stage, if the previous one has ended. Returns True after the last
        stage.

        Args:
            disk: tier of the files.
            copies: numbers of copies of pages and of states that have completed.
        """
        if not self.found.done():
            return False
        end = self.found.result()
        if not len(self.state_slots) and (not end or self.dropped or not self._reserve_slots(end)):
            return True
        if not self.filled and not self.dropped and self._are_free(copies):
            self.filled = list(self._start_reads(disk, end))
            self.began = time.perf_counter()
        if not self.filled and not self.dropped:
            return False
        if not all(each.done() for each in self.filled):
            return False
        whole = not self.dropped and all(each.result() for each in self.filled)
        if whole:
            self.read = len(self.slots)
            self.page_s = (time.perf_counter() - self.began) / (end - self.usable)
        self._name_slots(end if whole else 0)
        return True

    def _are_free(self, copies: tuple[int, int]) -> bool:
        """Returns whether no copy may use the slots any more."""
        return self.copies[0] <= copies[0] and self.copies[1] <= copies[1]

    def _reserve_slots(self, end: int) -> bool:
        """Reserves slots for the state and the pages before it. Returns False if too few slots are
        free.
        """
        count = max(end - self.available, 0)
        self.slots = self.host.reserve_pinned_slots(count)
        self.state_slots = self.states.reserve_pinned_slots(1)
        self.copies = self.host.memory.launched, self.states.memory.launched
        if len(self.slots) == count and len(self.state_slots):
            return True
        self._name_slots(0)
        return False

    def _name_slots(self, end: int) -> None:
        """Names the pages and the state that were read up to page `end`, and unpins all slots."""
        self.host.name_reserved_slots(self.names[self.available : end], self.slots)
        self.states.name_reserved_slots(self.names[end - 1 : end] if end else (), self.state_slots)

    def _start_reads(self, disk: DiskTier, end: int) -> Iterator[Future[bool]]:
        """Starts reading the files. Yields a future for each."""
        whole = end - end % self.run
        rows = self.host.memory.rows
        for begin in range(self.available // self.run * self.run, whole, self.run):
            first = max(begin, self.available)
            part = self.slots[first - self.available : begin + self.run - self.available]
            yield disk.start_read(self.names[begin + self.run - 1], rows, part, first - begin)
        first = min(max(whole, self.available), end)
        yield disk.start_read(
            name_state_file(self.names[end - 1]),
            rows,
            self.slots[len(self.slots) - (end - first) :],
            first - whole,
            StateRow(self.states.memory.rows, self.state_slots),
        )


_NONE: Ints = np.empty(0, dtype=np.int32)
