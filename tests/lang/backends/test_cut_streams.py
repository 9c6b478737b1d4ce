"""Streams of each API, cut at every event: a typed error that names the call, or the whole answer; never half of one."""

from contextlib import suppress

import pytest
from anthropic_answers import said as claude_said
from api_server import Events
from openai_answers import responded, run, streamed

import sglang_lite as sgl
from sglang_lite.lang.backend.anthropic import Anthropic

STREAMS = {
    "chat": list(streamed("Hel", "lo").events),
    "responses": responded("Hel", "lo"),
    "messages": list(claude_said("Hel", "lo").events),
}


@pytest.fixture
def backend(openai, connected):
    return {
        "chat": lambda: openai("gpt-4o"),
        "responses": lambda: openai("gpt-5", api="responses"),
        "messages": lambda: connected(Anthropic, "claude-opus-5"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("end", ["done", "drop"])
@pytest.mark.parametrize(("name", "cut"), [(name, i) for name, events in STREAMS.items() for i in range(len(events))])
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
