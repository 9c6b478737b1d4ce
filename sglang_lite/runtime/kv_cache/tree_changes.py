"""Gains and losses of a radix tree, as digests of prefixes: for the handle of several engines, which sends requests to
the one that has their prefix."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from sglang_lite.runtime.kv_cache.prefix_hash import Digests

_MAX_UNTAKEN = 2**17  # digests that are not taken: a megabyte


@dataclass(frozen=True, slots=True)
class TreeChange:
    """Changes of a tree since the last ones.

    Attributes:
        gained, lost: digests of prefixes that the tree has now, and has no more.
        forgotten: True if nothing that was gained before counts any more; it comes before the others.
    """

    gained: Digests
    lost: Digests
    forgotten: bool


class TreeChanges:
    """Changes of a tree that have not been taken: of each digest the last one. If nobody takes them they are
    forgotten, and with them everything before, so a reader misses prefixes but never believes in one that is gone.

    Args:
        every: tokens between two digests of a prefix.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._lock = threading.Lock()
        self._there: dict[int, bool] = {}  # digest: whether the tree has it
        self._forgotten = False

    def add(self, digests: Digests, *, there: bool) -> None:
        """Notes prefixes that the tree has gained, or lost."""
        with self._lock:
            self._there.update(dict.fromkeys(digests.tolist(), there))
            if len(self._there) > _MAX_UNTAKEN:
                self._forget()

    def forget(self) -> None:
        """Notes that nothing in the tree can be found any more."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        self._there, self._forgotten = {}, True

    @property
    def waits(self) -> bool:
        """True if changes have not been taken."""
        return bool(self._there) or self._forgotten

    def take(self) -> TreeChange | None:
        """Returns the changes since the last call, or None. May be called on any thread."""
        if not self.waits:
            return None
        with self._lock:
            there, self._there = self._there, {}
            forgotten, self._forgotten = self._forgotten, False
        gained = [digest for digest, is_there in there.items() if is_there]
        lost = [] if forgotten else [digest for digest, is_there in there.items() if not is_there]
        return TreeChange(np.array(gained, np.uint64), np.array(lost, np.uint64), forgotten)
