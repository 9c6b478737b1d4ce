"""Queues of waiting requests, and of running ones, which have a slot and pages."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection, Iterator
from itertools import chain
from operator import attrgetter

from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache
from sglang_lite.runtime.requests.request import Request, State


class Queues:
    """Requests that have not ended, by stage.

    Args:
        store: pages, slots and radix tree.

    Attributes:
        returned: waiting requests that precede others: retracted ones, and those of programs that
            keep their prefix, by rank.
        waiting: all other waiting requests, in their order.
        prefilling, decoding: running requests in these stages.
    """

    def __init__(self, store: PrefixCache) -> None:
        self._store = store
        self.returned: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []

    def __iter__(self) -> Iterator[Request]:
        return chain(self.returned, self.waiting, self.running())

    def running(self) -> Iterator[Request]:
        return chain(self.prefilling, self.decoding)

    @property
    def has_running(self) -> bool:
        return bool(self.prefilling or self.decoding)

    @property
    def has_waiting(self) -> bool:
        return bool(self.returned or self.waiting)

    @property
    def idle(self) -> bool:
        return not (self.returned or self.waiting or self.prefilling or self.decoding)

    def queue_waiting(self, request: Request) -> None:
        """Queues a request after all waiting ones."""
        request.change_state(State.WAITING)
        self.waiting.append(request)

    def queue_returned(self, request: Request, state: State) -> None:
        """Changes a request's state to `state`, and queues it by rank among the returned requests.
        Returned requests go before those that have not begun.
        """
        request.change_state(state)
        insort(self.returned, request, key=attrgetter("rank"))

    def remove_waiting(self, request: Request) -> None:
        """Removes a waiting request."""
        if request in self.returned:
            self.returned.remove(request)
        else:
            self.waiting.remove(request)

    def remove_admitted(self, admitted: Collection[Request]) -> None:
        """Removes admitted requests from the waiting ones, and counts how often each of the others
        was passed over.
        """
        if not admitted:
            return
        gone = set(map(id, admitted))
        before = len(self.returned)
        self.returned = [r for r in self.returned if id(r) not in gone]
        count = len(admitted) - (before - len(self.returned))
        passed: list[Request] = []
        while count:
            request = self.waiting.popleft()
            if id(request) in gone:
                count -= 1
            else:
                request.passed_over += 1
                passed.append(request)
        self.waiting.extendleft(reversed(passed))

    def queue_prefilling(self, request: Request) -> None:
        """Queues a request that has a slot, to compute its tokens."""
        request.change_state(State.PREFILLING)
        self.prefilling.append(request)

    def move_to_decoding(self, request: Request) -> None:
        """Moves a request from the prefilling to the decoding ones, once all its tokens are
        computed.
        """
        request.change_state(State.DECODING)
        self.prefilling.remove(request)
        self.decoding.append(request)

    def move_to_end_of_decoding(self, served: Collection[Request]) -> None:
        """Moves decoding requests, in the given order, after the other ones."""
        ids = {request.id for request in served}
        self.decoding = [*(r for r in self.decoding if r.id not in ids), *served]

    def remove_running(self, request: Request) -> None:
        """Removes a running request from its queue. It keeps its slot and pages."""
        (self.prefilling if request.state is State.PREFILLING else self.decoding).remove(request)

    def stop(self, request: Request) -> None:
        """Removes a running request from its queue and frees its slot and pages; its prefix goes
        into the tree.
        """
        self.remove_running(request)
        assert request.handle is not None
        slot = request.slot
        table = self._store.table
        request.tokens = table.tokens[slot, : table.known[slot]].copy()
        self._store.release_request(request.handle)
        request.handle = None
