"""Scheduler: plans the batch of each step.

Owns the queues and the KV cache, and is independent of models, text and threads: `plan_batch`
returns a batch, and the loop reports its results. A batch may be planned before the tokens of the
previous step are known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.drafting.draft import Draft
from sglang_lite.runtime.drafting.drafting import Drafting
from sglang_lite.runtime.drafting.turns import Turns
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache
from sglang_lite.runtime.requests.request import Request, State
from sglang_lite.runtime.requests.resource import Resource
from sglang_lite.runtime.scheduler.admission import Admission
from sglang_lite.runtime.scheduler.admission_order import Policy
from sglang_lite.runtime.scheduler.batch import (
    NO_DRAFTS,
    Batch,
    Row,
    count_streaming_requests,
    make_batch,
)
from sglang_lite.runtime.scheduler.drafted_rows import DraftedRows
from sglang_lite.runtime.scheduler.oom_isolation import Isolation
from sglang_lite.runtime.scheduler.page_fetches import PageFetches
from sglang_lite.runtime.scheduler.page_reserve import PageReserve
from sglang_lite.runtime.scheduler.pauses import Pauses
from sglang_lite.runtime.scheduler.prompt_chunks import chunk_cost, chunk_end
from sglang_lite.runtime.scheduler.queues import Queues
from sglang_lite.runtime.scheduler.retraction import Retraction, request_slots
from sglang_lite.runtime.scheduler.slot_handover import start_in_slot
from sglang_lite.runtime.scheduler.step_pace import StepPace

ISOLATED_TOKENS = 512  # maximum number of tokens in a step of an isolated request


class Scheduler:
    """Queues of requests, and planner of each step's batch. Every request fits the pool when it
    runs alone (the engine rejects others), and the running request that ranks first always advances
    (retraction.py). So all requests end.

    Args:
        store: pages, slots and radix tree.
        queues: requests that wait for a slot or run.
        step_tokens: maximum number of tokens in a step; decoding rows come first, prompts share the
            rest.
        policy: order of admission.
        last_alone: whether the last token of a prompt that runs alone has its own step, as after a
            full cache hit, so that outputs have the same bits with and without the cache.
        pace: limit for steps with streams; None if steps are short enough without one.
        drafting: proposes tokens that may come next; None for no drafts. On a GPU, drafts delay the
            launch of a step, so they are used only while they save time.
        resources: resources that running requests hold in addition to a slot and pages.
        stages: number of concurrent steps, each with its own rows.

    Attributes:
        store, queues: the arguments of these names.
        pauses: paused branches of programs.
        admission: gives waiting requests slots and pages.
        fetches: fetches of pages that the device lacks.
        retraction: makes room for running requests.
        appended_tokens: number of tokens appended in a slot by requests that continue there.
        drafts: drafts of running requests, or None.
    """

    def __init__(
        self,
        store: PrefixCache,
        queues: Queues,
        step_tokens: int,
        policy: Policy,
        *,
        last_alone: bool = False,
        pace: StepPace | None = None,
        drafting: Drafting | None = None,
        resources: Sequence[Resource] = (),
        stages: int = 1,
    ) -> None:
        self.store = store
        self._stages = stages
        self._step_tokens = store.limit_chunk(step_tokens)
        self._last_alone = last_alone
        self._pace = pace
        self._reserve = PageReserve()
        self.pauses = Pauses(store, self._reserve)
        self._isolation = Isolation()
        self.queues = queues
        self.retraction = Retraction(store, self.queues, self.pauses, self._reserve)
        self._resources = resources
        self._cuts = (*(each.cut_chunk for each in resources), self._split_last_token)
        self.fetches = PageFetches(store, queues, self.pauses)
        self.admission = Admission(
            store, self.queues, self.pauses, self.fetches, self._reserve, policy, resources
        )
        self.appended_tokens = 0
        turns = Turns if pace is None else None
        self.drafts = None if drafting is None else DraftedRows(store, self.queues, drafting, turns)

    @property
    def idle(self) -> bool:
        """Whether there are no requests, and no pages being copied."""
        return self.queues.idle and not self.fetches.are_pending

    @property
    def may_plan_when_idle(self) -> bool:
        """Whether planning may have an effect even though there are no requests. That is the case
        if pauses are about to begin or the cache has a source of pages.
        """
        return self.pauses.has_requested_pauses or self.fetches.may_change_plan

    @property
    def may_wait(self) -> bool:
        """True if the loop may pause before the next plan. It may while pages are being copied, or
        if nothing runs because paused programs are expected soon.
        """
        if self.fetches.are_pending:
            return True
        return not self.queues.has_running and self.queues.has_waiting and self.admission.refuses

    def accept_request(self, request: Request) -> None:
        """Queues a request. If its program keeps its prefix, the request goes before those that
        have not begun.
        """
        branch = request.branch
        request.times.queued = self.pauses.now()
        self.fetches.read_ahead_for(request)
        self.admission.forget_refusal()
        if branch is None:
            self.queues.queue_waiting(request)
            return
        branch.program.arrival = min(branch.program.arrival, request.id)
        self.pauses.record_return(branch)
        if self.pauses.keeps_queue_position(branch):
            self.queues.queue_returned(request, State.WAITING)
        else:
            self.queues.queue_waiting(request)

    def plan_batch(self) -> Batch | None:
        """Returns the batch of the next step, with its pages reserved, or None if nothing can run."""
        retracted = self.retraction.stateless
        batch = self._plan_rows()
        while batch is None and self.retraction.stateless > retracted:
            # a request that was just retracted may be the only one that can run
            retracted = self.retraction.stateless
            batch = self._plan_rows()
        return batch

    def _plan_rows(self) -> Batch | None:
        """Does the work of `plan_batch`, but leaves out requests that it retracts because they lack
        a state.
        """
        self._apply_changes()
        decoding = self._select_decoding_requests()
        self._reserve.lower_reserved_share()
        self.admission.admit_requests(self._isolation.next)
        budget = self._prompt_budget(decoding)
        self.fetches.evict_ahead(2 * budget)
        chunks, budget = self._plan_prompt_chunks(budget)
        # leaves out requests that were retracted to make room for another request's prompt
        decoding = [r for r in decoding if r.state is State.DECODING]
        chunks = [c for c in chunks if c[0].state is State.PREFILLING]
        if not decoding and not chunks:
            return None
        started = self.admission.pop_started_requests()
        drafts = self._plan_drafts(decoding, chunks, budget)
        return make_batch(self.store, decoding, chunks, started, drafts)

    def _apply_changes(self) -> None:
        """Applies changes since the last plan, such as finished copies and requested pauses.
        Retracts requests that can't continue.
        """
        self.fetches.collect_arrived()
        while self._isolation.drop_cleared_suspect(self.store.table):
            # retracts the isolated request, or the one that continues in its slot
            self.retraction.retract_all()
        self.retraction.retract_requests_lacking_window()
        if self.store.states is not None:
            self.retraction.restore_states()
        self.pauses.begin_requested_pauses()
        self.fetches.fetch_for_pauses()

    def _select_decoding_requests(self) -> list[Request]:
        """Returns the requests that compute their last token in this step, each with a page for it."""
        ready = self._rotate_requests(self._requests_to_decode())
        return self.retraction.allocate_next_pages(ready)

    def _plan_prompt_chunks(self, budget: int) -> tuple[list[Row], int]:
        """Returns chunks of prompts that fit into a budget, and the rest of the budget. The chunks'
        pages are reserved.
        """
        table = self.store.table
        chunks: list[Row] = []
        for request in list(self.queues.prefilling):
            if request.state is not State.PREFILLING:
                continue  # retracted to make room for a request before it
            if self.store.states is not None and not self.retraction.restore_state(request):
                continue  # it was meant to begin inside a page that could not be copied
            start = int(table.computed[request.slot])
            length = int(table.length[request.slot])
            end = chunk_end(request, start, length, budget, self._cuts, first=not chunks)
            if (
                end > start
                and self.retraction.reserve_pages_for(request, end)
                and (self.store.states is None or self.retraction.restore_state(request))
            ):
                chunks.append((request, start, end))
                budget -= chunk_cost(request, start, end)
        return chunks, budget

    def _plan_drafts(
        self, decoding: list[Request], chunks: list[Row], budget: int
    ) -> Mapping[int, Draft]:
        """Returns the drafts of this step, by id of their request."""
        if self.drafts is None or self.isolated or not self.drafts.should_draft:
            return NO_DRAFTS
        return self.drafts.plan_drafts(decoding, chunks, budget)

    def _split_last_token(self, request: Request, start: int, end: int, *, first: bool) -> int:
        """Cuts a chunk before the last token of a prompt that runs alone, if it needs its own step."""
        alone = self._last_alone and request.id == self.admission.solo_request
        if not alone or start >= request.prompt_len or end < self.store.table.length[request.slot]:
            return end
        return max(end - 1, start + 1)

    def _prompt_budget(self, decoding: list[Request]) -> int:
        """Returns how many prompt tokens a step may compute in addition to the decoding rows."""
        most = (
            min(self._step_tokens, ISOLATED_TOKENS) if self.isolated else self._step_tokens
        ) - len(decoding)
        streams = count_streaming_requests(self.store.table, decoding)
        if self._pace is None or not streams:
            return most
        return min(most, self._pace.tokens_besides_streams(streams) - (len(decoding) - streams))

    def record_duration(self, batch: Batch, seconds: float) -> None:
        """Records the duration of a step, to pace later steps and to estimate the cost of drafts
        and, on a CPU, of recomputing tokens.
        """
        if self._pace is None:
            return
        tokens = batch.tokens
        if self.drafts is not None:
            self.drafts.drafting.cost.record_step_cost(tokens, seconds)
        if not batch.drafts:  # drafted tokens are not prompt tokens
            self.pauses.record_duration(tokens - batch.decoding, seconds)
        if batch.streams:
            self._pace.adapt_to_step(tokens, seconds, streams=batch.streams)

    def remaining_step_s(self, batch: Batch, seconds: float) -> float:
        """Returns how many more seconds a step may take, `seconds` after its start; infinite if
        none of its rows streams.
        """
        return (
            self._pace.remaining_pace_s(seconds)
            if self._pace is not None and batch.streams
            else math.inf
        )

    def record_launch(self, batch: Batch) -> list[int]:
        """Records that a batch has been launched, so later steps see its keys and values. Returns
        the rows whose prompts are complete.
        """
        table = self.store.table
        table.computed[batch.slots] = batch.ends
        if self.store.states is not None and batch.states is not None:
            self.store.states.record_step(
                table, batch.states, batch.slots, batch.starts, batch.ends, batch.draft_counts
            )
        complete: list[int] = []
        for row in range(batch.decoding, len(batch.requests)):
            request = batch.requests[row]
            assert request.handle is not None
            # generated tokens are published when the request ends
            if batch.starts[row] < request.prompt_len:
                self.store.publish_pages(
                    request.handle, all_but_last=request.may_recompute_last_token
                )
            if request.state is State.PREFILLING and batch.ends[row] == table.length[request.slot]:
                self.queues.move_to_decoding(request)
                complete.append(row)
        self.store.release_behind_windows(batch.slots, batch.ends, batch.handle_of_row)
        return complete

    def mask_unchanged_rows(self, batch: Batch) -> NDArray[np.bool_]:
        """Returns a mask of the rows whose slots still have the same request and tokens as when the
        batch was planned.
        """
        rows: NDArray[np.bool_] = self.store.table.epoch[batch.slots] == batch.epochs
        return rows

    def add_pending_tokens(self, slots: Ints) -> None:
        """Counts one more token for each of these slots; its id is recorded later by
        `record_tokens`.
        """
        self.store.table.length[slots] += 1

    def schedule_last_token_recompute(self, slots: Ints) -> None:
        """Schedules the last token of these slots to be computed again, because no token was drawn
        after it.
        """
        self.store.table.computed[slots] -= 1

    def record_tokens(self, slots: Ints, tokens: Ints) -> None:
        """Records the ids of drawn tokens, one per slot."""
        table = self.store.table
        table.tokens[slots, table.known[slots]] = tokens
        table.known[slots] += 1

    def discard_last_draw(self, request: Request) -> None:
        """Removes the last token of a decoding request, so that another one is drawn. If the next
        draw is already planned, its result will be ignored.
        """
        table = self.store.table
        slot = request.slot
        table.known[slot] -= 1
        table.length[slot] = table.known[slot]
        table.computed[slot] = table.known[slot] - 1
        table.epoch[slot] += 1

    def append_tokens(self, request: Request, tokens: list[int]) -> None:
        """Appends tokens to a decoding request, to be computed like a prompt. If a draw is already
        planned for the request, its result will be ignored.
        """
        table = self.store.table
        slot = request.slot
        known = int(table.known[slot])
        table.tokens[slot, known : known + len(tokens)] = tokens
        table.known[slot] = table.length[slot] = known + len(tokens)
        table.epoch[slot] += 1
        self.queues.remove_running(request)
        self.queues.queue_prefilling(request)

    def retire_request(self, request: Request, end: State) -> None:
        """Removes a request, whose final state is `end`, from its queue, and frees its slot and
        pages.
        """
        if request.state in (State.WAITING, State.RETRACTED):
            self.queues.remove_waiting(request)
        elif request.state not in (State.COMPILING, State.PREPARING):
            self.queues.stop(request)
            if end is State.FINISHED and request.branch is not None:
                scored = request.score_from if request.limit == request.prompt_len else None
                self.pauses.begin_pause(request.branch, request.tokens[:scored], request.space)
        request.change_state(end)
        for resource in self._resources:
            resource.release_unused()

    def continue_in_slot(
        self, request: Request, following: Request, *, appended: bool = False
    ) -> None:
        """Finishes a request and continues with its program's next request in the same slot, from
        the end of their common prefix.

        If that would change shared pages, the next request waits for admission instead.

        Args:
            request: request that has ended.
            following: next request of the program.
            appended: whether the tokens of `following` are those of `request`, possibly without the
                last one, followed by more tokens.
        """
        count = start_in_slot(
            self.store, self.queues, self.admission, request, following, appended=appended
        )
        if count is None:
            self.retire_request(request, State.FINISHED)
            self.queues.queue_returned(following, State.WAITING)
        else:
            self.appended_tokens += count

    def close_resources(self) -> None:
        """Notifies all who wait for a resource, because the engine is closing."""
        for resource in self._resources:
            resource.close()

    def end_pauses_and_flush(self, *, keep: bool = False) -> int:
        """Evicts every prefix that no request uses, including those of paused programs. Returns the
        number of freed pages. `keep` is passed to the store's `flush_prefixes`.
        """
        self.pauses.end_all_pauses()
        return self.store.flush_prefixes(keep=keep)

    def isolate_running(self) -> None:
        """Retracts all running requests after an out-of-memory error, and runs them one by one."""
        self._isolation.isolate_requests(self.retraction.retract_all())

    @property
    def isolated(self) -> bool:
        """Whether requests run one by one after an out-of-memory error."""
        return bool(self._isolation.suspects)

    @property
    def must_read_before_planning(self) -> bool:
        """Whether the tokens of all steps have to be read before the next is planned."""
        return self.isolated or (self.drafts is not None and self.drafts.should_draft)

    def _requests_to_decode(self) -> list[Request]:
        """Returns the decoding requests that have a token to compute and have not reached their
        limit. The result is limited to one stage's share of all decoding requests.
        """
        table = self.store.table
        requests = self.queues.decoding
        slots = request_slots(requests)
        most = -(-len(requests) // self._stages)
        waiting = table.length[slots] >= table.limit[slots]  # for the id of the last token
        waiting |= table.length[slots] <= table.computed[slots]  # for the draw of the next one
        if not waiting.any():
            return list(requests)[:most]
        return [r for r, w in zip(requests, waiting.tolist()) if not w][:most]

    def _rotate_requests(self, ready: list[Request]) -> list[Request]:
        """Returns all streaming requests, and as many others as the time of a step allows. The
        others take turns. If no request streams, returns all.
        """
        streams = count_streaming_requests(self.store.table, ready)
        if self._pace is None or not streams:
            return ready
        room = self._pace.tokens_besides_streams(streams)
        chosen = [r for r in ready if not r.output.stream][
            : room // 2 if self.queues.prefilling else room
        ]
        served = {r.id for r in chosen}
        self.queues.move_to_end_of_decoding(chosen)
        return [r for r in ready if r.output.stream or r.id in served]
