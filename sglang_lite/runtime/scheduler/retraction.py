"""Retraction: if no prefix can be evicted and no program is away too long, the paused program or
running request that ranks last gives up pages. A running request also gives up its slot, and waits
again.

The computed pages of a retracted request go into the radix tree. When the request continues, it
recomputes only the pages that the tree no longer has, and its output does not change.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

import numpy as np

from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache
from sglang_lite.runtime.requests.request import Request, State
from sglang_lite.runtime.scheduler.page_reserve import PageReserve
from sglang_lite.runtime.scheduler.pauses import Pauses
from sglang_lite.runtime.scheduler.queues import Queues


class Retraction:
    """Makes pages available for running requests. If necessary, takes pages from programs that are
    paused or that came later.

    Ranks sort by priority, then by age. Of two requests that compete for pages, the one with the
    smaller rank wins. So the oldest running request of the highest priority always advances.

    Args:
        store: pages, slots and radix tree.
        queues: requests; running ones may be retracted.
        pauses: paused branches of programs.
        reserve: admission's estimate of growth, which a retraction corrects.

    Attributes:
        stateless: number of requests retracted so far because they had no state to continue from.
    """

    def __init__(
        self, store: PrefixCache, queues: Queues, pauses: Pauses, reserve: PageReserve
    ) -> None:
        self._store = store
        self._queues = queues
        self._pauses = pauses
        self._reserve = reserve
        self.stateless = 0

    def retract_request(self, request: Request) -> None:
        """Moves a running request to the queue of requests that wait to continue. Its prefix goes
        into the tree. If the request belongs to a program, its prefix stays locked.
        """
        self._queues.stop(request)
        if request.branch is not None:
            self._pauses.begin_pause(request.branch, request.tokens, request.space)
        self._queues.queue_returned(request, State.RETRACTED)

    def retract_requests_lacking_window(self) -> None:
        """Retracts requests that lack pages of their window. After a request has dropped tokens,
        its window may begin in pages that it has already released.
        """
        if self._store.windows is None:
            return
        running = list(self._queues.running())
        for i in self._store.slots_lacking_window(request_slots(running)):
            self.retract_request(running[i])

    def restore_states(self) -> None:
        """Makes running requests recompute the tokens after their last state, if tokens were taken
        back. Retracts requests that have no state on their own pages.
        """
        running = list(self._queues.running())
        for i in self._store.slots_lacking_state(request_slots(running)):
            self.restore_state(running[i])

    def restore_state(self, request: Request) -> bool:
        """Does the work of `restore_states` for one request, if necessary. Returns False if the
        request was retracted.
        """
        if not self._store.slots_lacking_state(request_slots([request])):
            return True
        assert request.handle is not None
        if not self._store.return_to_state(request.handle):
            self.stateless += 1
            self.retract_request(request)
            return False
        table = self._store.table
        left = table.length[request.slot] - table.computed[request.slot]
        if request.state is State.DECODING and left > 1:
            self._queues.remove_running(request)
            self._queues.queue_prefilling(request)
        return True

    def retract_all(self) -> list[Request]:
        """Retracts all running requests, and returns them in the order of their admission."""
        requests = sorted(self._queues.running(), key=lambda r: r.admission)
        for request in reversed(requests):
            self.retract_request(request)
        return requests

    def allocate_next_pages(self, decoding: list[Request]) -> list[Request]:
        """Allocates a page for the token that each decoding request computes, if it needs one.
        Returns the requests that have a page for that token.
        """
        if not decoding:
            return decoding
        table = self._store.table
        size = self._store.page_size
        slots = request_slots(decoding)
        short = slots[-(-table.length[slots] // size) > table.page_count[slots]]
        if not len(short):
            return decoding
        pages = self._store.allocate(len(short))
        if pages is not None:
            table.pages[short, table.page_count[short]] = pages
            table.page_count[short] += 1
            return decoding
        wanting = set(short.tolist())
        waits = set[int]()
        for request in sorted((r for r in decoding if r.slot in wanting), key=_order):
            if request.state is not State.DECODING:
                continue  # retracted to make room for an earlier request
            if waits or not self.reserve_pages_for(request, int(table.length[request.slot])):
                # all later requests wait, too: they may not take its pages
                waits.add(request.id)
        return [r for r in decoding if r.state is State.DECODING and r.id not in waits]

    def reserve_pages_for(self, request: Request, end: int) -> bool:
        """Reserves pages for the first `end` tokens of a running request. Returns False if it has
        to wait.
        """
        while not self._store.reserve_pages(request.slot, end):
            # pages are in quarantine until a step has ended
            if self._store.will_have_pages(request.slot, end):
                return False
            short = -(-end // self._store.page_size) - int(
                self._store.table.page_count[request.slot]
            )
            # at most 0 if only window pages are short; paused branches keep none of these locked
            short -= self._store.available
            if short > 0 and self._pauses.release_overdue_pages(short):
                continue
            last = max(self._queues.running(), key=_order)
            # Paused programs that rank after the last running request give way. If that request is
            # the one that needs pages, any paused program gives way.
            if short > 0 and self._pauses.release_lowest_ranked_pages(
                short, None if last is request else last.rank
            ):
                continue
            if last is request:
                if self._store.pop_pending_copies(request.slot):
                    continue  # cancelling copies has unlocked pages, which can be evicted
                return False
            table = self._store.table
            slots = request_slots(self._queues.decoding)
            self._reserve.raise_reserved_share(table.length[slots], table.limit[slots])
            self.retract_request(last)
        return True


def request_slots(requests: Iterable[Request]) -> Ints:
    """Returns the slots of running requests, int32 [R]."""
    return np.fromiter(map(_SLOT, requests), dtype=np.int32)


_SLOT = attrgetter("handle.slot")
_order = attrgetter("rank", "admission")
