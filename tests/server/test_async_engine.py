"""Events of a request on the loop: none is lost, whatever comes with it."""

import asyncio
from typing import cast

import pytest

from sglang_lite.engine.engine import Engine
from sglang_lite.protocol import Delta, OverloadedError, SamplingParams
from sglang_lite.runtime.core.submission import GenerateRequest
from sglang_lite.server.async_engine import AsyncEngine


class Failing:
    """Engine whose request says two words and fails, all before the loop looks."""

    def submit(self, *_, sink, flush, **__):
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
