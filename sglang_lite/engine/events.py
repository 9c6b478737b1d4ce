"""Submissions that are open at an engine's process, and the sinks that are told of them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from copy import copy
from typing import Any, TypeVar

from sglang_lite.engine.engine_process import EngineProcess
from sglang_lite.engine.frames import AskReply, Ended, RequestEvent, error_of
from sglang_lite.protocol import Delta, Played, ProgramResult, SglError
from sglang_lite.protocol.anything import Json
from sglang_lite.wire.failure import Failure

logger = logging.getLogger("sglang_lite")
E = TypeVar("E")


class OpenEntry:
    """Submission whose last event has not come."""

    __slots__ = ("cached", "failed", "last", "process", "sink")

    def __init__(self, last: int = 1) -> None:
        self.last, self.cached = last, -1  # events that end it; tokens of its prompt that were found in the cache
        self.failed = False  # its sink has, and hears no more of it than its end
        self.sink: Callable[[Any], None]
        self.process: EngineProcess


class Events:
    """
    Args:
        abort: ends a submission by its number.

    Attributes:
        lock: of what is open and of what is sent: whole frames, in the order of their numbers.
        reader: the thread that tells.
    """

    def __init__(self, abort: Callable[[int], object]) -> None:
        self._abort = abort
        self.lock = threading.Lock()
        self.reader = threading.current_thread()  # until there is one
        self._open: dict[int, OpenEntry] = {}
        self._asked: dict[int, tuple[EngineProcess, Future[Any]]] = {}
        self._flushes: dict[Callable[[], object], None] = {}  # to be called after the frame, in this order
        self._late: deque[Callable[[], object]] = deque()

    # ------------------------------------------------------------------------------------------ any thread

    def add(self, number: int, entry: OpenEntry) -> None:
        """Opens a submission. Under the lock."""
        self._open[number] = entry

    def get(self, number: int) -> OpenEntry | None:
        return self._open.get(number)

    def ask(self, number: int, process: EngineProcess) -> Future[Json]:
        """The future of a call that a process will answer. Under the lock."""
        future: Future[Any] = Future()
        self._asked[number] = (process, future)
        return future

    def flushed(self, sink: Callable[[E], object], flush: Callable[[], object] | None) -> Callable[[E], None]:
        """A sink with `flush` called after it: once for all events that come together."""

        def tell(event: E) -> None:
            sink(event)
            if flush is None:
                return
            if threading.current_thread() is self.reader:
                self._flushes[flush] = None
            else:
                flush()

        return tell

    def later(self, call: Callable[[], object]) -> None:
        """Calls back on the reader's thread when it has read more. Takes no lock."""
        self._late.append(call)

    # ------------------------------------------------------------------------------------ the reader's thread

    def answer(self, message: AskReply) -> None:
        """Gives a call its answer."""
        _, future = self._asked.pop(message.id)
        if message.failure is None:
            future.set_result(message.value)
        else:
            future.set_exception(error_of(message.failure))

    def tell(self, message: RequestEvent) -> None:
        """Hands an event to the sink of its submission."""
        entry = self._open.get(message.id)
        if entry is None:  # it was aborted, or its sink has failed
            _, future = self._asked.pop(message.id, (None, None))
            if future is not None and isinstance(message.event, Failure):  # a call that could not be read
                future.set_exception(error_of(message.event))
            return
        entry.cached = max(entry.cached, message.cached)
        event: Any = message.event
        if isinstance(event, Failure):
            event = error_of(event)
        elif isinstance(event, Ended):
            event = ProgramResult(event.text)
        if message.path is not None:
            event = Played(message.path, message.name, event)
        times = 1
        if isinstance(event, Delta | Played):
            if entry.failed:
                return
        else:
            times = entry.last if message.ends else 1
            entry.last -= times
        for _ in range(times):
            try:
                entry.sink(event)
            except Exception:  # the caller's code, whose request alone ends
                with contextlib.suppress(Exception):  # the caller's handlers
                    logger.exception("the sink of request %d failed", message.id)
                entry.failed = True
                self._abort(message.id)
        if not entry.last:
            self._end(message.id)

    def _end(self, number: int) -> None:
        """Forgets what has ended."""
        with self.lock:
            found = self._open.pop(number, None)
        del found  # without the lock: what it refers to may end with it, and send

    def flush(self) -> None:
        """Wakes who was told something, and calls what was put off."""
        flushes, self._flushes = self._flushes, {}
        for flush in flushes:
            try:
                flush()
            except Exception:  # an event loop that was closed, say
                with contextlib.suppress(Exception):  # the caller's handlers
                    logger.exception("the reader of an engine's events could not be woken")
        while self._late:
            try:
                self._late.popleft()()
            except Exception:
                with contextlib.suppress(Exception):  # the caller's handlers
                    logger.exception("a stream that nobody reads could not be ended")

    def fail(self, process: EngineProcess, error: SglError) -> None:
        """Tells everybody who waits for a process that has ended."""
        if not process.ready.done():
            process.ready.set_exception(copy(error))
        with self.lock:  # so that nothing is being sent to it any more
            asked = [self._asked.pop(number) for number, (of, _) in list(self._asked.items()) if of is process]
            ended = [self._open.pop(number) for number, entry in list(self._open.items()) if entry.process is process]
        for _, future in asked:
            future.set_exception(copy(error))
        for entry in ended:
            for _ in range(entry.last):
                with contextlib.suppress(Exception):
                    entry.sink(copy(error))
        self.flush()
