"""Adapter slots of requests. A request names its adapter in `lora_path`, and holds it in its prefix
space (kv_cache/prefix_space.py) until it ends. On admission, the request gets the adapter's slot on
the device. The record of each step tells the runner which slot computes each row.
docs/internals/lora.md describes the whole process.

Among the first waiting requests, those whose adapter is on the device go before others, and none
starves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.slot_table import SlotTable
from sglang_lite.runtime.models.lora.adapter import Adapter
from sglang_lite.runtime.models.lora.pool import COLUMN, AdapterPool
from sglang_lite.runtime.requests.request import Request
from sglang_lite.runtime.requests.resource import Resource
from sglang_lite.runtime.scheduler.admission_order import AGE_BOUND
from sglang_lite.runtime.scheduler.batch import Batch
from sglang_lite.runtime.scheduler.queues import Queues

_LOOKED_AT = 128  # like in admission_order.py


class AdapterSlots(Resource):
    """Assigns adapter slots to requests on admission, and adds these slots to step records.

    Args:
        pool: adapters on the device.
        table: slot table, which gets the adapter slot of each request (-1 for none), and the
            position of its first token that the adapter computes.
        queues: requests that wait for a slot or run.

    Attributes:
        pool: the argument of this name.
        name: name of the column in step records.
    """

    name = COLUMN

    def __init__(self, pool: AdapterPool, table: SlotTable, queues: Queues) -> None:
        self.pool = pool
        self._queues = queues
        self._of_slot = table.add_column(COLUMN, -1)
        self._from = table.add_column("adapter_from", 0)
        self._in_use: Counter[int] = Counter()  # running requests of each adapter, in this plan
        self._draining: set[int] = set()  # adapters that get no more requests in this plan

    def order_candidates(self, candidates: Iterable[Request]) -> Iterator[Request]:
        """Yields requests in the order in which they may start: first those that continue or were
        passed over too often, then those whose adapter is on the device, then the others.
        """
        self._in_use = Counter(each.generation for each in _adapters_of(self._queues.running()))
        self._draining.clear()
        rest = iter(candidates)
        yield from sorted(islice(rest, _LOOKED_AT), key=self._order_key)
        yield from rest

    def _order_key(self, request: Request) -> int:
        if self._is_prioritised(request):
            return 0
        adapter = request.space.adapter
        return 1 if adapter is None or self.pool.slot_of(adapter) is not None else 2

    def _is_prioritised(self, request: Request) -> bool:
        return request.passed_over >= AGE_BOUND or request in self._queues.returned

    def may_start(self, request: Request) -> bool:
        """Makes sure that a request's adapter is on the device. Returns False if the request has to
        wait for a slot.

        If a request that goes first has to wait, the adapter with the fewest running requests gets
        no new ones.
        """
        adapter = request.space.adapter
        if adapter is None:
            return True
        if adapter.generation in self._draining:
            return False
        if self.pool.assign(adapter, self._in_use) is None:
            if not self._draining and self._is_prioritised(request):
                in_use = self.pool.unpinned_generations & self._in_use.keys()
                if in_use:  # pinned ones never give way
                    self._draining.add(min(in_use, key=lambda each: (self._in_use[each], each)))
            return False
        self._in_use[adapter.generation] += 1
        return True

    def record_start(self, request: Request) -> None:
        """Stores the request's adapter slot in the slot table, and the position where the adapter
        begins to apply.
        """
        adapter = request.space.adapter
        slot = -1 if adapter is None else self.pool.slot_of(adapter)
        assert slot is not None, "assigned when the request was admitted"
        self._of_slot[request.slot] = slot
        self._from[request.slot] = request.space.start

    def cut_chunk(self, request: Request, start: int, end: int, *, first: bool) -> int:
        """Returns the end of a chunk of a prompt. If a late adapter (aLoRA) begins to apply inside
        the chunk, the chunk ends there.
        """
        begins = request.space.start
        return begins if start < begins < end else end

    def column_values(self, batch: Batch) -> Ints:
        """Returns the adapter slot that computes each row, int32 [R]; -1 for none."""
        values: Ints = np.where(
            batch.starts < self._from[batch.slots], -1, self._of_slot[batch.slots]
        )
        return values

    def unload(self, adapters: Sequence[Adapter], done: Callable[[], object]) -> None:
        """Frees the slots of adapters once no waiting or running request uses them, and then calls
        `done`.
        """
        self.pool.remove_when_unused(adapters, done)
        self.release_unused()

    def release_unused(self) -> None:
        """Frees the slots of unloaded adapters that no request uses any more."""
        if self.pool.has_pending_removals:
            self.pool.free_unused_slots({each.generation for each in _adapters_of(self._queues)})

    def close(self) -> None:
        """Notifies callers that wait for an adapter to be unloaded."""
        self.pool.close()


def _adapters_of(requests: Iterable[Request]) -> Iterator[Adapter]:
    """Yields the adapters of the requests that have one."""
    return (each.space.adapter for each in requests if each.space.adapter is not None)
