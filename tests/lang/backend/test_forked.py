"""A process that forks: parent and copy each have connections of their own."""

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import openai as sdk
import pytest
from api_server import Hold

import sglang_lite as sgl
from sglang_lite.lang.backend.anthropic import Anthropic
from sglang_lite.lang.backend.openai import OpenAI
from tests.waiting import until

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.usefixtures("either_client"),
]


@sgl.function
def echo(s, word):
    s += sgl.user(word) + sgl.assistant(sgl.gen("a"))


def in_a_copy(work: Callable[[], Any]) -> Callable[[], Any]:
    """Does work in a forked copy of this process. Returns what waits for the result."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a copy that hangs ends
        try:
            os.write(theirs, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(theirs)

    def result() -> Any:
        with os.fdopen(ours) as pipe:
            told = pipe.read()
        os.waitpid(child, 0)
        return json.loads(told)

    return result


@pytest.fixture(params=[OpenAI, Anthropic])
def backend(request, api, connected):
    """Backend that answers with the user's words."""

    def answer(request):
        word = request.body["messages"][0]["content"]
        word = word if isinstance(word, str) else word[0]["text"]
        return Hold() if word == "hold" else word

    api.answers = answer
    return connected(request.param, "gpt-4o" if request.param is OpenAI else "claude-opus-5",
                     path="/v1" if request.param is OpenAI else "")  # fmt: skip


def echoed(backend, who, stream=False):
    return [echo.run(f"{who} {i}", backend=backend, stream=stream)["a"] for i in range(10)]


@pytest.mark.parametrize("stream", [False, True])
def test_both_go_on_each_with_its_own_answers(backend, stream):
    assert echo.run("before", backend=backend)["a"] == "before"
    copy = in_a_copy(lambda: echoed(backend, "copy", stream))
    assert echoed(backend, "parent", stream) == [f"parent {i}" for i in range(10)]
    assert copy() == [f"copy {i}" for i in range(10)]
    assert echo.run("after", backend=backend)["a"] == "after"


def test_a_call_under_way_stays_the_parents(api, backend):
    held = echo.run("hold", backend=backend)
    until(lambda: api.requests)
    copy = in_a_copy(lambda: [*echoed(backend, "copy"), backend.shutdown()])
    assert copy() == [*(f"copy {i}" for i in range(10)), None]
    assert echo.run("after", backend=backend)["a"] == "after"
    assert not api.hung_up.is_set()
    backend.shutdown()
    assert held.error() is not None
    assert api.hung_up.wait(30)


def test_a_client_of_ones_own_for_http_can_not_be_shared(api, openai):
    backend = openai(http_client=sdk.DefaultAsyncHttpxClient())
    api.answers = "x"
    assert echo.run("before", backend=backend)["a"] == "x"

    def told():
        error = echo.run("copy", backend=backend).error()
        return [type(error).__name__, str(error)]

    kind, message = in_a_copy(told)()
    assert kind == "BackendError"
    assert "the connections of http_client=" in message
    assert echo.run("after", backend=backend)["a"] == "x"
