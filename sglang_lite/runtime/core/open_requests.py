"""Requests and programs that have not ended: limits their number, queues callers until there is
room, and finds them by name.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from sglang_lite.errors import short_repr
from sglang_lite.protocol import Delta, OverloadedError, ParameterError, Played

logger = logging.getLogger("sglang_lite")
_COUNTED = ("requests_submitted", "programs_opened", "programs_extended")
E = TypeVar("E")


class Ticket:
    """Handle of a submission. Its events go to the sink that was passed with the submission."""

    def __init__(
        self,
        abort: Callable[[], object],
        cached_tokens: Callable[[], int] = int,
        wind_down: Callable[[], object] = lambda: None,
    ) -> None:
        self._abort = abort
        self._cached_tokens = cached_tokens
        self._wind_down = wind_down

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the cache; -1 before admission."""
        return self._cached_tokens()

    def abort(self) -> None:
        """Ends the submission with RequestAbortedError, unless it has ended."""
        self._abort()

    def wind_down(self) -> None:
        """Ends a generation, or all generations of a program, early: text at its next token, and
        JSON as soon as closing brackets can complete it. Output that can't be completed runs to its
        normal end, and so does a selection.
        """
        self._wind_down()


class OpenRequests:
    """Counter of open requests, and queue of callers waiting for room.

    Args:
        max_open: maximum number of requests that run or wait.
    """

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._open = 0
        # waiting: (callback, number of requests)
        self._queue: deque[tuple[Callable[[], object], int]] = deque()
        self._tickets: dict[str, Ticket] = {}  # of open submissions with a name

    def track(
        self,
        sink: Callable[[E], None],
        count: int = 1,
        rid: str | None = None,
        ticket: Ticket | None = None,
    ) -> Callable[[E], None]:
        """Counts each request of a submission as open until its last event, and keeps the
        submission's name until then. Returns a sink that forwards events and updates the count.

        Args:
            sink: callback for the events.
            count: number of requests of the submission; each has one last event.
            rid: name of the submission, or None.
            ticket: ticket to return for that name.

        Raises:
            ParameterError: an open submission has this name.
            OverloadedError: too many requests are open.
        """
        remaining = count
        with self._lock:
            if rid in self._tickets:
                raise ParameterError("rid", f"{rid!r} is the name of a request that has not ended.")
            if self._open + count > self._max_open:
                raise self._overloaded_error()
            self._open += count
            if rid is not None and ticket is not None:
                self._tickets[rid] = ticket

        def count_and_forward(event: E) -> None:
            nonlocal remaining
            if not isinstance(event, Delta | Played):
                with self._lock:
                    self._open -= 1
                    remaining -= 1
                    if not remaining and rid is not None:
                        self._tickets.pop(rid, None)  # none was kept without a ticket
                self._admit_queued_calls()
            sink(event)

        return count_and_forward

    def count(self, what: str, number: int = 1) -> None:
        """Adds `number` to the counter `what`, such as "requests_submitted"."""
        with self._lock:
            self._counts[what] += number

    @property
    def open_count(self) -> int:
        """Number of requests and programs that count as open."""
        return self._open

    def counts(self) -> dict[str, int]:
        with self._lock:
            counts = {what: self._counts[what] for what in _COUNTED}
            return counts | {
                "programs_open": self._counts["programs_opened"] - self._counts["programs_ended"]
            }

    def acquire(self) -> None:
        """Counts one more open request, like `try_acquire`. Raises OverloadedError if no room is
        left.
        """
        if not self.try_acquire():
            raise self._overloaded_error()

    def _overloaded_error(self) -> OverloadedError:
        return OverloadedError(
            f"{self._open:,} requests are waiting or running.",
            hint="Try again later, or raise max_queued.",
        )

    def try_acquire(self) -> bool:
        """Counts one more open request and returns True, if there is room. Must be paired with
        `release`.
        """
        with self._lock:
            if self._open >= self._max_open:
                return False
            self._open += 1
            return True

    def release(self) -> None:
        """Counts one open request less, and calls the next callers waiting for room."""
        with self._lock:
            self._open -= 1
        self._admit_queued_calls()

    def wait_for_room(self, call: Callable[[], object], count: int, *, first: bool = False) -> None:
        """Calls `call` once, on any thread, when there is room for `count` requests.

        If there is room, calls it immediately. Otherwise, waiting callbacks are called in order as
        other requests end. The room is not reserved: the callee must try to submit, and either wait
        again with `first`, or call `give_up_place`.

        Args:
            call: callback; identifies the caller in `give_up_place`.
            count: number of requests to submit.
            first: whether to wait at the front of the queue.

        Raises:
            OverloadedError: `count` exceeds the limit.
        """
        if count > self._max_open:
            raise OverloadedError(
                f"{count:,} samples at once; {self._max_open:,} may wait or run.",
                hint="Raise max_queued.",
            )
        with self._lock:
            others = bool(self._queue) and not first
            if others or self._open + count > self._max_open:
                self._queue.insert(0 if first else len(self._queue), (call, count))
                return
        call()

    def give_up_place(self, call: Callable[[], object]) -> None:
        """Removes a callback from the queue or, if it has already been called, gives up the room
        that it was called for. The next caller in the queue can use that room.
        """
        with self._lock:
            entry = next((place for place in self._queue if place[0] is call), None)
            if entry is not None:
                self._queue.remove(entry)
        self._admit_queued_calls()

    def _admit_queued_calls(self) -> None:
        """Calls the next callbacks in the queue, as many as there is room for."""
        called = False
        while not called:
            with self._lock:
                room = self._max_open - self._open
                calls = []
                while self._queue and self._queue[0][1] <= room:
                    call, count = self._queue.popleft()
                    room -= count
                    calls.append(call)
            called = True
            for call in calls:
                try:
                    call()
                except Exception:  # e.g. its event loop is closed: the next one is called instead
                    logger.exception("a callback of a caller that waits for room failed")
                    called = False

    async def submit_once_admitted(self, submit: Callable[[], Ticket], count: int) -> Ticket:
        """Submits as soon as the engine has room for `count` requests, and returns the result of
        `submit()`.

        Raises:
            OverloadedError: `count` exceeds the limit.
            SglError: any other error of `submit`.
        """
        call: Callable[[], object] | None = None
        try:
            while True:
                first = call is not None
                loop = asyncio.get_running_loop()
                if first or not self._queue:
                    try:
                        ticket = submit()
                        call = None
                        return ticket
                    except OverloadedError:
                        pass
                room = loop.create_future()
                call = partial(loop.call_soon_threadsafe, _resolve_if_pending, room)
                self.wait_for_room(call, count, first=first)
                await room
        finally:
            if call is not None:
                self.give_up_place(call)

    def ticket_by_name(self, rid: str) -> Ticket:
        """Returns the ticket of an open submission by its name.

        Raises:
            ParameterError: no open submission has this name.
        """
        with self._lock:
            ticket = self._tickets.get(rid) if isinstance(rid, str) else None
        if ticket is None:
            raise ParameterError(
                "rid", f"{short_repr(rid)} is no request that is waiting or running."
            )
        return ticket


def _resolve_if_pending(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
