"""Orders waiting requests by adapter: those whose adapter is on the device go first, and no others
starve.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from sglang_lite.runtime.models.lora.adapter import Adapter
from sglang_lite.runtime.models.lora.pool import AdapterPool
from sglang_lite.runtime.requests.request import Request
from sglang_lite.runtime.scheduler.admission_order import AGE_BOUND
from sglang_lite.runtime.scheduler.queues import Queues

_LOOKED_AT = 128  # like in admission_order.py


class AdapterSlots:
    """Assigns adapter slots to requests on admission. Used only on the loop's thread.

    Args:
        pool: adapters on the device.
        queues: requests that have not ended.

    Attributes:
        pool: the argument of this name.
    """

    def __init__(self, pool: AdapterPool, queues: Queues) -> None:
        self.pool = pool
        self._queues = queues
        self._in_use: Counter[int] = Counter()  # running requests of each adapter, in this plan
        self._draining: set[int] = set()  # adapters that get no more requests in this plan

    def order_by_adapter(self, candidates: Iterable[Request]) -> Iterator[Request]:
        """Begins a plan. Yields the requests that may be admitted: those that continue or were
        passed over too often, then those whose adapter is on the device, then others.
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

    def assign_adapter_slot(self, request: Request) -> int | None:
        """Returns the adapter slot for a request, -1 if it needs none, or None if it has to wait
        for one.

        If a request that goes first has to wait, the adapter with the fewest running requests gets
        no new ones.
        """
        adapter = request.space.adapter
        if adapter is None:
            return -1
        if adapter.generation in self._draining:
            return None
        slot = self.pool.assign(adapter, self._in_use)
        if slot is None:
            if not self._draining and self._is_prioritised(request):
                least = self.pool.unpinned_generations & self._in_use.keys()
                self._draining.add(min(least, key=lambda each: (self._in_use[each], each)))
            return None
        self._in_use[adapter.generation] += 1
        return slot

    def unload(self, adapters: Sequence[Adapter], done: Callable[[], object]) -> None:
        """Frees the slots of adapters, and calls back, when no waiting or running request uses
        them.
        """
        self.pool.remove_when_unused(adapters, done)
        self.free_unloaded()

    def free_unloaded(self) -> None:
        """Frees the slots of unloaded adapters that no request uses any more."""
        if self.pool.has_pending_removals:
            self.pool.free_unused({each.generation for each in _adapters_of(self._queues)})


def _adapters_of(requests: Iterable[Request]) -> Iterator[Adapter]:
    """Returns the adapters of the requests that have one."""
    return (each.space.adapter for each in requests if each.space.adapter is not None)
