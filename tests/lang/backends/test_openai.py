"""OpenAI through its own SDK, against a local server that speaks the protocol."""

import asyncio
import datetime
import json
import sys
import traceback
from typing import Literal

import pytest
from api_server import Drop, Events, Hold, Reply
from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob, TopLogprob
from openai.types.completion_choice import Logprobs
from openai.types.completion_usage import CompletionTokensDetails, PromptTokensDetails
from openai.types.responses import Response, ResponseCustomToolCall, ResponseOutputMessage, ResponseOutputRefusal
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_error import ResponseError
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails, ResponseUsage
from pydantic import BaseModel, Field

import sglang_lite as sgl
from sglang_lite.lang.backend.base_backend import Capabilities
from sglang_lite.lang.backend.openai import OpenAI
from sglang_lite.lang.backend.remote import RefusalError
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.protocol import Message, Prompt, SamplingParams

PNG = (
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x00\x00\x00\x00:~\x9bU\x00\x00\x00\n"
    b"IDATx\x9cc\xf8\x0f\x00\x01\x01\x01\x00\x1b\xb6\xeeV\x00\x00\x00\x00IEND\xaeB`\x82"
)
USAGE = CompletionUsage(
    prompt_tokens=10,
    completion_tokens=5,
    total_tokens=15,
    prompt_tokens_details=PromptTokensDetails(cached_tokens=4),
    completion_tokens_details=CompletionTokensDetails(reasoning_tokens=3),
)


def said(*texts, finish="stop", refusal=None, logprobs=None, usage=USAGE):
    """A chat completion with a choice for each text."""
    choices = [
        Choice(
            index=i,
            finish_reason=finish,
            logprobs=logprobs,
            message=ChatCompletionMessage(role="assistant", content=text, refusal=refusal),
        )
        for i, text in enumerate(texts)
    ]
    return Reply(
        ChatCompletion(id="chat-1", choices=choices, created=1, model="gpt-4o-x", object="chat.completion", usage=usage)
    )


def chunk(text=None, finish=None, index=0, usage=None, choices=True, refusal=None):
    delta = ChoiceDelta(content=text, refusal=refusal)
    each = [ChunkChoice(index=index, delta=delta, finish_reason=finish)] if choices else []
    return ChatCompletionChunk(
        id="chat-1", choices=each, created=1, model="gpt-4o-x", object="chat.completion.chunk", usage=usage
    )


def streamed(*pieces, finish="stop"):
    last = [chunk(finish=finish), chunk(choices=False, usage=USAGE), "[DONE]"]
    return Events([*[chunk(piece) for piece in pieces], *last])


def called(*inputs, **fields):
    """A response in which the custom tool is called."""
    output = [ResponseCustomToolCall(call_id="c", input=i, name="answer", type="custom_tool_call") for i in inputs]
    usage = ResponseUsage(
        input_tokens=20,
        output_tokens=9,
        total_tokens=29,
        input_tokens_details=InputTokensDetails(cached_tokens=8, cache_write_tokens=0),
        output_tokens_details=OutputTokensDetails(reasoning_tokens=6),
    )
    return Reply(
        Response(
            **{
                **dict(id="resp-1", created_at=1, model="gpt-5", object="response", output=output, usage=usage),
                **dict(parallel_tool_calls=False, tool_choice="auto", tools=[]),
                **fields,
            }
        )
    )


def failure(status, message, code=None, **headers):
    body = {"error": {"message": message, "type": "some_error", "param": None, "code": code}}
    return Reply(body, status, {"x-request-id": "req-7", **headers})


@pytest.fixture
def openai(connected):
    return lambda model="gpt-4o", **options: connected(OpenAI, model, path="/v1", **options)


def run(backend, before="", *, user="Hi", stream=False, **options):
    @sgl.function
    def program(s):
        s += sgl.system("Be brief.")
        s += sgl.user(user)
        s += sgl.assistant(before + sgl.gen("a", **options))

    return program.run(backend=backend, stream=stream)


def ask(backend, before="", **options):
    return run(backend, before, **options)["a"]


# --------------------------------------------------------------------------------------------------- requests


def test_a_request_carries_the_turns_and_only_what_was_set(api, openai):
    api.answers = [said("Hello")]
    state = run(openai())
    assert state["a"] == "Hello"
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert api.requests[0].path == "/v1/chat/completions"
    assert api.last == {"model": "gpt-4o", "messages": turns}
    assert state.messages() == [*turns, {"role": "assistant", "content": "Hello"}]


def test_every_parameter_that_was_set_is_sent(api, openai):
    api.answers = [said("a", "b")]
    ask(
        openai(),
        max_tokens=7,
        n=2,
        stop="\n",
        temperature=0,
        top_p=0.5,
        frequency_penalty=0.1,
        presence_penalty=0.2,
        seed=2**64 - 1,
        logit_bias={5: -1},
    )
    del api.last["model"], api.last["messages"]
    assert api.last == {
        "max_completion_tokens": 7,
        "n": 2,
        "stop": ["\n"],
        "temperature": 0,
        "top_p": 0.5,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "seed": 2**63 - 1,  # the API's seeds are signed
        "logit_bias": {"5": -1},
    }


@pytest.mark.parametrize(
    ("model", "name"),
    [("gpt-4o", "max_completion_tokens"), ("o4-mini", "max_completion_tokens"), ("Qwen/Qwen3-8B", "max_tokens")],
)
def test_the_limit_has_the_name_that_the_server_knows(api, openai, model, name):
    api.answers = [said("x")]
    ask(openai(model), max_tokens=3)
    assert api.last[name] == 3


def test_a_compatible_servers_own_parameters_are_sent_once_they_are_declared(api, openai):
    api.answers = [said("x")]
    plain = openai("local")
    with pytest.raises(sgl.CapabilityError, match=r"Gen\('a'\): OpenAI\('local'\) can't honour top_k"):
        ask(plain, top_k=5)
    own = Capabilities(params=frozenset({"top_k", "stop_token_ids"}), continues=False, prefill=False)
    ask(openai("local", capabilities=own), top_k=5, stop_token_ids=[1])
    assert (api.last["top_k"], api.last["stop_token_ids"]) == (5, [1])


def test_several_generations_keep_the_state_apart_from_the_requests(api, openai):
    api.answers = [said("one"), said("two")]

    @sgl.function
    def program(s):
        s += sgl.system("Be brief.")
        for name in ("a", "b"):
            s += sgl.user(f"ask {name}")
            s += sgl.assistant(sgl.gen(name))

    messages = program.run(backend=openai()).messages()
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert api.last["messages"] == messages[:-1]


def test_images_are_parts(api, openai):
    api.answers = [said("a dot")]
    ask(openai(), user=sgl.image("https://x.test/i.png") + "and" + sgl.image(PNG) + "?")
    address, text, data, mark = api.last["messages"][1]["content"]
    assert address == {"type": "image_url", "image_url": {"url": "https://x.test/i.png"}}
    assert (text, mark) == ({"type": "text", "text": "and"}, {"type": "text", "text": "?"})
    assert data["image_url"]["url"].startswith("data:image/png;base64,iVBOR")


def test_a_template_shapes_the_text_and_not_the_request(api, openai):
    api.answers = [said("<think>Hm.</think>a dot"), said("yes")]

    @sgl.function
    def program(s):
        s += sgl.user(sgl.image(PNG) + "What is it?")
        s += sgl.assistant(sgl.gen("a", reasoning="deepseek-v3"))
        s += sgl.user("Sure?")
        s += sgl.assistant(sgl.gen("b"))

    state = program.run(backend=openai("local", chat_template=get_chat_template("chatml-llava")))
    assert state["b"] == "yes"
    assert state.text().endswith("<|im_start|>assistant\nyes<|im_end|>\n")
    system, user, assistant, _ = api.last["messages"]
    assert system == {"role": "system", "content": "You are a helpful assistant."}  # the template's
    assert [part["type"] for part in user["content"]] == ["image_url", "text"]
    assert user["content"][1]["text"] == "What is it?"  # no placeholder
    assert assistant["content"] == "a dot"
    assert "stop" not in api.last


def test_completion_models_get_the_text(api, openai):
    logprobs = Logprobs(tokens=["Pa", "ris"], token_logprobs=[-0.1, -0.2], top_logprobs=[{"Pa": -0.1}, {"ris": -0.2}])
    choice = CompletionChoice(index=0, text="Paris", finish_reason="length", logprobs=logprobs)
    api.answers = [
        Reply(Completion(id="c", choices=[choice], created=1, model="m", object="text_completion", usage=USAGE))
    ]

    @sgl.function
    def program(s):
        s += "The capital of France is" + sgl.gen("a", max_tokens=2, return_logprob=True, top_logprobs_num=1)

    state = program.run(backend=openai("gpt-3.5-turbo-instruct"))
    assert state["a"] == "Paris"
    assert api.requests[0].path == "/v1/completions"
    assert api.last == {
        "model": "gpt-3.5-turbo-instruct",
        "prompt": "The capital of France is",
        "max_tokens": 2,
        "logprobs": 1,
    }
    meta = state.get_meta_info("a")
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert meta["output_token_logprobs"] == [[-0.1, -1, "Pa"], [-0.2, -1, "ris"]]


def test_completions_are_streamed(api, openai):
    def part(text, finish=None):
        choice = CompletionChoice.construct(index=0, text=text, finish_reason=finish, logprobs=None)
        return Completion(id="c", choices=[choice], created=1, model="m", object="text_completion")

    api.answers = [Events([part("Pa"), part("ris", "stop"), "[DONE]"])]

    @sgl.function
    def program(s):
        s += "France:" + sgl.gen("a")

    state = program.run(backend=openai("local-base", is_chat_model=False), stream=True)
    assert list(state.text_iter("a")) == ["Pa", "ris"]


def test_azure_is_reached_through_its_own_client(api):
    api.answers = [said("x")]
    backend = OpenAI(
        "my-deployment", is_azure=True, api_key="azure-key-012345", azure_endpoint=api.url, api_version="v"
    )
    assert ask(backend) == "x"
    backend.shutdown()
    assert api.requests[0].path == "/openai/deployments/my-deployment/chat/completions?api-version=v"


# ------------------------------------------------------------------------------------------------- constraints


class City(BaseModel):
    name: str = Field(max_length=20)
    people: int | None = None


def format_of(api):
    return api.last["response_format"]["json_schema"]


def test_a_schema_is_native_and_strict(api, openai):
    api.answers = [said('{"name": "Paris", "people": 2}')]
    assert ask(openai(), type=City) == City(name="Paris", people=2)
    assert api.last["response_format"]["type"] == "json_schema"
    assert format_of(api) == {
        "name": "answer",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "description": "(maxLength: 20)"},
                "people": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            },
            "required": ["name", "people"],
            "additionalProperties": False,
        },
    }


def test_what_strict_mode_cannot_keep_is_checked_in_the_answer(api, openai):
    api.answers = [said(json.dumps({"name": "x" * 21, "people": 1}))]
    with pytest.raises(sgl.ValueValidationError, match="at most 20 characters"):
        ask(openai(), type=City)


def test_alternatives_and_hard_patterns_stay_strict(api, openai):
    one = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?!x)"}}, "required": ["a"]}
    api.answers = [said('{"value": {"a": "y"}}'), said('{"value": {"a": "x"}}')]
    backend = openai()
    assert json.loads(ask(backend, json_schema={"type": "object", "oneOf": [one]})) == {"a": "y"}
    assert format_of(api)["strict"] is True
    (asked,) = format_of(api)["schema"]["properties"]["value"]["anyOf"]
    assert asked["properties"]["a"] == {"type": "string", "description": "(pattern: ^(?!x))"}
    with pytest.raises(sgl.ValueValidationError):
        ask(backend, json_schema={"type": "object", "oneOf": [one]})


def object_with(a, **more):
    return {"type": "object", "properties": {"a": a}, **more}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"a": 1}),
        (object_with({"type": "integer"}, allOf=[{"required": ["a"]}]), {"a": 1}),
        (object_with({"$ref": "#"}), {"a": {}}),  # would never end if it were required
        (object_with({}), {"a": 1}),
        (object_with(True), {"a": 1}),
        (object_with({"enum": [1, "x"]}), {"a": 1}),
        (object_with({"type": "array"}), {"a": [1]}),
    ],
)
def test_a_schema_that_strict_mode_does_not_take_is_asked_for_without_it_and_checked(api, openai, schema, value):
    api.answers = [said(json.dumps(value)), said("[]")]
    backend = openai()
    assert json.loads(ask(backend, json_schema=schema)) == value
    assert format_of(api) == {"name": "answer", "strict": False, "schema": schema}
    with pytest.raises(sgl.ValueValidationError):
        ask(backend, json_schema=schema)


@pytest.mark.parametrize(
    ("type_", "answer", "value", "schema"),
    [
        (int, 42, 42, {"type": "integer"}),
        (int, 24.0, 24, {"type": "integer"}),
        (float, 1e-05, 1e-05, {"type": "number"}),
        (bool, "true", True, {"type": "string", "enum": ["true", "false"]}),
        (Literal["a", 2], "2", 2, {"type": "string", "enum": ["a", "2"]}),
        (datetime.date, "2024-05-01", datetime.date(2024, 5, 1), {"type": "string", "format": "date"}),
        (list[int], [1, 2], [1, 2], {"type": "array", "items": {"type": "integer"}}),
    ],
)
def test_values_that_are_no_objects_are_wrapped_and_unwrapped(api, openai, type_, answer, value, schema):
    api.answers = [said(json.dumps({"value": answer}))]
    assert ask(openai(), type=type_) == value
    assert format_of(api)["schema"]["properties"] == {"value": schema}
    assert format_of(api)["strict"] is True
    assert "stop" not in api.last  # that of a number: JSON ends by itself


@pytest.mark.parametrize(("dtype", "answer", "text"), [(int, 7, "7"), (bool, "True", "True"), (str, 'a"b', '"a\\"b"')])
def test_dtypes_are_text_as_a_local_model_writes_it(api, openai, dtype, answer, text):
    api.answers = [said(json.dumps({"value": answer}))]
    assert ask(openai(), dtype=dtype) == text


def test_references_are_moved_with_a_wrapped_schema(api, openai):
    nested = {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#"}}]}
    api.answers = [said('{"value": [1, [2]]}')]
    assert json.loads(ask(openai(), json_schema=nested)) == [1, [2]]
    wrapped = format_of(api)["schema"]["properties"]["value"]
    assert wrapped["anyOf"][1]["items"] == {"$ref": "#/properties/value"}

    class Node(BaseModel):
        value: int
        more: "Node | None" = None

    api.answers = [said('{"value": {"value": 1, "more": {"value": 2, "more": null}}}')]
    assert ask(openai(), type=Node).more.value == 2
    assert "Node" in format_of(api)["schema"]["$defs"]


def test_tools_are_called_by_structured_output(api, openai):
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    api.answers = [said('{"value": {"tool": "add", "arguments": {"a": 1, "b": 2}}}')]
    assert ask(openai(), tools=[add]).run() == 3
    assert format_of(api)["strict"] is True


def test_select_names_a_choice(api, openai):
    api.answers = [said('{"value": "cat"}')]

    @sgl.function
    def program(s):
        s += sgl.user("Which?")
        s += sgl.assistant(sgl.select("pet", ["dog", "cat"]))

    state = program.run(backend=openai())
    assert state["pet"] == "cat"
    assert format_of(api)["schema"]["properties"]["value"]["enum"] == ["dog", "cat"]
    assert api.last["temperature"] == 0
    assert state.get_meta_info("pet")["prompt_tokens"] == 10
    api.answers = [said('{"value": "bird"}')]
    with pytest.raises(sgl.ValueValidationError, match="'bird' is not one of"):
        program.run(backend=openai())["pet"]


def test_a_regex_is_the_grammar_of_a_tool_that_the_model_must_call(api, openai):
    api.answers = [called("AB-12")]
    state = run(openai("gpt-5"), regex=r"[A-Z]{2}-\d+", max_tokens=99, user=sgl.image(PNG) + "What is on it?")
    assert state["a"] == "AB-12"
    assert api.requests[0].path == "/v1/responses"
    (tool,) = api.last["tools"]
    assert tool["format"]["syntax"] == "regex"
    assert tool["format"]["definition"].startswith(r"[A-Z]{2,2}\x{2D}[0-9")
    assert api.last["tool_choice"] == {"type": "custom", "name": "answer"}
    assert (api.last["max_output_tokens"], api.last["parallel_tool_calls"], api.last["store"]) == (99, False, False)
    system, user = api.last["input"]
    assert system == {"role": "system", "content": "Be brief."}
    assert [part["type"] for part in user["content"]] == ["input_image", "input_text"]
    meta = state.get_meta_info("a")
    assert (meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]) == (20, 8, 9)
    assert meta["reasoning_tokens"] == 6


REFUSED = ResponseOutputMessage(
    id="m",
    role="assistant",
    status="completed",
    type="message",
    content=[ResponseOutputRefusal(refusal="I can't.", type="refusal")],
)


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        (called("nonsense"), sgl.ValueValidationError, "does not match the regex"),
        (called(), sgl.BackendError, "0 answers came"),
        (called("12", "34"), sgl.BackendError, "2 answers came"),
        (called(output=[REFUSED]), RefusalError, "I can't"),
        (called(incomplete_details=IncompleteDetails(reason="content_filter")), RefusalError, "content filter"),
        (
            called(incomplete_details=IncompleteDetails(reason="max_output_tokens")),
            sgl.ValueValidationError,
            "cut short after 9 tokens",
        ),
        (called(error=ResponseError(code="server_error", message="went wrong")), sgl.BackendError, "went wrong"),
        (Reply("[]"), sgl.BackendError, "0 answers came"),
    ],
)
def test_a_grammars_answer_is_never_a_wrong_value(api, openai, reply, error, message):
    api.answers = [reply]
    with pytest.raises(error, match=message):
        ask(openai("gpt-5"), regex="[0-9]{2}")


# --------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("model", "options", "feature"),
    [
        ("gpt-4o", dict(top_k=3), "top_k"),
        ("gpt-4o", dict(min_tokens=3), "min_tokens"),
        ("gpt-4o", dict(regex="a+"), "a regex"),
        ("gpt-4o", dict(type=int, stop="x"), "stop together with a constraint"),
        ("gpt-4o", dict(json_schema="{}", stop="x"), "stop together with a constraint"),
        ("gpt-4o", dict(stop=list("abcde")), "5 stop strings"),
        ("gpt-4", dict(type=City), "a JSON schema"),
        ("gpt-4", dict(type=bool), "a list of choices"),
        ("gpt-4", dict(type=int), "a regex"),
        ("o4-mini", dict(temperature=0), "temperature"),
        ("o4-mini", dict(stop="x"), "stop"),
        ("o1-mini", dict(type=City), "a JSON schema"),
        ("gpt-5", dict(top_p=0.5), "top_p"),
        ("gpt-5.6-luna", dict(temperature=0), "temperature"),
        ("gpt-6-astra", dict(return_logprob=True), "return_logprob"),
        ("gpt-5.2", dict(presence_penalty=1), "presence_penalty"),
        ("gpt-5", dict(regex="a", seed=1), "seed together with a regex"),
        ("gpt-5", dict(regex="a", n=2), "n together with a regex"),
    ],
)
def test_what_a_model_cannot_do_is_refused_before_any_call(api, openai, model, options, feature):
    with pytest.raises(sgl.CapabilityError) as caught:
        ask(openai(model), **options)
    text = str(caught.value)
    assert f"Gen('a'): OpenAI('{model}') can't honour {feature}" in text
    assert "Leave" in text or "It takes" in text or "gen(backend=" in text  # what to do instead
    assert text.endswith("program]")  # where
    assert not api.requests


def test_models_without_reasoning_take_what_those_with_it_do_not(api, openai):
    api.answers = [said("x")]
    for model in ("gpt-4.1", "gpt-5.2", "gpt-5-chat-latest", "ft:gpt-4o-2024-08-06:me::1", "openai/gpt-4o"):
        assert ask(openai(model), temperature=0, return_logprob=True) == "x"


def test_images_and_scores_are_refused_where_there_are_none(api, openai):
    with pytest.raises(sgl.CapabilityError, match="can't honour images"):
        ask(openai("o3-mini"), user=sgl.image(PNG))

    @sgl.function
    def program(s, heat):
        s += sgl.user("Which?")
        s += sgl.assistant(sgl.select("pet", ["dog", "cat"], temperature=heat))

    with pytest.raises(sgl.CapabilityError, match="without scores"):
        program.run(0.5, backend=openai())
    with pytest.raises(sgl.CapabilityError, match="can't honour select"):
        program.run(0.0, backend=openai("gpt-4"))
    assert not api.requests


def test_a_chat_is_not_asked_to_go_on_with_other_text(api, openai):
    backend = openai()

    def refused(body, message):
        with pytest.raises(sgl.CapabilityError, match=message) as caught:
            sgl.function(body).run(backend=backend)["a"]
        assert caught.value.where is not None

    refused(lambda s: s.__iadd__("Once upon" + sgl.gen("a")), "outside an assistant's turn. Write turns")
    refused(lambda s: s.__iadd__(sgl.user(sgl.gen("a"))), "outside an assistant's turn")
    refused(lambda s: s.__iadd__(sgl.user("x") + sgl.assistant("It is" + sgl.gen("a"))), "already: 'It is'")

    def intro(s):
        s += "Some introduction."
        s += sgl.user("x")
        s += sgl.assistant(sgl.gen("a"))

    def between(s):
        s += sgl.user("x")
        s += "An aside."
        s += sgl.assistant(sgl.gen("a"))

    refused(intro, "not be shown the text outside the turns: 'Someintroduction.'")
    refused(between, "'Anaside.'")
    assert not api.requests


# ---------------------------------------------------------------------------------------------------- streaming


def test_pieces_are_shown_as_they_come(api, openai):
    api.answers = [streamed("Hel", "lo")]
    state = run(openai(), stream=True)
    assert list(state.text_iter("a")) == ["Hel", "lo"]
    assert state["a"] == "Hello"
    assert api.last["stream_options"] == {"include_usage": True}
    meta = state.get_meta_info("a")
    assert (meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]) == (10, 4, 5)


def test_an_object_is_streamed_and_a_wrapped_value_comes_whole(api, openai):
    api.answers = [streamed('{"name": "Paris",', ' "people": 2}')]
    state = run(openai(), stream=True, type=City)
    assert len(list(state.text_iter("a"))) == 2
    assert state["a"].people == 2
    api.answers = [said('{"value": 42}')]
    state = run(openai(), stream=True, type=int)
    assert list(state.text_iter("a")) == ["42"]
    assert "stream" not in api.last
    api.answers = [called("ab")]
    assert list(run(openai("gpt-5"), stream=True, regex="[ab]+").text_iter("a")) == ["ab"]


def test_samples_of_a_stream_are_kept_apart(api, openai):
    parts = [chunk("a", index=0), chunk("b", index=1), chunk("A", index=0), chunk(finish="stop", index=1)]
    api.answers = [Events([*parts, chunk(finish="stop", index=0), chunk(choices=False, usage=USAGE), "[DONE]"])]
    state = run(openai(), stream=True, n=2)
    assert list(state.text_iter("a")) == ["a", "A"]
    assert state["a"] == ["aA", "b"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Events([chunk("Hel")], end="drop"), "the connection failed"),
        (Events([chunk("Hel"), "[DONE]"]), "stream ended before the answer was complete"),
        (Events([chunk("Hel"), "{broken"]), "not JSON"),
        (Events([chunk("Hel"), {"error": {"message": "server fell over"}}]), "server fell over"),
        (Events(["[DONE]"]), "0 answers came where 1 should have"),
    ],
)
def test_a_stream_that_breaks_is_an_error_after_its_text(api, openai, answer, message):
    api.answers = [answer]
    pieces = []
    with pytest.raises(sgl.BackendError, match=message):
        pieces += run(openai(), stream=True).text_iter("a")
    with pytest.raises(sgl.BackendError, match=message):
        run(openai(), stream=True)["a"]


@pytest.mark.parametrize("answer", [Hold(), Events([chunk("Hel")], end="hold")])
def test_a_time_limit_closes_the_connection(api, openai, answer):
    api.answers = [answer]
    with pytest.raises(sgl.RequestTimeoutError, match=r"within the node's timeout of 1 s"):
        run(openai(), stream=isinstance(answer, Events), timeout=1)["a"]
    assert api.hung_up.wait(60)


# ------------------------------------------------------------------------------------------- usage and logprobs


def test_usage_is_told_by_node_and_counted_in_total(api, openai):
    api.answers = [said("x")]
    backend = openai()
    meta = run(backend).get_meta_info("a")
    assert (meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]) == (10, 4, 5)
    assert (meta["id"], meta["model"], meta["reasoning_tokens"]) == ("chat-1", "gpt-4o-x", 3)
    ask(backend)
    assert (backend.token_usage.prompt_tokens, backend.token_usage.completion_tokens) == (20, 10)
    backend.token_usage.reset()
    assert (backend.token_usage.prompt_tokens, backend.token_usage.completion_tokens) == (0, 0)


def test_several_samples_are_counted_once(api, openai):
    api.answers = [said("a", "b")]
    backend = openai()
    state = run(backend, n=2)
    assert state["a"] == ["a", "b"]
    assert state.text().endswith("ASSISTANT:a\n")
    assert backend.token_usage.completion_tokens == 5
    assert [m["completion_tokens"] for m in state.get_meta_info("a")["samples"]] == [5, 0]


def test_logprobs_are_told_without_token_ids(api, openai):
    top = [TopLogprob(token="Hi", logprob=-0.1), TopLogprob(token="Ho", logprob=-2.0)]
    token = ChatCompletionTokenLogprob(token="Hi", logprob=-0.1, top_logprobs=top)
    api.answers = [said("Hi", logprobs=ChoiceLogprobs(content=[token]))]
    options = dict(return_logprob=True, top_logprobs_num=2, return_text_in_logprobs=True)
    meta = run(openai(), **options).get_meta_info("a")
    assert (api.last["logprobs"], api.last["top_logprobs"]) == (True, 2)
    assert meta["output_token_logprobs"] == [[-0.1, -1, "Hi"]]
    assert meta["output_top_logprobs"] == [[[-0.1, -1, "Hi"], [-2.0, -1, "Ho"]]]


def test_a_servers_missing_usage_counts_nothing(api, openai):
    api.answers = [said("x", usage=None)]
    assert run(openai()).get_meta_info("a")["prompt_tokens"] == 0


# ------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        (said("", refusal="I can't help."), RefusalError, "I can't help"),
        (said("Well", finish="content_filter"), RefusalError, "content filter"),
        (said("", finish="length"), sgl.BackendError, "no text after 5 tokens, which reasoning may have used up"),
        (said(None), sgl.BackendError, "answered with no text"),
        (said(), sgl.BackendError, "0 answers came where 1 should have"),
        (Reply({"object": "chat.completion"}), sgl.BackendError, "0 answers came"),
        (Reply("<html>hello</html>", headers={"Content-Type": "text/html"}), sgl.BackendError, "0 answers came"),
        (Reply("{broken"), sgl.BackendError, "not JSON"),
    ],
)
def test_an_answer_that_is_none_is_an_error(api, openai, reply, error, message):
    api.answers = [reply]
    with pytest.raises(error, match=message) as caught:
        ask(openai())
    assert caught.value.where is not None


def test_nothing_before_a_stop_string_is_an_answer(api, openai):
    api.answers = [said("")]
    assert ask(openai(), stop="\n") == ""


def test_text_may_be_cut_short_and_values_may_not(api, openai):
    api.answers = [said('{"name": "Par', finish="length")]
    state = run(openai())
    assert state["a"] == '{"name": "Par'
    assert state.get_meta_info("a")["finish_reason"]["type"] == "length"
    for options in (dict(type=City), dict(json_schema=City), dict(type=int)):
        with pytest.raises(sgl.ValueValidationError, match=r"cut short after 5 tokens\. Raise max_tokens") as caught:
            ask(openai(), **options)
        assert caught.value.text == '{"name": "Par'


@pytest.mark.parametrize(
    ("reply", "error", "parts"),
    [
        (failure(400, "Bad thing"), sgl.BackendError, ["Bad thing", "Change what the message names"]),
        (failure(401, "No key sk-secret-0123456789 here"), sgl.BackendError, ["No key … here", "Check api_key="]),
        (failure(404, "No model"), sgl.BackendError, ["Check model_name= and base_url="]),
        (failure(429, "Slow down"), sgl.OverloadedError, ["Slow down", "num_threads=", "max_retries="]),
        (failure(429, "Pay", "insufficient_quota"), sgl.BackendError, ["Pay", "quota and billing"]),
        (failure(500, "Oops"), sgl.BackendError, ["Oops", "Try again"]),
        (failure(503, "Busy"), sgl.OverloadedError, ["Busy"]),
        (failure(504, "Late"), sgl.RequestTimeoutError, ["Late", "timeout="]),
        (Reply("plain words", 502, {"x-request-id": "req-7"}), sgl.BackendError, ["plain words"]),
    ],
)
def test_failures_say_what_the_provider_said_and_what_to_do(api, openai, reply, error, parts):
    api.answers = [reply]
    with pytest.raises(error) as caught:
        ask(openai())
    text = str(caught.value)
    for part in ("OpenAI('gpt-4o')", f"HTTP {reply.status}", "request req-7", *parts):
        assert part in text
    assert "secret" not in "".join(traceback.format_exception(caught.value))
    assert isinstance(caught.value, sgl.OverloadedError) == (error is sgl.OverloadedError)


def test_retries_are_the_sdks_own(api, openai):
    soon = {"Retry-After": "0.01"}
    api.answers = [Drop(), failure(429, "Slow down", **soon), failure(500, "x", **soon), said("done")]
    assert ask(openai(max_retries=3)) == "done"
    assert [r.headers["x-stainless-retry-count"] for r in api.requests] == ["0", "1", "2", "3"]


def test_a_server_that_is_silent_or_gone_is_an_error(api, openai):
    api.answers = [Hold()]
    with pytest.raises(sgl.RequestTimeoutError, match=r"did not answer in time\. timeout="):
        ask(openai(timeout=0.1))
    api.answers = [Drop()]
    with pytest.raises(sgl.BackendError, match=r"the connection failed \(.*Check base_url"):
        ask(openai())


def test_one_failing_program_fails_alone(api, openai):
    def answer(request):
        return failure(400, "no") if "bad" in str(request.body) else said("fine")

    api.answers = answer

    @sgl.function
    def program(s, q):
        s += sgl.user(q)
        s += sgl.assistant(sgl.gen("a"))

    states = program.run_batch([{"q": q} for q in ("one", "bad", "two")], backend=openai(), on_error="return")
    assert [isinstance(s, sgl.BackendError) for s in states] == [False, True, False]
    assert states[2]["a"] == "fine"


def test_a_missing_sdk_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(sgl.BackendError, match=r"pip install 'sglang-lite\[openai\]'"):
        OpenAI("gpt-4o")


def test_a_missing_key_is_told_at_once(monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(sgl.ParameterError, match="OPENAI_API_KEY"):
        OpenAI("gpt-4o")


def test_a_backend_that_was_shut_down_connects_again(api, openai):
    api.answers = [said("x")]
    backend = openai()
    assert ask(backend) == "x"
    backend.shutdown()
    assert ask(backend) == "x"


def test_an_event_loop_is_not_given_the_connections_of_another(api, openai):
    api.answers = [said("x")]
    backend = openai()
    prompt = Prompt((), (Message("user", ("Hi",)),), "assistant")

    async def generate():
        async for event in backend.agenerate(prompt, SamplingParams(), None, stream=False):
            assert event.text == "x"
        return backend.client()

    loops = [asyncio.new_event_loop(), asyncio.new_event_loop()]
    clients = [loop.run_until_complete(generate()) for loop in loops]
    for loop, client in zip(loops, clients):
        loop.run_until_complete(client.close())
        loop.close()
    assert clients[0] is not clients[1]
