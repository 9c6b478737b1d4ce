"""Tiers of the KV cache below the device: which pages are copied down, and which are fetched again.

Pages below the device go by name (page_names.py), so the radix tree is of the device alone. A page that is fetched
belongs to its `Fetch` until it is in the tree; one that is copied down stays where it is, and after an eviction in
quarantine until the copy has ended. Copies run in their order, so a slot of the host may be used again at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Literal

import numpy as np

from sglang_lite.runtime.kv_cache.host_tier import HostTier
from sglang_lite.runtime.kv_cache.page_names import PageNames
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.radix import Match, Node, PrefixLock

if TYPE_CHECKING:
    from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache

_MIN_FETCHED = 16  # tokens; fewer are computed


@dataclass(eq=False, slots=True)
class Fetch:
    """Pages on their way to the device.

    Attributes:
        tokens: int32, tokens from the beginning of the sequence to the last page.
        namespace: namespace of the sequence.
        lock: lock on the pages before, which are in the tree.
        before: int32, these pages.
        pages: int32, pages that are written.
        first: name of the first one.
        copy: number of the copy.
        done: True if the pages are in the tree, or were dropped.
    """

    tokens: Ints
    namespace: str
    lock: PrefixLock
    before: Ints
    pages: Ints
    first: bytes
    copy: int
    done: bool = False


class Tiers:
    """Movement of pages between the device and the tiers below.

    Args:
        store: cache of the device.
        host: tier in the host's memory.
        names: names of pages.
        policy: when pages are copied to the host: "write_through", when they are computed;
            "write_through_selective", when they are used again; "write_back", when they are evicted.

    Attributes:
        host, names: the arguments of these names.
        fetching: pages on their way to the device.
        fetched_pages: number of pages that were fetched so far.
    """

    def __init__(self, store: PrefixCache, host: HostTier, names: PageNames, policy: str) -> None:
        self._store, self.host, self.names, self._policy = store, host, names, policy
        self.fetching: list[Fetch] = []
        self.fetched_pages = 0

    def copying(self, completed: int) -> bool:
        """Returns True if pages are on their way, or were when `completed` copies had completed."""
        return bool(self.fetching) or completed < self.host.memory.launched

    # --------------------------------------------------------------------------------------------- down

    def published(self, node: Node) -> None:
        """Notes that the pages of a node are in the tree."""
        if self._policy == "write_through":
            self._save(node)

    def reused(self, node: Node) -> None:
        """Notes that a request begins with the pages up to a node's end."""
        if self._policy == "write_through_selective":
            while node.parent is not None:
                self._save(node)
                node = node.parent

    def leaving(self, node: Node) -> None:
        """Notes that the pages of a node leave the device."""
        if self._policy == "write_back":
            self._save(node)

    def _save(self, node: Node) -> None:
        self.host.save(self.names.of(node), node.pages)

    # ----------------------------------------------------------------------------------------------- up

    def fetch(self, tokens: Ints, match: Match, namespace: str, token_s: float) -> Fetch | Literal["later"] | None:
        """Starts to fetch the pages behind a match.

        Args:
            tokens: int32, the tokens that may be cached.
            match: pages of them that are on the device.
            namespace: namespace of the sequence.
            token_s: seconds to compute a token; 0 if unknown.

        Returns:
            The fetch, maybe one that has begun before. "later" if the pages for it become free after the running steps,
            and then the match may have changed. None if the lower tiers have too little, computing is faster, or the
            device has no room.
        """
        store, memory, size, at = self._store, self.host.memory, self._store.page_size, len(match.pages)
        behind = self.names.after(self.names.last(match.node), tokens[at * size : len(tokens) - 1])
        found = list(takewhile(self.host.__contains__, behind))
        if len(found) * size < _MIN_FETCHED or (token_s and memory.page_s > token_s * size):
            return None
        for other in self.fetching:
            if other.first == found[0]:
                return other
        lock = store.tree.lock(match.node)
        if len(found) > store.available + store.pool.quarantined:
            lock.release()
            return None
        self.host.slots(found)  # so that others make room first for pages that are evicted to the host now
        pages = store.allocate(len(found))
        found = list(takewhile(self.host.__contains__, found))
        if pages is None or not found:
            store.pool.release(_NO_PAGES if pages is None else pages, store.step)
            lock.release()
            return "later"
        store.pool.release(pages[len(found) :], store.step)
        pages = pages[: len(found)]
        memory.write(self.host.slots(found), pages)
        end = (at + len(found)) * size
        fetch = Fetch(tokens[:end].copy(), namespace, lock, match.pages, pages, found[0], memory.launched)
        self.fetching.append(fetch)
        self.fetched_pages += len(pages)
        self.settle()
        return fetch

    def settle(self) -> int:
        """Gives the tree the pages that have arrived. Returns the number of copies that have completed."""
        completed, store = self.host.memory.completed(), self._store
        while self.fetching and self.fetching[0].copy <= completed:
            fetch = self.fetching.pop(0)
            done = store.tree.insert(fetch.tokens, np.concatenate((fetch.before, fetch.pages)), fetch.namespace)
            store.pool.release(done.duplicates, store.step)
            fetch.lock.release()
            fetch.done = True
        return completed

    def clear(self) -> None:
        """Forgets all copies, and drops the pages that are on their way."""
        for fetch in self.fetching:
            self._store.pool.release(fetch.pages, self._store.step, fetch.copy)
            fetch.lock.release()
            fetch.done = True
        self.fetching.clear()
        self.host.clear()


_NO_PAGES: Ints = np.empty(0, dtype=np.int32)
