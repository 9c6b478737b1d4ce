"""What a server leaves out of its answer (usage, log-probabilities, finish reason) is a warning in
the metadata: each API and each field has one test.
"""

import contextlib
from typing import Any

import pytest
from api_server import Events, Reply
from google.oauth2.credentials import Credentials

import sglang_lite as sgl
from sglang_lite.lang.backend.anthropic import Anthropic
from sglang_lite.lang.backend.openai import OpenAI
from sglang_lite.lang.backend.vertexai import VertexAI
from sglang_lite.lang.results import WARNINGS
from sglang_lite.testing import ServerForTests
from tests.lang.backend.native_server import DONE, NativeServer, event

LOGPROB = {"token": "Paris", "logprob": -0.5, "bytes": [80]}
TOPS = [{"token": "Rome", "logprob": -1.5, "bytes": [82]}]
USAGE = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}


@sgl.function
def ask(s, /, **options):
    s += sgl.user("What is the capital of France?")
    s += sgl.assistant(sgl.gen("a", max_tokens=9, **options))


@sgl.function
def text(s, /, **options):
    s += "The capital of France is" + sgl.gen("a", max_tokens=9, **options)


# --------------------------------------------------------- answers of each API, without some fields


def kept(fields, without, **named):
    """Fields of an answer, and further ones, unless their names are left out."""
    return fields | {
        key: value
        for name, more in named.items()
        if name not in without
        for key, value in more.items()
    }


def entries(without):
    return [LOGPROB | {"top_logprobs": [] if "alternatives" in without else TOPS}]


def chat(without, stream):
    said = {
        "index": 0,
        "finish_reason": None,
        "delta" if stream else "message": {"role": "assistant", "content": "Paris"},
    }
    choice = kept(
        said,
        without,
        finish_reason={"finish_reason": "stop"},
        logprobs={"logprobs": {"content": entries(without)}},
    )
    kind = "chat.completion.chunk" if stream else "chat.completion"
    known = {"id": "c", "object": kind, "created": 1, "model": "m", "choices": [choice]}
    body = kept(known, without, usage={"usage": USAGE})
    return Events([body, "[DONE]"]) if stream else Reply(body)


def completion(without, stream):
    tops = None if "alternatives" in without else [{"Rome": -1.5}]
    logprobs = {
        "tokens": ["Paris"],
        "token_logprobs": [-0.5],
        "top_logprobs": tops,
        "text_offset": [0],
    }
    said = {"index": 0, "finish_reason": None, "text": "Paris", "logprobs": None}
    choice = kept(
        said, without, finish_reason={"finish_reason": "stop"}, logprobs={"logprobs": logprobs}
    )
    known = {
        "id": "c",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
    }
    body = kept(known, without, usage={"usage": USAGE})
    return Events([body, "[DONE]"]) if stream else Reply(body)


def response(without, stream):
    usage = {
        "input_tokens": 9, "output_tokens": 1, "total_tokens": 10, "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip
    part = {"type": "output_text", "text": "Paris", "annotations": [], "logprobs": []}
    part = kept(part, without, logprobs={"logprobs": entries(without)})
    item = {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }
    known = {"id": "r", "object": "response", "created_at": 1, "model": "gpt-4o", "output": [item]}
    body = kept(known, without, usage={"usage": usage}, finish_reason={"status": "completed"})
    return (
        Events([{"type": "response.completed", "sequence_number": 1, "response": body}])
        if stream
        else Reply(body)
    )


def message(without, stream):
    first = {
        "id": "m", "type": "message", "role": "assistant", "model": "c", "content": [], "stop_reason": None,
        "stop_sequence": None,
    }  # fmt: skip
    end = kept(
        {"stop_reason": None, "stop_sequence": None},
        without,
        finish_reason={"stop_reason": "end_turn"},
    )
    delta = {"type": "message_delta", "delta": end}
    return Events([
        {"type": "message_start", "message": kept(first, without, usage={"usage": {"input_tokens": 9}})},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Paris"}},
        {"type": "content_block_stop", "index": 0},
        kept(delta, without, usage={"usage": {"output_tokens": 1}}),
        {"type": "message_stop"},
    ])  # fmt: skip


def content(without, stream):
    tops = (
        []
        if "alternatives" in without
        else [{"candidates": [{"token": "Rome", "logProbability": -1.5}]}]
    )
    logprobs = {
        "chosenCandidates": [{"token": "Paris", "logProbability": -0.5}],
        "topCandidates": tops,
    }
    said = {"content": {"role": "model", "parts": [{"text": "Paris"}]}, "index": 0}
    candidate = kept(
        said, without, finish_reason={"finishReason": "STOP"}, logprobs={"logprobsResult": logprobs}
    )  # fmt: skip
    usage = {"promptTokenCount": 9, "candidatesTokenCount": 1, "totalTokenCount": 10}
    known = {"candidates": [candidate], "responseId": "r", "modelVersion": "g"}
    body = kept(known, without, usage={"usageMetadata": usage})
    return Events([body]) if stream else Reply(body)


def generated(without, stream):
    tops = [None if "alternatives" in without else [[-1.5, 8, "Rome"]]]
    meta = kept(
        {"id": "n"}, without, usage=USAGE, finish_reason={"finish_reason": {"type": "stop", "matched": None}},
        logprobs={"output_token_logprobs": [[-0.5, 7, "Paris"]], "output_top_logprobs": tops},
    )  # fmt: skip
    body = {"text": "Paris", "output_ids": [7], "meta_info": meta}
    return [event(body), DONE] if stream else body


def vertex(url):
    options = {
        "project": "p",
        "location": "l",
        "credentials": Credentials(token="token-0123456789"),
    }
    return VertexAI(
        "gemini-2.5-flash", http_options={"base_url": url, "timeout": 60_000}, **options
    )


# By API: its answers, a program, and a backend.
APIS = {
    "chat": (chat, ask, lambda url: OpenAI("gpt-4o", base_url=f"{url}/v1", api_key="key")),
    "completions": (
        completion,
        text,
        lambda url: OpenAI("davinci-002", base_url=f"{url}/v1", api_key="key"),
    ),
    "responses": (
        response,
        ask,
        lambda url: OpenAI("gpt-4o", base_url=f"{url}/v1", api_key="key", api="responses"),
    ),
    "messages": (message, ask, lambda url: Anthropic("claude-opus-5", base_url=url, api_key="key")),
    "generateContent": (content, ask, vertex),
    "native": (generated, text, sgl.RuntimeEndpoint),
}
WITHOUT_LOGPROBS = {"messages"}  # the API has none, so that the parameter is refused
# the rest is broken off
ASSUMED = {("chat", False), ("completions", False), ("responses", False), ("responses", True)}


class OneAnswer(ServerForTests):
    """A server that gives its answer at any address."""

    def answer_request(self, request):
        return self.answers


def asked(api, without, *, stream):
    """State of a program that asks an API whose answer lacks some fields."""
    answer, program, connect = APIS[api]
    options: dict[str, Any] = (
        {} if api in WITHOUT_LOGPROBS else {"return_logprob": True, "top_logprobs_num": 1}
    )
    with serving(api, answer(without, stream)) as url:
        backend = connect(url)
        state = program.run(backend=backend, stream=stream, **options)
        state.error()  # waits for the end
        backend.shutdown()
    return state


@contextlib.contextmanager
def serving(api, answer):
    """Address of a server that gives one answer."""
    if api != "native":
        with OneAnswer(answer, None, None, 0, compatible=True) as server:
            yield server.url
        return
    native = NativeServer()
    native.answers["/generate"] = answer
    yield native.url
    native.close()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("field", WARNINGS)
@pytest.mark.parametrize("api", APIS)
def test_what_a_server_leaves_out_is_a_warning(api, field, stream):
    if api in WITHOUT_LOGPROBS and field in ("logprobs", "alternatives"):
        _, program, connect = APIS[api]
        with pytest.raises(sgl.CapabilityError, match="return_logprob"):
            program.run(backend=connect("http://127.0.0.1:9"), return_logprob=True)
        return
    state = asked(api, {field}, stream=stream)
    if field == "finish_reason" and (api, stream) not in ASSUMED:
        assert isinstance(state.error(), sgl.BackendError)
        return
    fields = ["logprobs", "alternatives"] if field == "logprobs" else [field]
    assert state["a"] == "Paris"
    assert state.get_meta_info("a")["warnings"] == [WARNINGS[each] for each in fields]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", APIS)
def test_a_whole_answer_has_no_warning(api, stream):
    state = asked(api, (), stream=stream)
    assert state["a"] == "Paris"
    assert "warnings" not in state.get_meta_info("a")
