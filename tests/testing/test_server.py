"""The server for tests, asked by the official SDKs: they read every answer, and it refuses what
providers refuse.
"""

import subprocess
import sys
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from pydantic import BaseModel

import sglang_lite as sgl
from sglang_lite.testing import Buffered, Cut, Fail, Html, Say, Slow, ToolCall, overload, rate_limit
from tests.waiting import until

TURN: Any = [{"role": "user", "content": "Where is the Louvre?"}]


@pytest.fixture
def server():
    with sgl.server_for_tests() as server:
        yield server


@pytest.fixture
def gpt(server):
    with openai.OpenAI(**server.openai, max_retries=0) as client:
        yield client


@pytest.fixture
def claude(server):
    with anthropic.Anthropic(**server.anthropic, max_retries=0) as client:
        yield client


def chat(client, **options):
    return client.chat.completions.create(**{"model": "gpt-4o", "messages": TURN, **options})


def message(client, **options):
    return client.messages.create(
        **{"model": "claude-opus-5", "max_tokens": 99, "messages": TURN, **options}
    )


@sgl.function
def program(s):
    s += sgl.user("Where is the Louvre?")
    s += sgl.assistant(sgl.gen("city", max_tokens=9))


# ------------------------------------------------------------------------------------- what is said


def test_an_event_is_one_line_however_its_reader_splits_lines(server):
    server.answers = "one\x85two\u2028three\u2029four"
    body = {"model": "gpt-4o", "messages": TURN, "stream": True}
    lines = httpx2.post(
        f"{server.url}/v1/chat/completions", json=body, timeout=60
    ).text.splitlines()
    assert all(line.startswith("data: ") for line in lines if line)


def test_every_api_says_what_is_scripted_whole_and_in_pieces(server, gpt, claude):
    server.answers = {"Louvre": "It is in Paris."}
    assert chat(gpt).choices[0].message.content == "It is in Paris."
    assert (
        gpt.completions.create(model="gpt-3.5-turbo-instruct", prompt="Louvre").choices[0].text
        == "It is in Paris."
    )
    assert gpt.responses.create(model="gpt-5", input="The Louvre?").output_text == "It is in Paris."
    assert message(claude).content[0].text == "It is in Paris."
    pieces = [c.choices[0].delta.content or "" for c in chat(gpt, stream=True)]
    assert "".join(pieces) == "It is in Paris."
    assert len(list(filter(None, pieces))) == 4
    with gpt.responses.stream(model="gpt-5", input="The Louvre?") as stream:
        assert (
            "".join(e.delta for e in stream if e.type == "response.output_text.delta")
            == "It is in Paris."
        )
        assert stream.get_final_response().output_text == "It is in Paris."
    with claude.messages.stream(model="claude-opus-5", max_tokens=9, messages=TURN) as stream:
        assert list(stream.text_stream) == ["It", " is", " in", " Paris."]
        assert stream.get_final_message().stop_reason == "end_turn"


def test_rules_lists_and_functions_answer(server, gpt):
    server.answers = {
        "Louvre": ["Paris", "In Paris"],
        "Prado": lambda request: request.body["model"],
    }
    assert [chat(gpt).choices[0].message.content for _ in range(3)] == [
        "Paris",
        "In Paris",
        "In Paris",
    ]
    prado = [{"role": "user", "content": "The Louvre and the Prado?"}]
    assert chat(gpt, messages=prado).choices[0].message.content == "gpt-4o"
    assert [request.path for request in server.requests] == ["/v1/chat/completions"] * 4


def test_samples_take_the_next_answers(server, gpt):
    server.answers = ["a", "b", "c"]
    assert [choice.message.content for choice in chat(gpt, n=3).choices] == ["a", "b", "c"]


def test_stop_strings_and_limits_cut(server, gpt, claude):
    server.answers = "one two three. four"
    cut = chat(gpt, stop=["."]).choices[0]
    assert (cut.message.content, cut.finish_reason) == ("one two three", "stop")
    short = message(claude, max_tokens=2)
    assert (short.content[0].text, short.stop_reason) == ("one two", "max_tokens")
    stopped = message(claude, stop_sequences=[" three"])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == (
        "one two",
        "stop_sequence",
        " three",
    )
    assert gpt.responses.create(
        model="gpt-5", input="x", max_output_tokens=1
    ).incomplete_details.reason == ("max_output_tokens")


class Person(BaseModel):
    name: str
    age: int


def test_a_schema_is_kept_or_the_script_is_told(server, gpt, claude):
    server.answers = [{"name": "Maria", "age": 34}, None, "nobody"]
    parsed = gpt.chat.completions.parse(model="gpt-4o", messages=TURN, response_format=Person)
    assert parsed.choices[0].message.parsed == Person(name="Maria", age=34)
    made_up = claude.messages.parse(
        model="claude-opus-5", max_tokens=999, messages=TURN, output_format=Person
    )
    assert isinstance(made_up.parsed_output, Person)
    with pytest.raises(openai.InternalServerError, match=r"nobody.*none that JsonSchema"):
        gpt.chat.completions.parse(model="gpt-4o", messages=TURN, response_format=Person)


def test_a_tool_that_is_demanded_is_called(server, gpt, claude):
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    }
    server.answers = "Paris"
    tool = {"type": "function", "function": {"name": "go", "parameters": parameters}}
    force = {"type": "function", "function": {"name": "go"}}
    (call,) = chat(gpt, tools=[tool], tool_choice=force).choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("go", '{"city": "Paris"}')
    used = message(
        claude,
        tools=[{"name": "go", "input_schema": parameters}],
        tool_choice={"type": "tool", "name": "go"},
    )
    assert (used.stop_reason, used.content[0].input) == ("tool_use", {"city": "Paris"})


def test_tools_are_called_when_the_script_says_so(server, gpt, claude):
    server.answers = Say(calls=(ToolCall("go", {"city": "Paris"}), ToolCall("stay", {})))
    tools = [{"type": "function", "function": {"name": name}} for name in ("go", "stay")]
    calls = chat(gpt, tools=tools).choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["go", "stay"]
    pieces = [
        c.choices[0].delta.tool_calls
        for c in chat(gpt, tools=tools, stream=True)
        if c.choices[0].delta.tool_calls
    ]
    assert (
        "".join(p[0].function.arguments for p in pieces if p[0].index == 0) == '{"city": "Paris"}'
    )
    with gpt.responses.stream(model="gpt-5", input="x") as stream:
        names = [item.name for item in stream.until_done().get_final_response().output]
    assert names == ["go", "stay"]
    with claude.messages.stream(model="claude-opus-5", max_tokens=9, messages=TURN) as stream:
        assert [block.input for block in stream.get_final_message().content] == [
            {"city": "Paris"},
            {},
        ]


def test_refusals_reasoning_and_caches_are_told_as_each_api_tells_them(server, gpt, claude):
    server.answers = Say(refusal="I can't.")
    assert chat(gpt).choices[0].message.refusal == "I can't."
    assert gpt.responses.create(model="gpt-5", input="x").output[0].content[0].refusal == "I can't."
    refused = message(claude)
    assert (refused.stop_reason, refused.stop_details.explanation) == ("refusal", "I can't.")
    server.answers = Say("Paris", thinking="France, then.", cached=3, written=1)
    usage = chat(gpt).usage
    assert (usage.completion_tokens, usage.completion_tokens_details.reasoning_tokens) == (3, 2)
    assert (
        usage.prompt_tokens_details.cached_tokens,
        usage.prompt_tokens_details.cache_write_tokens,
    ) == (3, 1)
    usage = message(claude).usage
    assert (
        usage.input_tokens,
        usage.cache_read_input_tokens,
        usage.cache_creation_input_tokens,
    ) == (0, 3, 1)
    assert usage.output_tokens_details.thinking_tokens == 2
    assert [item.type for item in gpt.responses.create(model="gpt-5", input="x").output] == [
        "reasoning",
        "message",
    ]
    server.answers = Say("", finish="pause")
    assert message(claude).stop_reason == "pause_turn"


def test_models_keys_and_counts(gpt, claude):
    with sgl.server_for_tests(models=["gpt-4o"], api_key="key-1") as server:
        with openai.OpenAI(**server.openai, max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["gpt-4o"]
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                chat(client, model="gpt-9")
        with anthropic.Anthropic(**server.anthropic) as other:
            assert [model.id for model in other.models.list()] == ["gpt-4o"]
            assert other.messages.count_tokens(model="gpt-4o", messages=TURN).input_tokens == 4
        client = openai.OpenAI(base_url=server.openai["base_url"], api_key="key-2")
        with client, pytest.raises(openai.AuthenticationError):
            client.models.list()


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("model", "options", "told"),
    [
        ("gpt-5", {"temperature": 0.2}, "'temperature' does not support 0.2 with this model"),
        ("o3", {"max_tokens": 9}, "Use 'max_completion_tokens' instead"),
        ("gpt-5.2", {"top_p": 0.5, "reasoning_effort": "low"}, "'top_p' does not support"),
        ("gpt-5", {"logprobs": True}, "'logprobs' is not supported"),
        ("gpt-4o", {"stop": list("abcde")}, "maximum length 4"),
        ("gpt-4o", {"extra_body": {"top_k": 3}}, "Unrecognized request argument supplied: top_k"),
        (
            "gpt-4o",
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0",
        ),
        (
            "gpt-4",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": "object"}},
                }
            },
            "'json_schema' is not supported",
        ),
        (
            "gpt-4o",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "a",
                        "strict": True,
                        "schema": {"type": "object", "properties": {}},
                    },
                }
            },
            "'additionalProperties' is required",
        ),
    ],
)
def test_what_openais_models_refuse_is_a_400(gpt, model, options, told):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(gpt, model=model, **options)
    assert told in caught.value.message


@pytest.mark.parametrize(
    ("model", "options", "told"),
    [
        ("claude-opus-4-7", {"extra_body": {"temperature": 0.5}}, "`temperature` is deprecated"),
        (
            "claude-haiku-4-5",
            {"extra_body": {"temperature": 0.5, "top_p": 0.5}},
            "cannot both be specified",
        ),
        (
            "claude-opus-4-6",
            {"messages": [*TURN, {"role": "assistant", "content": "It"}]},
            "assistant message prefill",
        ),
        (
            "claude-opus-4-5",
            {"messages": [*TURN, {"role": "assistant", "content": "It "}]},
            "trailing whitespace",
        ),
        (
            "claude-opus-5",
            {"extra_body": {"nonsense": 1}},
            "nonsense: Extra inputs are not permitted",
        ),
        (
            "claude-3-haiku",
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "structured outputs",
        ),
    ],
)
def test_what_anthropics_models_refuse_is_a_400(claude, model, options, told):
    with pytest.raises(anthropic.BadRequestError) as caught:
        message(claude, model=model, **options)
    assert told in str(caught.value)


def test_what_a_generation_takes_is_answered(gpt, claude):
    assert (
        chat(gpt, model="gpt-5.2", top_p=0.5, max_completion_tokens=5).choices[0].message.content
        == "ok"
    )
    assert chat(gpt, model="my-own", max_tokens=5, temperature=0).choices[0].message.content == "ok"
    old = message(
        claude, model="claude-haiku-4-5", extra_body={"temperature": 0.5},
        messages=[*TURN, {"role": "assistant", "content": "It"}],
    )  # fmt: skip
    assert old.content[0].text == "ok"


def test_a_compatible_server_takes_other_fields():
    with (
        sgl.server_for_tests("yes", compatible=True) as server,
        openai.OpenAI(**server.openai) as client,
    ):
        assert (
            chat(client, model="gpt-5", temperature=0, extra_body={"top_k": 3})
            .choices[0]
            .message.content
            == "yes"
        )


# ---------------------------------------------------------------------------------- what goes wrong


def test_rate_limits_say_when_to_come_again_or_do_not(server, gpt, claude):
    server.answers = [rate_limit(0.01), "ok"]
    assert chat(gpt.with_options(max_retries=1)).choices[0].message.content == "ok"
    server.answers = rate_limit()
    with pytest.raises(openai.RateLimitError) as caught:
        chat(gpt)
    assert "retry-after" not in caught.value.response.headers
    server.answers = rate_limit(30)
    with pytest.raises(anthropic.RateLimitError) as late:
        message(claude)
    assert late.value.response.headers["retry-after"] == "30"
    assert len(server.requests) == 4


def test_overload_before_and_in_the_middle_of_a_stream(server, claude, gpt):
    server.answers = overload()
    with pytest.raises(anthropic.APIStatusError, match="Overloaded"):
        message(claude)
    server.answers = overload(after=3)
    for model in (
        sgl.Anthropic("claude-opus-5", **server.anthropic, max_retries=0),
        sgl.OpenAI("gpt-4o", **server.openai, max_retries=0),
    ):
        state = program.run(backend=model, stream=True)
        with pytest.raises(sgl.OverloadedError, match="Overloaded"):
            state["city"]
        model.shutdown()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "answer", [Cut(2), Cut(0), Cut(2, "garbage"), Html(), Html(502), Fail(500)], ids=repr
)
@pytest.mark.parametrize("kind", [sgl.OpenAI, sgl.Anthropic])
def test_broken_answers_are_errors_of_a_backend(server, kind, answer, stream):
    server.answers = answer
    model, client = (
        ("gpt-4o", server.openai) if kind is sgl.OpenAI else ("claude-opus-5", server.anthropic)
    )
    backend = kind(model, **client, max_retries=0)
    state = program.run(backend=backend, stream=stream)
    with pytest.raises(sgl.BackendError, match=model):
        state["city"]
    backend.shutdown()


def test_a_slow_answer_and_a_buffered_one_arrive_whole(server, gpt):
    server.answers = Slow(0.001, "one two")
    assert "".join(c.choices[0].delta.content or "" for c in chat(gpt, stream=True)) == "one two"
    server.answers = Buffered("one two")
    assert "".join(c.choices[0].delta.content or "" for c in chat(gpt, stream=True)) == "one two"


def test_an_answer_that_never_comes_is_left(server):
    server.answers = Cut(1, "hold")
    backend = sgl.OpenAI("gpt-4o", **server.openai, max_retries=0)
    state = program.run(backend=backend)
    until(lambda: server.requests)
    state.cancel()
    with pytest.raises(sgl.RequestAbortedError):
        state["city"]
    assert server.hung_up.wait(60)
    backend.shutdown()


@pytest.mark.parametrize("answers", [5, b"x", object])
def test_a_script_that_is_none_is_refused(server, answers):
    answers = answers() if isinstance(answers, type) else answers
    with pytest.raises(
        sgl.ParameterError, match=r"^answers: .* is not a string, list, mapping or function"
    ):
        sgl.server_for_tests(answers)
    with pytest.raises(sgl.ParameterError, match=r"^answers: "):
        server.answers = answers


def test_a_misspelt_argument_is_told_of_the_nearest_one():
    with pytest.raises(
        sgl.ParameterError,
        match=r"^model: server_for_tests has no such argument. Did you mean models=",
    ):
        sgl.server_for_tests("x", model="a")  # type: ignore[call-arg] # wrong on purpose


def test_importing_the_package_loads_neither_it_nor_an_sdk():
    code = (
        "import sys, sglang_lite; print('sglang_lite.testing' in sys.modules); import sglang_lite.testing\n"
        "print([m for m in ('openai', 'anthropic', 'pydantic', 'torch') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    assert out.split("\n")[:2] == ["False", "[]"]
