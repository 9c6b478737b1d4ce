"""States in the tiers below the device: which kept states are copied to the host's memory, and
which are fetched back.

A state below the device has the name of the page that it ends with, so only states at the ends of
pages are kept there. Copies of states and copies of pages are numbered separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_lite.runtime.kv_cache.host_tier import HostTier
from sglang_lite.runtime.kv_cache.page_names import PageNames
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.radix import Match, Node
from sglang_lite.runtime.kv_cache.state_pages import StatePages

# If states are copied when they are dropped, one in this many of the kept states' places is free,
# or will be after the running copies.
_SPARE = 16


@dataclass(frozen=True, slots=True)
class StateFetch:
    """State that is being copied to the device.

    Attributes:
        place: its place.
        pages: number of pages from the beginning of the sequence that it covers.
        copy: number of the copy.
    """

    place: int
    pages: int
    copy: int


class StateTier:
    """Moves states between the device and the host's memory.

    Args:
        states: places of states on the device.
        host: tier in the host's memory.
        on_drop: whether to copy states to the host when the device drops them.

    Attributes:
        host: the argument.
        fetched: number of states fetched so far.
    """

    def __init__(self, states: StatePages, host: HostTier, *, on_drop: bool) -> None:
        self._states = states
        self.host = host
        self._on_drop = on_drop
        # names of kept states by place, if states are copied when dropped
        self._names: dict[int, bytes] = {}
        self._completed = 0  # number of completed copies when last counted
        self.fetched = 0
        if on_drop:
            states.before_drop = self._save_dropped

    def save_states(self, names: PageNames, node: Node, *, new: bool = False) -> list[int]:
        """Copies the kept states at the ends of a node's pages to the host, as space permits. If
        `new` is set, skips states that have already been copied. Returns the indices of the pages
        whose states were selected.
        """
        indices, places = self._states.places_at_ends(node.pages, new=new)
        if len(places):
            of_pages = names.names_of_node(node)
            self._copy_to_host([of_pages[i] for i in indices.tolist()], places)
        found: list[int] = indices.tolist()
        return found

    def save_states_of_prefix(self, names: PageNames, node: Node) -> None:
        """Copies the kept states of a prefix to the host, from the root to `node`."""
        path: list[Node] = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        for each in reversed(path):
            self.save_states(names, each)

    def name_states(self, names: PageNames, node: Node) -> None:
        """Remembers the names of a node's kept states, which are copied when they are dropped."""
        indices, places = self._states.places_at_ends(node.pages)
        if len(places):
            of_pages = names.names_of_node(node)
            self._names.update(zip(places.tolist(), (of_pages[i] for i in indices.tolist())))

    def _save_dropped(self, place: int) -> None:
        name = self._names.pop(place, None)
        if name is not None:
            self._copy_to_host([name], np.array([place], dtype=np.int32))
            self.settle_copies()

    def _copy_to_host(self, names: Sequence[bytes], places: Ints) -> None:
        self.host.save_pages(names, places)
        self._states.record_copy(places, self.host.memory.launched)

    def count_usable_tokens(self, match: Match) -> int:
        """Returns how many tokens of a match can be reused without a fetch."""
        return self._states.count_usable_tokens(match)

    def has_state(self, name: bytes | None) -> bool:
        """Returns whether the host has the state of this name."""
        return name is not None and name in self.host

    def find_last(self, names: Sequence[bytes]) -> int:
        """Returns how many of these consecutive pages are covered by the last of their states that
        the host has; 0 if it has none.
        """
        return next((i + 1 for i in range(len(names) - 1, -1, -1) if names[i] in self.host), 0)

    def start_fetch(self, name: bytes, pages: int) -> StateFetch | None:
        """Starts copying a state of the host to the device. Returns None if no place is available.

        Args:
            name: name of the last page that it covers.
            pages: number of pages that it covers.
        """
        slots = self.host.touch_pages([name])
        self.host.pin_slots(slots)  # a state dropped to make room may be copied to the host
        place = self._states.take_place_for_copy()
        if place is not None:
            self.host.memory.copy_to_device(slots, np.array([place], dtype=np.int32))
        self.host.unpin_slots(slots)
        if place is None:
            return None
        self.fetched += 1
        return StateFetch(place, pages, self.host.memory.launched)

    def adopt_fetched(self, fetch: StateFetch, pages: Ints) -> None:
        """Keeps a state that has arrived.

        Args:
            fetch: its fetch.
            pages: pages of the tree from the beginning of the sequence.
        """
        self._states.adopt_copy(fetch.place, pages[: fetch.pages])

    def abandon_fetch(self, fetch: StateFetch) -> None:
        """Gives back the place of a state whose pages are not kept."""
        self._states.abandon_copy(fetch.place, fetch.copy)

    @property
    def copies_are_running(self) -> bool:
        """Whether some copies were still running when they were last counted."""
        return self._completed < self.host.memory.launched

    def settle_copies(self) -> int:
        """Launches copies that were waiting for earlier ones, and frees places that only completed
        copies have used. Returns the number of completed copies.
        """
        self._completed = self.host.memory.count_completed()
        self._states.settle_copies(self._completed)
        return self._completed

    def make_room(self) -> None:
        """Frees a few places in advance, because dropped states must be copied before their places
        are written again.
        """
        if self._on_drop:
            self._states.spare_places(-(-self._states.kept // _SPARE))

    def forget_states(self) -> None:
        """Forgets all states of the host, and the names of those on the device."""
        self._names.clear()
        self.host.forget_pages()

    def check_invariants(self, fetches: Sequence[StateFetch]) -> None:
        """Raises AssertionError if the host's slots, or the places of running fetches, are
        miscounted.
        """
        self.host.check_slots()
        assert sorted(each.place for each in fetches) == self._states.arriving_places, (
            "places that a copy writes without a fetch"
        )

    def stats(self) -> dict[str, int]:
        """Returns counts for `Engine.stats`."""
        return {
            "host_states_total": self.host.slots,
            "host_states_kept": len(self.host),
            "host_states_fetched": self.fetched,
        }
