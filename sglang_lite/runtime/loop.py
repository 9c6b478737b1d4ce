"""The step loop: schedule → launch → settle, on one thread.

Other threads only post commands to its inbox. Everything a request goes through happens here, so nothing needs a lock;
and nothing here may block: tokenising and compiling are done before a request is posted.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import numpy as np

from sglang_lite.protocol import (
    EngineClosedError,
    RequestAbortedError,
    SglError,
    TokenLogprob,
)
from sglang_lite.runtime.execute.runner import Runner, StepResult
from sglang_lite.runtime.execute.sampler import SamplingTable, Special
from sglang_lite.runtime.request import Event, Finish, Request, State
from sglang_lite.runtime.schedule.batch import Batch
from sglang_lite.runtime.schedule.scheduler import Scheduler

logger = logging.getLogger("sglang_lite")
T = TypeVar("T")


class StepLoop:
    """
    Args:
        scheduler: queues and cache; used by this loop alone.
        runner: runs batches.
        sampling: parameters by slot; filled here, read by the runner.
        eos_ids: tokens that may end a generation.
        vocab_size: for grammar masks.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        sampling: SamplingTable,
        eos_ids: frozenset[int],
        vocab_size: int,
    ) -> None:
        self.scheduler = scheduler
        self.steps = 0
        self.crash: BaseException | None = None
        self._runner, self._sampling = runner, sampling
        self._eos = np.array(sorted(eos_ids), dtype=np.int32)
        self._mask_words = -(-vocab_size // 32)
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._closing = False  # told to stop; read and written on the loop's thread
        self._ended = False  # takes no more commands; under the lock
        self._lock = threading.Lock()

    # ------------------------------------------------------------------------------------- any thread

    def post(self, command: Callable[[], object]) -> None:
        """Runs `command` on the loop's thread, soon.

        Raises:
            EngineClosedError: the loop has ended; nothing was posted.
        """
        with self._lock:
            if self._ended:
                raise EngineClosedError("the engine is closed.") from self.crash
            self._inbox.put(command)

    def call(self, command: Callable[[], T]) -> T:
        """Runs `command` on the loop's thread and returns its result. Not to be called on that thread."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(command())
            except Exception as error:  # the caller's, not the loop's
                future.set_exception(error)

        self.post(run)
        return future.result()

    def submit(self, request: Request) -> None:
        self.post(lambda: self._receive(request))

    def abort(self, request: Request) -> None:
        """Ends a request with RequestAbortedError unless it has ended. Takes effect between two steps."""
        with contextlib.suppress(EngineClosedError):  # then it has ended
            self.post(lambda: self._end(request, RequestAbortedError("the request was aborted."), State.ABORTED))

    def fail(self, request: Request, error: SglError) -> None:
        """Ends a request that could not be made ready."""
        with contextlib.suppress(EngineClosedError):
            self.post(lambda: self._end(request, error, State.FAILED))

    def close(self) -> None:
        """Tells the loop to end; every request that has not ended fails."""

        def stop() -> None:
            self._closing = True

        with contextlib.suppress(EngineClosedError):
            self.post(stop)

    # --------------------------------------------------------------------------------- the loop's thread

    def run(self) -> None:
        """The loop itself, on the thread that calls it, until `close`."""
        try:
            while True:
                if self.scheduler.idle:
                    self._inbox.get()()
                self._run_commands()
                if self._closing:
                    break
                self._step()
            error = EngineClosedError("the engine was closed before the request finished.")
        except BaseException as crash:  # whatever it is, every waiting caller must hear of it
            logger.exception("the engine's loop crashed")
            self.crash = crash
            error = EngineClosedError(f"the engine's loop crashed: {crash!r}")
            error.__cause__ = crash
        self._closing = True
        with self._lock:
            self._ended = True
        for request in list(self.scheduler.requests()):
            request.state = State.FAILED
            self._deliver(request, error)
        self._run_commands()

    def _run_commands(self) -> None:
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return
            command()

    def _receive(self, request: Request) -> None:
        if request.ended:
            return  # aborted while it was compiled
        if self._closing:
            self._end(request, EngineClosedError("the engine is closed."), State.FAILED)
            return
        self.scheduler.add(request)

    def _step(self) -> None:
        batch = self.scheduler.plan()
        if batch is None:
            return
        self.steps += 1
        for request in batch.admitted:
            self._sampling.set(request.slot, request.params, request.seed)
        result = self._runner.run(batch, self._special(batch))
        through = batch.ends == self.scheduler.store.table.length[batch.slots]
        self.scheduler.computed(batch)
        self.scheduler.store.settle(batch.step)
        for row, scored in result.scored.items():
            batch.requests[row].prompt_logprobs.extend(scored)
        for row in (through & ~batch.samples).nonzero()[0].tolist():  # nothing to generate
            self._finish(batch.requests[row], Finish("length", None))
        self._settle(batch, result)

    def _special(self, batch: Batch) -> dict[int, Special]:
        """What the draws of this step need beyond the sampling table."""
        special: dict[int, Special] = {}
        table = self.scheduler.store.table
        for row in (batch.samples & table.watched[batch.slots]).nonzero()[0].tolist():
            request = batch.requests[row]
            if not request.special:
                continue
            tokens = table.tokens[request.slot, : table.length[request.slot]]
            mask = None
            if request.matcher is not None:
                mask = np.zeros(self._mask_words, dtype=np.int32)
                request.matcher.fill_mask(mask)
            params = request.params
            early = len(tokens) - request.prompt_len < params.min_tokens
            special[row] = Special(params, tokens, request.prompt_len, mask, tuple(request.ends) if early else ())
        return special

    def _settle(self, batch: Batch, result: StepResult) -> None:
        """Appends the drawn tokens; looks at those that may end a request or that somebody watches."""
        rows = batch.samples.nonzero()[0]
        if not len(rows):
            return
        table = self.scheduler.store.table
        slots, tokens = batch.slots[rows], np.array(result.sampled.tokens, dtype=np.int32)
        self.scheduler.append(slots, tokens)
        full = table.length[slots] >= table.limit[slots]
        look = full | table.watched[slots] | np.isin(tokens, self._eos)
        for i in look.nonzero()[0].tolist():
            request = batch.requests[rows[i]]
            try:
                finish = self._look(request, int(tokens[i]), result.sampled.logprobs.get(i))
            except SglError as error:
                self._end(request, error, State.FAILED)
                continue
            if finish is None and full[i]:
                finish = Finish("length", None)
            if finish is not None:
                self._finish(request, finish)

    def _look(self, request: Request, token: int, logprob: TokenLogprob | None) -> Finish | None:
        if request.watched:
            return request.take(token, logprob)
        return Finish("stop", token) if token in request.ends else None

    def _finish(self, request: Request, finish: Finish) -> None:
        self.scheduler.finish(request, State.FINISHED)
        self._deliver(request, request.generation(finish))

    def _deliver(self, request: Request, event: Event) -> None:
        try:
            request.sink(event)
        except Exception:  # a caller's sink must not stop the others
            logger.exception("the sink of request %d failed", request.id)

    def _end(self, request: Request, error: SglError, state: State) -> None:
        if request.ended:
            return
        self.scheduler.finish(request, state)
        self._deliver(request, error)
