"""Anthropic's messages, by the official client."""

import asyncio
import json

import anthropic
import pytest

from sglang_lite.protocol import BackendError
from tests.server.conftest import serving
from tests.server.scripted import Scripted

USER: list = [{"role": "user", "content": "a quick brown fox"}]
WEATHER: dict = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
    "cache_control": {"type": "ephemeral"},
}
POINT = {
    "type": "object",
    "properties": {"x": {"enum": [1, 2]}},
    "required": ["x"],
    "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'
THINKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "</{{ m.role }}>{% endfor %}{{ tools | tojson if tools else '' }}effort={{ reasoning_effort }}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{# <think> </think> #}"
)


@pytest.fixture(scope="session")
def client(url):
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def scripted(engine):
    """Servers of engines that say what they are told: a client and the engine."""
    opened = []

    def serve(*said, **options):
        fake = Scripted(engine, said, **options)
        server = serving(fake)
        client = anthropic.Anthropic(base_url=server.__enter__(), api_key="none", max_retries=0)
        opened.append((server, client))
        return client, fake

    yield serve
    for server, client in opened:
        client.close()
        server.__exit__(None, None, None)


def ask(client, messages=USER, **options):
    extra = {"temperature": 0, **options.pop("extra_body", {})}
    return client.messages.create(
        **{"model": "", "messages": messages, "max_tokens": 12, **options}, extra_body=extra
    )


def streamed(client, messages=USER, **options):
    extra = {"temperature": 0, **options.pop("extra_body", {})}
    options = {"model": "", "messages": messages, "max_tokens": 12, **options}
    with client.messages.stream(**options, extra_body=extra) as stream:
        return list(stream), stream.get_final_message()


def content_of(message):
    """The content of a message, without the names of its calls."""
    blocks = [
        block.model_dump(exclude_none=True, exclude={"id", "parsed_output"})
        for block in message.content
    ]
    return blocks, message.stop_reason, message.stop_sequence


def refused(client, **options):
    with pytest.raises(anthropic.BadRequestError) as raised:
        ask(client, **options)
    body = raised.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["request_id"] == raised.value.response.headers["x-request-id"]
    return body["error"]["message"]


def rendered(fake):
    """The text of the last prompt."""
    return fake.tokenizer.decode(fake.asked[-1][0], skip_special=False)


# ------------------------------------------------------------------------------- of the small model


def test_an_answer_is_what_the_engine_says_to_the_rendered_messages(client, engine):
    answer = ask(client, system="be short")
    messages = [{"role": "system", "content": "be short"}, *USER]
    text = engine.chat_template().render(messages, add_generation_prompt=True)
    alone = engine.generate(text, {"max_new_tokens": 12, "temperature": 0})
    assert [block.text for block in answer.content] == [alone["text"]]
    assert (answer.stop_reason, answer.role, answer.model) == (
        "max_tokens",
        "assistant",
        engine.model_name,
    )
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == alone["meta_info"]["prompt_tokens"]
    assert usage.output_tokens == 12


def test_a_prompt_that_was_there_before_is_read_from_the_cache(client):
    messages = [
        {"role": "user", "content": "a prompt of some length, which two requests share " * 8}
    ]
    ask(client, messages)
    again = ask(client, messages).usage
    assert again.cache_read_input_tokens > 300 > again.input_tokens > 0


def test_a_stream_says_the_same(client):
    events, message = streamed(client)
    alone = ask(client)
    assert content_of(message) == content_of(alone)
    assert message.usage.output_tokens == alone.usage.output_tokens
    assert "".join(event.text for event in events if event.type == "text") == alone.content[0].text
    kinds = [event.type for event in events if event.type != "text"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_tokens_are_counted_as_an_answer_counts_them(client):
    options: dict = dict(messages=USER, model="", system="be short", tools=[WEATHER])
    counted = client.messages.count_tokens(**options).input_tokens
    usage = client.messages.create(**options, max_tokens=1).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
    assert counted > client.messages.count_tokens(messages=USER, model="").input_tokens


def test_a_stop_sequence_is_named_and_left_out(client):
    text = ask(client).content[0].text
    stop = text[4:6]
    answer = ask(client, stop_sequences=["☃", stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == text[: text.index(stop)]
    assert content_of(streamed(client, stop_sequences=["☃", stop])[1]) == content_of(answer)


def test_sampling_that_the_wire_has_is_honoured(client, engine):
    extra = {"temperature": 1, "top_k": 1}
    assert ask(client, extra_body=extra).content[0].text == ask(client).content[0].text
    with pytest.raises(anthropic.BadRequestError, match="top_p"):
        ask(client, extra_body={"top_p": 7})


@pytest.mark.parametrize("options", [
    {"output_config": {"format": {"type": "json_schema", "schema": POINT}}},
    {"extra_body": {"output_format": {"type": "json_schema", "schema": POINT}}},
])  # fmt: skip
def test_a_schema_holds(client, options):
    answer = ask(client, **options)
    assert json.loads(answer.content[0].text)["x"] in (1, 2)
    assert answer.stop_reason == "end_turn"


def test_a_format_is_parsed_by_the_client(client):
    import pydantic

    class Point(pydantic.BaseModel):
        x: bool

    answer = client.messages.parse(model="", messages=USER, max_tokens=30, output_format=Point)
    assert isinstance(answer.parsed_output.x, bool)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_call_that_is_demanded_has_valid_input(client, choice):
    options: dict = dict(
        tools=[WEATHER], tool_choice={**choice, "disable_parallel_tool_use": True}, max_tokens=200,
        extra_body={"temperature": 1, "top_k": 20},
    )  # fmt: skip
    answer = ask(client, **options)
    (call,) = answer.content
    assert (call.type, call.name, answer.stop_reason) == ("tool_use", "weather", "tool_use")
    assert set(call.input) == {"city"}
    assert call.id.startswith("toolu_")
    events, message = streamed(client, **options)
    (call,) = message.content
    assert (call.name, message.stop_reason, set(call.input)) == ("weather", "tool_use", {"city"})
    assert (
        json.loads("".join(e.partial_json for e in events if e.type == "input_json")) == call.input
    )


def test_a_call_that_a_limit_cuts_ends_with_max_tokens(client):
    answer = ask(client, tools=[WEATHER], tool_choice={"type": "any"}, max_tokens=50)
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == 50


def test_coroutines_have_the_same_answers(client, url):
    async def both():
        async with anthropic.AsyncAnthropic(base_url=url, api_key="x") as many:
            options: dict = dict(
                model="", messages=USER, max_tokens=12, extra_body={"temperature": 0}
            )
            async with many.messages.stream(**options) as stream:
                text = "".join([text async for text in stream.text_stream])
            return text, (await many.messages.create(**options)).content[0].text

    assert set(asyncio.run(both())) == {ask(client).content[0].text}


def test_the_last_message_can_be_the_answers_beginning(client, engine):
    answer = ask(client, [*USER, {"role": "assistant", "content": "jumps over"}])
    text = engine.chat_template().render(USER, add_generation_prompt=True) + "jumps over"
    assert (
        answer.content[0].text
        == engine.generate(text, {"max_new_tokens": 12, "temperature": 0})["text"]
    )


def test_models_have_anthropics_shape_for_its_clients(client, engine):
    (found,) = client.models.list()
    assert (found.id, found.type, found.max_input_tokens) == (
        engine.model_name,
        "model",
        engine.context_length,
    )
    assert client.models.retrieve(engine.model_name).display_name
    with pytest.raises(anthropic.NotFoundError) as raised:
        client.models.retrieve("claude-9")
    assert raised.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.NotFoundError, match="claude-9"):
        ask(client, model="claude-9")


# ------------------------------------------------------------------------------ of scripted answers


@pytest.mark.parametrize("whole", [False, True])
def test_thinking_text_and_calls_are_blocks(scripted, whole):
    said = f"<think>\nhm, so\n</think>\n\nLook:{CALL}\n{CALL}"
    client, _ = scripted(*([said] if whole else said), template=THINKS)
    options: dict = dict(tools=[WEATHER], thinking={"type": "adaptive"})
    answer = ask(client, **options)
    _, message = streamed(client, **options)
    assert content_of(message) == content_of(answer)
    thought, text, first, second = answer.content
    assert (thought.type, thought.thinking, bool(thought.signature)) == (
        "thinking",
        "hm, so\n",
        True,
    )
    assert text.text == "Look:"
    assert first.input == second.input == {"city": "Rom"}
    assert first.id != second.id
    assert answer.stop_reason == message.stop_reason == "tool_use"
    assert message.usage.output_tokens_details.thinking_tokens == len("hm, so\n")
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (5, 4)


def test_thinking_can_be_left_out_of_the_answer(scripted):
    client, _ = scripted(*"<think>hm</think>yes", template=THINKS)
    options: dict = dict(thinking={"type": "adaptive", "display": "omitted"})
    for answer in (ask(client, **options), streamed(client, **options)[1]):
        thought, text = answer.content
        assert (thought.thinking, text.text) == ("", "yes")


def test_an_answer_can_be_sent_back_as_it_came(scripted):
    client, fake = scripted(*f"<think>hm</think>Look:{CALL}", template=THINKS)
    answer = ask(client, tools=[WEATHER])
    result: dict = {
        "type": "tool_result", "tool_use_id": answer.content[-1].id, "is_error": True,
        "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "city"}],
    }  # fmt: skip
    messages = [
        *USER,
        answer.to_param(),
        {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
    ]
    ask(client, messages, tools=[WEATHER])
    assert rendered(fake).partition("</user>")[2].partition("[{")[0] == (
        '<assistant>(hm)Look:<tool_call>{"name": "weather", "arguments": {"city": "Rom"}}</tool_call></assistant>'
        "<tool>Error: no\ncity</tool><user>so?</user>"
    )


def test_thinking_and_effort_are_variables_of_the_template(scripted):
    client, fake = scripted("yes", template=THINKS)
    ask(client, thinking={"type": "disabled"}, output_config={"effort": "low"})
    assert rendered(fake).endswith("effort=low<think>\n\n</think>\n\n")
    raw = client.messages.with_raw_response.create(
        model="",
        messages=USER,
        max_tokens=2000,
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert "x-unused-fields" not in raw.headers
    assert fake.asked[-1][1].thinking == 1024
    assert fake.asked[-1][1].reasoning_format == ("qwen3",)
    assert rendered(fake).endswith("effort=")


def test_a_billing_line_is_no_part_of_the_prompt(scripted):
    client, fake = scripted("yes")
    system = [
        {"type": "text", "text": text}
        for text in ("x-anthropic-billing-header: v=1; a=b;", "be short")
    ]
    raw = client.messages.with_raw_response.create(
        model="", messages=USER, max_tokens=2, system=system
    )
    assert raw.headers["x-unused-fields"] == "x-anthropic-billing-header"
    assert "billing" not in rendered(fake)
    assert "<system>be short</system>" in rendered(fake)
    system[0]["text"] += "\nand be polite"
    client.messages.create(model="", messages=USER, max_tokens=2, system=system)
    assert "billing" in rendered(fake)


def test_tools_of_anthropics_are_never_called_and_named(scripted):
    client, fake = scripted("yes")
    search = {"type": "web_search_20250305", "name": "web_search"}
    raw = client.messages.with_raw_response.create(
        model="", messages=USER, max_tokens=2, tools=[WEATHER, search]
    )
    assert raw.headers["x-unused-fields"] == "tools[1] web_search_20250305"
    assert "web_search" not in rendered(fake)
    assert "web_search" in refused(
        client, tools=[search], tool_choice={"type": "tool", "name": "web_search"}
    )
    assert "tool_choice" in refused(client, tools=[search], tool_choice={"type": "any"})


def test_documents_of_text_are_read(scripted):
    client, fake = scripted("yes")
    source = {"type": "text", "media_type": "text/plain", "data": "of foxes"}
    ask(
        client,
        [{"role": "user", "content": [{"type": "document", "source": source, "title": "Book"}]}],
    )
    assert "<user>Book\nof foxes</user>" in rendered(fake)


def test_a_full_context_is_told_apart_from_a_limit(scripted):
    client, _ = scripted("a", "b", finish="length")
    assert ask(client, max_tokens=3).stop_reason == "model_context_window_exceeded"
    assert ask(client, max_tokens=2).stop_reason == "max_tokens"


def test_an_error_in_the_middle_is_an_event(scripted):
    client, _ = scripted("a", "b", BackendError("the fuse blew."))
    with pytest.raises(anthropic.APIStatusError, match="fuse") as raised:
        streamed(client)
    assert raised.value.body["error"]["type"] == "api_error"
    with pytest.raises(anthropic.InternalServerError, match="fuse"):
        ask(client)


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(("options", "parameter"), [
    ({"extra_body": {"max_tokenz": 1}}, "max_tokenz"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"extra_body": {"max_tokens": None}}, "max_tokens"),
    ({"extra_body": {"temperature": "hot"}}, "temperature"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, r"messages[0].content"),
    ({"messages": [{"role": "tool", "content": "a"}]}, r"messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "txt": 1}]}]}, "txt"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
     "messages[0].content[0]"),
    ({"messages": [*USER, {"role": "assistant", "content": [
        {"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]}, "messages"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "a", "type": "costom"}]}, "tools[0].type"),
    ({"tools": [{**WEATHER, "description": 3}]}, "tools[0].description"),
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "auto", "name": "weather"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "thing"}}}}, "json_schema"),
    ({"extra_body": {"container": "c"}}, "container"),
    ({"extra_body": {"mcp_servers": [{"name": "a"}]}}, "mcp_servers"),
])  # fmt: skip
def test_a_bad_field_is_named(client, options, parameter):
    assert parameter in refused(client, **options)


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(client):
    assert "2,048" in refused(client, messages=[{"role": "user", "content": "a b c " * 3000}])
