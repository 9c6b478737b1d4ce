"""Prefixes that programs will come back for: held in the cache between two requests of a branch, as long as nobody who
runs needs the room."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache
from sglang_lite.runtime.kv_cache.radix import PrefixLock
from sglang_lite.runtime.schedule_hints import ScheduleHints


class PrefixHints:
    """
    Locks on prefixes, one a branch. Those that were there first yield first.

    Args:
        store: that has the prefixes.
    """

    def __init__(self, store: PrefixCache) -> None:
        self._store = store
        self._locks: dict[ScheduleHints, PrefixLock] = {}
        self._wanted: dict[ScheduleHints, tuple[Ints, str]] = {}

    def __iter__(self) -> Iterator[ScheduleHints]:
        return iter(self._locks)

    def __len__(self) -> int:
        return len(self._locks)

    @property
    def locks(self) -> list[PrefixLock]:
        """The locks that it holds, for the invariant checks."""
        return list(self._locks.values())

    def want(self, prospect: ScheduleHints, tokens: Ints, namespace: str) -> None:
        """Holds a prefix for a branch from the next step on, when what runs has been published; in the place of the one
        that it has."""
        if self._store.reuses and len(tokens):
            self._wanted[prospect] = tokens, namespace

    def settle(self) -> None:
        """Holds what is wanted and cached."""
        wanted, self._wanted = self._wanted, {}
        for prospect, (tokens, namespace) in wanted.items():
            lock = self._store.tree.lock(self._store.tree.match(tokens, namespace).node)
            self.release(prospect)
            self._locks[prospect] = lock
            prospect.held = True

    def release(self, prospect: ScheduleHints) -> None:
        """Lets go of a branch's prefix: it reads it now, or needs it no more."""
        self._wanted.pop(prospect, None)
        lock = self._locks.pop(prospect, None)
        if lock is not None:
            lock.release()
            prospect.held = False

    def give_way(self) -> bool:
        """Lets go of the prefix that was held longest. False: there is none."""
        if not self._locks:
            return False
        self.release(next(iter(self._locks)))
        return True

    def clear(self) -> None:
        """Lets go of all."""
        self._wanted.clear()
        while self.give_way():
            pass
