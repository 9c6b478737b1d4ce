"""The step loop: schedule → launch → settle, on one thread.

Other threads only post commands to its inbox. Everything a request goes through happens here, so nothing needs a lock;
and nothing here may block: tokenising and compiling are done before a request is posted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from sglang_lite.protocol import (
    BackendError,
    EngineClosedError,
    OverloadedError,
    RequestAbortedError,
    SglError,
    TokenLogprob,
)
from sglang_lite.runtime.executor import memory
from sglang_lite.runtime.executor.model_runner import LaunchedForward, ModelRunner, PendingTokens
from sglang_lite.runtime.executor.sampler import Masks, SamplingTable, Special
from sglang_lite.runtime.request import Finish, Request, State
from sglang_lite.runtime.scheduler.batch import Batch
from sglang_lite.runtime.scheduler.scheduler import ISOLATED_TOKENS, Scheduler
from sglang_lite.runtime.structured_output.base import Matcher
from sglang_lite.runtime.structured_output.mask_filler import MaskFiller
from sglang_lite.runtime.structured_output.timings import Seconds
from sglang_lite.serving import serving

logger = logging.getLogger("sglang_lite")
T = TypeVar("T")

# What a step waits for masks at least; longer where its forward took longer, as a row that is late costs another one.
_PATIENCE = 0.0025


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step that was launched: its forward, the rows it draws tokens for, those tokens, the rows whose prompts are
    through with it, and how long its masks took, where it has any."""

    forward: LaunchedForward
    rows: NDArray[np.int64]
    drawn: PendingTokens
    through: list[int]
    filling: float


class StepLoop:
    """
    Args:
        scheduler: queues and cache; used by this loop alone.
        runner: runs batches.
        sampling: parameters by slot; filled here, read by the runner.
        eos_ids: tokens that may end a generation.
        vocab_size: for grammar masks.
        filler: makes those.
        overlap: launch a step before the tokens of the one before are read.
        jump: append what grammars force as a whole.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        sampling: SamplingTable,
        eos_ids: frozenset[int],
        vocab_size: int,
        filler: MaskFiller,
        *,
        overlap: bool,
        jump: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.steps = 0
        self.mask_times = Seconds()  # to fill the masks of a step
        self.mask_waits = Seconds()  # of those, and of what else the host does meanwhile, what its device waited for
        self.late_masks = 0  # rows that went on a step later, as their masks took too long
        self.crash: BaseException | None = None
        self._runner, self._sampling, self._filler = runner, sampling, filler
        self._overlap, self._jump = overlap, jump
        self._in_flight: _InFlight | None = None
        slots = len(scheduler.store.table.length)
        self._looks = np.zeros(slots, dtype=bool)  # by slot: the tokens that are wanted have to be looked at
        self._wanted = np.zeros((slots, vocab_size), dtype=bool)
        self._eos = np.array(sorted(eos_ids), dtype=np.int32)
        self._masked = np.zeros(slots, dtype=bool)  # by slot: the grammar alone looks at its tokens
        self._masks = runner.allocate_masks(slots, -(-vocab_size // 32))  # of the step that draws now
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._flushes: dict[Callable[[], object], None] = {}  # to be called after the step, in this order
        self._closing = False  # told to stop; read and written on the loop's thread
        self._ended = False  # takes no more commands; under the lock
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._thread: int | None = None  # that runs it

    # ------------------------------------------------------------------------------------- any thread

    @property
    def is_copy(self) -> bool:
        """This process is a forked copy, which has no such thread."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """To be called before any lock is taken: in a forked copy it may be held by a thread that is not there.

        Raises:
            EngineClosedError: this process is a forked copy.
        """
        if self.is_copy:
            raise EngineClosedError(
                f"the engine runs in process {self._process}, and this one ({os.getpid()}) is a forked copy of it.",
                hint="Start an engine in this process (and make it the default backend here), or start processes with "
                'multiprocessing\'s "spawn" method.',
            )

    def check_wait(self, name: str) -> None:
        """
        Raises:
            BackendError: `name` was called on the loop's own thread, which would wait for itself.
            EngineClosedError: as `check_process`.
        """
        self.check_process()
        if threading.get_ident() == self._thread:
            raise BackendError(
                f"{name} was called on the engine's own thread, by a logit processor or a sink, and waits for it.",
                hint="Call it on another thread; submit() and its like don't wait.",
            )

    def post(self, command: Callable[[], object]) -> None:
        """Runs `command` on the loop's thread, soon.

        Raises:
            EngineClosedError: the loop has ended, or runs in another process; nothing was posted.
        """
        self.check_process()
        with self._lock:
            if self._ended:
                raise EngineClosedError("the engine is closed.") from self.crash
            self._inbox.put(command)

    def call(self, command: Callable[[], T]) -> T:
        """Runs `command` on the loop's thread and returns its result.

        Raises:
            EngineClosedError: the loop has ended.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(command())
            except Exception as error:  # the caller's, not the loop's
                future.set_exception(error)

        self.post(run)
        return future.result()

    def tell(self, command: Callable[[], object]) -> None:
        """`post`, but nothing happens if the loop has ended."""
        with contextlib.suppress(EngineClosedError):
            self.post(command)

    def flushed(self, sink: Callable[[T], object], flush: Callable[[], object] | None) -> Callable[[T], None]:
        """A sink with `flush` called after it: once for all that a step tells such sinks."""

        def tell(event: T) -> None:
            sink(event)
            if flush is None:
                return
            if threading.get_ident() == self._thread and not self._ended:
                self._flushes[flush] = None
            else:
                flush()

        return tell

    def submit(self, request: Request) -> None:
        self.post(partial(self.receive, request))

    def abort(self, request: Request) -> None:
        """Ends a request with RequestAbortedError, which has the result up to there, unless it has ended. Takes effect
        between two steps."""
        self.tell(lambda: self._abort(request))

    def fail(self, request: Request, error: SglError) -> None:
        """Ends a request that could not be made ready."""
        try:
            self.post(lambda: self._end(request, error, State.FAILED))
        except EngineClosedError:  # it never got there
            if not request.ended:
                request.tell(error)

    def close(self) -> None:
        """Tells the loop to end; every request that has not ended fails. Takes no lock: whoever collects garbage calls
        it, whatever it holds."""
        self._inbox.put(self._stop)

    def _stop(self) -> None:
        self._closing = True

    # --------------------------------------------------------------------------------- the loop's thread

    def run(self) -> None:
        """The loop itself, on the thread that calls it, until `close`."""
        self._thread, serving.engine = threading.get_ident(), True
        try:
            while True:
                if self.scheduler.idle and self._in_flight is None:
                    self._inbox.get()()
                self._run_commands()
                if self._closing:
                    break
                self._step()
                self._flush()
            error = EngineClosedError("the engine was closed before the request finished.")
        except BaseException as crash:  # whatever it is, every waiting caller must hear of it
            logger.exception("the engine's loop crashed")
            self.crash = crash
            error = EngineClosedError(f"the engine's loop crashed: {crash!r}")
            error.__cause__ = crash
            traceback.clear_frames(crash.__traceback__)  # whoever keeps the error keeps no tensors
        self._closing, self._in_flight = True, None
        self._masks = self._masks[:0].copy()  # on a GPU, memory that stays where it is
        self._filler.close()
        with self._lock:
            self._ended = True
        self._flush()
        for request in list(self.scheduler.requests()):
            if not request.ended:
                request.state = State.FAILED
                request.tell(error)
        self._run_commands()
        self._runner.close()

    def _flush(self) -> None:
        flushes, self._flushes = self._flushes, {}
        for flush in flushes:
            flush()

    def _run_commands(self) -> None:
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return
            command()

    def receive(self, request: Request) -> None:
        """`submit` on the loop's own thread."""
        if request.ended:
            return  # aborted while it was compiled
        if self._closing:
            closed = EngineClosedError("the engine is closed.")
            closed.__cause__ = self.crash
            self._end(request, closed, State.FAILED)
            return
        try:
            self._begin(request)
        except SglError as error:
            self._end(request, error, State.FAILED)
            return
        self.scheduler.add(request)

    def _step(self) -> None:
        """One step. Where memory ends in it, its rows are put back and each is tried alone."""
        batch = self.scheduler.plan()
        shortage = None
        try:
            self._advance(batch)
        except Exception as error:  # which of them it is, its words say
            if not memory.is_shortage(error):
                raise
            shortage = str(error).partition("\n")[0]
        if shortage is not None:  # by now what the error held is free
            self._isolate(shortage)

    def _isolate(self, shortage: str) -> None:
        """Goes on after a step whose memory was not enough. Nothing of it counts; of the one before it all does, unless
        it can't be read: then its tokens are drawn again."""
        try:
            self._settle_before()
        except Exception as error:  # as in _step
            if not memory.is_shortage(error):
                raise
        memory.release_cached()
        self.scheduler.store.settle(self.scheduler.store.step)  # what was launched of it comes before any other step
        if not self.scheduler.isolated:
            logger.warning("%s The rows of the step are tried one by one.", shortage)
            self.scheduler.isolate()
            return
        for request in list(self.scheduler.running()):
            failure = OverloadedError(
                f"not enough memory for the request, alone and in pieces of {ISOLATED_TOKENS} tokens: {shortage}",
                hint="Lower mem_fraction or max_total_tokens, which leaves more beside the KV pool, or end what else "
                "takes memory.",
            )
            self._end(request, failure, State.FAILED)

    def _advance(self, batch: Batch | None) -> None:
        """Launches a step, and reads what the one before has drawn while it runs (depth 1), or what itself has drawn
        (depth 0). A step's draws may depend on every token before, so they are launched last."""
        if batch is None:
            if self._in_flight is None and not self.scheduler.idle:
                raise AssertionError("requests are waiting, nothing runs, and nothing can be admitted")
            self._settle_before()
            return
        self.steps += 1
        for request in batch.fresh:
            self._sampling.set(request.slot, request.params, request.seed)
            self._masked[request.slot] = request.masked_only
            wanted = request.wanted
            self._looks[request.slot] = wanted is not None
            if wanted is not None:
                self._wanted[request.slot, : len(wanted)] = wanted
        began = time.perf_counter()
        forward = self._runner.forward(batch)
        patience = max(time.perf_counter() - began, _PATIENCE)
        through = self.scheduler.launched(batch)
        self._settle_before()
        rows = (batch.samples & self.scheduler.live(batch)).nonzero()[0]
        rows, masks, filling = self._fill(batch, rows, patience)
        special = self._special(batch, rows)
        drawn = self._runner.sample(forward, rows, special, masks)
        self.scheduler.drawn(batch.slots[rows])
        self._in_flight = _InFlight(forward, rows, drawn, through, filling)
        if not self._overlap or self.scheduler.isolated:
            self._settle_before()

    def _settle_before(self) -> None:
        """Reads the step that is in flight, if any."""
        before, self._in_flight = self._in_flight, None
        if before is not None:
            self._settle(before)

    def _fill(
        self, batch: Batch, rows: NDArray[np.int64], patience: float
    ) -> tuple[NDArray[np.int64], Masks | None, float]:
        """The masks of some rows, and how long those took. Returns the rows without those whose masks are late: their
        last token is computed again in the next step."""
        watched = self.scheduler.store.table.watched[batch.slots[rows]].nonzero()[0].tolist()
        matchers: list[Matcher] = []
        masked: list[int] = []
        for i, row in zip(watched, rows[watched].tolist()):
            matcher = batch.requests[row].matcher
            if matcher is not None:
                masked.append(i)
                matchers.append(matcher)
        if not matchers:
            return rows, None, 0.0
        words = self._masks[: len(matchers)]
        began = time.perf_counter()
        late = self._filler.fill(
            matchers,
            words,
            patience=patience,
            can_wait=lambda i: self.scheduler.repeatable(batch.requests[rows[masked[i]]]),
            others=len(masked) < len(batch.slots),  # a piece of a prompt goes on, too
        )
        filling = time.perf_counter() - began
        which = np.full(len(rows), -1, dtype=np.int32)
        which[masked] = np.arange(len(masked))
        if late:
            behind = np.array(masked)[late]
            self.late_masks += len(late)
            self.scheduler.repeat(batch.slots[rows[behind]])
            rows, which = np.delete(rows, behind), np.delete(which, behind)
        return rows, Masks(words, which), filling

    def _special(self, batch: Batch, rows: NDArray[np.int64]) -> dict[int, Special]:
        """What the draws of some rows need beyond the sampling table and masks, by index into `rows`."""
        special: dict[int, Special] = {}
        table = self.scheduler.store.table
        slots = batch.slots[rows]
        watched = (table.watched[slots] & ~self._masked[slots]).nonzero()[0]
        for i, row in zip(watched.tolist(), rows[watched].tolist()):
            request = batch.requests[row]
            if not request.special:
                continue
            tokens = table.tokens[request.slot, : table.length[request.slot]]
            params = request.params
            early = len(tokens) - request.prompt_len < params.min_tokens
            banned = tuple(request.ends) if early else ()
            special[i] = Special(params, tokens, request.prompt_len, banned, request.processor)
        return special

    def _settle(self, step: _InFlight) -> None:
        """Reads what a step has computed: appends the drawn tokens, and looks at those that may end a request or that
        somebody watches. Rows that were changed since the step was launched are passed over."""
        scheduler, batch = self.scheduler, step.forward.batch
        sampled = step.drawn.read()
        if step.filling:
            self.mask_times.add(step.filling)
            self.mask_waits.add(step.filling if sampled.waited is None else sampled.waited)
        scheduler.store.settle(batch.step)
        live = scheduler.live(batch)
        for row, scored in step.forward.scored.items():
            if live[row]:
                try:
                    batch.requests[row].score(scored.first, scored.read())
                except SglError as error:
                    self._end(batch.requests[row], error, State.FAILED)
        for i, why in sampled.errors.items():
            if live[step.rows[i]]:
                self._end(batch.requests[step.rows[i]], why, State.FAILED)
        live = scheduler.live(batch)
        now = time.perf_counter()
        for row in step.through:
            if live[row]:
                request = batch.requests[row]
                request.first_token_at = request.first_token_at or now
                if request.ending is not None:
                    self._finish(request, request.ending)
        which = live[step.rows].nonzero()[0]
        if not len(which):
            return
        table = scheduler.store.table
        slots, tokens = batch.slots[step.rows[which]], np.array(sampled.tokens, dtype=np.int32)[which]
        scheduler.learned(slots, tokens)
        full = table.known[slots] >= table.limit[slots]
        look = full | table.watched[slots] | (tokens[:, None] == self._eos).any(1)
        look |= self._looks[slots] & self._wanted[slots, tokens]
        looked = look.nonzero()[0]
        for row, i, slot, token, at_end in zip(
            step.rows[which[looked]].tolist(),
            which[looked].tolist(),
            slots[looked].tolist(),
            tokens[looked].tolist(),
            full[looked].tolist(),
        ):
            request = batch.requests[row]
            try:
                finish = self._look(request, slot, token, sampled.logprobs.get(i))
                if finish is None and not at_end and self._jump and request.matcher is not None:
                    finish, at_end = self._leap(request)
            except SglError as error:
                self._end(request, error, State.FAILED)
                continue
            if finish is None and at_end:
                finish = Finish("length", None)
            if finish is not None:
                self._finish(request, finish)

    def _look(self, request: Request, slot: int, token: int, logprob: TokenLogprob | None) -> Finish | None:
        table = self.scheduler.store.table
        if self._masked[slot]:
            return request.take_masked(token)
        if table.watched[slot]:
            return request.take((token,), logprob)
        if self._looks[slot]:
            return request.take(request.untaken(table.tokens[slot, : table.known[slot]]), None)
        return Finish("stop", token) if token in request.ends else None

    def _begin(self, request: Request) -> None:
        """Appends to a request that has not begun what its grammar forces at once, and sees whether that is all."""
        if self._jump and request.matcher is not None:
            tokens, request.ending = request.jump(request.limit - request.prompt_len)
            if tokens:
                request.tokens = np.concatenate((request.tokens, np.array(tokens, dtype=np.int32)))
        if request.ending is not None:
            request.limit = len(request.tokens)  # nothing is drawn
        elif request.limit == len(request.tokens):
            request.ending = Finish("length", None)

    def _leap(self, request: Request) -> tuple[Finish | None, bool]:
        """Appends what the request's grammar forces. Says whether that ends it, and whether it has its full length."""
        table, slot = self.scheduler.store.table, request.slot
        room = int(table.limit[slot] - table.known[slot])
        tokens, finish = request.jump(room)
        if tokens:
            self.scheduler.append(request, tokens)
        return finish, len(tokens) >= room

    def _finish(self, request: Request, finish: Finish) -> None:
        """Ends a request with its result, or lets the next one of its program go on in its slot."""
        if request.follow is None:
            self.scheduler.finish(request, State.FINISHED)
            request.tell(request.generation(finish))
            return
        table = self.scheduler.store.table
        request.tokens = table.tokens[request.slot, : table.known[request.slot]].copy()
        generation = request.generation(finish)
        request.tell(generation)
        following = request.follow(generation)
        if following is None:
            self.scheduler.finish(request, State.FINISHED)
            return
        try:
            self._begin(following)
        except SglError as error:
            self.scheduler.finish(request, State.FINISHED)
            self._end(following, error, State.FAILED)
        else:
            self.scheduler.succeed(request, following)

    def _abort(self, request: Request) -> None:
        if request.ended:
            return
        self.scheduler.finish(request, State.ABORTED)
        error = RequestAbortedError("the request was aborted.")
        error.partial = request.generation(Finish("abort", None))
        request.tell(error)

    def _end(self, request: Request, error: SglError, state: State) -> None:
        if request.ended:
            return
        self.scheduler.finish(request, state)
        request.tell(error)
