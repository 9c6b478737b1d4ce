"""Events of a request on the loop: none is lost, whatever comes with it."""

import asyncio
from typing import cast

import pytest

from sglang_lite import Engine
from sglang_lite.protocol import Delta, OverloadedError, SamplingParams
from sglang_lite.runtime.core.submission import GenerateRequest, OpenRequest
from sglang_lite.server.async_engine import AsyncEngine, wait_for_first_event


class Failing:
    """Engine whose request says two words and fails, all before the loop looks."""

    @property
    def core(self):
        return self

    def submit(self, request, sink, flush):
        for event in (Delta("a "), Delta("b"), OverloadedError("no room")):
            sink(event)
        flush()
        return self

    def abort(self):
        pass


def test_text_that_comes_with_an_error_comes_before_it():
    async def main():
        taken = []
        with pytest.raises(OverloadedError, match="no room"):
            async for events in AsyncEngine(cast(Engine, Failing())).generate(
                GenerateRequest("x", SamplingParams(), stream=True)
            ):
                taken += events
        return taken

    assert [event.text for event in asyncio.run(main())] == ["a b"]


class Opening:
    """Engine that opens a program, which says nothing."""

    aborted = False

    @property
    def core(self):
        return self

    def open_program(self, *_):
        return self

    def abort(self):
        self.aborted = True


def test_the_time_of_a_program_that_grows_begins_before_anybody_reads(monkeypatch):
    async def main():
        engine, timers = Opening(), []

        def later(seconds, end):
            timers.append((seconds, end))
            return Timer()

        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", later)
        events = AsyncEngine(cast(Engine, engine)).open_program(
            OpenRequest(), lambda program: None, timeout_s=60
        )
        assert await anext(events) == []
        ((seconds, end),) = timers
        assert (seconds, engine.aborted) == (60, False)
        end()
        assert engine.aborted
        await events.aclose()
        assert Timer.cancelled

    class Timer:
        cancelled = False

        def cancel(self):
            Timer.cancelled = True

    asyncio.run(main())


def test_a_stream_that_has_begun_is_closed_though_nobody_has_read():
    closed = []

    async def numbers():
        try:
            yield 1
            yield 2
        finally:
            closed.append(True)

    async def main():
        events = await wait_for_first_event(numbers())
        await events.aclose()
        assert closed
        assert [each async for each in await wait_for_first_event(numbers())] == [1, 2]

    asyncio.run(main())
