"""OpenAI's chat and completions, by the official client."""

import asyncio
import json

import openai
import pydantic
import pytest

from tests.server.conftest import serving

USER: list = [{"role": "user", "content": "a quick brown fox"}]
WEATHER: dict = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "days": {"type": "integer", "maximum": 9},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
POINT = {
    "type": "object",
    "properties": {"x": {"enum": [1, 2]}},
    "required": ["x"],
    "additionalProperties": False,
}


@pytest.fixture(scope="session")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client, messages=USER, **options):
    return client.chat.completions.create(
        **{"model": "", "messages": messages, "temperature": 0, **options}
    )


def whole(stream):
    """The chunks of a stream, put together: reasoning, content, calls, the reason for its end."""
    content, calls, finish, usage = "", {}, None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or ():
                known = calls.setdefault(
                    call.index, {"id": call.id, "name": call.function.name, "arguments": ""}
                )
                known["arguments"] += call.function.arguments
    return content, list(calls.values()), finish, usage


def test_an_answer_is_what_the_engine_says_to_the_rendered_messages(client, engine):
    answer = chat(client, max_completion_tokens=12)
    text = engine.chat_template().render(USER, add_generation_prompt=True)
    alone = engine.generate(text, {"max_new_tokens": 12, "temperature": 0})
    assert answer.choices[0].message.content == alone["text"]
    assert answer.usage.completion_tokens == len(alone["output_ids"])
    assert answer.usage.prompt_tokens == alone["meta_info"]["prompt_tokens"]


def test_a_stream_says_the_same(client):
    options = dict(max_completion_tokens=12, stream_options={"include_usage": True})
    content, _, finish, usage = whole(chat(client, stream=True, **options))
    alone = chat(client, max_completion_tokens=12)
    assert content == alone.choices[0].message.content
    assert finish == alone.choices[0].finish_reason
    assert usage.completion_tokens == alone.usage.completion_tokens


def test_several_samples_depend_on_the_seed_alone(client):
    options = dict(n=3, seed=5, temperature=1, max_tokens=6)
    first, second = chat(client, **options), chat(client, **options)
    assert [c.index for c in first.choices] == [0, 1, 2]
    assert [c.message.content for c in first.choices] == [c.message.content for c in second.choices]


def test_log_probabilities_are_told_of_every_token(client):
    answer = chat(client, max_tokens=5, logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    assert all(len(e.top_logprobs) == 2 and e.top_logprobs[0].logprob == e.logprob for e in entries)
    streamed = [
        entry
        for chunk in chat(client, max_tokens=5, logprobs=True, top_logprobs=2, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [e.logprob for e in streamed] == [e.logprob for e in entries]


def test_a_schema_holds(client):
    format = {
        "type": "json_schema",
        "json_schema": {"name": "point", "schema": POINT, "strict": True},
    }
    answer = chat(client, response_format=format)
    assert json.loads(answer.choices[0].message.content)["x"] in (1, 2)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("field", [
    {"regex": "[0-9]{3}"}, {"ebnf": "root ::= [0-9] [0-9] [0-9]"},
    {"structured_outputs": {"regex": "[0-9]{3}"}}, {"structured_outputs": {"choice": ["123", "456"]}},
    {"structured_outputs": {"grammar": 'start: /[0-9]{3}/'}},
])  # fmt: skip
def test_what_peers_clients_send_of_constraints_holds(client, field):
    content = chat(client, extra_body=field).choices[0].message.content
    assert len(content) == 3
    assert content.isdigit()


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_call_that_is_demanded_has_valid_arguments(client, choice):
    options = dict(
        tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, temperature=1, seed=3
    )
    answer = chat(client, **options).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls"
    assert call.function.name == "weather"
    assert "city" in json.loads(call.function.arguments)
    content, calls, finish, _ = whole(chat(client, stream=True, **options))
    assert (content, finish) == ("", "tool_calls")
    assert [(c["name"], c["arguments"]) for c in calls] == [("weather", call.function.arguments)]


def test_an_answer_without_calls_reads_the_same_prompt(client):
    options = dict(tools=[WEATHER], temperature=1, seed=3)
    free = chat(client, **options)
    last = chat(client, tool_choice="none", **options)
    assert last.choices[0].message.tool_calls is None
    assert "<tool_call>" not in last.choices[0].message.content
    assert last.usage.prompt_tokens == free.usage.prompt_tokens
    assert last.usage.prompt_tokens_details.cached_tokens >= free.usage.prompt_tokens - 1


def test_tools_that_are_allowed_are_called_alone(client):
    other = {"type": "function", "function": {**WEATHER["function"], "name": "time"}}
    named = {"type": "function", "function": {"name": "weather"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    for seed in range(3):
        options = dict(tools=[other, WEATHER], parallel_tool_calls=False, temperature=1, seed=seed)
        (call,) = chat(client, tool_choice=choice, **options).choices[0].message.tool_calls
        assert call.function.name == "weather"


def test_the_clients_helpers_parse_answers_and_calls(client):
    class Point(pydantic.BaseModel):
        x: bool

    answer = client.chat.completions.parse(model="", messages=USER, response_format=Point)
    assert isinstance(answer.choices[0].message.parsed.x, bool)
    with client.chat.completions.stream(model="", messages=USER, response_format=Point) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed.x, bool)
    tool = openai.pydantic_function_tool(Point)
    answer = client.chat.completions.parse(
        model="", messages=USER, tools=[tool], tool_choice="required", seed=1
    )
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments.x, bool)


def test_coroutines_have_the_same_answers(client, url):
    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as many:
            options: dict = dict(model="", temperature=0, max_tokens=6)
            chats = await many.chat.completions.create(**options, messages=USER, stream=True)
            content = "".join([c.choices[0].delta.content or "" async for c in chats])
            texts = await many.completions.create(**options, prompt="a b", stream=True)
            text = "".join([c.choices[0].text async for c in texts])
            whole = await many.completions.create(**options, prompt="a b")
            return content, text, whole.choices[0].text

    content, text, plain = asyncio.run(all_of_them())
    assert content == chat(client, max_tokens=6).choices[0].message.content
    assert (
        text
        == plain
        == client.completions.create(model="", temperature=0, max_tokens=6, prompt="a b")
        .choices[0]
        .text
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_a_limit_cuts_ends_with_length(client, stream):
    answer = chat(client, tools=[WEATHER], tool_choice="required", max_tokens=12, stream=stream)
    end = [*answer][-1] if stream else answer
    assert end.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("syntax", "definition"), [("regex", "[0-9]{3}"), ("lark", 'start: "12" /[0-9]/')]
)
def test_the_input_of_a_custom_tool_keeps_its_grammar(client, syntax, definition):
    format = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    tool = {"type": "custom", "custom": {"name": "dial", "format": format}}
    answer = chat(client, tools=[tool], tool_choice={"type": "custom", "custom": {"name": "dial"}})
    (call,) = answer.choices[0].message.tool_calls
    assert call.type == "custom"
    assert len(call.custom.input) == 3
    assert call.custom.input.isdigit()


def test_a_conversation_with_calls_is_read(client):
    called = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rom"}'},
    }
    messages = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": "warm"},
    ]
    assert (
        chat(client, messages, max_tokens=4, tools=[WEATHER]).choices[0].finish_reason == "length"
    )


def test_the_last_message_can_be_continued(client, engine):
    messages = [*USER, {"role": "assistant", "content": "jumps over"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    answer = chat(client, messages, max_tokens=6, extra_body=extra)
    text = engine.chat_template().render(USER, add_generation_prompt=True) + "jumps over"
    assert (
        answer.choices[0].message.content
        == engine.generate(text, {"max_new_tokens": 6, "temperature": 0})["text"]
    )


def test_no_content_is_read_as_special_tokens(client, engine):
    special = engine.tokenizer.control_texts[0]
    plain = chat(client, [{"role": "user", "content": "x"}], max_tokens=1).usage.prompt_tokens
    spelled = chat(
        client, [{"role": "user", "content": f"x{special}"}], max_tokens=1
    ).usage.prompt_tokens
    assert spelled > plain + 1  # its characters


def test_completions_echo_and_score_their_prompt(client, engine):
    answer = client.completions.create(
        model="", prompt=["a b", "c"], max_tokens=3, temperature=0, echo=True, logprobs=1
    )
    assert [c.index for c in answer.choices] == [0, 1]
    for choice, prompt in zip(answer.choices, ("a b", "c")):
        ids = engine.tokenizer.encode(prompt)
        assert len(choice.logprobs.tokens) == len(ids) + 3
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.text.startswith(prompt)


def test_a_completion_of_no_tokens_scores_its_prompt(client):
    answer = client.completions.create(
        model="", prompt="a b c", max_tokens=0, echo=True, logprobs=0
    )
    assert answer.choices[0].text == "a b c"
    assert all(value < 0 for value in answer.choices[0].logprobs.token_logprobs[1:])


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_of_generated_tokens_alone(client, engine, stream):
    options = dict(model="", max_tokens=0, stream=stream)
    answer = client.completions.create(prompt="a b c", echo=True, logprobs=2, **options)
    chunks = list(answer) if stream else [answer]
    told = [token for chunk in chunks for token in chunk.choices[0].logprobs.tokens]
    assert len(told) == len(engine.tokenizer.encode("a b c"))
    answer = client.chat.completions.create(
        messages=[{"role": "user", "content": "a"}], logprobs=True, top_logprobs=2, **options
    )
    for chunk in answer if stream else [answer]:
        assert not (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content)


def test_streamed_completions_say_the_same(client):
    options = dict(model="", prompt=["a b", "c"], max_tokens=5, temperature=0)
    alone = client.completions.create(**options)
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(**options, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {choice.index: choice.text for choice in alone.choices}


def test_many_clients_at_once_have_the_answers_they_have_alone(client, url):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as many:
            asked = [
                many.chat.completions.create(
                    model="",
                    messages=[{"role": "user", "content": f"number {i}"}],
                    max_tokens=8,
                    temperature=0,
                )
                for i in range(32)
            ]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]

    alone = [
        chat(client, [{"role": "user", "content": f"number {i}"}], max_tokens=8) for i in range(32)
    ]
    assert asyncio.run(ask()) == [answer.choices[0].message.content for answer in alone]


@pytest.mark.parametrize(("options", "parameter"), [
    ({"extra_body": {"max_tokenz": 1}}, "max_tokenz"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 3}, "max_completion_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{}]}}},
     "tool_choice.allowed_tools.tools[0]"),
    ({"tools": [{**WEATHER, "strict": True}]}, "tools[0]"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"audio": {"voice": "a", "format": "wav"}}, "audio"),
    ({"extra_body": {"regex": "a", "ebnf": 'root ::= "a"'}}, "ebnf"),
    ({"messages": []}, "messages"),
    ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
])  # fmt: skip
def test_a_bad_field_is_named(client, options, parameter):
    with pytest.raises(openai.BadRequestError) as raised:
        chat(client, **options)
    assert raised.value.body["param"] == parameter


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(client):
    with pytest.raises(openai.BadRequestError, match=r"[0-9,]{4,} tokens long; .* takes 2,048"):
        chat(client, [{"role": "user", "content": "a b c " * 3000}])


def test_another_model_is_not_served(client):
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        chat(client, model="gpt-9")
    assert client.models.list().data[0].id
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_an_image_is_refused(client):
    parts = [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\].content\[0\]"):
        chat(client, [{"role": "user", "content": parts}])


def test_unknown_fields_can_be_reported_instead(engine):
    with (
        serving(engine, unknown_fields="report") as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client,
    ):
        raw = client.chat.completions.with_raw_response.create(
            model="", messages=USER, max_tokens=2, extra_body={"max_tokenz": 1}
        )
        assert raw.headers["x-unused-fields"] == "max_tokenz"


def test_token_ids_by_the_names_of_vllm_and_sglang(client, engine):
    text = engine.chat_template().render(USER, add_generation_prompt=True)
    alone = engine.generate(
        text,
        {"max_new_tokens": 5, "temperature": 0},
        return_prompt_token_ids=True,
        return_logprob=True,
    )
    vllm = chat(client, max_tokens=5, extra_body={"return_token_ids": True})
    assert vllm.prompt_token_ids == vllm.choices[0].prompt_token_ids == alone["prompt_token_ids"]
    assert vllm.choices[0].token_ids == alone["output_ids"]
    sglang = chat(
        client,
        max_tokens=5,
        logprobs=True,
        extra_body={"return_prompt_token_ids": True, "return_meta_info": True},
    ).choices[0]
    assert sglang.prompt_token_ids == alone["prompt_token_ids"]
    assert not hasattr(sglang, "token_ids")
    told, expected = sglang.meta_info, alone["meta_info"]
    assert [entry[:2] for entry in told["output_token_logprobs"]] == [
        list(entry[:2]) for entry in expected["output_token_logprobs"]
    ]
    assert told["weight_version"] == expected["weight_version"]
    completed = client.completions.create(
        model="", prompt=text, max_tokens=5, temperature=0, extra_body={"return_token_ids": True}
    )
    assert completed.choices[0].token_ids == alone["output_ids"]
    assert completed.choices[0].prompt_token_ids == alone["prompt_token_ids"]
    assert not hasattr(chat(client, max_tokens=5).choices[0], "prompt_token_ids")


@pytest.mark.parametrize(
    "name", ["return_token_ids", "return_prompt_token_ids", "return_meta_info"]
)
def test_token_ids_have_no_place_in_a_stream(client, name):
    with pytest.raises(openai.BadRequestError, match=f"{name}: has no place in a stream"):
        chat(client, stream=True, extra_body={name: True})
    chat(client, stream=True, max_tokens=1, extra_body={name: False}).close()
