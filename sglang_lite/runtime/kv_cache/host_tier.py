"""Host tier of the KV cache: copies of pages in the host's memory, by name. The least recently used
are dropped first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.kv_cache.pages import Ints


class PageMemory(Protocol):
    """Host memory for pages, and copies between it and the device's pages.

    Copies are numbered from 1 and run in order: after the device's earlier work, and concurrently
    with later work. Copies to the host may wait until the next call of `count_completed`; there is
    one in each plan.

    Attributes:
        rows: uint8 [slots, bytes of a page]; all planes of a page.
        launched: number of copies so far.
        page_s: measured seconds to copy a page to the device; 0 if unknown.
    """

    rows: NDArray[np.uint8]
    launched: int
    page_s: float

    def count_completed(self) -> int:
        """Returns the number of copies that have completed."""
        ...

    def copy_to_host(self, pages: Ints, slots: Ints) -> None:
        """Copies pages of the device, int32 [N], to slots of this memory."""
        ...

    def copy_to_device(self, slots: Ints, pages: Ints) -> None:
        """Starts copying slots of this memory, int32 [N], to pages of the device."""
        ...

    def close(self) -> None:
        """Releases the device's resources for this memory. No copy may be requested afterwards."""
        ...


class HostTier:
    """Assigns slots of host memory to pages by name.

    Args:
        memory: memory for the pages.
    """

    def __init__(self, memory: PageMemory) -> None:
        self.memory = memory
        self._slots: dict[bytes, int] = {}  # least recently used first
        self._free = list(range(len(memory.rows) - 1, -1, -1))
        self._pinned: dict[int, int] = {}  # number of users of slots that the host reads or writes
        self._nameless: set[int] = set()  # pinned slots without a page

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def slots(self) -> int:
        """Number of pages that the tier has room for."""
        return len(self.memory.rows)

    def __contains__(self, name: bytes) -> bool:
        return name in self._slots

    def touch_pages(self, names: Sequence[bytes]) -> Ints:
        """Returns the slots of stored pages, int32 [N], and marks the pages as just used. The first
        page counts as the most recently used.
        """
        for name in reversed(names):
            self._slots[name] = self._slots.pop(name)
        return np.array([self._slots[name] for name in names], dtype=np.int32)

    def save_pages(self, names: Sequence[bytes], pages: Ints) -> None:
        """Copies pages of the device to the host, as many as fit. Skips those that are already
        stored.

        Args:
            names: names of the pages, in the order of their sequence.
            pages: int32 [N], the pages.
        """
        self.touch_pages([name for name in names if name in self._slots])
        new = [i for i, name in enumerate(names) if name not in self._slots]
        slots = self.allocate_slots([names[i] for i in new])
        if len(slots):
            self.memory.copy_to_host(pages[new[: len(slots)]], slots)

    def allocate_slots(self, names: Sequence[bytes]) -> Ints:
        """Allocates slots, int32 [M], for the first M of these pages, as many as fit. The pages
        must not be stored yet, and the caller copies their contents.
        """
        taken = self._allocate(len(names))
        for name, slot in reversed(list(zip(names, taken))):
            self._slots[name] = slot
        return np.array(taken, dtype=np.int32)

    def pin_slots(self, slots: Ints) -> None:
        """Keeps the contents of slots until `unpin_slots`, while the host reads them."""
        for slot in slots.tolist():
            self._pinned[slot] = self._pinned.get(slot, 0) + 1

    def unpin_slots(self, slots: Ints) -> None:
        """Undoes one `pin_slots` of these slots. A slot without a named page becomes free once it
        is no longer pinned.
        """
        for slot in slots.tolist():
            self._pinned[slot] -= 1
            if not self._pinned[slot]:
                del self._pinned[slot]
                if slot in self._nameless:
                    self._nameless.remove(slot)
                    self._free.append(slot)

    def reserve_pinned_slots(self, count: int) -> Ints:
        """Allocates and pins up to `count` slots that don't belong to a page yet. The host may
        write to them once all copies launched so far have completed.
        """
        slots = self._allocate(count)
        self._nameless.update(slots)
        self._pinned.update(dict.fromkeys(slots, 1))
        return np.array(slots, dtype=np.int32)

    def name_reserved_slots(self, names: Sequence[bytes], slots: Ints) -> None:
        """Stores pages that the host has written to reserved slots, under these names. The first
        name is for the first slot. Unpins all of the slots, including slots beyond the last name.
        """
        for name, slot in zip(names, slots.tolist()):
            if name not in self._slots:
                self._slots[name] = slot
                self._nameless.remove(slot)
        self.unpin_slots(slots)

    def forget_pages(self) -> None:
        """Forgets all pages."""
        for slot in self._slots.values():
            if slot in self._pinned:
                self._nameless.add(slot)
            else:
                self._free.append(slot)
        self._slots.clear()

    def check_slots(self) -> None:
        """Recounts the slots, for the invariant checks."""
        slots = [*self._free, *self._slots.values(), *self._nameless]
        assert sorted(slots) == list(range(len(self.memory.rows))), (
            "slots of the host's memory that are lost or shared"
        )
        assert self._nameless <= self._pinned.keys(), "slots without a page that nobody uses"

    def _allocate(self, count: int) -> list[int]:
        """Allocates up to `count` slots: free ones, then those of the least recently used pages."""
        taken: list[int] = []
        while self._free and len(taken) < count:
            taken.append(self._free.pop())
        if len(taken) < count:
            oldest = (
                (name, slot) for name, slot in self._slots.items() if slot not in self._pinned
            )
            for name, slot in list(islice(oldest, count - len(taken))):
                del self._slots[name]
                taken.append(slot)
        return taken
