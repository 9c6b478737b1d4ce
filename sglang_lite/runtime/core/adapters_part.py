"""Engine part that lets requests name adapters, for engines that generate text."""

from __future__ import annotations

from concurrent.futures import Future

from sglang_lite.runtime.adapters.absent import raise_no_adapters
from sglang_lite.runtime.adapters.adapter_slots import AdapterSlots
from sglang_lite.runtime.adapters.engine_adapters import EngineAdapters
from sglang_lite.runtime.calls import LoadLoraAdapter, Loras, UnloadLoraAdapter
from sglang_lite.runtime.capacity import Capacity
from sglang_lite.runtime.core.engine_part import CallTable, Counts, EnginePart, Run
from sglang_lite.runtime.core.inbox import Inbox
from sglang_lite.runtime.core.request_builder import RequestBuilder
from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache
from sglang_lite.runtime.scheduler.queues import Queues


class NoAdapters(EnginePart):
    """Answers the calls about adapters in an engine that has none."""

    def answers(self, inbox: Inbox, run: Run) -> CallTable:
        """Returns functions that answer the calls: loading or unloading an adapter raises an error,
        and the list of adapters is empty.
        """
        return {
            LoadLoraAdapter: lambda _: run(raise_no_adapters),
            UnloadLoraAdapter: lambda _: run(raise_no_adapters),
            Loras: lambda _: run(list),
        }


class AdaptersPart(EnginePart):
    """Feature of an engine whose requests can name adapters.

    Args:
        adapters: adapters of the engine.
    """

    def __init__(self, adapters: EngineAdapters) -> None:
        self.adapters = adapters
        self.device_memory = adapters.memory

    def join_scheduler(self, store: PrefixCache, queues: Queues, capacity: Capacity) -> None:
        """Creates the adapter slots of requests. They are also a column of step records."""
        self._slots = AdapterSlots(self.adapters.pool, store.table, queues)
        self.resource = self._slots
        self.column = self._slots

    def join_builder(self, builder: RequestBuilder) -> None:
        """Makes the adapters known to the request builder, by name."""
        builder.adapters = self.adapters.adapter_for
        builder.adapter_at_hand = self.adapters.is_adapter_in_memory

    def answers(self, inbox: Inbox, run: Run) -> CallTable:
        """Answers the calls that load, unload and list adapters."""
        adapters = self.adapters

        def load(call: LoadLoraAdapter) -> Future[None]:
            return run(adapters.load_adapter, call.name, call.path, pinned=call.pinned)

        def unload(call: UnloadLoraAdapter) -> Future[None]:
            return adapters.unload(call.name, self._slots.unload, inbox.post)

        return {
            LoadLoraAdapter: load,
            UnloadLoraAdapter: unload,
            Loras: lambda _: run(adapters.list),
        }

    def stats(self) -> Counts:
        """Returns the number of adapters, and how often they were read or copied."""
        return self.adapters.stats()

    def memory_stats(self) -> dict[str, int]:
        """Returns the size of the adapter pool in bytes."""
        return {"adapter_pool_bytes": self.adapters.memory.bytes}

    def drop_with_weights(self) -> None:
        """Frees the adapters' tensors. An adapter is read again when a request names it."""
        self.adapters.drop_cpu_tensors()

    def restore_with_weights(self, *, dropped: bool) -> None:
        """Reads the pinned adapters again if tensors were dropped. Otherwise copies all adapters to
        their slots again.
        """
        if dropped:
            self.adapters.restore_pinned()
        else:
            self.adapters.pool.rewrite_all_slots()
