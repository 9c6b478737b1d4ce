"""Streams of each API, cut at every event: a typed error that names the call, or the whole answer;
never half of one.
"""

import asyncio
import gc
import re
from contextlib import suppress
from types import AsyncGeneratorType

import pytest
from anthropic_answers import said as claude_said
from api_server import Events
from openai_answers import responded, run, streamed

import sglang_lite as sgl
from sglang_lite.lang.backend.anthropic import Anthropic

pytestmark = pytest.mark.usefixtures("either_client")

STREAMS = {
    "chat": list(streamed("Hel", "lo").events),
    "responses": responded("Hel", "lo"),
    "messages": list(claude_said("Hel", "lo").events),
}

UNREADABLE = {
    "chat": {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": 5,
    },
    "responses": {
        "type": "response.output_text.delta",
        "output_index": 0,
        "delta": "!",
        "logprobs": 5,
    },
    "messages": {"type": "content_block_delta", "index": 0, "delta": 5},
}
REFUSED = {
    "chat": "{no JSON",
    "responses": "{no JSON",
    "messages": {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}},
}


@pytest.fixture
def backend(openai, connected):
    return {
        "chat": lambda: openai("gpt-4o"),
        "responses": lambda: openai("gpt-5", api="responses"),
        "messages": lambda: connected(Anthropic, "claude-opus-5"),
    }


@pytest.mark.parametrize("end", ["done", "drop"])
@pytest.mark.parametrize(
    ("name", "cut"), [(name, i) for name, events in STREAMS.items() for i in range(len(events))]
)
def test_a_cut_stream_is_an_error_or_the_whole_answer(api, backend, name, cut, end):
    api.answers = [Events(STREAMS[name][:cut], end=end)]
    state = run(backend[name](), stream=True)
    with suppress(sgl.SglError):
        list(state.text_iter())  # to its end
    error = state.error()
    if error is None:
        assert state["a"] == "Hello"
        assert cut >= len(STREAMS[name]) - 2  # what ends the answer has come
    else:
        assert type(error) is sgl.BackendError
        assert error.origin.provider == ("anthropic" if name == "messages" else "openai")
        assert error.origin.node == "a"


def open_generators():
    """Asynchronous generators of the SDKs and their HTTP library that have begun and not ended."""
    found = (
        each
        for each in gc.get_objects()
        if isinstance(each, AsyncGeneratorType) and each.ag_frame is not None
    )
    return [
        each
        for each in found
        if re.search(r"/(httpx2|httpcore2|openai|anthropic)/", each.ag_code.co_filename)
    ]


async def read(events, *, leave):
    """Reads an answer's stream, with `leave` to its first text alone. Returns what was raised, with
    the frames that raised it, and the generators that are open afterwards.
    """
    before, errors = open_generators(), []
    try:
        async for _ in events:
            if leave:
                break
    except Exception as error:
        errors.append(error)
    await events.aclose()
    for _ in range(50):  # rounds in which the loop closes what was dropped
        await asyncio.sleep(0)
    return errors, [each for each in open_generators() if each not in before]


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize(
    "end", ["left by the caller", "refused by the SDK", "refused by the reader"]
)
def test_a_stream_that_is_left_early_leaves_no_generator_to_the_collector(api, backend, name, end):
    first, *_ = (at for at, event in enumerate(STREAMS[name]) if "Hel" in str(event))
    wrong = {
        "refused by the SDK": [REFUSED[name]],
        "refused by the reader": [UNREADABLE[name]],
    }.get(end, [])
    api.answers = [Events([*STREAMS[name][: first + 1], *wrong, *STREAMS[name][first + 1 :]])]
    prompt = sgl.protocol.Prompt((), (sgl.protocol.Message("user", ("Hi",)),), "assistant")
    events = backend[name]().agenerate(prompt, sgl.SamplingParams(), None, stream=True)
    gc.disable()
    try:
        errors, left_open = asyncio.run(read(events, leave=end == "left by the caller"))
    finally:
        gc.enable()
    assert len(errors) == (end != "left by the caller")
    assert left_open == []
