"""Chat completions through OpenAI's own SDK, against a local server that speaks the protocol."""

import datetime
import json
from typing import Literal

import pytest
from api_server import Events, Hold
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob, TopLogprob
from openai_answers import PNG, USAGE, ask, calling, chunk, run, said, streamed
from pydantic import BaseModel, Field

import sglang_lite as sgl
from sglang_lite.lang.chat_template import get_chat_template
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("either_client")

# ----------------------------------------------------------------------------------------- requests


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

    state = program.run(
        backend=openai("local", profile="vllm", chat_template=get_chat_template("chatml-llava"))
    )
    assert state["b"] == "yes"
    assert state.text().endswith("<|im_start|>assistant\nyes<|im_end|>\n")
    system, user, assistant, _ = api.last["messages"]
    assert system == {"role": "system", "content": "You are a helpful assistant."}  # the template's
    assert [part["type"] for part in user["content"]] == ["image_url", "text"]
    assert user["content"][1]["text"] == "What is it?"  # no placeholder
    assert assistant["content"] == "a dot"
    assert "stop" not in api.last


# -------------------------------------------------------------------------------------- constraints


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
    one = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "^(?!x)"}},
        "required": ["a"],
    }
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
def test_a_schema_that_strict_mode_does_not_take_is_refused_and_emulated_as_a_hint(
    api, openai, schema, value
):
    api.answers = [said(json.dumps(value)), said("[]")]
    with pytest.raises(
        sgl.CapabilityError, match=r"can't honour this JSON schema. Change /.*policy=.emulate"
    ):
        ask(openai(), json_schema=schema)
    assert not api.requests
    backend = openai(policy="emulate")
    assert json.loads(ask(backend, json_schema=schema)) == value
    assert format_of(api) == {"name": "answer", "strict": False, "schema": schema}
    with pytest.raises(sgl.ValueValidationError, match="3 answers broke the constraint"):
        ask(backend, json_schema=schema)
    assert len(api.requests) == 4


@pytest.mark.parametrize(
    ("type_", "answer", "value", "schema"),
    [
        (int, 42, 42, {"type": "integer"}),
        (int, 24.0, 24, {"type": "integer"}),
        (float, 1e-05, 1e-05, {"type": "number"}),
        (bool, "true", True, {"type": "string", "enum": ["true", "false"]}),
        (Literal["a", 2], "2", 2, {"type": "string", "enum": ["a", "2"]}),
        (
            datetime.date,
            "2024-05-01",
            datetime.date(2024, 5, 1),
            {"type": "string", "format": "date"},
        ),
        (list[int], [1, 2], [1, 2], {"type": "array", "items": {"type": "integer"}}),
    ],
)
def test_values_that_are_no_objects_are_wrapped_and_unwrapped(
    api, openai, type_, answer, value, schema
):
    api.answers = [said(json.dumps({"value": answer}))]
    assert ask(openai(), type=type_) == value
    assert format_of(api)["schema"]["properties"] == {"value": schema}
    assert format_of(api)["strict"] is True
    assert "stop" not in api.last  # that of a number: JSON ends by itself


@pytest.mark.parametrize(
    ("dtype", "answer", "text"), [(int, 7, "7"), (bool, "True", "True"), (str, 'a"b', '"a\\"b"')]
)
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


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def test_tools_are_the_apis_own(api, openai):
    api.answers = [calling(("c-1", "add", '{"a": 1, "b": 2}'))]
    call = ask(openai(), tools=[add])
    assert (call.name, call.arguments, call.run()) == ("add", {"a": 1, "b": 2}, 3)
    (tool,) = api.last["tools"]
    assert tool["type"] == "function"
    assert tool["function"]["name"] == "add"
    assert tool["function"]["description"] == "Adds two numbers."
    assert tool["function"]["strict"] is True
    assert tool["function"]["parameters"]["required"] == ["a", "b"]
    assert (api.last["tool_choice"], api.last["parallel_tool_calls"]) == ("auto", False)
    assert "response_format" not in api.last
    api.answers = [said("Three.")]
    assert ask(openai(), tools=[add]) == "Three."
    api.answers = [calling(("c-1", "add", '{"a": 1, "b": 2}'))]
    ask(openai(), tools=[add], tool_choice="required")
    assert api.last["tool_choice"] == "required"


def test_tools_have_no_words_that_only_cost_tokens(api, openai):
    api.answers = [calling(("c-1", "add", '{"a": 1, "b": 2}'))]
    ask(openai("local", profile="sglang_lite"), tools=[add])
    (tool,) = api.last["tools"]
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }


def test_a_tools_result_answers_the_call(api, openai):
    api.answers = [calling(("c-1", "add", '{"a": 1, "b": 2}')), said("Three.")]

    @sgl.function
    def program(s):
        s += sgl.user("1 + 2?")
        assert sgl.use_tools(s, [add]) == "Three."

    program.run(backend=openai())
    user, turn, result = api.last["messages"]
    assert user["content"] == "1 + 2?"
    assert turn["tool_calls"] == [
        {
            "id": "c-1",
            "type": "function",
            "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'},
        }
    ]
    assert result == {"role": "tool", "tool_call_id": "c-1", "content": "3"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([("c", "add", '{"a": 1')], "no call of a tool"),
        ([("c", "add", '{"a": "x", "b": 2}')], "no call of a tool|is not of type"),
        ([("c", "sub", "{}")], "no call of a tool|is not valid|none of"),
        (
            [("c", "add", '{"a": 1, "b": 2}'), ("d", "add", '{"a": 3, "b": 4}')],
            "called 2 tools at once",
        ),
    ],
)
def test_a_malformed_call_is_a_value_that_will_not_do(api, openai, calls, message, stream):
    api.answers = [calling(*calls)]
    with pytest.raises(sgl.ValueValidationError) as caught:
        run(openai(), stream=stream, tools=[add])["a"]
    assert caught.value.origin.request_id == "chat-1"


def test_a_server_without_tools_is_asked_for_json(api, openai):
    api.answers = [said('{"tool": "add", "arguments": {"a": 1, "b": 2}}')]
    assert ask(openai("local", policy="emulate"), tools=[add]).run() == 3
    assert "tools" not in api.last


def test_what_a_compatible_server_says_of_its_thoughts_is_told_apart(api, openai):
    thought = said("42")
    thought.body.choices[0].message.reasoning_content = "Six times seven."
    api.answers = [thought]
    state = run(openai("local"), reasoning="deepseek-r1")
    assert (state["a"], state["a_reasoning_content"]) == ("42", "Six times seven.")
    assert state.get_meta_info("a")["reasoning_content"] == "Six times seven."
    deltas = [chunk(), chunk("4"), chunk("2", finish="stop"), "[DONE]"]
    deltas[0].choices[0].delta.reasoning_content = "Hm."
    api.answers = [Events(deltas)]
    state = run(openai("local"), reasoning="deepseek-r1", stream=True)
    assert list(state.text_iter("a_reasoning_content")) == ["Hm."]
    assert list(state.text_iter("a")) == ["4", "2"]


def test_select_names_a_choice(api, openai):
    api.answers = [said('{"value": "duck"}')]

    @sgl.function
    def program(s):
        s += sgl.user("Which?")
        # which may begin with the same token
        s += sgl.assistant(sgl.select("pet", ["dog", "duck"]))

    state = program.run(backend=openai())
    assert state["pet"] == "duck"
    assert format_of(api)["schema"]["properties"]["value"]["enum"] == ["dog", "duck"]
    assert api.last["temperature"] == 0
    assert state.get_meta_info("pet")["prompt_tokens"] == 10
    api.answers = [said('{"value": "bird"}')]
    with pytest.raises(sgl.ValueValidationError, match="'bird' is not one of"):
        program.run(backend=openai())["pet"]


# ---------------------------------------------------------------------------------------- streaming


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


def test_samples_of_a_stream_are_kept_apart(api, openai):
    parts = [
        chunk("a", index=0),
        chunk("b", index=1),
        chunk("A", index=0),
        chunk(finish="stop", index=1),
    ]
    api.answers = [
        Events([*parts, chunk(finish="stop", index=0), chunk(choices=False, usage=USAGE), "[DONE]"])
    ]
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
        (Events(["[DONE]"]), "0 samples arrived instead of 1"),
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
def test_a_time_limit_closes_the_connection(api, openai, time_limits, answer):
    api.answers = [answer]
    streams = isinstance(answer, Events)
    state = run(openai(), stream=streams, timeout=1000)
    until(lambda: api.requests)
    assert not streams or next(state.text_iter("a")) == "Hel"
    time_limits.expire()
    with pytest.raises(sgl.RequestTimeoutError, match=r"within the node's timeout of 1000 s"):
        state["a"]
    assert api.hung_up.wait(60)


# ------------------------------------------------------------------------------- usage and logprobs


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
