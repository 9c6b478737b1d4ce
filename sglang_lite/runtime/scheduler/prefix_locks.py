"""Cached prefixes of programs, locked between two requests of a branch as long as no running request needs the room."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache
from sglang_lite.runtime.kv_cache.radix import PrefixLock
from sglang_lite.runtime.requests.schedule_hints import ScheduleHints


class PrefixLocks:
    """Locks on prefixes, at most one per branch. The oldest lock is released first.

    Args:
        store: cache that has the prefixes.
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
        """All locks, for the invariant checks."""
        return list(self._locks.values())

    def want(self, hints: ScheduleHints, tokens: Ints, namespace: str) -> None:
        """Asks for a lock on a branch's prefix from the next step on, when the tokens of running requests have been
        published. Replaces the branch's lock."""
        if self._store.reuses and len(tokens):
            self._wanted[hints] = tokens, namespace

    def settle(self) -> None:
        """Locks the cached parts of all prefixes asked for since the last step."""
        wanted, self._wanted = self._wanted, {}
        for hints, (tokens, namespace) in wanted.items():
            lock = self._store.tree.lock(self._store.tree.match(tokens, namespace).node)
            self.release(hints)
            self._locks[hints] = lock
            hints.locked = True

    def release(self, hints: ScheduleHints) -> None:
        """Releases a branch's lock: a request of the branch reads the prefix now, or the branch doesn't need it any
        more."""
        self._wanted.pop(hints, None)
        lock = self._locks.pop(hints, None)
        if lock is not None:
            lock.release()
            hints.locked = False

    def release_oldest(self) -> bool:
        """Releases the oldest lock. Returns False if no prefix is locked."""
        if not self._locks:
            return False
        self.release(next(iter(self._locks)))
        return True

    def clear(self) -> None:
        """Releases all locks."""
        self._wanted.clear()
        while self.release_oldest():
            pass
