"""Records which prefixes a radix tree gains and loses, as digests. With several engines, these
changes are used to route each request to the engine that has its prefix.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from sglang_lite.runtime.kv_cache.prefix_hash import Digests

_MAX_UNTAKEN = 2**17  # maximum number of pending digests: a megabyte


@dataclass(frozen=True, slots=True)
class TreeChange:
    """Changes of a tree since the previous `TreeChange`.

    Attributes:
        gained, lost: digests of prefixes that the tree has now, and no longer has.
        forgotten: True if everything gained earlier is invalid; applies before the others.
    """

    gained: Digests
    lost: Digests
    forgotten: bool


class TreeChanges:
    """Pending changes of a tree: the latest one for each digest.

    If too many accumulate because nobody takes them, they are dropped, and everything reported
    earlier is declared invalid. So a reader may miss prefixes, but never believes in one that is
    gone.

    Args:
        every: tokens between two digests of a prefix.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._lock = threading.Lock()
        self._there: dict[int, bool] = {}  # digest: whether the tree has it
        self._forgotten = False

    def record_digests(self, digests: Digests, *, there: bool) -> None:
        """Records prefixes that the tree has gained or lost."""
        with self._lock:
            self._there.update(dict.fromkeys(digests.tolist(), there))
            if len(self._there) > _MAX_UNTAKEN:
                self._forget_all_locked()

    def forget_all(self) -> None:
        """Declares everything reported earlier invalid. Called when nothing in the tree can be
        found any more.
        """
        with self._lock:
            self._forget_all_locked()

    def _forget_all_locked(self) -> None:
        self._there = {}
        self._forgotten = True

    @property
    def has_changes(self) -> bool:
        """True if there are changes that have not been taken."""
        return bool(self._there) or self._forgotten

    def take_changes(self) -> TreeChange | None:
        """Returns the changes since the last call, or None if there are none. Can be called on any
        thread.
        """
        if not self.has_changes:
            return None
        with self._lock:
            there = self._there
            self._there = {}
            forgotten = self._forgotten
            self._forgotten = False
        gained = [digest for digest, is_there in there.items() if is_there]
        lost = [] if forgotten else [digest for digest, is_there in there.items() if not is_there]
        return TreeChange(np.array(gained, np.uint64), np.array(lost, np.uint64), forgotten)
