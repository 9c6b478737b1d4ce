"""Submissions that are still open in an engine's process. Their events are delivered to sinks here."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from sglang_lite.engine.engine_process import EngineProcess
from sglang_lite.engine.frames import AskReply, ProgramEnded, RequestEvent
from sglang_lite.protocol import Delta, Played, ProgramResult, SglError
from sglang_lite.protocol.anything import Json
from sglang_lite.runtime.core.flushes import Flushes
from sglang_lite.wire.failure import Failure, as_error

logger = logging.getLogger("sglang_lite")


@dataclass(slots=True, eq=False)
class OpenSubmission:
    """Submission that still expects at least one event.

    Attributes:
        expected_ends: number of last events that have not arrived.
        flush: called once for the events of a frame.
        cached: cached tokens of the prompt; -1 while unknown.
        unsent: frame that will be sent together with the submission's next one.
        failed: True if the sink has raised an exception. It is then called only with last events.
    """

    expected_ends: int = 1
    flush: Callable[[], object] | None = None
    cached: int = -1
    unsent: bytes = b""
    failed: bool = False
    sink: Callable[[Any], None] = field(init=False)
    process: EngineProcess = field(init=False)


class OpenSubmissions:
    """Open submissions and unanswered calls of an engine's process, by number.

    Args:
        abort: function that aborts a submission by its number.

    Attributes:
        lock: guards the open submissions and sending, so that frames are sent whole and in the
            order of their numbers.
        open: open submissions by number, to which the holder of `lock` adds.
        reader: thread that calls the sinks.
    """

    def __init__(self, abort: Callable[[int], object]) -> None:
        self._abort = abort
        self.lock = threading.Lock()
        self.reader = threading.current_thread()  # until the reader's thread exists
        self.open: dict[int, OpenSubmission] = {}
        self._calls: dict[int, tuple[EngineProcess, Future[Any]]] = {}
        self._flushes = Flushes(lambda: True)  # events are delivered only on the reader's thread
        self._late: deque[Callable[[], object]] = deque()

    # ------------------------------------------------------------------------- called on any thread

    def register_call(self, number: int, process: EngineProcess) -> Future[Json]:
        """Registers a call that the process will answer, and returns the future of the answer. The
        caller must hold `lock`.
        """
        future: Future[Any] = Future()
        self._calls[number] = (process, future)
        return future

    def call_soon(self, call: Callable[[], object]) -> None:
        """Schedules a call on the thread that calls the sinks, after the next frame. Takes no lock."""
        self._late.append(call)

    # ---------------------------------------------------------------- called on the reader's thread

    def complete_call(self, message: AskReply) -> None:
        """Completes the future of a call."""
        _, future = self._calls.pop(message.id)
        if message.failure is None:
            future.set_result(message.value)
        else:
            future.set_exception(as_error(message.failure))

    def deliver_event(self, message: RequestEvent) -> None:
        """Passes an event to the sink of its submission."""
        entry = self.open.get(message.id)
        if entry is None:  # the submission was aborted, or its sink has failed
            _, future = self._calls.pop(message.id, (None, None))
            # the call could not be decoded
            if future is not None and isinstance(message.event, Failure):
                future.set_exception(as_error(message.event))
            return
        entry.cached = max(entry.cached, message.cached)
        event: Any = message.event
        if isinstance(event, Failure):
            event = as_error(event)
        elif isinstance(event, ProgramEnded):
            event = ProgramResult(event.text)
        if message.path is not None:
            event = Played(message.path, message.name, event, message.attempt)
        times = 1
        if isinstance(event, Delta | Played):
            if entry.failed:
                return
        else:
            times = entry.expected_ends if message.ends else 1
            entry.expected_ends -= times
        for _ in range(times):
            try:
                entry.sink(event)
            except Exception:  # the caller's code: only its own request ends
                with contextlib.suppress(Exception):  # the caller's logging handlers may raise
                    logger.exception("the sink of request %d failed", message.id)
                entry.failed = True
                self._abort(message.id)
        if entry.flush is not None:
            self._flushes.flush_after_step(entry.flush)
        if not entry.expected_ends:
            self._forget_ended_submission(message.id)

    def _forget_ended_submission(self, number: int) -> None:
        """Forgets a submission that has ended."""
        with self.lock:
            ended = self.open.pop(number, None)
        del ended  # without the lock: destructors of objects it refers to may send

    def run_deferred_calls(self) -> None:
        """Flushes the sinks that have received events since the last flush, and runs the callbacks
        of `call_soon`.
        """
        self._flushes.call_flush_callbacks()
        while self._late:
            try:
                self._late.popleft()()
            except Exception:
                with contextlib.suppress(Exception):  # the caller's logging handlers may raise
                    logger.exception("a stream that nobody reads could not be ended")

    def fail_all_of(self, process: EngineProcess, error: SglError) -> None:
        """Fails all submissions and calls of a process that has ended."""
        if not process.ready.done():
            process.ready.set_exception(copy(error))
        with self.lock:  # nothing is being sent to the process from here on
            calls = [
                self._calls.pop(number)
                for number, (of, _) in list(self._calls.items())
                if of is process
            ]
            ended = [
                self.open.pop(number)
                for number, entry in list(self.open.items())
                if entry.process is process
            ]
        for _, future in calls:
            future.set_exception(copy(error))
        for entry in ended:
            for _ in range(entry.expected_ends):
                with contextlib.suppress(Exception):
                    entry.sink(copy(error))
        for flush in {entry.flush for entry in ended if entry.flush is not None}:
            with contextlib.suppress(Exception):
                flush()  # immediately: another process's reader may be calling the sinks by now
        self.run_deferred_calls()
