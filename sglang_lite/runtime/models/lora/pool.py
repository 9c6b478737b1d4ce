"""Adapters on the device, by adapter slot. Knows no requests: admission names the adapters that are in use."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, Protocol

from sglang_lite.runtime.models.lora.adapter import PAGE_RANK, Adapter


class AdapterMemory(Protocol):
    """Adapters of a runner, by adapter slot."""

    def pack(self, adapter: Adapter) -> Adapter:
        """Returns an adapter with its tensors in the form that `write` copies. May be called by any thread."""
        ...

    def write(self, slot: int, pages: Sequence[int], adapter: Adapter) -> None:
        """Makes an adapter the one of a slot, before the first step that uses it.

        Args:
            slot: adapter slot, which no running request uses.
            pages: pages of PAGE_RANK ranks for it.
            adapter: the adapter.
        """
        ...

    def clear(self, slot: int) -> None:
        """Empties an adapter slot, which no running request uses."""
        ...


class AdapterPool:
    """Adapter slots of a device. Used by the loop's thread alone.

    Args:
        memory: memory of the slots.
        slots: number of slots.
        max_rank: largest rank of an adapter; each slot has pages for it.
        eviction: whether the slot that was used, or filled, longest ago is taken first.

    Attributes:
        slots: adapter in each slot, or None.
        writes: number of adapters that were copied to the device.
    """

    def __init__(self, memory: AdapterMemory, slots: int, max_rank: int, eviction: Literal["lru", "fifo"]) -> None:
        self._memory, self._eviction = memory, eviction
        self._pages = -(-max_rank // PAGE_RANK)
        self.slots: list[Adapter | None] = [None] * slots
        self._slot: dict[int, int] = {}  # by generation
        self._order = list(range(slots))  # slots, the one to be taken first at the front
        self._pinned: set[int] = set()
        self.writes = 0

    def pin(self, adapter: Adapter) -> None:
        """Keeps an adapter in its slot once it has one, until `leave`."""
        self._pinned.add(adapter.generation)

    def slot_of(self, adapter: Adapter) -> int | None:
        """Slot that an adapter is in, or None."""
        return self._slot.get(adapter.generation)

    @property
    def unpinned(self) -> set[int]:
        """Generations of the adapters that may leave their slots."""
        return self._slot.keys() - self._pinned

    def assign(self, adapter: Adapter, in_use: Collection[int]) -> int | None:
        """Gives an adapter a slot unless it has one. Returns the slot, or None if all are in use or pinned.

        Args:
            adapter: the adapter.
            in_use: generations of the adapters of running requests.
        """
        slot = self.slot_of(adapter)
        if slot is None:
            slot = next((each for each in self._order if not self._is_kept(self.slots[each], in_use)), None)
            if slot is None:
                return None
            self._empty(slot)
            first = slot * self._pages
            self._memory.write(slot, range(first, first + adapter.rank // PAGE_RANK), adapter)
            self.slots[slot], self._slot[adapter.generation] = adapter, slot
            self.writes += 1
        elif self._eviction == "fifo":
            return slot
        self._order.remove(slot)
        self._order.append(slot)
        return slot

    def leave(self, adapter: Adapter) -> None:
        """Frees the slot of an adapter, which no running request uses."""
        self._pinned.discard(adapter.generation)
        slot = self.slot_of(adapter)
        if slot is not None:
            self._memory.clear(slot)
            self._empty(slot)
            self._order.remove(slot)
            self._order.insert(0, slot)

    def _empty(self, slot: int) -> None:
        leaving, self.slots[slot] = self.slots[slot], None
        if leaving is not None:
            del self._slot[leaving.generation]

    def _is_kept(self, adapter: Adapter | None, in_use: Collection[int]) -> bool:
        return adapter is not None and (adapter.generation in in_use or adapter.generation in self._pinned)
