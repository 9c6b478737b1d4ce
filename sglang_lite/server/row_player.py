"""Programs of a batch on an engine, for an event loop: a window of them under way, told when they have ended.

No row has a task of its own: the engine's thread puts events away, and wakes one reader once for all of a step.
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
_AT_ONCE = 32  # rows that are begun before the loop has a turn


class RowPlayer:
    """
    Args:
        asked: of the engine for each row, by its number; or why that can't be.
        window: how many may be under way, or have ended and not been read.
        timeout_s: after which each ends with RequestTimeoutError.
    """

    def __init__(
        self,
        core: Core,
        asked: Iterator[tuple[int, ProgramRequest | SglError]],
        window: int,
        timeout_s: float,
    ) -> None:
        self._core, self._asked, self._window, self._timeout = core, asked, window, timeout_s
        self._loop = asyncio.get_running_loop()
        self._put_off: tuple[int, ProgramRequest | SglError] | None = None  # there was no room for it
        self._events: dict[int, list[RowEvent]] = {}  # of the window's
        self._tickets: dict[int, Ticket] = {}  # of those of them that have begun
        self._ended: deque[int] = deque()  # appended to on any thread
        self._come = asyncio.Event()
        self._flush = self._wake_soon  # one object: the engine calls it once for all that a step tells
        self._due: deque[tuple[float, int]] = deque()  # when rows are late, the first one first
        self._late: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def ended(self) -> AsyncGenerator[list[tuple[int, list[RowEvent]]], None]:
        """Rows with all their events, as they end: those that have ended meanwhile at a time."""
        await self._begin()
        while self._events:
            while not self._ended:
                self._come.clear()
                if not self._ended:
                    await self._come.wait()
            yield self._take()
            await self._begin()

    def abort(self) -> None:
        """Ends what is under way."""
        if self._timer is not None:
            self._timer.cancel()
        for ticket in self._tickets.values():
            ticket.abort()

    # --------------------------------------------------------------------------------------------- beginning

    async def _begin(self) -> None:
        """Begins rows while there is room."""
        begun = 0
        while len(self._events) < self._window:
            following = self._put_off or next(self._asked, None)
            self._put_off = None
            if following is None or not await self._begin_one(*following):
                return
            begun += 1
            if not begun % _AT_ONCE:
                await asyncio.sleep(0)

    async def _begin_one(self, number: int, asked: ProgramRequest | SglError) -> bool:
        """Begins a row. False: there is no room at the engine, and some will come when another row has ended."""
        sink = self._core.flushed(self._sink(number), self._flush)
        try:
            if isinstance(asked, SglError):
                raise asked
            submit = partial(self._core.run_program, asked, sink)
            try:
                self._tickets[number] = submit()
            except OverloadedError:
                if self._tickets:
                    del self._events[number]
                    self._put_off = number, asked
                    return False
                self._tickets[number] = await self._core.admitted(submit, 1)
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

    # -------------------------------------------------------------------------------------------------- time

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

    # ------------------------------------------------------------------------------------------------ ending

    def _wake_soon(self) -> None:
        """Wakes the reader, on any thread."""
        if self._ended:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                self._loop.call_soon_threadsafe(self._come.set)

    def _take(self) -> list[tuple[int, list[RowEvent]]]:
        taken = []
        while self._ended:
            number = self._ended.popleft()
            events = self._events.pop(number)
            self._tickets.pop(number, None)
            if number in self._late and isinstance(events[-1], RequestAbortedError):
                events[-1] = RequestTimeoutError(f"the program took more than {self._timeout:g} seconds.")
            taken.append((number, events))
        return taken
