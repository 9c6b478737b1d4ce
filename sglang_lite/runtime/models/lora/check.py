"""Consistency checks of an engine's adapters, for tests."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_lite.runtime.models.lora.adapter import PAGE_RANK, Adapter
from sglang_lite.runtime.models.lora.loaded import LoadedAdapters
from sglang_lite.runtime.models.lora.pool import AdapterPool


def check_adapters(
    loaded: LoadedAdapters,
    pool: AdapterPool,
    running: Iterable[tuple[Adapter, int]],
    max_loaded: int | None = None,
    max_bytes: int | None = None,
) -> None:
    """Checks the adapters in memory and those on the device.

    Args:
        loaded: adapters by name.
        pool: adapters on the device.
        running: adapter and adapter slot of each running request that has one.
        max_loaded, max_bytes: maximum number of adapters in memory, and of their bytes.

    Raises:
        AssertionError: an invariant is violated; the message names it.
    """
    entries = loaded.list()
    in_memory = [each.adapter for each in entries if each.adapter is not None]
    assert len({each.name for each in entries}) == len(entries), "two adapters of one name"
    assert max_loaded is None or len(in_memory) <= max_loaded, "more adapters in memory than may be"
    assert max_bytes is None or sum(each.bytes for each in in_memory) <= max_bytes, (
        "more bytes than may be"
    )
    assert all(each.adapter is not None for each in entries if each.pinned), (
        "a pinned adapter that is not in memory"
    )
    resident = [each.generation for each in pool.slots if each is not None]
    assert len(set(resident)) == len(resident), "an adapter in two slots"
    assert all(
        each is None or pool.slot_of(each) == slot for slot, each in enumerate(pool.slots)
    ), "a slot misnamed"
    pages = [page for own in pool.pages.values() for page in own]
    assert len(set(pages)) == len(pages), "a page of two adapters"
    ranks = {slot: each.rank for slot, each in enumerate(pool.slots) if each is not None}
    assert {slot: len(own) * PAGE_RANK for slot, own in pool.pages.items()} == ranks, (
        "pages that are no adapter's"
    )
    for adapter, slot in running:
        assert pool.slots[slot] is adapter, "a running request whose adapter has left its slot"
