"""SGLang's offline engine: native requests run to their end, or streamed."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from sglang_lite.engine.core import Core
from sglang_lite.engine.sglang.api import SampleAnswer
from sglang_lite.protocol import BatchError, Delta, Generation, OverloadedError, RequestAbortedError, SglError
from sglang_lite.protocol.anything import Json
from sglang_lite.runtime.core.open_requests import Ticket
from sglang_lite.runtime.core.submission import GenerateRequest
from sglang_lite.runtime.output_builder import Event

Post: TypeAlias = Callable[[tuple[int, Event] | None], object]


class Running:
    """A native request under way: its events, and the answers they make.

    Args:
        engine: that runs it.
        post: called on the engine's thread with each event, and with None when there is room for more; what it is
            called with is to be handed to `take`, wherever the caller wants that to happen.
        calls: what is asked, one a prompt.
        is_list: the answer is a list.
        stream: events come as text comes.
        flush: called there after `post`, once for all events that come together.

    Raises:
        ParameterError, OverloadedError, EngineClosedError: one of the prompts was refused, or has more samples than may
            ever wait; nothing runs. Where others leave no room, it waits for its turn.
    """

    def __init__(
        self,
        engine: Core,
        post: Post,
        calls: Sequence[GenerateRequest],
        *,
        is_list: bool,
        stream: bool,
        flush: Callable[[], object] | None = None,
    ) -> None:
        self._engine, self._post, self._is_list, self._stream = engine, post, is_list, stream
        self._flush = flush
        self._answers: list[SampleAnswer] = []
        self._waiting: deque[tuple[int, GenerateRequest]] = deque()  # with the index of the call's first answer
        decode = partial(engine.tokenizer.decode, skip_special=False)
        for number, call in enumerate(calls):
            try:
                ids = engine.checked_ids(call)
            except SglError as error:
                error.add_note(f"in prompt {number} of {len(calls)}")
                raise
            first = len(self._answers)
            self._waiting.append((first, replace(call, prompt=ids, stream=stream)))
            for index in range(first, first + call.samples):
                rid = call.rid if call.samples == 1 else f"{call.rid}_{index - first}"
                place = index if is_list and stream else None
                version = engine.config.weight_version
                self._answers.append(SampleAnswer(call, ids, place, decode, rid=rid, weight_version=version))
        self._tickets: list[Ticket | None] = [None] * len(self._answers)  # the samples of a call share theirs
        self._open = len(self._answers)
        self._running = 0  # samples whose last event has not come
        self._call: Callable[[], object] | None = None  # by which the engine says that it has room, if it is to
        self._submit()

    def _submit(self) -> None:
        """Submits what the engine takes now; the rest when something has ended."""
        while self._waiting:
            first, call = self._waiting[0]
            try:
                sink = self._engine.flushed(partial(_post, self._post, first), self._flush)
                ticket = self._engine.submit(call, sink)
            except OverloadedError:
                if self._running:
                    return
                first = self._call is not None
                self._call = partial(self._post, None)
                self._engine.wait_for_room(self._call, call.samples, first=first)
                return
            except SglError:
                self.abort()
                raise
            self._waiting.popleft()
            self._tickets[first : first + call.samples] = [ticket] * call.samples
            self._running += call.samples
            self._call = None

    @property
    def open(self) -> bool:
        """True while something is still to come."""
        return self._open > 0

    def take(self, item: tuple[int, Event] | None) -> list[dict[str, Json]]:
        """The answers that an event changes, as they are now.

        Raises:
            SglError: why the only one failed, where answers are streamed.
        """
        if item is None:
            self._submit()
            return []
        at, event = item
        ticket, changed = self._tickets[at], [self._answers[at]]
        assert ticket is not None
        if isinstance(event, SglError) and not isinstance(event, RequestAbortedError):  # ends the other samples, too
            ticket.abort()
            changed = [answer for answer, t in zip(self._answers, self._tickets) if t is ticket]
        changed = [answer for answer in changed if answer.outcome is None]
        dictionaries = [answer.take(event, ticket.cached_tokens) for answer in changed]
        self._open -= sum(answer.outcome is not None for answer in changed)
        if not isinstance(event, Delta):
            self._running -= 1
            self._submit()
        if self._stream and not self._is_list:
            self.results()
        return dictionaries

    def results(self) -> Any:  # a dictionary, or a list of dictionaries and errors
        """Gives all answers as they are: one dictionary, or a list.

        Raises:
            SglError: why the only one failed.
            BatchError: some of several failed; its `results` are dictionaries and exceptions.
        """
        outcomes = [answer.outcome for answer in self._answers]
        failures = [outcome for outcome in outcomes if isinstance(outcome, SglError)]
        if failures and not self._is_list:
            raise failures[0]
        if failures:
            which = outcomes.index(failures[0])
            count = f"{len(failures)} of {len(outcomes)} requests failed"
            raise BatchError(f"{count}; the first at index {which}: {failures[0]}", outcomes)
        return outcomes if self._is_list else outcomes[0]

    def abort(self) -> None:
        """Ends what has not ended."""
        self._waiting.clear()
        call, self._call = self._call, None
        if call is not None:
            self._engine.leave(call)
        for answer, ticket in zip(self._answers, self._tickets):
            if ticket is not None and answer.outcome is None:
                ticket.abort()

    def drop(self) -> None:
        """`abort` for whoever collects garbage, which may hold any lock: it is done on the engine's thread."""
        self._engine.later(self.abort)


class Stream(Iterator[dict[str, Any]]):
    """Answers as they come. Closed or dropped, it ends what runs, before its first answer too."""

    def __init__(self, running: Running, answers: Generator[dict[str, Json], None, None]) -> None:
        self._running, self._answers = running, answers

    def __next__(self) -> dict[str, Json]:
        return next(self._answers)

    def close(self) -> None:
        """Ends what runs."""
        self._answers.close()
        self._running.abort()

    def __del__(self) -> None:
        self._running.drop()


class AsyncStream(AsyncIterator[dict[str, Any]]):
    """`Stream` for coroutines."""

    def __init__(self, running: Running, answers: AsyncGenerator[dict[str, Json], None]) -> None:
        self._running, self._answers = running, answers

    async def __anext__(self) -> dict[str, Json]:
        return await anext(self._answers)

    async def aclose(self) -> None:
        """Ends what runs."""
        await self._answers.aclose()
        self._running.abort()

    def __del__(self) -> None:
        self._running.drop()


def _post(post: Post, first: int, event: Event) -> None:
    result = event.partial if isinstance(event, RequestAbortedError) else event
    index = result.index if isinstance(result, Delta | Generation) else 0
    post((first + index, event))


def generate(
    engine: Core, calls: Sequence[GenerateRequest], *, is_list: bool, stream: bool
) -> Any:  # as `Running.results`, or a Stream
    """Carries out `Engine.generate`."""
    events: queue.SimpleQueue[tuple[int, Event] | None] = queue.SimpleQueue()
    running = Running(engine, events.put, calls, is_list=is_list, stream=stream)

    def answers() -> Generator[dict[str, Any], None, None]:
        try:
            while running.open:
                yield from running.take(events.get())
        finally:
            running.abort()

    if stream:
        return Stream(running, answers())
    deque(answers(), maxlen=0)
    return running.results()


async def async_generate(
    engine: Core, calls: Sequence[GenerateRequest], *, is_list: bool, stream: bool
) -> Any:  # as `Running.results`, or a Stream
    """Carries out `Engine.async_generate`."""
    events: asyncio.Queue[tuple[int, Event] | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def post(item: tuple[int, Event] | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            loop.call_soon_threadsafe(events.put_nowait, item)

    running = Running(engine, post, calls, is_list=is_list, stream=stream)

    async def answers() -> AsyncGenerator[dict[str, Any], None]:
        try:
            while running.open:
                for answer in running.take(await events.get()):
                    yield answer
        finally:
            running.abort()

    if stream:
        return AsyncStream(running, answers())
    async for _ in answers():
        pass
    return running.results()
