"""Scheduler: admission, and the batch of each step.

Owns the queues and the KV cache, and is independent of models, text and threads: `plan` returns a batch, and the loop
reports its results. A batch may be planned while the tokens of the step before are not known yet.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache
from sglang_lite.runtime.kv_cache.slot_table import SlotTable
from sglang_lite.runtime.requests.request import Request, State, StreamPace
from sglang_lite.runtime.requests.schedule_hints import ScheduleHints
from sglang_lite.runtime.scheduler.admission_order import Policy
from sglang_lite.runtime.scheduler.batch import Batch
from sglang_lite.runtime.scheduler.held_prefixes import HeldPrefixes
from sglang_lite.runtime.scheduler.oom_isolation import Isolation
from sglang_lite.runtime.scheduler.page_reserve import PageReserve
from sglang_lite.runtime.scheduler.queues import Queues
from sglang_lite.runtime.scheduler.retraction import Retraction, slots_of
from sglang_lite.runtime.scheduler.step_pace import StepPace

Row: TypeAlias = tuple[Request, int, int]  # request, start, end: positions start … end-1 are computed

# A request waits if another one is computing at least this many tokens of its prompt, to find them in the cache.
_SHARED = 32
PATIENCE = 32  # plans for which a request waits for room while prefixes are held for programs
ISOLATED_TOKENS = 512  # maximum number of tokens in a step of an isolated request


class Scheduler:
    """Queues of requests, and planner of each step's batch.

    Every request fits the pool by itself (the engine refuses others), and the oldest running request always advances
    (retraction.py). So all requests end.

    Args:
        store: pages, slots and prefix tree.
        step_tokens: maximum number of tokens in a step; decoding rows come first, prompts share the rest.
        policy: order of admission.
        last_alone: whether the last token of a prompt that runs alone has its own step, as after a full cache hit, so
            that outputs have the same bits with and without the cache.
        pace: limit for steps with streams; None if steps are short enough without.

    Attributes:
        queues: requests that have not ended.
        held_prefixes: locked prefixes of programs.
        retraction: makes room for running requests.
    """

    def __init__(
        self,
        store: PrefixCache,
        step_tokens: int,
        policy: Policy,
        *,
        last_alone: bool = False,
        pace: StepPace | None = None,
    ) -> None:
        self.store, self._policy = store, policy
        self._step_tokens, self._last_alone, self._pace = step_tokens, last_alone, pace
        self._solo_request = -1  # id of the last request that was admitted while no other ran or waited
        self._reserve = PageReserve()
        self.held_prefixes = HeldPrefixes(store)
        self._refused = 0  # consecutive plans that refused the next request because prefixes are held
        self._admissions = 0
        self._started: list[Request] = []
        self._isolation = Isolation()
        self.queues = Queues(store)
        self.retraction = Retraction(store, self.queues, self.held_prefixes, self._reserve)

    @property
    def waits(self) -> bool:
        """True if nothing runs because waiting requests may not yet evict held prefixes (for `PATIENCE` plans)."""
        return not self.queues.running_any and bool(self.queues.waiting) and self._refused > 0

    def add(self, request: Request) -> None:
        self.queues.wait(request)

    def plan(self) -> Batch | None:
        """Returns the batch of the next step, with its pages reserved, or None if nothing can run."""
        while self._isolation.advance(self.store.table):
            self.retraction.retract_all()  # the isolated request, or the one that continues in its slot
        self.held_prefixes.settle()
        decoding = self.retraction.with_next_pages(self._in_turn(self._ready()))
        self._reserve.decay()
        self._admit()
        budget = self._budget(decoding)
        table = self.store.table
        chunks: list[Row] = []
        for request in list(self.queues.prefilling):
            if request.state is not State.PREFILLING:
                continue  # retracted to make room for a request before it
            start = int(table.computed[request.slot])
            end, cost = _reach(request, start, int(table.length[request.slot]), budget)
            if request.id == self._solo_request and start < request.prompt_len and end == table.length[request.slot]:
                end = max(end - 1, start + 1)
            if end > start and self.retraction.make_room(request, end):
                chunks.append((request, start, end))
                budget -= cost
        decoding = [r for r in decoding if r.state is State.DECODING]
        chunks = [c for c in chunks if c[0].state is State.PREFILLING]
        return self._batch(decoding, chunks) if decoding or chunks else None

    def _budget(self, decoding: list[Request]) -> int:
        """Number of prompt tokens that a step may compute in addition to the decoding rows."""
        most = (min(self._step_tokens, ISOLATED_TOKENS) if self.isolated else self._step_tokens) - len(decoding)
        streams = _streams(self.store.table, decoding)
        if self._pace is None or not streams:
            return most
        return min(most, self._pace.room(streams) - (len(decoding) - streams))

    def record_duration(self, batch: Batch, seconds: float) -> None:
        """Records the duration of a step, to pace later steps."""
        if self._pace is not None and batch.streams:
            self._pace.record_duration(batch.tokens, seconds, streams=batch.streams)

    def remaining_s(self, batch: Batch, seconds: float) -> float:
        """Remaining seconds of a step with streams, `seconds` after its start; infinite without streams."""
        return self._pace.remaining_s(seconds) if self._pace is not None and batch.streams else math.inf

    def record_launch(self, batch: Batch) -> list[int]:
        """Records that later steps see the batch's keys and values. Returns the rows whose prompts are complete."""
        table = self.store.table
        table.computed[batch.slots] = batch.ends
        complete: list[int] = []
        for row in range(batch.decoding, len(batch.requests)):
            request = batch.requests[row]
            assert request.handle is not None
            if batch.starts[row] < request.prompt_len:  # generated tokens are published when the request ends
                self.store.publish(request.handle, all_but_last=request.may_recompute_last)
            if batch.ends[row] == table.length[request.slot]:
                self.queues.decode(request)
                complete.append(row)
        return complete

    def live(self, batch: Batch) -> NDArray[np.bool_]:
        """Mask of the rows whose slots still have the same request and tokens as when the batch was planned."""
        rows: NDArray[np.bool_] = self.store.table.epoch[batch.slots] == batch.epochs
        return rows

    def count_draws(self, slots: Ints) -> None:
        """Counts one more token for each of these slots; its id is recorded later by `record_tokens`."""
        self.store.table.length[slots] += 1

    def recompute_last(self, slots: Ints) -> None:
        """Schedules the last token of these slots, after which none was drawn, to be computed again."""
        self.store.table.computed[slots] -= 1

    def record_tokens(self, slots: Ints, tokens: Ints) -> None:
        """Records the ids of drawn tokens, one per slot."""
        table = self.store.table
        table.tokens[slots, table.known[slots]] = tokens
        table.known[slots] += 1

    def append(self, request: Request, tokens: list[int]) -> None:
        """Appends tokens to a decoding request, to be computed like a prompt. Voids a draw that was planned for it."""
        table, slot = self.store.table, request.slot
        known = int(table.known[slot])
        table.tokens[slot, known : known + len(tokens)] = tokens
        table.known[slot] = table.length[slot] = known + len(tokens)
        table.epoch[slot] += 1
        self.queues.leave_running(request)
        self.queues.prefill(request)

    def finish(self, request: Request, end: State) -> None:
        """Removes a request, whose final state is `end`, from its queue, and frees its slot and pages."""
        if request.state in (State.WAITING, State.RETRACTED):
            self.queues.waiting.remove(request)
        elif request.state is not State.COMPILING:
            self.queues.stop(request)
            if end is State.FINISHED and request.hints is not None and request.hints.returns:
                scored = request.score_from if request.limit == request.prompt_len else None
                self.held_prefixes.want(request.hints, request.tokens[:scored], request.namespace)
        request.move(end)

    def continue_in_slot(self, request: Request, following: Request) -> None:
        """Finishes a request and continues with another one in its slot, from the end of their common prefix; if that
        would change shared pages, the other one waits for admission."""
        table, slot, handle, tokens = self.store.table, request.slot, request.handle, following.tokens
        assert handle is not None
        common = _common(table.tokens[slot, : table.known[slot]], tokens)
        if common < handle.owned_from * self.store.page_size:  # pages of the tree, which others may read, would change
            self.finish(request, State.FINISHED)
            self.queues.wait_first(following, State.WAITING)
            return
        request.tokens = table.tokens[slot, : table.known[slot]].copy()
        self.queues.leave_running(request)
        request.move(State.FINISHED)
        request.handle = None
        table.tokens[slot, common : len(tokens)] = tokens[common:]
        table.length[slot] = table.known[slot] = len(tokens)
        table.computed[slot] = min(int(table.computed[slot]), common, len(tokens) - 1)
        table.epoch[slot] += 1
        self.store.publish(handle)  # for branches that fork here
        self.store.adopt_cached_pages(handle)  # an earlier run of the same program may have left more in the cache
        following.handle = handle
        following.admission = request.admission
        following.times.started = time.perf_counter()
        following.cached_tokens = int(table.computed[slot])
        following.miss = self.store.miss_in_place(tokens, handle)
        following.move(State.WAITING)
        self._start(following)

    def flush(self) -> int:
        """Evicts every prefix that no request uses, also held ones. Returns the number of freed pages."""
        self.held_prefixes.clear()
        return self.store.flush()

    def isolate(self) -> None:
        """Retracts all running requests after an out-of-memory error, and runs them one by one."""
        self._isolation.begin(self.retraction.retract_all())

    @property
    def isolated(self) -> bool:
        """True while requests run one by one after an out-of-memory error."""
        return bool(self._isolation)

    def _batch(self, decoding: list[Request], chunks: list[Row]) -> Batch:
        self.store.step += 1
        table = self.store.table
        singles = [c for c in chunks if c[2] - c[1] == 1]
        chunks = singles + [c for c in chunks if c[2] - c[1] > 1]
        requests = decoding + [c[0] for c in chunks]
        slots = np.array([r.slot for r in requests], dtype=np.int32)
        starts, ends = table.computed[slots], table.length[slots].copy()
        ends[len(decoding) :] = [c[2] for c in chunks]
        started, self._started = self._started, []
        return Batch(
            step=self.store.step,
            requests=tuple(requests),
            slots=slots,
            epochs=table.epoch[slots],
            starts=starts,
            ends=ends,
            decoding=len(decoding),
            singles=len(decoding) + len(singles),
            draws=(ends == table.length[slots]) & (ends < table.limit[slots]),
            pending=ends > table.known[slots],
            started=tuple(r for r in started if r.handle is not None),
            copies=self.store.take_copies(),
            streams=_streams(self.store.table, decoding),
        )

    def _ready(self) -> list[Request]:
        """Decoding requests that have a token to compute and have not reached their limit."""
        table = self.store.table
        slots = slots_of(self.queues.decoding)
        waiting = table.length[slots] >= table.limit[slots]  # for the id of the last token
        if not waiting.any():
            return list(self.queues.decoding)
        return [r for r, w in zip(self.queues.decoding, waiting.tolist()) if not w]

    def _in_turn(self, ready: list[Request]) -> list[Request]:
        """Every streaming request, and as many other ones as the time of a step allows, in turn."""
        streams = _streams(self.store.table, ready)
        if self._pace is None or not streams:
            return ready
        room = self._pace.room(streams)
        chosen = [r for r in ready if not r.output.stream][: room // 2 if self.queues.prefilling else room]
        served = {r.id for r in chosen}
        self.queues.move_back(chosen)
        return [r for r in ready if r.output.stream or r.id in served]

    def _admit(self) -> None:
        """Admits waiting requests in the policy's order while slots and pages last."""
        store, table = self.store, self.store.table
        if not self.queues.waiting or not table.free:
            return
        size = store.page_size
        slots = slots_of(self.queues.running())
        growth = self._reserve.growth(table.length[slots], table.limit[slots])
        promised = int((-(-(table.length[slots] + growth) // size) - table.held[slots]).sum())
        counted = {*self.held_prefixes, *(r.hints for r in self.queues.running() if r.hints is not None)}
        promised += sum(map(self.expected_pages, counted))
        admitted: list[Request] = []
        prefilling = {r.slot: r for r in self.queues.prefilling}
        candidates = self._policy(self.queues.waiting, store.tree)
        if self.isolated:
            candidates = [r for r in (self._isolation.next,) if r is not None and r.handle is None]
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
                busy = self.queues.running_any or (len(self.held_prefixes) > 0 and self._refused <= PATIENCE)
                while (full := needed + expected > store.available - promised) and busy and self._release_held():
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
            self._start(request)
            prefilling[request.slot] = request
            admitted.append(request)
            promised += needed
        self.queues.leave_waiting(admitted)
        if self._last_alone:
            alone = len(admitted) == 1 and [*self.queues] == admitted and admitted[0].ending is None
            self._solo_request = admitted[0].id if alone else -1

    def _start(self, request: Request) -> None:
        table, slot = self.store.table, request.slot
        table.limit[slot] = request.limit
        if request.skips_last_token and table.computed[slot] < request.limit - 1:
            table.length[slot] = table.limit[slot] = request.limit - 1
        table.watched[slot] = request.watched
        table.paced[slot] = StreamPace.AT_ONCE if request.paced else StreamPace.NONE
        table.streamed[slot] = request.output.stream
        self.queues.prefill(request)
        self._started.append(request)
        if request.hints is not None:
            self.held_prefixes.release(request.hints)

    def expected_pages(self, hints: ScheduleHints) -> int:
        """Number of pages to reserve for the queued nodes of a branch, at most half of all pages."""
        return min(-(-self._reserve.of_program(hints.expected) // self.store.page_size), self.store.pool.total // 2)

    def _release_held(self) -> bool:
        """Releases a held prefix for a request that was refused often enough. Returns False if it has to wait."""
        if not len(self.held_prefixes):
            return False
        self._refused += 1
        return self._refused > PATIENCE and self.held_prefixes.give_way()


def _reach(request: Request, start: int, length: int, budget: int) -> tuple[int, int]:
    """End of the next chunk of a prompt within the budget, and its cost in tokens. Positions whose logits are wanted
    cost two, so that a step with them takes no longer than one without."""
    budget = max(budget, 0)
    if request.score_from is None:
        end = min(length, start + budget)
        return end, end - start
    plain = min(budget, max(request.score_from - 1 - start, 0))
    end = min(length, start + plain + (budget - plain + 1) // 2)
    return end, (end - start) + max(end - start - plain, 0)


def _computes(prefilling: Mapping[int, Request], table: SlotTable, tokens: Ints, matched: int, namespace: str) -> bool:
    """Returns True if a prefilling request will soon cache at least `_SHARED` more tokens of this prompt, so that
    waiting pays.

    Args:
        prefilling: prefilling requests by slot.
        table: slot table with their tokens.
        tokens: reusable tokens of the prompt.
        matched: number of those that are cached.
        namespace: namespace in the prefix tree.
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


def _streams(table: SlotTable, decoding: Iterable[Request]) -> int:
    """Number of requests that stream."""
    if not table.streamed.any():  # without a look at each
        return 0
    return sum(request.output.stream for request in decoding)


def _common(a: Ints, b: Ints) -> int:
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length
