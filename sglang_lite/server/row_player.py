"""Programs of a batch, played for an event loop: a limited number (window) runs at once, and each is reported when it
has ended.

No row has a task of its own: the engine's thread stores events, and wakes one reader once for all events of a step.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from typing import TypeAlias

from sglang_lite.engine.core import Core
from sglang_lite.protocol import (
    OverloadedError,
    Played,
    ProgramResult,
    RequestAbortedError,
    RequestTimeoutError,
    SglError,
)
from sglang_lite.runtime.core.open_requests import Ticket
from sglang_lite.runtime.core.submission import ProgramRequest

RowEvent: TypeAlias = "Played | ProgramResult | SglError"
_AT_ONCE = 32  # rows that are submitted before the event loop runs other tasks


class RowPlayer:
    """Player of a batch of programs.

    Args:
        core: core of the engine.
        rows: number of each row, with its request or the error that the row ends with.
        window: most rows that are running, or have ended and not been read.
        timeout_s: seconds after which each program ends with RequestTimeoutError.
    """

    def __init__(
        self,
        core: Core,
        rows: Iterator[tuple[int, ProgramRequest | SglError]],
        window: int,
        timeout_s: float,
    ) -> None:
        self._core, self._rows, self._window, self._timeout = core, rows, window, timeout_s
        self._loop = asyncio.get_running_loop()
        self._put_off: tuple[int, ProgramRequest | SglError] | None = None  # row that waits for room in the engine
        self._events: dict[int, list[RowEvent]] = {}  # of the rows of the window
        self._tickets: dict[int, Ticket] = {}  # of the rows of the window that were submitted
        self._ended: deque[int] = deque()  # appended to on any thread
        self._come = asyncio.Event()
        self._flush = self._wake_soon  # one object, so that the engine calls it once a step
        self._due: deque[tuple[float, int]] = deque()  # deadlines of rows, the earliest first
        self._late: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def ended(self) -> AsyncGenerator[list[tuple[int, list[RowEvent]]], None]:
        """Yields batches of ended rows, each with all its events, in order of completion."""
        await self._begin()
        while self._events:
            while not self._ended:
                self._come.clear()
                if not self._ended:
                    await self._come.wait()
            yield self._take()
            await self._begin()

    def abort(self) -> None:
        """Aborts the rows that are running."""
        if self._timer is not None:
            self._timer.cancel()
        for ticket in self._tickets.values():
            ticket.abort()

    # -------------------------------------------------------------------------------------------- submission

    async def _begin(self) -> None:
        """Submits rows while the window and the engine have room."""
        submitted = 0
        while len(self._events) < self._window:
            following = self._put_off or next(self._rows, None)
            self._put_off = None
            if following is None or not await self._begin_one(*following):
                return
            submitted += 1
            if not submitted % _AT_ONCE:
                await asyncio.sleep(0)

    async def _begin_one(self, number: int, request: ProgramRequest | SglError) -> bool:
        """Submits a row. Returns False if the engine has no room before another row has ended."""
        sink = self._core.with_flush(self._sink(number), self._flush)
        try:
            if isinstance(request, SglError):
                raise request
            submit = partial(self._core.run_program, request, sink)
            try:
                self._tickets[number] = submit()
            except OverloadedError:
                if self._tickets:
                    del self._events[number]
                    self._put_off = number, request
                    return False
                self._tickets[number] = await self._core.submit_when_room(submit, 1)
        except SglError as error:
            self._events[number].append(error)
            self._ended.append(number)
            return True
        self._due.append((self._loop.time() + self._timeout, number))
        if self._timer is None:
            self._set_timer()
        return True

    def _sink(self, number: int) -> Callable[[RowEvent], None]:
        events = self._events[number] = []

        def put(event: RowEvent) -> None:
            events.append(event)
            if not isinstance(event, Played):
                self._ended.append(number)

        return put

    # ---------------------------------------------------------------------------------------------- timeouts

    def _set_timer(self) -> None:
        while self._due and self._due[0][1] not in self._tickets:
            self._due.popleft()
        self._timer = self._loop.call_at(self._due[0][0], self._end_late) if self._due else None

    def _end_late(self) -> None:
        while self._due and self._due[0][0] <= self._loop.time():
            _, number = self._due.popleft()
            if number in self._tickets:
                self._late.add(number)
                self._tickets[number].abort()
        self._set_timer()

    # -------------------------------------------------------------------------------------------- completion

    def _wake_soon(self) -> None:
        """Wakes the reader. Called on any thread."""
        if self._ended:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits for rows
                self._loop.call_soon_threadsafe(self._come.set)

    def _take(self) -> list[tuple[int, list[RowEvent]]]:
        batch = []
        while self._ended:
            number = self._ended.popleft()
            events = self._events.pop(number)
            self._tickets.pop(number, None)
            if number in self._late and isinstance(events[-1], RequestAbortedError):
                events[-1] = RequestTimeoutError(f"the program took more than {self._timeout:g} seconds.")
            batch.append((number, events))
        return batch
