"""Answers of SGLang's offline engine: all at the end, or as a stream, in threads and in asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from typing import TYPE_CHECKING, Any

from sglang_lite.compat.sglang.answers import Answer
from sglang_lite.server.sglang.request import NativeRequest
from sglang_lite.server.sglang.run import NativeRun

if TYPE_CHECKING:
    from sglang_lite.engine.core import Core
    from sglang_lite.runtime.requests.output_builder import Event


class Stream(Iterator[Answer]):
    """Iterator of answers. Closing or dropping it aborts the requests, even before the first answer was taken."""

    def __init__(self, running: NativeRun, answers: Generator[Answer, None, None]) -> None:
        self._running, self._answers = running, answers

    def __next__(self) -> Answer:
        return next(self._answers)

    def close(self) -> None:
        """Aborts the requests."""
        self._answers.close()
        self._running.abort()

    def __del__(self) -> None:
        self._running.drop()


class AsyncStream(AsyncIterator[Answer]):
    """Asynchronous form of `Stream`."""

    def __init__(self, running: NativeRun, answers: AsyncGenerator[Answer, None]) -> None:
        self._running, self._answers = running, answers

    async def __anext__(self) -> Answer:
        return await anext(self._answers)

    async def aclose(self) -> None:
        """Aborts the requests."""
        await self._answers.aclose()
        self._running.abort()

    def __del__(self) -> None:
        self._running.drop()


def run(core: Core, request: NativeRequest) -> Any:  # as `NativeRun.results`, or a Stream
    """Runs a request. Waits for its answers, unless it asks for a stream."""
    events: queue.SimpleQueue[tuple[int, Event] | None] = queue.SimpleQueue()
    running = NativeRun(core, events.put, request)

    def answers() -> Generator[Answer, None, None]:
        try:
            while running.open:
                yield from running.add_event(events.get())
        finally:
            running.abort()

    if request.stream:
        return Stream(running, answers())
    deque(answers(), maxlen=0)
    return running.results()


async def async_run(core: Core, request: NativeRequest) -> Any:  # as `NativeRun.results`, or an AsyncStream
    """Asynchronous form of `run`."""
    events: asyncio.Queue[tuple[int, Event] | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def post(item: tuple[int, Event] | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits for events
            loop.call_soon_threadsafe(events.put_nowait, item)

    running = NativeRun(core, post, request)

    async def answers() -> AsyncGenerator[Answer, None]:
        try:
            while running.open:
                for answer in running.add_event(await events.get()):
                    yield answer
        finally:
            running.abort()

    if request.stream:
        return AsyncStream(running, answers())
    async for _ in answers():
        pass
    return running.results()
