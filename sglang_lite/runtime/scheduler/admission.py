"""Admission of waiting requests: each gets a slot, what the cache has of its prompt, and a promise of pages."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache
from sglang_lite.runtime.kv_cache.slot_table import SlotTable
from sglang_lite.runtime.requests.request import Request, StreamPace
from sglang_lite.runtime.requests.schedule_hints import ScheduleHints
from sglang_lite.runtime.scheduler.admission_order import Policy
from sglang_lite.runtime.scheduler.page_reserve import PageReserve
from sglang_lite.runtime.scheduler.prefix_locks import PrefixLocks
from sglang_lite.runtime.scheduler.queues import Queues
from sglang_lite.runtime.scheduler.retraction import slots_of

# A request waits if another one is computing at least this many tokens of its prompt, to find them in the cache.
_SHARED = 32
PATIENCE = 32  # plans for which a request waits for room while prefixes are locked for programs


class Admission:
    """Admission of requests while pages last for them and for the expected growth of those that run.

    Args:
        store: pages, slots and radix tree.
        queues: requests, of which waiting ones may be admitted.
        prefix_locks: prefixes of programs, which give way to a request that was refused often enough.
        reserve: estimate of growth.
        policy: order of admission.

    Attributes:
        solo_request: id of the request that was admitted last, if no other ran or waited then, else -1.
        prompt_tokens, prompt_tokens_cached: tokens of all prompts so far, and those of them that the cache had.
    """

    def __init__(
        self, store: PrefixCache, queues: Queues, prefix_locks: PrefixLocks, reserve: PageReserve, policy: Policy
    ) -> None:
        self._store, self._queues, self._prefix_locks = store, queues, prefix_locks
        self._reserve, self._policy = reserve, policy
        self._refused = 0  # consecutive plans that refused the next request because prefixes are locked
        self._admissions = 0
        self._started: list[Request] = []
        self.solo_request = -1
        self.prompt_tokens = self.prompt_tokens_cached = 0

    @property
    def refuses(self) -> bool:
        """True while the next request may not yet evict locked prefixes (for `PATIENCE` plans)."""
        return self._refused > 0

    def admit(self, alone: Request | None = None) -> None:
        """Admits waiting requests in the policy's order while slots and pages last.

        Args:
            alone: only request that may be admitted, or None for no such limit.
        """
        store, table = self._store, self._store.table
        if not self._queues.waiting or not table.free:
            return
        size = store.page_size
        counted = {*self._prefix_locks, *(r.hints for r in self._queues.running() if r.hints is not None)}
        promised = self._growth() + sum(map(self.expected_pages, counted))
        admitted: list[Request] = []
        prefilling = {r.slot: r for r in self._queues.prefilling}
        if alone is None:
            candidates = self._policy(self._queues.waiting, store.tree)
        else:
            candidates = [alone] if alone.handle is None else []
        for request in candidates:
            if not table.free:
                break
            tokens = request.tokens
            reusable = tokens if request.score_from is None else tokens[: max(request.score_from, 1)]
            match = store.match(reusable, request.namespace)
            cached = len(match.pages) * size + (0 if match.tail is None else match.tail.count)
            if store.reuses and _computes(prefilling, table, reusable, cached, request.namespace):
                continue
            expected = len(tokens) + self._reserve.of_request(len(tokens), request.limit)
            needed = -(-expected // size) - len(match.pages)
            expected = 0
            if request.hints is not None and request.hints not in counted:
                expected = self.expected_pages(request.hints)
                counted.add(request.hints)
            with store.tree.lock(match.node):  # so that its own prefix is not evicted to make room for it
                busy = self._queues.running_any or (len(self._prefix_locks) > 0 and self._refused <= PATIENCE)
                while (full := needed + expected > store.available - promised) and busy and self._release_prefix():
                    pass
                if full and busy:
                    break
            needed += expected
            self._admissions += 1
            request.admission = self._admissions
            request.handle = store.admit(tokens, match, request.namespace)
            self._refused = 0
            request.times.started = request.times.started or time.perf_counter()
            if request.cached_tokens < 0:
                request.cached_tokens = min(int(table.computed[request.slot]), request.prompt_len)
                prompt = tokens[: request.prompt_len]
                request.miss = store.miss(prompt, min(len(reusable), len(prompt)) - 1, match, request.handle)
                self.count(request)
            self.start(request)
            prefilling[request.slot] = request
            admitted.append(request)
            promised += needed
        self._queues.leave_waiting(admitted)
        queues = self._queues
        solo = len(admitted) == 1 and queues.prefilling == admitted and not (queues.waiting or queues.decoding)
        self.solo_request = admitted[0].id if solo and admitted[0].ending is None else -1

    def _growth(self) -> int:
        """Number of pages that running requests are expected to need, in addition to those that they have."""
        table, slots = self._store.table, slots_of(self._queues.running())
        ends = table.length[slots] + self._reserve.growth(table.length[slots], table.limit[slots])
        return int((-(-ends // self._store.page_size) - table.page_count[slots]).sum())

    def count(self, request: Request) -> None:
        """Counts the tokens of a request's prompt, once it is known which are cached."""
        self.prompt_tokens += request.prompt_len
        self.prompt_tokens_cached += request.cached_tokens

    def start(self, request: Request) -> None:
        """Queues a request that has a slot for prefill."""
        table, slot = self._store.table, request.slot
        table.limit[slot] = request.limit
        if request.skips_last_token and table.computed[slot] < request.limit - 1:
            table.length[slot] = table.limit[slot] = request.limit - 1
        table.watched[slot] = request.watched
        table.paced[slot] = StreamPace.FIRST_TOKEN if request.paced else StreamPace.NONE
        table.streamed[slot] = request.output.stream
        table.scored[slot] = request.scored
        self._queues.prefill(request)
        self._started.append(request)
        if request.hints is not None:
            self._prefix_locks.release(request.hints)

    def take_started(self) -> list[Request]:
        """Returns the requests that were given their slot since the last call."""
        started, self._started = self._started, []
        return started

    def expected_pages(self, hints: ScheduleHints) -> int:
        """Number of pages to reserve for the queued nodes of a branch, at most half of all pages."""
        return min(-(-self._reserve.of_program(hints.expected) // self._store.page_size), self._store.pool.total // 2)

    def _release_prefix(self) -> bool:
        """Releases a locked prefix for a request that was refused often enough. Returns False if it has to wait."""
        if not len(self._prefix_locks):
            return False
        self._refused += 1
        return self._refused > PATIENCE and self._prefix_locks.release_oldest()


def _computes(prefilling: Mapping[int, Request], table: SlotTable, tokens: Ints, matched: int, namespace: str) -> bool:
    """Returns True if a prefilling request will soon cache at least `_SHARED` more tokens of this prompt, so that
    waiting pays.

    Args:
        prefilling: prefilling requests by slot.
        table: slot table with their tokens.
        tokens: reusable tokens of the prompt.
        matched: number of those that are cached.
        namespace: namespace in the radix tree.
    """
    end = matched + _SHARED
    if len(tokens) <= end or not prefilling:
        return False
    alike = (table.tokens[:, end - 1] == tokens[end - 1]).nonzero()[0].tolist()  # prompts mostly differ at this token
    return any(
        len(other.tokens) >= end
        and other.namespace == namespace
        and np.array_equal(other.tokens[matched:end], tokens[matched:end])
        and np.array_equal(other.tokens[:matched], tokens[:matched])
        for other in map(prefilling.get, alike)
        if other is not None
    )
