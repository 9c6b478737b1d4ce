"""Adapters on the device, by adapter slot. Independent of requests: the caller passes in which
adapters are in use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from sglang_lite.runtime.models.lora.adapter import PAGE_RANK, Adapter, AdapterRoom

COLUMN = "adapter"  # of the slot table and of step records: each request's adapter slot
_MORE = 4  # slots for each adapter that can be in use: small ones leave pages for others


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Number of adapter slots and of pages. A page holds PAGE_RANK ranks of one adapter. An adapter
    of the largest rank takes `longest` pages.
    """

    slots: int
    pages: int
    longest: int

    @classmethod
    def for_adapters(cls, most: int, max_rank: int) -> PoolSize:
        """Returns the size at which `most` adapters can be in use, even if all have the largest
        rank.
        """
        longest = -(-max_rank // PAGE_RANK)
        return cls(most * min(longest, _MORE), most * longest, longest)

    @property
    def max_adapters(self) -> int:
        """Number of adapters of the largest rank that fit the pages."""
        return self.pages // self.longest


class AdapterMemory(Protocol):
    """A runner's memory for adapters, by adapter slot."""

    def allocate_adapter_buffer(self, rank: int) -> AdapterRoom | None:
        """Allocates host memory for an adapter of this rank, in the layout that
        `write_adapter_slot` copies. Returns the same as `room` of AdapterReader. Any thread may
        call this.
        """
        ...

    def write_adapter_slot(self, slot: int, pages: Sequence[int], adapter: Adapter) -> None:
        """Writes an adapter to a slot, before the first step that uses it.

        Args:
            slot: adapter slot, which no running request uses.
            pages: pages of PAGE_RANK ranks for it.
            adapter: the adapter.
        """
        ...

    def clear_adapter_slot(self, slot: int) -> None:
        """Empties an adapter slot, which no running request uses."""
        ...


class AdapterPool:
    """A device's adapter slots, and the pages that they share. A page holds PAGE_RANK ranks, and an
    adapter takes as many pages as its rank needs. Used only by the loop's thread.

    Args:
        memory: memory of the slots.
        size: size of the memory.
        most: number of adapters that can be in use or pinned; there are pages for this many of the
            largest rank.
        eviction: whether the slot that was used ("lru") or filled ("fifo") longest ago is reused
            first.

    Attributes:
        slots: adapter in each slot, or None.
        pages: pages of each slot with an adapter.
        writes: number of adapters that were copied to the device.
    """

    def __init__(
        self, memory: AdapterMemory, size: PoolSize, most: int, eviction: Literal["lru", "fifo"]
    ) -> None:
        self._memory = memory
        self._most = most
        self._eviction = eviction
        self.slots: list[Adapter | None] = [None] * size.slots
        self._slot: dict[int, int] = {}  # by generation
        self._order = list(range(size.slots))  # slots in the order in which they are to be reused
        self._free = list(range(size.pages))
        self.pages: dict[int, list[int]] = {}  # by slot
        self._pinned: set[int] = set()
        self._leaving: list[tuple[Sequence[Adapter], Callable[[], object]]] = []
        self.writes = 0

    def pin(self, adapter: Adapter) -> None:
        """Keeps an adapter in its slot, once it has one, until it is unloaded."""
        self._pinned.add(adapter.generation)

    def slot_of(self, adapter: Adapter) -> int | None:
        """Returns the slot that an adapter is in, or None if it is in no slot."""
        return self._slot.get(adapter.generation)

    @property
    def unpinned_generations(self) -> set[int]:
        """Generations of the adapters in slots that can be evicted."""
        return self._slot.keys() - self._pinned

    def assign(self, adapter: Adapter, in_use: Collection[int]) -> int | None:
        """Assigns a slot to an adapter unless it has one. Returns the slot, or None if the maximum
        number of adapters is in use or pinned.

        Args:
            adapter: the adapter.
            in_use: generations of the adapters of running requests.
        """
        slot = self.slot_of(adapter)
        kept = ({*in_use} | (self._pinned & self._slot.keys())) - {adapter.generation}
        if len(kept) >= self._most and adapter.generation not in in_use:
            return None
        if slot is None:
            slot = self._evict_until_fits(adapter.rank // PAGE_RANK, kept)
            own = self.pages[slot] = [self._free.pop() for _ in range(adapter.rank // PAGE_RANK)]
            self._memory.write_adapter_slot(slot, own, adapter)
            self.slots[slot] = adapter
            self._slot[adapter.generation] = slot
            self.writes += 1
        elif self._eviction == "fifo":
            return slot
        self._order.remove(slot)
        self._order.append(slot)
        return slot

    def rewrite_all_slots(self) -> None:
        """Copies all adapters to their slots again, after the memory has lost them."""
        for slot, adapter in enumerate(self.slots):
            if adapter is not None:
                self._memory.write_adapter_slot(slot, self.pages[slot], adapter)

    def clear_all_slots(self) -> None:
        """Empties all slots and unpins all adapters. No request may be running."""
        for slot, adapter in enumerate(self.slots):
            if adapter is not None:
                self._memory.clear_adapter_slot(slot)
                self._empty_slot(slot)
        self._pinned.clear()

    def remove_when_unused(self, adapters: Sequence[Adapter], done: Callable[[], object]) -> None:
        """Schedules adapters for removal once none of them is in use. `free_unused_slots` then removes
        them and calls `done`. `close` calls `done` without removing them.
        """
        self._leaving.append((adapters, done))

    @property
    def has_pending_removals(self) -> bool:
        """True if adapters are to be removed once they are unused."""
        return bool(self._leaving)

    def free_unused_slots(self, used: Collection[int]) -> None:
        """Frees the slots of unloaded adapters that are no longer used.

        Args:
            used: generations of the adapters of all requests that have not ended.
        """
        for adapters, done in self._leaving.copy():
            if not any(adapter.generation in used for adapter in adapters):
                self._leaving.remove((adapters, done))
                for adapter in adapters:
                    self._remove(adapter)
                done()

    def close(self) -> None:
        """Calls the callbacks of all removals that are still pending. Called when the loop ends."""
        for _, done in self._leaving:
            done()
        self._leaving.clear()

    def _remove(self, adapter: Adapter) -> None:
        self._pinned.discard(adapter.generation)
        slot = self.slot_of(adapter)
        if slot is not None:
            self._memory.clear_adapter_slot(slot)
            self._empty_slot(slot)
            self._order.remove(slot)
            self._order.insert(0, slot)

    def _evict_until_fits(self, pages: int, kept: Collection[int]) -> int:
        """Evicts adapters in the order in which their slots are to be reused, until a slot and
        enough pages are free. Returns an empty slot.
        """
        for slot in self._order:
            adapter = self.slots[slot]
            if (
                adapter is not None
                and adapter.generation not in kept
                and (None not in self.slots or len(self._free) < pages)
            ):
                self._empty_slot(slot)
        return next(slot for slot in self._order if self.slots[slot] is None)

    def _empty_slot(self, slot: int) -> None:
        leaving = self.slots[slot]
        self.slots[slot] = None
        if leaving is not None:
            del self._slot[leaving.generation]
            self._free += self.pages.pop(slot)
