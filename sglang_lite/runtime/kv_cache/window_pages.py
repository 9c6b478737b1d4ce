"""Pages of the layers with a sliding window: which tokens need them, and when they are released.

A page of the pool stands for a run of tokens in all layers. In the layers with a window its keys
and values are on a page of a second, smaller pool, as long as a running request can see them. A
request's own pages are freed once its window has moved past them. Those of prefixes in the tree
stay while there is room. A prefix can be reused up to any length at which the pages of one whole
window before that point are cached. A short convolution has a window, too: the tokens that its
kernel covers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.kv_cache.companions import Companion
from sglang_lite.runtime.kv_cache.pages import Ints, PagePool
from sglang_lite.runtime.kv_cache.radix import Match
from sglang_lite.runtime.kv_cache.slot_table import SlotTable

SLACK = 16  # tokens that a request may drop without being recomputed
_USED = np.iinfo(np.int64).max  # order of a page that is not idle


def count_kept_pages(window: int, page_size: int) -> int:
    """Returns how many window pages a running request keeps for earlier tokens, in addition to the
    pages of the tokens that it computes.
    """
    return -(-(window + SLACK) // page_size) + 1


class WindowPages(Companion):
    """Second, smaller pool of pages, for the layers with a window. Each of its pages is free or is
    assigned to a page of the first pool.

    Args:
        pages: number of pages in the first pool.
        count: number of pages in this one.
        page_size: tokens in a page.
        window: longest window, in tokens.
        slots: maximum number of running requests.
        step_tokens: maximum number of tokens in a step.

    Attributes:
        pool: pages that are free.
        of: int32 [pages]; window page of each page of the first pool, or `pool.total` if it has
            none.
        first: int32 [slots]; index of the first page that a slot's request may read.
        readers: int32 [pages]; number of running requests that may read a page's window page.
        idle: number of window pages without readers, whose pages are in the tree.
        kept: number of window pages that a running request keeps.
        chunk: number of window pages for the tokens of a step.
    """

    def __init__(
        self, pages: int, count: int, page_size: int, window: int, slots: int, step_tokens: int
    ) -> None:
        self.pool: PagePool = PagePool(count)
        self._window = window
        self._size = page_size
        self.of: Ints = np.full(pages, count, dtype=np.int32)
        self.first: Ints = np.zeros(slots, dtype=np.int32)
        self.readers: Ints = np.zeros(pages, dtype=np.int32)
        # order in which idle pages are released
        self._order: NDArray[np.int64] = np.full(pages, _USED, dtype=np.int64)
        self._since: Ints = np.zeros(pages, dtype=np.int32)  # last step that may read an idle page
        self._reused = np.zeros(pages, dtype=bool)
        self._clock = self.idle = 0
        self.kept = min(count_kept_pages(window, page_size), count - 1)
        self.chunk = max(min(-(-step_tokens // page_size) + 1, count // 4, count - self.kept), 1)

    def stats(self) -> dict[str, int]:
        """Returns counts for `Engine.stats`."""
        free = self.pool.free + self.pool.quarantined
        return {
            "window_cached_tokens": self.idle * self._size,
            "window_free_tokens": free * self._size,
            "window_total_tokens": self.pool.total * self._size,
        }

    def limit_chunk(self, tokens: int) -> int:
        """Returns how many of the next prompt tokens a step can compute."""
        return min(tokens, max((self.chunk - 1) * self._size, 1))

    def first_pages_read(self, lengths: Ints) -> Ints:
        """Returns the index of the first page that each sequence's next token reads, given the
        sequences' lengths.
        """
        firsts: Ints = np.maximum(lengths - np.int32(self._window - 1), 0) // np.int32(self._size)
        return firsts

    def _first_page_read(self, length: int) -> int:
        return max(length - (self._window - 1), 0) // self._size

    def usable_pages(self, pages: Ints) -> int:
        """Returns how many pages of a cached prefix a request can reuse. All pages within one
        window of the reused part's end must have window pages.
        """
        index = np.arange(len(pages), dtype=np.int32)
        missing = np.maximum.accumulate(np.where(self.of[pages] == self.pool.total, index, -1))
        ends = np.flatnonzero(missing < self.first_pages_read((index + 1) * np.int32(self._size)))
        return int(ends[-1]) + 1 if len(ends) else 0

    def count_usable_tokens(self, match: Match) -> int:
        """Returns how many tokens of a match a request can reuse."""
        count = self.usable_pages(match.pages)
        if (
            count == len(match.pages)
            and match.tail is not None
            and self.has_window_page(match.tail.page)
        ):
            return match.count_cached(self._size)
        return count * self._size

    def has_window_page(self, page: int) -> bool:
        """Returns whether a page has a window page."""
        return bool(self.of[page] != self.pool.total)

    def has_any_window_page(self, pages: Ints) -> bool:
        """Returns whether any of these pages has a window page."""
        return bool((self.of[pages] != self.pool.total).any())

    def count_idle(self) -> int:
        """Recounts `idle`, for the invariant checks."""
        return int((self._order != _USED).sum())

    # ----------------------------------------------------------------------------------- allocation

    def make_room(self, count: int) -> bool:
        """Frees idle window pages until `count` are free. Returns False if fewer are free now, for
        example because a running step may still read some of the pages. Those become free after the
        step.
        """
        self.pool.settle_quarantine()
        short = count - self.pool.free
        if short <= 0 or short > self.idle + self.pool.quarantined:
            return short <= 0
        idle = np.flatnonzero(self._order != _USED).astype(np.int32)
        settled = idle[self._since[idle] <= self.pool.settled_step]
        chosen = settled if len(settled) >= short else idle
        # frees more than needed, so that a full pool is not searched at every step
        more = min(max(short, self.pool.total // 64), len(chosen))
        if more < len(chosen):
            chosen = chosen[np.argpartition(self._order[chosen], more - 1)[:more]]
        now = self._since[chosen] <= self.pool.settled_step
        self.pool.return_to_pool(self._detach_window_pages(chosen[now]))
        later = chosen[~now]
        if len(later):
            self.pool.quarantine_pages(
                self._detach_window_pages(later), int(self._since[later].max())
            )
        return count <= self.pool.free

    def attach(self, pages: Ints) -> None:
        """Assigns free window pages to pages that were newly allocated to a slot. The caller must
        ensure that there are enough.
        """
        self.of[pages] = self.pool.allocate(len(pages))
        self.readers[pages] = 1

    def detach(self, pages: Ints, step: int) -> None:
        """Releases the window pages that are assigned to `pages`. They become free after `step`,
        the last step that may read them.
        """
        self.pool.quarantine_pages(
            self._detach_window_pages(pages[self.of[pages] != self.pool.total]), step
        )

    def _detach_window_pages(self, pages: Ints) -> Ints:
        """Detaches the window pages assigned to `pages` and returns the window pages."""
        found: Ints = self.of[pages]
        self.idle -= int((self._order[pages] != _USED).sum())
        self.of[pages] = self.pool.total
        self._order[pages] = _USED
        self.readers[pages] = 0
        self._reused[pages] = False
        return found

    # -------------------------------------------------------------------------------------- reading

    def begin_reading(self, slot: int, match: Match) -> None:
        """Registers a slot as a reader of its cached prefix. Counts only the pages in the window at
        the end of the prefix.
        """
        pages = match.pages
        first = self.first[slot] = self._first_page_read(len(pages) * self._size)
        self.add_reader(pages[first:])

    def end_reading(self, slot: int, pages: Ints, step: int) -> None:
        """Removes a slot as a reader of its cached prefix, `pages`."""
        self.remove_reader(pages[self.first[slot] :], step)
        self.first[slot] = 0

    def begin_copying(self, page: int) -> None:
        self.add_reader(np.array([page]))

    def end_copying(self, page: int, step: int) -> None:
        self.remove_reader(np.array([page]), step)

    def add_reader(self, pages: Ints) -> None:
        """Adds a reader to pages in the tree. All of them must have window pages."""
        self.readers[pages] += 1
        self.idle -= int((self._order[pages] != _USED).sum())
        self._order[pages] = _USED
        self._reused[pages] = True

    def remove_reader(self, pages: Ints, step: int, *, ended: bool = True) -> None:
        """Removes a reader from these pages of the tree.

        Args:
            pages: the pages.
            step: last step that may read them.
            ended: whether the request has ended, rather than moved on. If it has moved on, pages
                that no other request has used are released before all others, the last page first.
        """
        self.readers[pages] -= 1
        pages = pages[self.readers[pages] == 0]
        order = np.arange(self._clock + 1, self._clock + 1 + len(pages))
        self._clock += len(pages)
        self._order[pages] = np.where(self._reused[pages] | ended, order, -order)
        self._since[pages] = step
        self.idle += len(pages)

    def slots_past_window(self, slots: Ints, lengths: Ints) -> NDArray[np.intp]:
        """Returns the indices of the slots that can release pages. At these lengths, their windows
        begin after pages that they still hold.
        """
        return np.flatnonzero(self.first_pages_read(lengths - SLACK) > self.first[slots])

    def slots_lacking_pages(self, slots: Ints, lengths: Ints) -> NDArray[np.intp]:
        """Returns the indices of the slots that need pages which they have already released. This
        happens when a sequence becomes shorter, so its window moves back.
        """
        return np.flatnonzero(self.first_pages_read(lengths) < self.first[slots])

    def release_behind_window(
        self, table: SlotTable, slot: int, owned_from: int, step: int
    ) -> None:
        """Releases the pages before a slot's window.

        Args:
            table: slot table with its pages.
            slot: the slot.
            owned_from: index of the first page that is not in the tree.
            step: last step that may read the pages.
        """
        pages = table.pages[slot, : table.page_count[slot]]
        before = int(self.first[slot])
        first = self._first_page_read(int(table.computed[slot]) - SLACK)
        self.remove_reader(pages[before : min(first, owned_from)], step, ended=False)
        self.detach(pages[max(before, owned_from) : first], step)
        self.first[slot] = first

    def replace_own_pages(self, slot: int, before: Ints, after: Ints) -> None:
        """Makes a slot read the tree's pages `after` instead of its own pages `before`. A tree page
        without a window page takes over the window page of the page that it replaces. The caller
        frees `before` afterwards.
        """
        first = int(self.first[slot])
        other = np.flatnonzero(before[first:] != after[first:]) + first
        before = before[other]
        after = after[other]
        lacks = self.of[after] == self.pool.total
        self.add_reader(after[~lacks])
        taken = before[lacks]
        lacking = after[lacks]
        self.of[lacking] = self._detach_window_pages(taken)
        self.readers[lacking] = 1
