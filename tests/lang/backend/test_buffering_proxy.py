"""Streams that come in one piece at their end, as behind a proxy that buffers: the same answer,
events and limits.
"""

import asyncio
import threading

import pytest

import sglang_lite as sgl
from sglang_lite.lang.backend.anthropic import Anthropic
from sglang_lite.protocol import Delta
from sglang_lite.testing import Buffered, Events, Fail, Say


@pytest.fixture(params=["chat", "responses", "messages"])
def connect(request, openai, connected):
    return {
        "chat": lambda **options: openai("gpt-4o", **options),
        "responses": lambda **options: openai("gpt-5", api="responses", **options),
        "messages": lambda **options: connected(Anthropic, "claude-opus-5", **options),
    }[request.param]


@sgl.function
def program(s, /, **options):
    s += sgl.user("Hi") + sgl.assistant(sgl.gen("a"))


def pieces(backend):
    """Pieces of a stream with the metadata that is theirs, the whole text and the usage."""
    state = program.run(backend=backend, stream=True)
    shown = [text for text in state.text_iter("a") if text]
    usage = state.usage()
    return shown, state["a"], (usage.prompt_tokens, usage.completion_tokens, usage.reasoning_tokens)


def test_the_same_comes_of_it(api, connect):
    backend, answer = connect(), Say("One two three.", thinking="Let me count.")
    api.answers = answer
    at_once = pieces(backend)
    api.answers = Buffered(answer)
    assert pieces(backend) == at_once
    assert at_once[1] == "".join(at_once[0]) == "One two three."
    assert len(at_once[0]) == 3


def test_nothing_is_shown_before_it_comes_and_limits_hold(api, connect):
    over, shown = threading.Event(), []

    def events():
        over.wait()
        yield from ()

    for backend, timeout in ((connect(timeout=0.05), None), (connect(), 0.05)):
        api.answers = [Events(events(), buffered=True)]
        state = program.run(backend=backend, stream=True, timeout=timeout)
        with pytest.raises(sgl.RequestTimeoutError):
            shown += state.text_iter("a")
    over.set()
    assert shown == []


def test_an_error_in_the_middle_is_one(api, connect):
    api.answers = Buffered(Fail(529, "Overloaded", kind="overloaded_error", after=2))
    with pytest.raises(sgl.BackendError, match="Overloaded"):
        list(program.run(backend=connect(), stream=True).text_iter("a"))


def test_events_are_those_of_a_stream(api, connect):
    api.answers = Buffered("One two three.")
    backend = connect()

    async def events():
        prompt = sgl.protocol.Prompt((), (sgl.protocol.Message("user", ("Hi",)),), "assistant")
        return [
            each
            async for each in backend.agenerate(prompt, sgl.SamplingParams(), None, stream=True)
        ]

    *deltas, whole = asyncio.run(events())
    assert [type(each) for each in deltas] == [Delta] * 3
    assert "".join(each.text for each in deltas) == whole.text == "One two three."
