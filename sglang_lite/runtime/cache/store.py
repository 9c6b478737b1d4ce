"""Who owns which page: the pool, the prefix tree and the slot table as one, and the only code that moves pages.

A page has exactly one owner at any time: the pool (free or in quarantine), the tree, or a running request (the pages
of its slot from `owned_from` on). A running request reads pages of the tree under its lock.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang_lite.runtime.cache.pages import Ints, PagePool
from sglang_lite.runtime.cache.radix import Match, Node, PrefixLock, RadixTree
from sglang_lite.runtime.cache.table import SlotTable


class Holding:
    """What a running request holds: a slot, a lock on its cached prefix, and the pages it owns.

    Attributes:
        slot: row of the slot table.
        lock: on the tree's part of its pages.
        owned_from: index of its first own page; those before belong to the tree.
        namespace: of the tree.
    """

    __slots__ = ("lock", "namespace", "owned_from", "slot")

    def __init__(self, slot: int, lock: PrefixLock, owned_from: int, namespace: str) -> None:
        self.slot, self.lock, self.owned_from, self.namespace = slot, lock, owned_from, namespace


class KVStore:
    """
    Args:
        pages: pages in the pool.
        page_size: tokens in a page.
        slots: requests that run at once.
        longest: longest sequence in tokens.
        reuse: keep computed prefixes in the tree.
        priority: eviction order, lowest first.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        slots: int,
        longest: int,
        *,
        reuse: bool,
        priority: Callable[[Node], float],
    ) -> None:
        self.page_size = page_size
        self.pool = PagePool(pages)
        self.tree = RadixTree(page_size)
        self.table = SlotTable(slots, longest, page_size)
        self._reuse = reuse
        self._priority = priority
        self.step = 0  # the last step that was launched
        self._settled = 0  # the last one that has completed

    @property
    def available(self) -> int:
        """Pages that could be handed out now."""
        return self.pool.free + self.tree.evictable

    def match(self, tokens: Ints, namespace: str) -> Match:
        """The longest cached prefix that leaves at least one token to compute (its logits are needed)."""
        return self.tree.match(tokens[: len(tokens) - 1] if self._reuse else tokens[:0], namespace)

    def admit(self, tokens: Ints, match: Match, namespace: str) -> Holding:
        """Gives a request a slot that starts with its cached prefix."""
        lock = self.tree.lock(match.node)
        slot = self.table.allocate()
        count = len(match.pages)
        self.table.tokens[slot, : len(tokens)] = tokens
        self.table.pages[slot, :count] = match.pages
        self.table.held[slot] = count
        self.table.length[slot] = len(tokens)
        self.table.computed[slot] = count * self.page_size
        return Holding(slot, lock, count, namespace)

    def reserve(self, slot: int, end: int) -> bool:
        """Makes sure that positions before `end` of a slot have pages. False: there are not enough."""
        held, needed = int(self.table.held[slot]), -(-end // self.page_size)
        if needed <= held:
            return True
        pages = self.allocate(needed - held)
        if pages is None:
            return False
        self.table.pages[slot, held:needed] = pages
        self.table.held[slot] = needed
        return True

    def allocate(self, count: int) -> Ints | None:
        """`count` pages, evicting from the tree if need be; None when there are not that many."""
        if count > self.pool.free:
            self.pool.release(self.tree.evict(count - self.pool.free, self._priority), self.step)
            self.pool.settle(self._settled)
        return self.pool.allocate(count) if count <= self.pool.free else None

    def settle(self, step: int) -> None:
        """Step `step` and all before it have completed: what they may have read can be reused."""
        self._settled = step
        self.pool.settle(step)

    def publish(self, holding: Holding) -> None:
        """Gives the tree every full page that is computed, so that others can use it. The request keeps reading them,
        and reads the tree's own copy of what the tree had already."""
        if not self._reuse:
            return
        slot = holding.slot
        full = int(self.table.computed[slot]) // self.page_size
        if full <= holding.owned_from:
            return
        pages = self.table.pages[slot, :full]
        done = self.tree.insert(self.table.tokens[slot, : full * self.page_size], pages, holding.namespace)
        self.table.pages[slot, :full] = done.pages
        self.pool.release(done.duplicates, self.step)
        lock = self.tree.lock(done.node)
        holding.lock.release()
        holding.lock, holding.owned_from = lock, full

    def release(self, holding: Holding) -> None:
        """Ends a request's hold on everything. What it computed stays in the tree."""
        self.publish(holding)
        slot = holding.slot
        held = int(self.table.held[slot])
        self.pool.release(self.table.pages[slot, holding.owned_from : held], self.step)
        holding.lock.release()
        self.table.release(slot)

    def flush(self) -> int:
        """Drops every prefix that no request is using; returns how many pages that freed."""
        pages = self.tree.evict(self.tree.pages, self._priority)
        self.pool.release(pages, self.step)
        self.pool.settle(self._settled)
        return len(pages)
