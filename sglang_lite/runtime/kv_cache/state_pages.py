"""States of recurrent layers, which summarise all earlier tokens: where a step reads and writes
them, and which ones are kept for later requests.

A place is room on the device for one state. A step reads the state of a row's earlier tokens at one
place, and writes the state after the row's last token to another place. So nothing needs to be
copied: a branch reads its initial state at the place where that state is kept, and a state is kept
by writing the next one elsewhere.

A kept state belongs to the page of its last token, and covers the page's tokens up to that one. A
cached prefix can be reused up to any token after which a state is kept.

Kept states may be copied to other memory and back (state_tier.py). A place is not written again
until the copies that read it have completed. While a copy writes a place, nothing else uses that
place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.kv_cache.companions import Companion
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.radix import Match
from sglang_lite.runtime.kv_cache.slot_table import SlotTable

OWN = 2  # places of a running request: one for its state, one for the next or previous state
_NO_PAGE = -1


@dataclass(frozen=True, slots=True)
class StateMark:
    """State that a step writes inside a row, before the row's last token.

    Attributes:
        row: row of the step.
        end: number of tokens of the row's sequence that the state covers.
        place: place that the state is written to.
    """

    row: int
    end: int
    place: int


@dataclass(frozen=True, slots=True)
class RowStates:
    """States that a step reads and writes.

    Attributes:
        read: int32 [R], place of the state that each row begins with; -1 for an empty state.
        write: int32 [R], place for the state after each row's last token.
        marks: states that are written inside rows, in order within each row.
    """

    read: Ints
    write: Ints
    marks: tuple[StateMark, ...] = ()


class StatePages(Companion):
    """Places of states. Each is free, belongs to a slot, holds the state of a page, or is in use by
    a copy.

    Args:
        pages: number of pages in the first pool.
        count: number of states that can be kept.
        page_size: tokens in a page.
        slots: maximum number of running requests.
        interval: number of tokens between states that are kept in long texts; 0 to keep only states
            from which another text is expected to continue.

    Attributes:
        total: number of places.
        of: int32 [pages]; place of the state of each page, or `total` if it has none.
        at: int32 [pages]; number of the page's tokens that its state covers.
        ends: int32 [slots]; number of tokens that a running request's state covers.
        before_drop: called with the place of each kept state before it is dropped; None for
            nothing.
        hits, recomputed: number of requests that began with a kept state, and number of cached
            tokens that were recomputed because no state was kept after them.
    """

    def __init__(
        self, pages: int, count: int, page_size: int, slots: int, interval: int = 0
    ) -> None:
        self._size = page_size
        self._interval = interval
        self.kept = count
        self.total = OWN * slots + count
        self.of: Ints = np.full(pages, self.total, dtype=np.int32)
        self.at: Ints = np.zeros(pages, dtype=np.int32)
        self.ends: Ints = np.zeros(slots, dtype=np.int32)
        self.before_drop: Callable[[int], object] | None = None
        self.hits = self.recomputed = 0
        # places that each slot may write to
        self._own: Ints = np.arange(OWN * slots, dtype=np.int32).reshape(slots, OWN)
        self._free = list(range(self.total - 1, OWN * slots - 1, -1))
        # page whose state is at each place
        self._page_of: Ints = np.full(self.total + 1, _NO_PAGE, dtype=np.int32)
        # places of states whose pages were freed while a request still needed the states
        self._orphans = set[int]()
        self._marked = set[int]()  # places of marks of the planned step
        self._arriving = set[int]()  # places that a copy is writing to
        # last copy that reads each place
        self._last_copy: NDArray[np.int64] = np.zeros(self.total, np.int64)
        self._settled_copy = 0
        self._quarantine = deque[int]()  # dropped places that copies still read
        self._current: Ints = np.full(slots, self.total, dtype=np.int32)
        self._previous: Ints = np.full(slots, self.total, dtype=np.int32)
        self._previous_ends: Ints = np.full(slots, -1, dtype=np.int32)
        # page of each slot's spare state: the one at the end of its last full page, for a rewind
        self._spare: Ints = np.full(slots, _NO_PAGE, dtype=np.int32)
        self._wanted: list[set[int]] = [set() for _ in range(slots)]
        # order in which kept states are dropped: tokens saved times uses, with aging (GreedyDual)
        self._worth: NDArray[np.float64] = np.zeros(self.total)
        self._saves: NDArray[np.float64] = np.zeros(self.total)
        self._age = 0.0

    def stats(self) -> dict[str, int]:
        """Returns counts for `Engine.stats`."""
        kept = int((self._page_of != _NO_PAGE).sum())
        idle = self._orphans.difference(self._current.tolist())
        return {
            "states_total": self.total,
            "states_running": int((self._current != self.total).sum()),
            "states_kept": kept,
            "states_free": len(self._free) + len(idle) + len(self._quarantine),
            "state_hits": self.hits,
            "state_recomputed_tokens": self.recomputed,
        }

    # ------------------------------------------------------------------------------ cached prefixes

    def count_covered(self, page: int) -> int:
        """Returns how many of a page's tokens its state covers; 0 if it has none."""
        return int(self.at[page]) if self.of[page] != self.total else 0

    def count_usable_tokens(self, match: Match) -> int:
        """Returns how many tokens of a match a request can reuse: those up to the last state."""
        tail = match.tail
        if tail is not None and self.count_covered(tail.page) == tail.count:
            return match.count_cached(self._size)
        with_state = np.flatnonzero(self.of[match.pages] != self.total)
        if not len(with_state):
            return 0
        last = int(with_state[-1])
        return last * self._size + int(self.at[match.pages[last]])

    def begin_reading(self, slot: int, match: Match) -> None:
        """Makes a slot's request begin with the state at the end of a match."""
        self._forget_states(slot)
        cached = match.count_cached(self._size)
        if not cached:
            return
        page = int(match.pages[-1]) if match.tail is None else match.tail.page
        place = int(self.of[page])
        self._current[slot] = place
        self.ends[slot] = cached
        self.hits += 1
        self._worth[place] = max(self._worth[place], self._age) + self._saves[place]

    def end_reading(self, slot: int, pages: Ints, step: int) -> None:
        """Drops a slot's states. The current one is kept if its tokens are in the tree."""
        self.keep_current(slot, pages)
        self._forget_states(slot)

    def keep_current(self, slot: int, pages: Ints) -> None:
        """Keeps the state of a slot's request for others, if all of its tokens are in the tree.

        Args:
            slot: the slot.
            pages: pages of the tree that hold the slot's first tokens.
        """
        end = int(self.ends[slot])
        if 0 < end <= len(pages) * self._size:
            self._keep(slot, pages, end)
        self._spare[slot] = _NO_PAGE

    def _forget_states(self, slot: int) -> None:
        self._current[slot] = self._previous[slot] = self.total
        self.ends[slot] = 0
        self._previous_ends[slot] = _NO_PAGE
        self._spare[slot] = _NO_PAGE
        self._wanted[slot].clear()

    def detach(self, pages: Ints, step: int) -> None:
        """Drops the states of pages that are freed."""
        if not len(pages):
            return
        for page in pages[self.of[pages] != self.total].tolist():
            self._drop_state(page)

    def replace_own_pages(self, slot: int, before: Ints, after: Ints) -> None:
        """Moves the states of a slot's own pages to the tree's pages that replace them, unless
        those have states.
        """
        differ = np.flatnonzero(before != after)
        for own, other in zip(before[differ].tolist(), after[differ].tolist()):
            if self.of[own] == self.total:
                continue
            if self._spare[slot] == own:
                self._spare[slot] = _NO_PAGE
            if self.of[other] == self.total:
                place = int(self.of[own])
                self.of[own] = self.total
                self.of[other] = place
                self.at[other] = self.at[own]
                self._page_of[place] = other

    # ---------------------------------------------------------------------------------------- steps

    def want_states(self, slot: int, ends: Iterable[int]) -> None:
        """Requests that states be kept after these numbers of tokens of a slot's sequence. Replaces
        the slot's previous request.
        """
        self._wanted[slot] = set(ends)

    def ends_in_long_text(self, start: int, end: int) -> range:
        """Returns the positions strictly between `start` and `end` that are multiples of the
        interval; none if the interval is 0.
        """
        if not self._interval:
            return range(0)
        first = -(-(start + 1) // self._interval) * self._interval
        return range(first, end, self._interval)

    def plan_step(self, slots: Ints, starts: Ints, ends: Ints, lengths: Ints) -> RowStates:
        """Returns the states that a step reads and writes.

        Args:
            slots: int32 [R], slot of each row.
            starts, ends: int32 [R], positions start … end-1 that each row computes, without drafts.
            lengths: int32 [R], number of known tokens of each row.
        """
        self._reclaim_marks()
        current = self._current[slots]
        own = self._own[slots]
        read: Ints = np.where(starts > 0, current, np.int32(-1)).astype(np.int32)
        write: Ints = np.where(own[:, 0] == current, own[:, 1], own[:, 0]).astype(np.int32)
        marks = list[StateMark]()
        for row in np.flatnonzero(ends - starts > 1).tolist():
            inner = self._find_inner_ends(
                int(slots[row]), int(starts[row]), int(ends[row]), whole=ends[row] == lengths[row]
            )
            for end in inner:
                place = self._take_place()
                if place is None:
                    break
                self._marked.add(place)
                marks.append(StateMark(row, end, place))
        return RowStates(read, write, tuple(marks))

    def _find_inner_ends(self, slot: int, start: int, end: int, *, whole: bool) -> list[int]:
        """Returns the positions inside a row after which states are to be written.

        Args:
            slot: slot of the row.
            start, end: positions that the row computes.
            whole: whether the row reaches the end of the request's known tokens.
        """
        inner = {each for each in self._wanted[slot] if start < each < end}
        inner.update(self.ends_in_long_text(start, end))
        last = end // self._size * self._size
        if whole and start < last < end:
            inner.add(last)
        return sorted(inner)

    def record_step(
        self,
        table: SlotTable,
        states: RowStates,
        slots: Ints,
        starts: Ints,
        ends: Ints,
        drafted: Ints,
    ) -> None:
        """Records that a step has been launched.

        Args:
            table: slot table with the rows' pages.
            states: states of the step, from `plan_step`.
            slots: int32 [R], slot of each row.
            starts, ends: int32 [R], positions that each row computes, without drafts.
            drafted: int32 [R], number of drafted tokens that each row computes after these.
        """
        self._previous[slots] = np.where(starts > 0, self._current[slots], self.total)
        self._previous_ends[slots] = starts
        self._current[slots] = states.write
        self.ends[slots] = ends + drafted
        for mark in states.marks:
            self._marked.discard(mark.place)
            self._record_mark(table, mark, int(slots[mark.row]))
        for row, (slot, end) in enumerate(zip(slots.tolist(), ends.tolist())):
            wanted = end in self._wanted[slot]
            # with one token per page, the current state is always at the end of a page
            spare = self._size > 1 and end % self._size == 0
            if (wanted or spare) and not drafted[row]:
                kept = self._keep(slot, table.pages[slot], end)
                if kept is not None and not wanted:
                    self._move_spare(slot, kept)

    def _record_mark(self, table: SlotTable, mark: StateMark, slot: int) -> None:
        """Assigns a state written inside a row to the page of its last token, unless that page has
        one.
        """
        page = int(table.pages[slot, (mark.end - 1) // self._size])
        if self.of[page] != self.total:
            self._free.append(mark.place)
            return
        self._bind(mark.place, page, mark.end, table.pages[slot])
        on_grid = self._interval and mark.end % self._interval == 0
        if mark.end not in self._wanted[slot] and not on_grid:
            self._move_spare(slot, page)

    def rewind(self, table: SlotTable, slot: int, own_from: int) -> bool:
        """Returns a slot to its last state that covers no more than its computed tokens, some of
        which were taken back. The tokens after that state are recomputed. Returns False if there is
        no such state, or if it covers too little to keep the tree's pages.

        Args:
            table: slot table; its `computed` is lowered to the state's end.
            slot: the slot.
            own_from: number of tokens on pages of the tree, which may not be written again.
        """
        computed = int(table.computed[slot])
        pages = table.pages[slot, : table.page_count[slot]]
        with_state = np.flatnonzero(self.of[pages] != self.total)
        ends = with_state * self._size + self.at[pages[with_state]]
        # the tokens that these states cover may have changed
        for page in pages[
            with_state[(ends > computed) & (with_state * self._size >= own_from)]
        ].tolist():
            self._drop_state(page)
        end = int(ends[ends <= computed].max(initial=0))
        place = int(self.of[pages[(end - 1) // self._size]]) if end else self.total
        previous = int(self._previous_ends[slot])
        if end <= previous <= computed:
            end = previous
            place = int(self._previous[slot])
        if end < own_from:
            # otherwise, the request would begin with its current state again
            if self._page_of[self._current[slot]] != _NO_PAGE:
                self._drop_state(int(self._page_of[self._current[slot]]))
            return False
        self.recomputed += computed - end
        table.computed[slot] = self.ends[slot] = end
        self._current[slot] = place
        self._previous_ends[slot] = _NO_PAGE
        return True

    # ------------------------------------------------------------------------------ kept states

    def _keep(self, slot: int, pages: Ints, end: int) -> int | None:
        """Assigns a slot's current state to the page of its last token, and returns the page.
        Returns None if the page already has a state, or if no place is left for the slot's next
        state.
        """
        page = int(pages[(end - 1) // self._size])
        own = np.flatnonzero(self._own[slot] == self._current[slot])
        if not len(own) or self.of[page] != self.total:
            return None
        place = self._take_place()
        if place is None:
            return None
        self._bind(int(self._current[slot]), page, end, pages)
        self._own[slot, own[0]] = place
        return page

    def _bind(self, place: int, page: int, end: int, pages: Ints) -> None:
        """Assigns the state at a place to a page.

        Args:
            place: the place.
            page: the page, which has no state.
            end: number of the sequence's tokens that the state covers.
            pages: the sequence's first pages.
        """
        before = pages[: (end - 1) // self._size]
        with_state = np.flatnonzero(self.of[before] != self.total)
        last = (
            int(with_state[-1]) * self._size + int(self.at[before[with_state[-1]]])
            if len(with_state)
            else 0
        )
        self.of[page] = place
        self.at[page] = (end - 1) % self._size + 1
        self._page_of[place] = page
        self._last_copy[place] = 0
        self._saves[place] = end - last
        self._worth[place] = self._age + end - last

    def _move_spare(self, slot: int, page: int) -> None:
        """Makes the state of `page` the slot's spare state, and drops the previous spare state."""
        before = int(self._spare[slot])
        self._spare[slot] = page
        if before not in (_NO_PAGE, page) and self.of[before] != self.total:
            self._drop_state(before)

    def _drop_state(self, page: int) -> None:
        """Drops the state of a page."""
        place = int(self.of[page])
        if self.before_drop is not None:
            self.before_drop(place)
        self.of[page] = self.total
        self._page_of[place] = _NO_PAGE
        self._spare[self._spare == page] = _NO_PAGE
        if (self._current == place).any():
            self._orphans.add(place)
        else:
            self._free_place(place)

    def _free_place(self, place: int) -> None:
        self._previous_ends[self._previous == place] = _NO_PAGE
        if self._last_copy[place] > self._settled_copy:
            self._quarantine.append(place)
        else:
            self._free.append(place)

    def _take_place(self) -> int | None:
        """Returns a place for a state. Drops the least useful kept state if no place is free.
        Returns None if running requests and copies need all places.
        """
        if not self._free and self._orphans:
            for place in self._orphans.difference(self._current.tolist()):
                self._orphans.discard(place)
                self._free_place(place)
        if not self._free and not self._quarantine:
            self._drop_least_useful()
        return self._free.pop() if self._free else None

    def _drop_least_useful(self) -> None:
        """Drops the least useful kept state that no running request needs, if there is one."""
        places = np.flatnonzero(self._page_of != _NO_PAGE)
        needed = np.isin(places, self._current) | np.isin(self._page_of[places], self._spare)
        places = places[~needed]
        if len(places):
            place = int(places[self._worth[places].argmin()])
            self._age = float(self._worth[place])
            self._drop_state(int(self._page_of[place]))

    def _reclaim_marks(self) -> None:
        """Frees the places of marks that belong to a failed step."""
        self._free.extend(self._marked)
        self._marked.clear()

    # --------------------------------------------------------------------------------------- copies

    def places_at_ends(self, pages: Ints, *, new: bool = False) -> tuple[Ints, Ints]:
        """Returns the indices of the pages that have a kept state after their last token, and the
        places of these states. Leaves out the spare states of running requests and, if `new` is
        set, states that have been copied.
        """
        places = self.of[pages]
        kept = (places != self.total) & (self.at[pages] == self._size)
        if new and kept.any():
            kept[kept] = self._last_copy[places[kept]] == 0
        if kept.any():
            kept &= ~np.isin(pages, self._spare)
        return np.flatnonzero(kept).astype(np.int32), places[kept]

    @property
    def arriving_places(self) -> list[int]:
        """Places that copies are writing to, in ascending order."""
        return sorted(self._arriving)

    def record_copy(self, places: Ints, copy: int) -> None:
        """Records the number of the last copy that reads these places."""
        self._last_copy[places] = copy

    def settle_copies(self, copy: int) -> None:
        """Records that all copies up to `copy` have completed."""
        self._settled_copy = copy
        while self._quarantine and self._last_copy[self._quarantine[0]] <= copy:
            self._free.append(self._quarantine.popleft())

    def spare_places(self, count: int) -> None:
        """Drops kept states that no running request needs, until `count` places are free or will be
        free after the running copies.
        """
        for _ in range(count - len(self._free) - len(self._quarantine) - len(self._orphans)):
            self._drop_least_useful()

    def take_place_for_copy(self) -> int | None:
        """Returns a place for a copy to write, until `adopt_copy` or `abandon_copy`. Returns None if
        none is available.
        """
        place = self._take_place()
        if place is not None:
            self._arriving.add(place)
        return place

    def adopt_copy(self, place: int, pages: Ints) -> None:
        """Keeps a state that a copy has written, as the state after the last token of these pages.

        Args:
            place: the place, from `take_place_for_copy`.
            pages: pages of the tree from the beginning of the sequence.
        """
        self._arriving.remove(place)
        page = int(pages[-1])
        covered = self.count_covered(page)
        if covered == self._size:
            self._free_place(place)
            return
        if covered:
            self._drop_state(page)
        self._bind(place, page, len(pages) * self._size, pages)

    def abandon_copy(self, place: int, copy: int) -> None:
        """Gives back a place that copies up to `copy` may still write."""
        self._arriving.remove(place)
        self._last_copy[place] = copy
        self._free_place(place)

    # --------------------------------------------------------------------------------------- checks

    def check_invariants(self, pages_in_use: Ints) -> None:
        """Recounts the places. Raises AssertionError if an invariant is violated.

        Args:
            pages_in_use: pages of the tree and of running requests.
        """
        bound = np.flatnonzero(self.of != self.total)
        assert sorted(self._page_of[self._page_of != _NO_PAGE].tolist()) == bound.tolist()
        assert (self._page_of[self.of[bound]] == bound).all(), "a state of another page"
        assert np.isin(bound, pages_in_use).all(), "a state of a free page"
        assert ((self.at[bound] > 0) & (self.at[bound] <= self._size)).all(), "a state outside"
        owned = [*self._own.ravel().tolist(), *self.of[bound].tolist(), *self._free]
        owned += [*self._orphans, *self._marked, *self._arriving, *self._quarantine]
        assert sorted(owned) == list(range(self.total)), "places with two owners, or without one"
        running = self._current[self._current != self.total]
        assert not set(running.tolist()) & set(self._free), "a state in use at a free place"
