"""Handover of a slot: the next request of a program continues in the slot of the one before."""

from __future__ import annotations

import time

from sglang_lite.runtime.kv_cache.cache_miss import continued
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache
from sglang_lite.runtime.requests.request import Request, State
from sglang_lite.runtime.scheduler.admission import Admission
from sglang_lite.runtime.scheduler.queues import Queues


class SlotHandover:
    """Starter of requests in the slots of others.

    Args:
        store: pages, slots and radix tree.
        queues: requests that have not ended.
        admission: counts and starts the requests.

    Attributes:
        appended_tokens: number of tokens that were appended to those in the slots.
    """

    def __init__(self, store: PrefixCache, queues: Queues, admission: Admission) -> None:
        self._store, self._queues, self._admission = store, queues, admission
        self.appended_tokens = 0

    def start(self, request: Request, following: Request, *, appended: bool) -> bool:
        """Starts the following request in the slot of a running one, which is finished.

        Args:
            request: request that has ended.
            following: the next one.
            appended: whether its tokens are those of the request, maybe without the last, and more.

        Returns:
            False if pages of the tree, which others may read, would change, or its keys and values are another
            adapter's. Nothing is done then.
        """
        store, table, slot, handle, tokens = (
            self._store,
            self._store.table,
            request.slot,
            request.handle,
            following.tokens,
        )
        assert handle is not None
        before = table.tokens[slot, : table.known[slot]]
        known = len(before)
        common = known - bool(tokens[known - 1] != before[-1]) if appended else _common(before, tokens)
        common = following.space.common(request.space, common)
        kept = max(handle.owned_from * store.page_size, 1)
        if common < kept or following.space.adapter is not request.space.adapter:
            return False
        request.tokens = before.copy()
        self._queues.leave_running(request)
        request.move(State.FINISHED)
        request.handle = None
        self.appended_tokens += len(tokens) - common
        table.tokens[slot, common : len(tokens)] = tokens[common:]
        table.length[slot] = table.known[slot] = len(tokens)
        table.computed[slot] = min(int(table.computed[slot]), common, len(tokens) - 1)
        table.epoch[slot] += 1
        handle.space = following.space
        if not appended or len(tokens) - common > store.page_size:  # else the next step gives its pages to the tree
            store.publish(handle)  # for branches that fork here
            store.adopt_cached_pages(handle)  # an earlier run of the same program may have left more in the cache
        following.handle, following.admission = handle, request.admission
        following.times.started = time.perf_counter()
        following.cache.tokens = int(table.computed[slot])
        cached = following.cache.tokens
        following.cache.miss = continued(tokens, cached) if cached < len(tokens) - 1 else None
        following.move(State.WAITING)
        self._admission.count(following)
        self._admission.start(following)
        return True


def _common(a: Ints, b: Ints) -> int:
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    at = int(differ.argmax()) if length else 0
    return at if length and differ[at] else length
