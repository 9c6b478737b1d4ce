"""Host tier of the KV cache: copies of pages in the host's memory, by name, least recently used first to go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.kv_cache.pages import Ints


class PageMemory(Protocol):
    """Host memory for pages, and copies between it and the device's pages. Copies have numbers from 1 on and run in
    their order: after what the device was given to do before, and beside what it is given later.

    Attributes:
        rows: uint8 [slots, bytes of a page]; all planes of a page.
        launched: number of copies so far.
        page_s: seconds to copy a page to the device, as measured; 0 if unknown.
    """

    rows: NDArray[np.uint8]
    launched: int
    page_s: float

    def completed(self) -> int:
        """Number of copies that have completed."""
        ...

    def read(self, pages: Ints, slots: Ints) -> None:
        """Starts copying pages of the device, int32 [N], to slots of this memory."""
        ...

    def write(self, slots: Ints, pages: Ints) -> None:
        """Starts copying slots of this memory, int32 [N], to pages of the device."""
        ...


class HostTier:
    """Names of the pages in a host memory.

    Args:
        memory: memory for the pages.
    """

    def __init__(self, memory: PageMemory) -> None:
        self.memory = memory
        self._slots: dict[bytes, int] = {}  # least recently used first
        self._free = list(range(len(memory.rows) - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, name: bytes) -> bool:
        return name in self._slots

    def slots(self, names: Sequence[bytes]) -> Ints:
        """Slots of pages that are here, int32 [N]. They become the last to go, the first page last of all."""
        for name in reversed(names):
            self._slots[name] = self._slots.pop(name)
        return np.array([self._slots[name] for name in names], dtype=np.int32)

    def save(self, names: Sequence[bytes], pages: Ints) -> None:
        """Copies those of the device's pages here that are not, as many as fit.

        Args:
            names: names of the pages, in the order of their sequence.
            pages: int32 [N], the pages.
        """
        self.slots([name for name in names if name in self._slots])
        new = [i for i, name in enumerate(names) if name not in self._slots]
        slots = self.add([names[i] for i in new])
        if len(slots):
            self.memory.read(pages[new[: len(slots)]], slots)

    def add(self, names: Sequence[bytes]) -> Ints:
        """Gives slots to pages that are not here, whose contents the caller copies: int32 [M], for the first M of them,
        as many as fit."""
        taken: list[int] = []
        for _ in names:
            slot = self._take()
            if slot is None:
                break
            taken.append(slot)
        for name, slot in reversed(list(zip(names, taken))):
            self._slots[name] = slot
        return np.array(taken, dtype=np.int32)

    def clear(self) -> None:
        """Forgets all pages."""
        self._free += self._slots.values()
        self._slots.clear()

    def check(self) -> None:
        """Recounts the slots, for the invariant checks."""
        slots = [*self._free, *self._slots.values()]
        assert sorted(slots) == list(range(len(self.memory.rows))), "slots of the host's memory that are lost or shared"

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        oldest = next(iter(self._slots), None)
        return None if oldest is None else self._slots.pop(oldest)
