"""An engine for coroutines: what is submitted from an event loop has its events there."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from sglang_lite.engine.core import OpenProgram
from sglang_lite.engine.engine import Engine
from sglang_lite.engine.sglang import offline
from sglang_lite.program.nodes import Path, Program
from sglang_lite.protocol import (
    Delta,
    Generation,
    Played,
    ProgramResult,
    Prompt,
    RequestAbortedError,
    RequestTimeoutError,
    Selection,
    SglError,
)
from sglang_lite.protocol.anything import Json
from sglang_lite.runtime.core.submission import GenerateRequest, ProgramRequest
from sglang_lite.runtime.output_builder import Event
from sglang_lite.server.row_player import RowPlayer

E = TypeVar("E")
T = TypeVar("T")
ProgramEvent: TypeAlias = "Played | ProgramResult | SglError"
_LONG = 4096  # characters of a prompt, above which it is tokenised beside the event loop


class Abortable(Protocol):
    """Request or program that was submitted, and can be ended."""

    def abort(self) -> None: ...


A = TypeVar("A", bound=Abortable)


class AsyncEngine:
    """
    Args:
        engine: that runs what is submitted.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._relay = _Relay()
        self._open: set[Abortable] = set()

    @property
    def open(self) -> int:
        """Number of requests and programs that have not ended."""
        return len(self._open)

    def abort_all(self) -> None:
        """Ends all that is open."""
        for each in list(self._open):
            each.abort()

    async def generate(self, asked: GenerateRequest) -> AsyncGenerator[list[Delta | Generation], None]:
        """Runs a request, and gives its events as they come, with the deltas of each sample joined. Closed before its
        end, it aborts the request.

        Raises:
            SglError: as `Engine.submit`, or the request's last event.
        """
        events: _Events[Event] = _Events(self._relay)
        submit = partial(
            self.engine.submit, asked.prompt, asked.params, asked.constraint, sink=events.put, flush=self._relay.flush,
            stream=asked.stream, namespace=asked.namespace, priority=asked.priority, rid=asked.rid,
        )  # fmt: skip
        left = asked.samples
        with self._ends(await _submitted(submit, _length(asked.prompt))):
            while left:
                taken: list[Delta | Generation] = []
                failed: SglError | None = None
                for event in _joined(await events.take()):
                    if isinstance(event, SglError):
                        failed = event
                        break
                    left -= isinstance(event, Generation)
                    taken.append(event)
                if taken:
                    yield taken
                if failed is not None:
                    raise failed

    async def results(self, asked: GenerateRequest) -> list[Generation]:
        """The generations of a request, in the samples' order.

        Raises:
            SglError: as `generate`.
        """
        found: list[Generation] = []
        async with contextlib.aclosing(self.generate(replace(asked, stream=False))) as events:
            async for taken in events:
                found += (event for event in taken if isinstance(event, Generation))
        return sorted(found, key=lambda generation: generation.index)

    async def native(
        self, calls: Sequence[GenerateRequest], *, is_list: bool, stream: bool
    ) -> AsyncGenerator[list[dict[str, Json]], None]:
        """Runs a native request, and gives what its answers are, those that have changed, each time that text comes;
        without `stream` all at the end. Closed before its end, it aborts the request.

        Raises:
            SglError: as `Engine.generate`.
        """
        events: _Events[tuple[int, Event] | None] = _Events(self._relay)

        def post(item: tuple[int, Event] | None) -> None:
            events.put(item)
            if item is None:  # there is room for more
                self._relay.flush()

        start = partial(
            offline.Running, self.engine.core, post, calls, is_list=is_list, stream=stream, flush=self._relay.flush
        )
        running = await _submitted(start, sum(_length(call.prompt) for call in calls))
        with self._ends(running):
            while running.open:
                changed: dict[int, dict[str, Any]] = {}
                for item in await events.take():
                    for answer in running.take(item):
                        changed[answer.get("index", 0)] = answer
                if stream:
                    yield list(changed.values())
            if not stream:
                found = running.results()
                yield found if is_list else [found]

    async def select(self, prompt: Prompt | str, choices: Sequence[str], *, unconditional: bool = False) -> Selection:
        """Scores choices.

        Raises:
            SglError: as `Engine.submit_select`, or the last event.
        """
        events: _Events[Selection | SglError] = _Events(self._relay)
        submit = partial(
            self.engine.submit_select, prompt, choices, sink=events.put, flush=self._relay.flush,
            unconditional=unconditional,
        )  # fmt: skip
        with self._ends(await _submitted(submit, _length(prompt))):
            (event,) = await events.take()
        if isinstance(event, SglError):
            raise event
        return event

    async def play(
        self,
        prompt: Prompt | str,
        program: Program,
        *,
        stream: bool = False,
        namespace: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[list[ProgramEvent], None]:
        """Plays a whole program, and gives its events as they come; the last one is a ProgramResult or an SglError.
        Closed before its end, it aborts the program.

        Args:
            timeout_s: after which it ends with RequestTimeoutError.

        Raises:
            SglError: as `Engine.run_program`.
        """
        events: _Events[ProgramEvent] = _Events(self._relay)
        run = partial(
            self.engine.core.run_program,
            ProgramRequest(prompt, program, stream, namespace, priority),
            self.engine.core.flushed(events.put, self._relay.flush),
        )
        with self._ends(await _submitted(run, _length(prompt))) as submitted:
            async with contextlib.aclosing(self._played(events, submitted, timeout_s)) as played:
                async for taken in played:
                    yield taken

    async def play_rows(
        self, asked: Iterator[tuple[int, ProgramRequest | SglError]], window: int, timeout_s: float
    ) -> AsyncGenerator[list[tuple[int, list[ProgramEvent]]], None]:
        """Plays programs, and gives each one's number and events when it has ended: see `RowPlayer`. Closed before its
        end, it aborts those under way."""
        with self._ends(RowPlayer(self.engine.core, asked, window, timeout_s)) as player:
            async for ended in player.ended():
                yield ended

    async def grow(
        self,
        begin: Callable[[OpenProgram], object],
        *,
        stream: bool = False,
        namespace: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[list[ProgramEvent], None]:
        """Opens a program, and gives its events as `play` does; first an empty list.

        Args:
            begin: takes the program when it is open, and may extend it until it has ended.
        """
        events: _Events[ProgramEvent] = _Events(self._relay)
        program = self.engine.open_program(
            sink=events.put, flush=self._relay.flush, stream=stream, namespace=namespace, priority=priority
        )
        with self._ends(program):
            begin(program)
            async with contextlib.aclosing(self._played(events, program, timeout_s, opened=True)) as played:
                async for taken in played:
                    yield taken

    async def _played(
        self, events: _Events[ProgramEvent], submitted: Abortable, timeout_s: float | None, *, opened: bool = False
    ) -> AsyncGenerator[list[ProgramEvent], None]:
        """Events of a program, which has so much time from now on; first an empty list if it was only `opened`."""
        late = False

        def end() -> None:
            nonlocal late
            late = True
            submitted.abort()

        timer = None if timeout_s is None else self._relay.loop.call_later(timeout_s, end)
        ended = False
        try:
            if opened:
                yield []
            while not ended:
                taken = _joined_played(await events.take())
                ended = not isinstance(taken[-1], Played)
                if late and isinstance(taken[-1], RequestAbortedError):
                    taken[-1] = RequestTimeoutError(f"the program took more than {timeout_s:g} seconds.")
                yield taken
        finally:
            if timer is not None:
                timer.cancel()

    @contextlib.contextmanager
    def _ends(self, submitted: A) -> Iterator[A]:
        """Aborts what was submitted, should it be left before its end."""
        self._open.add(submitted)
        try:
            yield submitted
        finally:
            self._open.discard(submitted)
            submitted.abort()


class _Relay:
    """Way of events from an engine's thread to the event loop, which is woken once for all of a step."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._pending: deque[_Events[Any]] = deque()

    def add(self, events: _Events[Any]) -> None:
        """Has the reader of events woken at the next `flush`. On any thread."""
        self._pending.append(events)

    def flush(self) -> None:
        """Wakes the readers, on any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            self.loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        while self._pending:
            self._pending.popleft().wake()


class _Events(Generic[E]):
    """Events of something submitted: put on the engine's thread, taken on the loop, all that have come at a time."""

    def __init__(self, relay: _Relay) -> None:
        self._relay = relay
        self._events: deque[E] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: E) -> None:
        """Takes an event, on any thread."""
        self._events.append(event)
        self._relay.add(self)

    def wake(self) -> None:
        """Wakes who waits in `take`, on the loop."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[E]:
        """The events that have come; waits for the first one."""
        while not self._events:
            self._waiter = self._relay.loop.create_future()
            await self._waiter
        taken = list(self._events)
        for _ in taken:  # others may have come
            self._events.popleft()
        return taken


async def _submitted(submit: Callable[[], A], length: int) -> A:
    """Submits, and what takes long to tokenise on another thread. A cancelled caller's is aborted when it is there."""
    if length <= _LONG:
        return submit()
    task = asyncio.ensure_future(asyncio.to_thread(submit))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_abort)
        raise


def _abort(task: asyncio.Future[Any]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().abort()


def _length(prompt: Prompt | str | Sequence[int]) -> int:
    """Characters of a prompt that are to be tokenised."""
    if isinstance(prompt, Prompt):
        return sum(len(span.text) for span in prompt.spans)
    return len(prompt) if isinstance(prompt, str) else 0


def _joined(events: Iterable[T]) -> list[T | Delta]:
    """Events, with the deltas of each sample as one."""
    found: list[T | Delta] = []
    at: dict[int, int] = {}  # where the delta of a sample is
    for event in events:
        if not isinstance(event, Delta):
            found.append(event)
        elif event.index not in at:
            at[event.index] = len(found)
            found.append(event)
        else:
            last = found[at[event.index]]
            assert isinstance(last, Delta)
            found[at[event.index]] = Delta(
                last.text + event.text, last.token_ids + event.token_ids, last.logprobs + event.logprobs, event.index
            )
    return found


def _joined_played(events: Sequence[ProgramEvent]) -> list[ProgramEvent]:
    """Events of a program, with the deltas of each node as one."""
    found: list[ProgramEvent] = []
    at: dict[tuple[Path, int], int] = {}  # where the delta of a sample is
    for event in events:
        new = event.event if isinstance(event, Played) else None
        if isinstance(event, Played) and isinstance(new, Delta):
            place = at.setdefault((event.path, new.index), len(found))
            if place < len(found):
                last = found[place]
                assert isinstance(last, Played)
                found[place] = Played(event.path, event.name, *_joined((last.event, new)))
                continue
        found.append(event)
    return found


async def begun(events: AsyncGenerator[E, None]) -> AsyncGenerator[E, None]:
    """Events of which the first have come: what is wrong with a request is raised here, before a response begins.

    Raises:
        SglError: as `events`.
    """

    async def all_of_them() -> AsyncGenerator[E, None]:
        async with contextlib.aclosing(events):
            first = await anext(events)
            yield first  # taken below: what has not begun could not be closed
            yield first
            async for each in events:
                yield each

    found = all_of_them()
    await anext(found)
    return found


async def merged(streams: Sequence[AsyncGenerator[E, None]]) -> AsyncGenerator[tuple[int, E], None]:
    """Union of several streams, each event with the index of its own, as it comes. The first error ends them all."""
    queue: asyncio.Queue[tuple[int, E] | BaseException | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[E, None]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for each in stream:
                    queue.put_nowait((index, each))
            queue.put_nowait(None)
        except BaseException as error:
            queue.put_nowait(error)
            raise

    tasks = [asyncio.ensure_future(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
