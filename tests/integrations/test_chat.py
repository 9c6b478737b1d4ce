"""Fields and time limits of conversations with an engine of this process."""

import asyncio
import math

import pytest

import sglang_lite as sgl
from sglang_lite.integrations.chat import EngineChat
from tests.waiting import until

ASKED = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout", "abc"),
        ("timeout", math.nan),
        ("timeout", 0),
        ("timeout", -1),
        ("stream", True),
        ("model", "other"),
    ],
)
def test_fields_that_mean_nothing_here_are_refused(engine, name, value):
    with pytest.raises(sgl.ParameterError, match=name):
        EngineChat(engine).answer(messages=ASKED, max_tokens=1, **{name: value})
    with pytest.raises(sgl.ParameterError, match=name):
        list(EngineChat(engine).stream(messages=ASKED, max_tokens=1, **{name: value}))


def test_the_timeout_counts_the_wait_for_room(engine, monkeypatch):
    async def never(_submit, _count):
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(engine, "submit_when_room", never)
    with pytest.raises(sgl.RequestTimeoutError):
        EngineChat(engine).answer(messages=ASKED, timeout=0.01)


def test_a_stream_that_is_left_unclosed_as_its_loop_ends_says_nothing(engine, caplog):
    streams = []

    async def leave():
        streams.append(
            EngineChat(engine).stream_async(messages=ASKED, max_tokens=1000, ignore_eos=True)
        )
        await anext(streams[0])

    asyncio.run(leave())
    streams.clear()
    until(lambda: engine.stats()["running"] == 0)
    assert caplog.records == []
