"""Asynchronous form of an engine: a request's events arrive on the event loop that submitted it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Sequence
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import msgspec

from sglang_lite.engine.core import OpenProgram
from sglang_lite.engine.engine import Engine
from sglang_lite.program.nodes import Path
from sglang_lite.protocol import (
    Delta,
    Generation,
    ParameterError,
    Played,
    ProgramResult,
    Prompt,
    RequestAbortedError,
    RequestTimeoutError,
    Selection,
    SglError,
)
from sglang_lite.protocol.anything import Json
from sglang_lite.runtime.core.open_requests import Ticket
from sglang_lite.runtime.core.submission import (
    GenerateRequest,
    OpenRequest,
    ProgramRequest,
    SelectRequest,
    Submission,
)
from sglang_lite.runtime.requests.output_builder import Event
from sglang_lite.server.sglang.request import NativeRequest
from sglang_lite.server.sglang.run import NativeRun
from sglang_lite.server.tenants import scope_name_to_key

E = TypeVar("E")
T = TypeVar("T")
ProgramEvent: TypeAlias = "Played | ProgramResult | SglError"
_LONG = 4096  # characters of a prompt; a longer one is tokenised on another thread


class Abortable(Protocol):
    """Submitted request or program that can be aborted."""

    def abort(self) -> None: ...


A = TypeVar("A", bound=Abortable)
S = TypeVar("S", bound=Submission | OpenRequest)
# API key of the HTTP request that is handled
key_in_use: ContextVar[str] = ContextVar("key_in_use", default="")


@dataclass(frozen=True, slots=True)
class Owned:
    """Owner of an open submission.

    Attributes:
        key: API key of the HTTP request that submitted it; "" if none is required.
        rids: names of its requests; another key may use the same names.
    """

    key: str
    rids: Collection[str | None]


class AsyncEngine:
    """Engine for coroutines of one event loop.

    Args:
        engine: engine that runs the requests.
        observe: function that is called with all events of the engine.
        apart: whether requests of different API keys must not share cached prefixes.
    """

    def __init__(
        self,
        engine: Engine,
        observe: Callable[[Sequence[object]], object] | None = None,
        *,
        apart: bool = False,
    ) -> None:
        self.engine = engine
        self._apart = apart
        self._relay = _Relay(observe)
        self._open: dict[Abortable, Owned] = {}

    @property
    def open(self) -> int:
        """Number of requests and programs that have not ended."""
        return len(self._open)

    def abort(self, rid: str, key: str | None) -> None:
        """Aborts the request that has the name `rid` and belongs to an API key. Does nothing if the
        request has ended.

        Args:
            key: API key whose request is aborted; None aborts the requests of this name of all
                keys.
        """
        for owned in list(self._open.values()):
            if rid in owned.rids and key in (None, owned.key):
                with contextlib.suppress(ParameterError):  # the request has ended
                    self.engine.abort(scope_name_to_key(owned.key, rid))

    def abort_all(self, key: str | None) -> None:
        """Aborts all open requests and programs of an API key, or of all keys if it is None."""
        for each, owned in list(self._open.items()):
            if key is None or owned.key == key:
                each.abort()

    async def generate(
        self, request: GenerateRequest
    ) -> AsyncGenerator[list[Delta | Generation], None]:
        """Runs a request and yields its events as they arrive, with the deltas of each sample
        joined. Closing the generator before its end aborts the request.

        Raises:
            SglError: for the same reasons as in `Engine.submit`, or because the request failed.
        """
        events: _EventQueue[Event] = _EventQueue(self._relay)
        remaining = request.samples
        with (
            _restoring_client_names((request.rid,)),
            self._abort_on_exit(await self._submit(request, events), events, (request.rid,)),
        ):
            while remaining:
                batch: list[Delta | Generation] = []
                failed: SglError | None = None
                for event in _join_deltas(await events.next_batch()):
                    if isinstance(event, SglError):
                        failed = event
                        break
                    remaining -= isinstance(event, Generation)
                    batch.append(event)
                if batch:
                    yield batch
                if failed is not None:
                    raise failed

    async def results(self, request: GenerateRequest) -> list[Generation]:
        """Runs a request and returns its generations, in the order of the samples.

        Raises:
            SglError: for the same reasons as in `generate`.
        """
        generations: list[Generation] = []
        async with contextlib.aclosing(self.generate(replace(request, stream=False))) as events:
            async for batch in events:
                generations += (event for event in batch if isinstance(event, Generation))
        return sorted(generations, key=lambda generation: generation.index)

    async def generate_native(
        self, request: NativeRequest
    ) -> AsyncGenerator[list[dict[str, Json]], None]:
        """Runs a native request. With `stream`, yields the changed answers each time text arrives.
        Otherwise, yields all answers once, at the end. Closing the generator before its end aborts
        the request.

        Raises:
            SglError: for the same reasons as in `Engine.generate`.
        """
        events: _EventQueue[tuple[int, Event] | None] = _EventQueue(self._relay)

        def post(item: tuple[int, Event] | None) -> None:
            events.enqueue_event(item)
            if item is None:  # there is room for more requests
                self._relay.wake_readers()

        request = replace(
            request, calls=[self._move_to_key_namespace(call) for call in request.calls]
        )
        name = partial(scope_name_to_key, key_in_use.get())
        rids = [call.rid for call in request.calls]
        start = partial(NativeRun, self.engine.core, post, request, self._relay.wake_readers, name)
        length = sum(_untokenized_length(call.prompt) for call in request.calls)
        with (
            _restoring_client_names(rids),
            self._abort_on_exit(await _call_submit(start, length), events, rids) as running,
        ):
            while running.open:
                changed: dict[int, dict[str, Any]] = {}
                for item in await events.next_batch():
                    for answer in running.add_event(item):
                        changed[answer.get("index", 0)] = answer
                if request.stream:
                    yield list(changed.values())
            if not request.stream:
                results = running.results()
                yield results if request.is_list else [results]

    async def select(self, request: SelectRequest) -> Selection:
        """Scores a request's choices and returns the selection.

        Raises:
            SglError: for the same reasons as in `Engine.submit_select`, or because the request
                failed.
        """
        events: _EventQueue[Selection | SglError] = _EventQueue(self._relay)
        with self._abort_on_exit(await self._submit(request, events), events):
            (event,) = await events.next_batch()
        if isinstance(event, SglError):
            raise event
        return event

    async def play(
        self, request: ProgramRequest, timeout_s: float | None = None
    ) -> AsyncGenerator[list[ProgramEvent], None]:
        """Runs a complete program and yields its events as they arrive; the last one is a
        ProgramResult or an SglError. Closing the generator before its end aborts the program.

        Args:
            timeout_s: seconds after which the program ends with RequestTimeoutError; None for no
                limit.

        Raises:
            SglError: for the same reasons as in `Engine.run_program`.
        """
        events: _EventQueue[ProgramEvent] = _EventQueue(self._relay)
        with self._abort_on_exit(await self._submit(request, events), events) as submitted:
            async with contextlib.aclosing(
                self._program_events(events, submitted, timeout_s)
            ) as played:
                async for batch in played:
                    yield batch

    async def open_program(
        self,
        request: OpenRequest,
        begin: Callable[[OpenProgram], object],
        timeout_s: float | None = None,
    ) -> AsyncGenerator[list[ProgramEvent], None]:
        """Opens a program. Yields an empty list once it is open, and then its events, like `play`.

        Args:
            begin: function that receives the open program; the program may be extended until it has
                ended.
        """
        events: _EventQueue[ProgramEvent] = _EventQueue(self._relay)
        opened = self.engine.core.open_program(
            self._move_to_key_namespace(request), events.enqueue_event, self._relay.wake_readers
        )
        with self._abort_on_exit(opened, events) as program:
            begin(program)
            async with contextlib.aclosing(
                self._program_events(events, program, timeout_s, opened=True)
            ) as played:
                async for batch in played:
                    yield batch

    async def _submit(self, request: Submission, events: _EventQueue[Any]) -> Ticket:
        request = self._move_to_key_namespace(request)
        if isinstance(request, GenerateRequest) and request.rid is not None:
            request = replace(request, rid=scope_name_to_key(key_in_use.get(), request.rid))
        submit = partial(
            self.engine.core.submit, request, events.enqueue_event, self._relay.wake_readers
        )
        return await _call_submit(submit, _untokenized_length(request.prompt))

    def _move_to_key_namespace(self, request: S) -> S:
        """Moves a request to a namespace of its API key if keys must not share cached prefixes.
        Otherwise returns the request unchanged.
        """
        key = key_in_use.get()
        if not self._apart or not key:
            return request
        namespace = scope_name_to_key(key, request.namespace)
        change: Any = replace if isinstance(request, GenerateRequest) else msgspec.structs.replace
        salted: S = change(request, namespace=namespace)
        return salted

    async def _program_events(
        self,
        events: _EventQueue[ProgramEvent],
        submitted: Abortable,
        timeout_s: float | None,
        *,
        opened: bool = False,
    ) -> AsyncGenerator[list[ProgramEvent], None]:
        """Yields the events of a program, and aborts it after `timeout_s`. With `opened`, yields an
        empty list first.
        """
        late = False

        def abort_late() -> None:
            nonlocal late
            late = True
            submitted.abort()

        timer = None if timeout_s is None else self._relay.loop.call_later(timeout_s, abort_late)
        ended = False
        try:
            if opened:
                yield []
            while not ended:
                batch = _join_program_deltas(await events.next_batch())
                ended = not isinstance(batch[-1], Played)
                if late and isinstance(batch[-1], RequestAbortedError):
                    batch[-1] = RequestTimeoutError(
                        f"the program took more than {timeout_s:g} seconds."
                    )
                yield [each for each in batch if not (late and _is_abort_event(each))]
        finally:
            if timer is not None:
                timer.cancel()

    @contextlib.contextmanager
    def _abort_on_exit(
        self, submitted: A, events: _EventQueue[Any], rids: Collection[str | None] = ()
    ) -> Iterator[A]:
        """Aborts a submission if the block is left before the submission has ended. Its last
        events, which report its usage, still reach the observer. `rids` are the names of its
        requests.
        """
        self._open[submitted] = Owned(key_in_use.get(), rids)
        try:
            yield submitted
        except (GeneratorExit, asyncio.CancelledError):  # the client has left
            events.detach_reader()
            raise
        finally:
            del self._open[submitted]
            submitted.abort()


@contextlib.contextmanager
def _restoring_client_names(rids: Iterable[str | None]) -> Iterator[None]:
    """Replaces the engine's name of a request in an error with the name that the client gave it.
    `rids` are the client's names.
    """
    try:
        yield
    except ParameterError as error:
        key = key_in_use.get()
        for rid in rids:
            if (
                rid is not None
                and error.parameter == "rid"
                and scope_name_to_key(key, rid) in str(error)
            ):
                raise ParameterError(
                    "rid", f"{rid!r} is the name of a request that has not ended."
                ) from None
        raise


def _is_abort_event(event: ProgramEvent) -> bool:
    """Returns whether an event reports what a generation had used when its program was aborted."""
    return isinstance(event, Played) and isinstance(event.event, RequestAbortedError)


class _Relay:
    """Passes events from an engine's thread to the event loop. The loop is woken once for all
    events of a step.
    """

    def __init__(self, observe: Callable[[Sequence[object]], object] | None) -> None:
        self.loop = asyncio.get_running_loop()
        self.observe = observe
        self._pending: deque[_EventQueue[Any]] = deque()

    def mark_pending(self, events: _EventQueue[Any]) -> None:
        """Marks a queue. The next `wake_readers` wakes the reader of this queue. Called on any
        thread.
        """
        self._pending.append(events)

    def wake_readers(self) -> None:
        """Wakes the readers of all marked queues. Called on any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits for events
            self.loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        while self._pending:
            self._pending.popleft().wake()


class _EventQueue(Generic[E]):
    """Queue of a submission's events, filled on the engine's thread and emptied on the event loop."""

    def __init__(self, relay: _Relay) -> None:
        self._relay = relay
        self._events: deque[E] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._left: Context | None = None  # context of a reader that has left

    def enqueue_event(self, event: E) -> None:
        """Adds an event. Called on any thread."""
        self._events.append(event)
        self._relay.mark_pending(self)

    def wake(self) -> None:
        """Wakes the coroutine that waits in `next_batch`. Called on the event loop."""
        if self._left is not None:
            self._left.run(self._pop_batch)
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next_batch(self) -> list[E]:
        """Returns all events that have arrived, after waiting for the first one."""
        while not self._events:
            self._waiter = self._relay.loop.create_future()
            await self._waiter
        return self._pop_batch()

    def detach_reader(self) -> None:
        """Stops collecting events for a reader that has left. Later events are only passed to the
        observer, in the context of this call.
        """
        self._left = copy_context()
        self.wake()

    def _pop_batch(self) -> list[E]:
        batch = list(self._events)
        for _ in batch:  # further events may have arrived
            self._events.popleft()
        if self._relay.observe is not None and batch:
            self._relay.observe(batch)
        return batch


async def _call_submit(submit: Callable[[], A], length: int) -> A:
    """Submits a request, on another thread if its prompt is long. If the caller is cancelled
    meanwhile, the submission is aborted as soon as it has been made.
    """
    if length <= _LONG:
        return submit()
    task = asyncio.ensure_future(asyncio.to_thread(submit))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_abort_submitted_task)
        raise


def _abort_submitted_task(task: asyncio.Future[Any]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().abort()


def _untokenized_length(prompt: Prompt | str | Sequence[int]) -> int:
    """Returns the number of characters of a prompt that must be tokenised."""
    if isinstance(prompt, Prompt):
        return sum(len(span.text) for span in prompt.spans)
    return len(prompt) if isinstance(prompt, str) else 0


def _join_deltas(events: Iterable[T]) -> list[T | Delta]:
    """Joins the deltas of each sample into one, at the position of the sample's first delta."""
    found: list[T | Delta] = []
    at: dict[int, int] = {}  # index in `found` of each sample's delta
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
                last.text + event.text,
                last.token_ids + event.token_ids,
                last.logprobs + event.logprobs,
                event.index,
            )
    return found


def _join_program_deltas(events: Sequence[ProgramEvent]) -> list[ProgramEvent]:
    """Joins the deltas of each sample of a program's node into one, at the position of the sample's
    first delta.
    """
    found: list[ProgramEvent] = []
    at: dict[tuple[Path, int, int], int] = {}  # index in `found` of each sample's delta
    for event in events:
        new = event.event if isinstance(event, Played) else None
        if isinstance(event, Played) and isinstance(new, Delta):
            place = at.setdefault((event.path, event.attempt, new.index), len(found))
            if place < len(found):
                last = found[place]
                assert isinstance(last, Played)
                (joined,) = _join_deltas((last.event, new))
                found[place] = msgspec.structs.replace(event, event=joined)
                continue
        found.append(event)
    return found


async def wait_for_first_event(events: AsyncGenerator[E, None]) -> AsyncGenerator[E, None]:
    """Waits for the first event, and then returns a generator of all events. An invalid request
    thus raises its error before a response begins.

    Raises:
        SglError: any error of `events`.
    """

    async def all_events() -> AsyncGenerator[E, None]:
        async with contextlib.aclosing(events):
            first = await anext(events)
            # consumed below: closing a generator that has not started would not close `events`
            yield first
            yield first
            async for each in events:
                yield each

    found = all_events()
    await anext(found)
    return found


async def merge_streams(
    streams: Sequence[AsyncGenerator[E, None]],
) -> AsyncGenerator[tuple[int, E], None]:
    """Yields the events of several streams as they arrive, each with the index of its stream. The
    first error ends all streams.
    """
    queue: asyncio.Queue[tuple[int, E] | BaseException | None] = asyncio.Queue()

    async def forward_events(index: int, stream: AsyncGenerator[E, None]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for each in stream:
                    queue.put_nowait((index, each))
            queue.put_nowait(None)
        except BaseException as error:
            queue.put_nowait(error)
            raise

    tasks = [
        asyncio.ensure_future(forward_events(index, stream)) for index, stream in enumerate(streams)
    ]
    try:
        remaining = len(tasks)
        while remaining:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                remaining -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
