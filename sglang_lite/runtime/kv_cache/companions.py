"""Companions: memory that belongs to pages of the cache in addition to the keys and values of all
layers, such as the pages of layers with a window.
"""

from __future__ import annotations

from sglang_lite.runtime.kv_cache.pages import Ints, PagePool
from sglang_lite.runtime.kv_cache.radix import Match


class Companion:
    """Memory of another kind that belongs to pages of the cache, such as window pages or states. It
    limits how much of a cached prefix a request can reuse (`count_usable_tokens`).

    A subclass overrides the methods that concern it.

    Attributes:
        pool: pool from which a new page gets its companion memory; None if new pages get none.
    """

    pool: PagePool | None = None

    def count_usable_tokens(self, match: Match) -> int:
        """Returns how many tokens of a match a request can reuse."""
        raise NotImplementedError

    def begin_reading(self, slot: int, match: Match) -> None:
        """Records that the request in a slot continues after a match, all of which it can reuse."""

    def end_reading(self, slot: int, pages: Ints, step: int) -> None:
        """Records that a slot's request no longer reads the tree's pages.

        Args:
            slot: the slot.
            pages: pages of the tree that it has read, in order from the beginning.
            step: last step that may read them.
        """

    def begin_copying(self, page: int) -> None:
        """Keeps the companion memory of a page in the tree until `end_copying`, because a slot's
        request continues inside a copy of the page.
        """

    def end_copying(self, page: int, step: int) -> None:
        """Releases what `begin_copying` has kept. `step` is the last step that may read the
        page.
        """

    def make_room(self, count: int) -> bool:
        """Frees companion memory for `count` new pages. Returns False if too little is free now."""
        return True

    def attach(self, pages: Ints) -> None:
        """Assigns companion memory to pages newly allocated to a slot. Called after `make_room`."""

    def detach(self, pages: Ints, step: int) -> None:
        """Releases the companion memory of pages that are freed after `step`."""

    def replace_own_pages(self, slot: int, before: Ints, after: Ints) -> None:
        """Makes a slot read the tree's pages `after` instead of its pages `before`, which the
        caller frees.
        """

    def settle_steps(self, step: int) -> None:
        """Records that all steps up to `step` have completed."""
        if self.pool is not None:
            self.pool.settle_quarantine(step)

    def limit_chunk(self, tokens: int) -> int:
        """Returns how many of the next prompt tokens a step can compute."""
        return tokens

    def stats(self) -> dict[str, int]:
        """Returns counts for `Engine.stats`."""
        return {}
