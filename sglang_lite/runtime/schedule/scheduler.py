"""What runs next: admission, the batch of a step, retraction.

Owns the queues and the KV store. Knows nothing of models, text or threads: `plan` gives a batch, and the loop reports
back what came of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import TypeAlias

import numpy as np

from sglang_lite.runtime.cache.pages import Ints
from sglang_lite.runtime.cache.store import KVStore
from sglang_lite.runtime.request import Request, State
from sglang_lite.runtime.schedule.batch import Batch

Row: TypeAlias = tuple[Request, int, int]  # positions start … end-1 are computed

# Tokens that admission keeps free for each running request, so that it is not retracted at once.
_HEADROOM = 32


class Scheduler:
    """
    Every request fits the pool by itself (the engine refuses others), and of two that compete for pages the one
    admitted first wins. So the oldest running request always goes on, and all end.

    Args:
        store: pages and slots.
        step_tokens: most tokens in a step; running requests come first, prompts share what is left.
    """

    def __init__(self, store: KVStore, step_tokens: int) -> None:
        self.store = store
        self._step_tokens = step_tokens
        self._admissions = 0
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.prefilling or self.decoding)

    def requests(self) -> Iterator[Request]:
        """All that have not ended."""
        return chain(self.waiting, self.prefilling, self.decoding)

    def add(self, request: Request) -> None:
        request.move(State.WAITING)
        self.waiting.append(request)

    def plan(self) -> Batch | None:
        """The next step, with its pages reserved; None when nothing can run."""
        decoding = self._with_pages(list(self.decoding))
        admitted = self._admit()
        budget = self._step_tokens - len(decoding)
        table = self.store.table
        chunks: list[Row] = []
        for request in list(self.prefilling):
            if request.state is not State.PREFILLING:
                continue  # retracted for one before it
            start = int(table.computed[request.slot])
            end = min(int(table.length[request.slot]), start + budget)
            if end > start and self._make_room(request, end):
                chunks.append((request, start, end))
                budget -= end - start
        running = [r for r in decoding if r.state is State.DECODING]
        rows = [(r, int(table.computed[r.slot]), int(table.length[r.slot])) for r in running]
        chunks = [c for c in chunks if c[0].state is State.PREFILLING]
        singles = rows + [c for c in chunks if c[2] - c[1] == 1]
        extends = [c for c in chunks if c[2] - c[1] > 1]
        return self._batch(singles, extends, admitted) if singles or extends else None

    def computed(self, batch: Batch) -> None:
        """The batch's tokens have keys and values now. Prompts that are through go on decoding."""
        self.store.table.computed[batch.slots] = batch.ends
        through = batch.ends == self.store.table.length[batch.slots]
        for request, done in zip(batch.requests, through.tolist()):
            if request.state is State.PREFILLING and request.holding is not None:
                self.store.publish(request.holding)
                if done:
                    request.move(State.DECODING)
                    request.first_token_at = request.first_token_at or time.perf_counter()
                    self.prefilling.remove(request)
                    self.decoding.append(request)

    def append(self, slots: Ints, tokens: Ints) -> None:
        """One more known token for each of these slots."""
        table = self.store.table
        table.tokens[slots, table.length[slots]] = tokens
        table.length[slots] += 1

    def finish(self, request: Request, end: State) -> None:
        """Takes a request out, wherever it is, and frees what it holds."""
        if request.state in (State.WAITING, State.RETRACTED):
            self.waiting.remove(request)
        elif request.state is not State.COMPILING:
            self._stop(request)
        request.move(end)

    def retract(self, request: Request) -> None:
        """Puts a running request back to the front of the queue. Its prefix stays in the tree while there is room."""
        self._stop(request)
        request.move(State.RETRACTED)
        self.waiting.appendleft(request)

    def _stop(self, request: Request) -> None:
        (self.prefilling if request.state is State.PREFILLING else self.decoding).remove(request)
        assert request.holding is not None
        slot = request.slot
        request.tokens = self.store.table.tokens[slot, : self.store.table.length[slot]].copy()
        self.store.release(request.holding)
        request.holding = None

    def _batch(self, singles: list[Row], extends: list[Row], admitted: list[Request]) -> Batch:
        self.store.step += 1
        rows = singles + extends
        table = self.store.table
        slots = np.array([r.slot for r, _, _ in rows], dtype=np.int32)
        ends = np.array([end for _, _, end in rows], dtype=np.int32)
        return Batch(
            step=self.store.step,
            requests=tuple(r for r, _, _ in rows),
            slots=slots,
            starts=np.array([start for _, start, _ in rows], dtype=np.int32),
            ends=ends,
            singles=len(singles),
            samples=(ends == table.length[slots]) & (ends < table.limit[slots]),
            admitted=tuple(r for r in admitted if r.holding is not None),
        )

    def _with_pages(self, decoding: list[Request]) -> list[Request]:
        """Those that have, or could be given, a page for the token to compute. In the common case one allocation."""
        table, size = self.store.table, self.store.page_size
        slots = np.array([r.slot for r in decoding], dtype=np.int32)
        short = slots[-(-table.length[slots] // size) > table.held[slots]]
        if not len(short):
            return decoding
        pages = self.store.allocate(len(short))
        if pages is not None:
            table.pages[short, table.held[short]] = pages
            table.held[short] += 1
            return decoding
        decoding.sort(key=lambda r: r.admission)
        return [r for r in decoding if r.state is State.DECODING and self._make_room(r, int(table.length[r.slot]))]

    def _make_room(self, request: Request, end: int) -> bool:
        """Reserves positions before `end`, retracting those admitted after `request`. False: it has to wait."""
        while not self.store.reserve(request.slot, end):
            last = max(chain(self.prefilling, self.decoding), key=lambda r: r.admission)
            if last is request:
                return False
            self.retract(last)
        return True

    def _admit(self) -> list[Request]:
        """Starts waiting requests, first come first served, while slots and pages last."""
        admitted: list[Request] = []
        store, table = self.store, self.store.table
        size = store.page_size
        running = np.array([r.slot for r in chain(self.prefilling, self.decoding)], dtype=np.int32)
        growth = np.minimum(table.limit[running] - table.length[running], _HEADROOM)
        missing = -(-(table.length[running] + growth) // size) - table.held[running]
        promised = int(missing.sum())
        while self.waiting and table.free:
            request = self.waiting[0]
            tokens = request.tokens
            reusable = tokens if request.score_from is None else tokens[: max(request.score_from, 1)]
            match = store.match(reusable, request.namespace)
            needed = -(-min(len(tokens) + _HEADROOM, request.limit) // size) - len(match.pages)
            with store.tree.lock(match.node):  # what it reuses can't be evicted for it
                if needed > store.available - promised and (self.prefilling or self.decoding):
                    break
            self.waiting.popleft()
            self._admissions += 1
            request.admission = self._admissions
            request.holding = store.admit(tokens, match, request.namespace)
            table.limit[request.slot] = request.limit
            table.watched[request.slot] = request.watched
            request.started_at = request.started_at or time.perf_counter()
            if request.cached_tokens < 0:
                request.cached_tokens = len(match.pages) * size
            request.move(State.PREFILLING)
            self.prefilling.append(request)
            admitted.append(request)
            promised += needed
        return admitted
