"""The step loop, on one thread: plan → launch → settle the step before (read and record it) → make
masks → draw.

If a model has several stages, a step is settled and drawn one turn later for each stage after the
first. Other threads only post commands to its inbox (inbox.py). All state of requests is changed on
the loop's thread, so no locks are needed. This thread waits only for results of the device and,
briefly, for masks: tokenisation and grammar compilation finish before a request is posted.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import count

from sglang_lite.process.service_threads import this_thread
from sglang_lite.protocol import EngineClosedError, ModelError, RequestAbortedError, SglError
from sglang_lite.runtime.core.flushes import Flushes
from sglang_lite.runtime.core.inbox import Inbox
from sglang_lite.runtime.core.preparation import Preparation
from sglang_lite.runtime.core.recount import Recount
from sglang_lite.runtime.core.step_clock import DeviceTime, StepClock
from sglang_lite.runtime.core.step_masks import MaskedRows, StepMasks, build_draws
from sglang_lite.runtime.core.token_reader import TokenReader
from sglang_lite.runtime.core.token_watch import TokenWatch
from sglang_lite.runtime.executor import memory_shortage
from sglang_lite.runtime.executor.model_runner import LaunchedForward, ModelRunner, PendingTokens
from sglang_lite.runtime.executor.step_record import StepWriter
from sglang_lite.runtime.parallel.shared_steps import SharedSteps
from sglang_lite.runtime.requests.output_builder import Finish
from sglang_lite.runtime.requests.request import Request, State
from sglang_lite.runtime.scheduler.batch import Batch
from sglang_lite.runtime.scheduler.scheduler import ISOLATED_TOKENS, Scheduler
from sglang_lite.runtime.structured_output.mask_filler import MaskFiller

logger = logging.getLogger("sglang_lite")

# Minimum and maximum time that a step waits for masks. Within them, it waits for as long as its
# forward took, because a late row costs another forward. Beyond the maximum, neither the other rows
# of the step nor concurrent streams are held up any longer.
_PATIENCE = 0.0025
_MAX_PATIENCE = 0.05
# Requests that are submitted together should start together: if a second one arrives before the
# first has begun, the loop waits for more until a pause. Without this, the first few would get
# their own step, which takes as long to launch as one step with all of them, and longer while the
# submitting thread is busy.
_BURST_PAUSE_S = 0.0002
_BURST_S = 0.02  # longest wait for a burst
# pause between plans while nothing runs and programs with locked prefixes should continue soon
_PAUSE_S = 0.002
_COPY_PAUSE_S = 0.0002  # the same while pages are being copied


@dataclass(frozen=True, slots=True)
class _Launched:
    """Step whose forward pass has been launched.

    Attributes:
        batch: its rows.
        forward: the runner's handle of the forward pass.
        completed_rows: rows whose prompts are complete after this step.
        patience: maximum time its draws may wait for masks, in seconds.
        planned, began: times when it was planned and launched.
    """

    batch: Batch
    forward: LaunchedForward
    completed_rows: list[int]
    patience: float
    planned: float
    began: float


@dataclass(frozen=True, slots=True)
class _InFlight:
    """Step whose draws have been launched, with its tokens, which may not have been computed yet."""

    step: _Launched
    masked: MaskedRows
    pending: PendingTokens


class StepLoop:
    """Runs an engine's requests step by step.

    Args:
        scheduler: queues and KV cache; used only by this loop.
        runner: runner of batches on the model.
        writer: writes the records of steps for the runner.
        eos_ids: tokens that may end a generation.
        vocab_size: size of the vocabulary, for grammar masks.
        filler: threads that make grammar masks.
        overlap: whether to launch a step before the tokens of the previous one are read.
        jump: whether to append forced tokens of grammars as a whole.
        stream_interval_s: minimum time between two looks at tokens that only streams need, in
            seconds.
        preparation: work that requests wait for before they are scheduled; None if no request waits
            for any.
        shared: steps of all replicas, which include every step of this loop.
        stages: number of the model's stages, and so of concurrent steps.

    Attributes:
        scheduler, runner, jump: the arguments of these names.
        holds: reasons not to plan a step, such as "paused", each with the error that new requests
            get, or None if they wait. Empty while the engine runs.
        clock: clock of the requests' deadlines.
        masks: makes the masks of steps.
        recount: recount of the cache's pages while nothing runs.
        postponed: work that waits until the device computes.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        writer: StepWriter,
        eos_ids: frozenset[int],
        vocab_size: int,
        filler: MaskFiller,
        *,
        overlap: bool,
        jump: bool = True,
        stream_interval_s: float = 0.0,
        preparation: Preparation | None = None,
        shared: SharedSteps | None = None,
        stages: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.steps = 0
        # start of the running step on the monotonic clock; None between steps
        self.stepping_since: float | None = None
        # marks parts of a step in a profile
        self.span: Callable[[str], AbstractContextManager[object]] = span_without_profiler
        self.holds: dict[str, SglError | None] = {}
        self.postponed = Postponed()
        self.inbox = inbox = Inbox(filler.interrupt, self.postponed.run_all)
        self.flushes = Flushes(self.inbox.gate.is_on_own_thread)
        self.recount = Recount(scheduler)
        self.runner = runner
        self._writer = writer
        self._eos_ids = eos_ids
        self.jump = jump
        self._overlap = overlap
        self._in_flight: _InFlight | None = None
        self.clock = StepClock()
        self._device_time = DeviceTime(scheduler.pauses.record_duration)
        self._watch = TokenWatch(
            scheduler.store.table, eos_ids, vocab_size, stream_interval_s=stream_interval_s
        )
        self._reader = TokenReader(scheduler, self._watch, self.clock, jump=jump)
        self._ends = RequestEnds(self, self._reader, self._fail_now)
        draws = 1 if scheduler.drafts is None else 1 + scheduler.drafts.drafting.most
        words = runner.allocate_masks(
            len(scheduler.store.table.length) * draws, -(-vocab_size // 32)
        )
        self.preparation = preparation
        self._shared = shared
        self._launched = deque[_Launched](maxlen=stages)
        for each in (preparation, shared):
            if each is not None:
                each.wake = partial(inbox.post_if_open, _no_op_command)
        self.masks = StepMasks(scheduler, filler, words, lambda: not inbox.empty)

    # ----------------------------------------------------------------------------------- any thread

    def submit_request(self, request: Request) -> None:
        self.inbox.post(partial(self.receive_request, request))

    def abort(self, request: Request) -> None:
        """Ends a request with RequestAbortedError, which carries the partial result. Does nothing
        if it has ended. Takes effect between two steps.
        """
        self.inbox.post_if_open(lambda: self._abort_now(request))

    def wind_down(self, requests: Sequence[Request]) -> None:
        """Ends requests early, as soon as a limit could cut their output; see
        `TokenReader.wind_down`. A request whose constraint is still being compiled winds down when
        it starts.
        """

        def mark_winding_down() -> None:
            for request in requests:
                request.times.winds_down = True
            self.wind_down_now(
                [request for request in requests if request.state is not State.COMPILING]
            )

        self.inbox.post_if_open(mark_winding_down)

    def fail_before_start(self, request: Request, error: SglError) -> None:
        """Ends a request whose preparation has failed."""
        try:
            self.inbox.post(lambda: self._fail_now(request, error))
        except EngineClosedError:  # the loop has ended, and never received the request
            if not request.ended:
                request.output.send(error)

    # ---------------------------------------------------------------------------- the loop's thread

    def run(self) -> None:
        """Runs the loop on the calling thread until its inbox is closed. Then every request that
        has not ended fails with EngineClosedError.
        """
        self.inbox.gate.claim_thread()
        this_thread.runs_engine = True
        try:
            busy = self.busy
            while True:
                if not busy:
                    if not self.inbox.wait(self.recount.seconds_until_recount):
                        self.recount.run()
                        busy = self.busy
                        continue
                    self.inbox.run_until_quiet(_BURST_PAUSE_S, _BURST_S)
                    if not (self.busy or self._may_step_when_idle or self.inbox.closing):
                        self.flushes.call_flush_callbacks()  # for events sent by the commands
                        continue
                elif (
                    self.scheduler.may_wait
                    and not self._has_unread_step
                    and not self._must_join_step
                ):
                    self.inbox.wait(
                        _COPY_PAUSE_S if self.scheduler.fetches.are_pending else _PAUSE_S
                    )
                self.inbox.run()
                if self.inbox.closing:
                    break
                self.stepping_since = time.monotonic()
                with self.span("step"):
                    self.run_step()
                self.stepping_since = None
                self.flushes.call_flush_callbacks()
                busy = self.busy
            error = EngineClosedError("the engine was closed before the request finished.")
        except BaseException as crash:  # any exception: every waiting caller must be notified
            logger.exception("the engine's loop crashed")
            self.inbox.crash = crash
            error = _crash_error(crash)
        self._in_flight = None
        self._launched.clear()
        self.postponed.close()
        self.masks.close()
        self.inbox.reject_commands()
        self.flushes.call_flush_callbacks()
        for request in [
            each for each in (*self.scheduler.queues, *(self.preparation or ())) if not each.ended
        ]:
            request.state = State.FAILED
            request.output.send(error)
        self.inbox.run()
        _close_scheduler(self.scheduler)
        self.runner.close()

    @property
    def busy(self) -> bool:
        """Whether the loop has work to do before the next command."""
        if self._in_flight is not None or self._launched or self.postponed or self._must_join_step:
            return True
        if not self.scheduler.idle and not self._is_planning_held:
            return True
        return self.preparation is not None and self.preparation.has_work and not self.holds

    @property
    def _may_step_when_idle(self) -> bool:
        """Whether a step may have an effect even if the loop is not `busy`."""
        return self.preparation is not None or self.scheduler.may_plan_when_idle

    @property
    def _has_unread_step(self) -> bool:
        """Whether the tokens of a launched step have not been read yet."""
        return self._in_flight is not None or bool(self._launched)

    @property
    def _must_join_step(self) -> bool:
        """Whether other replicas have begun a step and are waiting for this replica to join it."""
        return self._shared is not None and self._shared.is_awaited

    @property
    def _is_planning_held(self) -> bool:
        """Whether no step may be planned now."""
        return bool(self.holds) or (self.preparation is not None and self.preparation.blocks_steps)

    def receive_request(self, request: Request) -> None:
        """Starts a request like `submit_request`, but on the loop's own thread."""
        if request.ended:
            return  # aborted while its grammar was compiled
        try:
            if self.inbox.closing:
                raise EngineClosedError("the engine is closed.") from self.inbox.crash
            if (refusal := next(filter(None, self.holds.values()), None)) is not None:
                raise copy(refusal)
            self._reader.begin_output(request)
            if self.preparation is not None and self.preparation.requires_preparation(request):
                self.preparation.queue_request(request)
                return
        except SglError as error:
            self._fail_now(request, error)
        else:
            self.scheduler.accept_request(request)

    def wind_down_now(self, requests: Sequence[Request]) -> None:
        """Does the work of `wind_down` on the loop's own thread, for requests whose constraints are
        compiled.
        """
        for request in requests:
            if not request.ended:
                self._reader.wind_down(request)

    def run_step(self) -> None:
        """Runs one step. If it runs out of memory, all running requests are retracted and tried one
        by one.
        """
        if self.preparation is not None and not self.holds:
            for request in self.preparation.prepare_next(self._fail_now):
                self.scheduler.accept_request(request)
        began = self.clock.now()
        batch = self._plan_batch()
        shortage = None
        try:
            self._run_batch(batch)
        except Exception as error:  # kinds of shortage are recognised by their message
            if not memory_shortage.is_out_of_memory(error):
                raise
            shortage = str(error).partition("\n")[0]
        # outside the except block, where the memory held by the error is free
        if shortage is not None:
            self._recover_from_shortage(shortage)
        elif batch is not None:
            self.clock.record_step_time(self.clock.now() - began)

    def renew_preparation(self) -> None:
        """Prepares running requests again, because results were lost or belong to other weights. No
        step is planned until this is done.
        """
        if self.preparation is not None:
            self.preparation.redo_preparation()

    def _plan_batch(self) -> Batch | None:
        self._planned = time.perf_counter()
        batch = None if self._is_planning_held else self.scheduler.plan_batch()
        stuck = batch is None and not self._has_unread_step and not self._is_planning_held
        if stuck and not self.scheduler.queues.idle and not self.scheduler.may_wait:
            raise AssertionError("requests are waiting, nothing runs, and nothing can be admitted")
        return batch

    def _run_batch(self, batch: Batch | None) -> None:
        """Launches a step. With overlap, reads the previous step's tokens while this step runs.
        Without overlap, reads this step's own tokens. Draws are launched last, after the steps of
        other stages, because they may depend on all earlier tokens.
        """
        began = time.perf_counter()
        if batch is not None:
            self._launched.append(self._launch_batch(batch))
            if self.scheduler.drafts is not None:
                self.scheduler.drafts.record_outcomes()
        elif self._shared is not None and self._must_join_step:
            self._shared.join_step_without_rows()
        self._read_step_in_flight()
        if self._launched and (batch is None or len(self._launched) == self._launched.maxlen):
            step = self._launch_next_draws()
            self.scheduler.record_duration(step.batch, time.perf_counter() - began)
            if not self._overlap or step.batch.drafts or self.scheduler.must_read_before_planning:
                self.settle_launched_steps()

    def settle_launched_steps(self) -> None:
        """Draws and reads the tokens of all launched steps."""
        self._read_step_in_flight()
        while self._launched:
            self._launch_next_draws()
            self._read_step_in_flight()

    def _recover_from_shortage(self, shortage: str) -> None:
        """Discards a step that ran out of memory. The results of the previous step are kept if they
        can still be read. If not, the previous step's tokens are drawn again.
        """
        self._launched.clear()
        try:
            self._read_step_in_flight()
        except Exception as error:  # as in `run_step`
            if not memory_shortage.is_out_of_memory(error):
                raise
        memory_shortage.release_cached_memory()
        self._writer.forget_written_state()
        # its launched work runs before any later step
        self.scheduler.store.complete_steps(self.scheduler.store.step)
        if not self.scheduler.isolated:
            logger.warning("%s The rows of the step are tried one by one.", shortage)
            self.scheduler.isolate_running()
            return
        for request in list(self.scheduler.queues.running()):
            self._fail_now(request, memory_shortage.request_error(shortage, ISOLATED_TOKENS))

    def _launch_batch(self, batch: Batch) -> _Launched:
        self.steps += 1
        for request in batch.started:
            self._watch.watch_request(request)
        began = time.perf_counter()
        with self.span(_span_name(batch)):
            forward = self.runner.forward(self._writer.write_record(batch))
        took = time.perf_counter() - began
        patience = max(
            min(took, self.scheduler.remaining_step_s(batch, took), _MAX_PATIENCE), _PATIENCE
        )
        return _Launched(
            batch, forward, self.scheduler.record_launch(batch), patience, self._planned, began
        )

    def _read_step_in_flight(self) -> None:
        """Reads the tokens of the step in flight, if any."""
        before = self._in_flight
        self._in_flight = None
        self.postponed.run(lambda: before is None or not before.pending.ready)
        if before is not None:
            self._settle_step(before)

    def _launch_next_draws(self) -> _Launched:
        """Launches the draws of the oldest step that has none yet, and returns the step."""
        step = self._launched.popleft()
        with self.span("masks"):
            masked = self.masks.make_masks(step.batch, step.patience)
        batch = step.batch
        table = self.scheduler.store.table
        pending = self.runner.sample(step.forward, build_draws(batch, masked, table, self._eos_ids))
        self.scheduler.add_pending_tokens(batch.slots[masked.rows[masked.offsets == 0]])
        self._in_flight = _InFlight(step, masked, pending)
        return step

    def _settle_step(self, before: _InFlight) -> None:
        """Reads the results of a step and appends the drawn tokens. Tokens that may end a request,
        or that a stream needs, are also processed. Skips rows whose request has changed since the
        step was planned.
        """
        scheduler = self.scheduler
        step = before.step
        rows = before.masked.rows
        batch = step.batch
        sampled = before.pending.wait_for_tokens()
        self._device_time.record_settled_step(batch, step.began, read=before.pending is not sampled)
        on_cpu = before.pending is sampled  # a CPU waits only for masks
        self.masks.record_mask_times(
            before.masked, before.masked.filling if on_cpu else sampled.waited
        )
        scheduler.store.complete_steps(batch.step)
        live = scheduler.mask_unchanged_rows(batch)
        for row, scored in step.forward.scored.items():
            if live[row]:
                try:
                    batch.requests[row].add_prompt_logprobs(
                        scored.first, scored.wait_for_logprobs()
                    )
                except SglError as error:
                    self._fail_now(batch.requests[row], error)
        for i, why in sampled.errors.items():
            # after a draft, the error may come from a wrong guess
            if live[rows[i]] and not before.masked.offsets[i]:
                self._fail_now(batch.requests[rows[i]], why)
        live = scheduler.mask_unchanged_rows(batch)
        now = time.perf_counter()
        for row in step.completed_rows:
            if live[row]:
                request = batch.requests[row]
                request.times.first_token = request.times.first_token or now
                if request.ending is not None:
                    self._ends.end_with_result(request, request.ending)
        for request, end in self._reader.read_draws(batch, before.masked, live, sampled):
            if isinstance(end, SglError):
                self._fail_now(request, end)
            else:
                self._ends.end_with_result(request, end)
        if scheduler.drafts is not None:
            scheduler.drafts.record_step(batch, before.masked.offsets, step.planned)
        if before.pending is sampled:  # on a CPU, which computes nothing meanwhile
            self.postponed.run_all()

    def _abort_now(self, request: Request) -> None:
        if request.ended:
            return
        self._ends.store_recorded_values(request)
        self.scheduler.retire_request(request, State.ABORTED)
        error = RequestAbortedError("the request was aborted.")
        error.partial = request.build_generation(Finish("abort", None))
        request.output.send(error)

    def _fail_now(self, request: Request, error: SglError) -> None:
        if request.ended:
            return
        self.scheduler.retire_request(request, State.FAILED)
        if isinstance(error, ModelError):
            # A NaN spreads to earlier tokens of its step, whose pages others may share.
            self.scheduler.store.flush_prefixes()
        request.output.send(error)


_NOTHING = nullcontext()


def _no_op_command() -> None:
    """Does nothing: posting this command wakes the loop."""


def span_without_profiler(_: str) -> AbstractContextManager[object]:
    """Stands in for `Profiler.span` and marks nothing."""
    return _NOTHING


def _span_name(batch: Batch) -> str:
    """Returns the name of a step in a profile: "prefill", "decode" or both."""
    if not batch.decoding:
        return "prefill"
    return "decode" if batch.decoding == len(batch.requests) else "prefill and decode"


def _close_scheduler(scheduler: Scheduler) -> None:
    """Shuts down a scheduler's resources and the source of its cache's pages."""
    scheduler.close_resources()
    scheduler.store.source.close()


class RequestEnds:
    """Ends the requests of a step loop. Used on the loop's thread.

    Args:
        loop: loop that runs the requests.
        reader: reader of drawn tokens, which prepares the next requests.
        fail: function that ends a request with an error.
    """

    def __init__(
        self, loop: StepLoop, reader: TokenReader, fail: Callable[[Request, SglError], None]
    ) -> None:
        self._loop = loop
        self._scheduler = loop.scheduler
        self._reader = reader
        self._fail = fail

    def end_with_result(self, request: Request, finish: Finish) -> None:
        """Ends a request with its result. If possible, the next request of its program starts in
        the same slot.
        """
        if self._scheduler.drafts is not None:
            self._scheduler.drafts.learn_from_request(request)
        self.store_recorded_values(request)
        if request.follow is None:
            self._scheduler.retire_request(request, State.FINISHED)
            request.output.send(request.build_generation(finish))
            return
        table = self._scheduler.store.table
        slot = request.slot
        request.tokens = table.tokens[slot, : table.known[slot]].copy()
        report = partial(self._send_and_continue, request, finish)
        begun = request.follow.begin_next_request(
            request.tokens, finish, partial(self._loop.postponed.postpone_call, report)
        )
        if begun is not None:
            self._claim_if_prepared(begun)
            self._scheduler.continue_in_slot(request, begun, appended=True)
            return
        following = report()
        if following is None or not self._claim_if_prepared(following):
            self._scheduler.retire_request(request, State.FINISHED)
            if following is not None:
                self._loop.receive_request(following)
            return
        try:
            self._reader.begin_output(following)
        except SglError as error:
            self._scheduler.retire_request(request, State.FINISHED)
            self._fail(following, error)
        else:
            self._scheduler.continue_in_slot(request, following)

    def store_recorded_values(self, request: Request) -> None:
        """Reads the recorded values of a request's tokens before its pages are released."""
        names = request.params.recorded_fields
        if names and request.handle is not None:
            table = self._scheduler.store.table
            slot = request.slot
            count = min(int(table.computed[slot]), int(table.known[slot]) - 1)
            request.output.recorded = self._loop.runner.read_recorded_values(
                table.slots_of_positions(slot, 0, count), names
            )

    def _claim_if_prepared(self, request: Request) -> bool:
        """Prepares a request that continues in a slot. Returns False if it has to wait."""
        preparation = self._loop.preparation
        return preparation is None or preparation.claim_if_ready(request)

    def _send_and_continue(self, request: Request, finish: Finish) -> Request | None:
        """Sends the result of a request, and continues its program. Returns the next request if it
        can continue in the slot and has not begun.
        """
        assert request.follow is not None
        generation = request.build_generation(finish)
        request.output.send(generation)
        return request.follow.continue_program(generation)


_SHARE = 4  # a step runs at least one in this many of the waiting calls, so none waits long


class Postponed:
    """Queue of postponed calls. Each runs once, in order."""

    def __init__(self) -> None:
        self._calls: dict[int, Callable[[], object]] = {}
        self._numbers = count()

    def __bool__(self) -> bool:
        return bool(self._calls)

    def postpone_call(self, call: Callable[[], object]) -> Callable[[], None]:
        """Queues a call. Returns a function that runs it immediately if it has not run yet."""
        number = next(self._numbers)
        self._calls[number] = call
        return partial(self._run_numbered_call, number)

    def run(self, goes_on: Callable[[], bool]) -> None:
        """Runs a fixed share of the queued calls, in order, and more as long as `goes_on` returns
        True.
        """
        due = -(-len(self._calls) // _SHARE)
        while self._calls and (due > 0 or goes_on()):
            due -= 1
            self._run_numbered_call(next(iter(self._calls)))

    def run_all(self) -> None:
        """Runs all calls, including those added meanwhile."""
        while self._calls:
            self._run_numbered_call(next(iter(self._calls)))

    def close(self) -> None:
        """Runs all calls as the loop ends, and logs their exceptions."""
        while self._calls:
            try:
                self.run_all()
            except Exception:  # may have ended the loop; the other callers must still be notified
                logger.exception("what a step has led to could not be told")

    def _run_numbered_call(self, number: int) -> None:
        call = self._calls.pop(number, None)
        if call is not None:
            call()


def _crash_error(crash: BaseException) -> EngineClosedError:
    """Returns the error callers get when an exception has ended the loop."""
    error = EngineClosedError(f"the engine's loop crashed: {crash!r}")
    error.__cause__ = crash
    traceback.clear_frames(crash.__traceback__)  # so that a stored error keeps no tensors alive
    return error
