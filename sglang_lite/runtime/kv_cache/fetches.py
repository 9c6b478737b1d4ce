"""Records that tiers keep of a sequence whose pages they fetch: which pages the device lacks, and
which are on their way from files or from the host.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from sglang_lite.runtime.kv_cache.page_source import PromisedPages
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.radix import Match, PrefixLock
from sglang_lite.runtime.kv_cache.state_read import StateRead
from sglang_lite.runtime.kv_cache.state_tier import StateFetch


@dataclass(eq=False, slots=True)
class Fetch(PromisedPages):
    """Pages being copied to the device.

    Attributes:
        tokens: int32, ids in the tree from the beginning of the sequence to the last page.
        namespace: namespace of the sequence.
        lock: lock on the preceding pages, which are in the tree.
        before: int32, the preceding pages.
        pages: int32, pages that are written.
        first: name of the first page in `pages`; if there are none, the name of the state.
        copy: number of the copy.
        state: state that arrives with the pages; None for models without states.
    """

    tokens: Ints
    namespace: str
    lock: PrefixLock
    before: Ints
    pages: Ints
    first: bytes
    copy: int
    state: StateFetch | None

    def has_arrived(self, copies: int, states: int) -> bool:
        """Returns whether pages and state have arrived, after these numbers of completed copies."""
        return self.copy <= copies and (self.state is None or self.state.copy <= states)


@dataclass(eq=False, slots=True)
class DiskRead(PromisedPages):
    """Pages of a sequence that are being read from files into host memory.

    Attributes:
        names: names of the pages.
        files: names of the files that may contain these pages.
        skip: number of pages in the first file that precede these pages.
        found: how many of the sequence's files exist.
        earlier_files, earlier: numbers of the sequence's files, and of their pages, that earlier
            reads of the same lookup cover.
        patience_s: how many seconds a request waits for the pages.
        slots: host slots for the pages; empty until the number of pages is known.
        copy: number of the last copy that may use the slots.
        filled: whether the slots of each file have been filled; set once the copy has completed.
        began: when `filled` was set.
        read: number of pages that have been read.
        asked: when the read was requested.
        dropped: True if the pages may no longer be used.
    """

    names: Sequence[bytes]
    files: Sequence[bytes]
    skip: int
    found: Future[int]
    earlier_files: int
    earlier: int
    patience_s: float
    slots: Ints = field(default_factory=lambda: _NONE)
    copy: int = 0
    filled: Sequence[Future[bool]] = ()
    began: float = 0.0
    read: int = 0
    asked: float = field(default_factory=lambda: time.perf_counter())
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class MissingPages:
    """Pages of a sequence that the device lacks.

    Attributes:
        match: pages that the device has, with and without states.
        usable: number of tokens that can be reused without a fetch.
        names: names of the pages after the match.
        before: names of the match's pages; empty for models without states.
    """

    match: Match
    usable: int
    names: Sequence[bytes]
    before: Sequence[bytes] = ()

    def were_read_by(self, promise: PromisedPages | None) -> bool:
        """Returns whether a promise has read all of these pages that are stored in files."""
        if isinstance(promise, StateRead):  # the promise may be for another sequence
            return promise.names == [*self.before, *self.names]
        return isinstance(promise, DiskRead)


@dataclass(frozen=True, slots=True)
class WantedPages:
    """Pages of a sequence to fetch from the host.

    Attributes:
        names: names of the pages.
        end: number of the sequence's tokens that can be reused after the fetch.
        state: name of the state to fetch with them; None for models without states.
    """

    names: Sequence[bytes]
    end: int
    state: bytes | None = None

    @property
    def first(self) -> bytes:
        """Name of the first page; if there are no pages, name of the state."""
        first = self.names[0] if self.names else self.state
        assert first is not None
        return first


_NONE: Ints = np.empty(0, dtype=np.int32)
