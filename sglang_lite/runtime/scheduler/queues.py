"""Queues of requests: those that wait, and those that run, which have a slot and pages."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from itertools import chain

from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache
from sglang_lite.runtime.requests.request import Request, State


class Queues:
    """Requests that have not ended, by stage.

    Args:
        store: pages, slots and radix tree.

    Attributes:
        waiting, prefilling, decoding: requests in these stages.
    """

    def __init__(self, store: PrefixCache) -> None:
        self._store = store
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []

    def __iter__(self) -> Iterator[Request]:
        return chain(self.waiting, self.running())

    def running(self) -> Iterator[Request]:
        return chain(self.prefilling, self.decoding)

    @property
    def running_any(self) -> bool:
        return bool(self.prefilling or self.decoding)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running_any)

    def wait(self, request: Request) -> None:
        """Queues a request behind all that wait."""
        request.move(State.WAITING)
        self.waiting.append(request)

    def wait_first(self, request: Request, state: State) -> None:
        """Queues a request, whose state becomes `state`, before all that wait."""
        request.move(state)
        self.waiting.appendleft(request)

    def leave_waiting(self, admitted: Collection[Request]) -> None:
        """Removes admitted requests from those that wait, and counts how often each of the others was passed over."""
        if not admitted:
            return
        gone = set(map(id, admitted))
        if all(id(request) in gone for request, _ in zip(self.waiting, admitted)):  # the common case: the first ones
            for _ in admitted:
                self.waiting.popleft()
            return
        last = max(i for i, request in enumerate(self.waiting) if id(request) in gone)
        for i, request in enumerate(self.waiting):
            if i < last and id(request) not in gone:
                request.passed_over += 1
        self.waiting = deque(r for r in self.waiting if id(r) not in gone)

    def prefill(self, request: Request) -> None:
        """Queues a request that has a slot, to compute its tokens."""
        request.move(State.PREFILLING)
        self.prefilling.append(request)

    def decode(self, request: Request) -> None:
        """Moves a request whose tokens are all computed from the prefilling ones to the decoding ones."""
        request.move(State.DECODING)
        self.prefilling.remove(request)
        self.decoding.append(request)

    def move_back(self, served: Collection[Request]) -> None:
        """Moves decoding requests, in the given order, behind the other ones."""
        ids = {request.id for request in served}
        self.decoding = [*(r for r in self.decoding if r.id not in ids), *served]

    def leave_running(self, request: Request) -> None:
        """Removes a running request from its queue. Its slot and pages stay its own."""
        (self.prefilling if request.state is State.PREFILLING else self.decoding).remove(request)

    def stop(self, request: Request) -> None:
        """Removes a running request from its queue and frees its slot and pages; its prefix goes into the tree."""
        self.leave_running(request)
        assert request.handle is not None
        slot, table = request.slot, self._store.table
        request.tokens = table.tokens[slot, : table.known[slot]].copy()
        self._store.release(request.handle)
        request.handle = None
