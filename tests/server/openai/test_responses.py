"""OpenAI's Responses, by the official client."""

import asyncio
import json

import openai
import pydantic
import pytest

from sglang_lite.protocol import BackendError, TokenLogprob
from sglang_lite.server.openai.responses_answer import TextLogprobs
from tests.server.conftest import serving
from tests.server.scripted import Scripted

SAID = "a quick brown fox"
CITY = {"city": {"type": "string", "maxLength": 8}}
WEATHER: dict = {
    "type": "function",
    "name": "weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": CITY,
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
TIME: dict = {**WEATHER, "name": "time", "description": "Time of a city"}
DIAL: dict = {
    "type": "custom",
    "name": "dial",
    "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]{3}"},
}
SEARCH: dict = {"type": "web_search"}
POINT = {
    "type": "object",
    "properties": {"x": {"enum": [1, 2]}},
    "required": ["x"],
    "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'
DIALS = '<tool_call>\n{"name": "dial", "arguments": {"input": "123"}}\n</tool_call>'
THINKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "</{{ m.role }}>{% endfor %}{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "effort={{ reasoning_effort }}{# <think> </think> #}"
)


@pytest.fixture(scope="session")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def scripted(engine):
    """Servers of engines that say what they are told: a client and the engine."""
    opened = []

    def serve(*said, **options):
        fake = Scripted(engine, said, **options)
        server = serving(fake)
        client = openai.OpenAI(base_url=f"{server.__enter__()}/v1", api_key="none", max_retries=0)
        opened.append((server, client))
        return client, fake

    yield serve
    for server, client in opened:
        client.close()
        server.__exit__(None, None, None)


def ask(client, said=SAID, **options):
    return client.responses.create(
        **{"model": "", "input": said, "temperature": 0, "max_output_tokens": 12, **options}
    )


def streamed(client, said=SAID, **options):
    """The events of a stream; those that the client accumulates are checked by it."""
    options = {"model": "", "input": said, "temperature": 0, "max_output_tokens": 12, **options}
    with client.responses.stream(**options) as stream:
        return list(stream)


def items_of(response):
    """The output of a response, without its ids."""
    return [
        item.model_dump(
            exclude_none=True,
            exclude={"id": True, "call_id": True, "content": {"__all__": {"parsed"}}},
        )
        if item.type in ("message", "reasoning")
        else item.model_dump(exclude_none=True, exclude={"id", "call_id", "parsed_arguments"})
        for item in response.output
    ]


def rendered(fake):
    """The text of the last prompt."""
    return fake.asked[-1][0].text


def alone(engine, messages, limit=12):
    text = engine.chat_template().render(messages, add_generation_prompt=True)
    return engine.generate(text, {"max_new_tokens": limit, "temperature": 0})


# ------------------------------------------------------------------------------- of the small model


def test_an_answer_is_what_the_engine_says_to_the_rendered_messages(client, engine):
    answer = ask(client, instructions="be short")
    plain = alone(
        engine, [{"role": "system", "content": "be short"}, {"role": "user", "content": SAID}]
    )
    assert answer.output_text == plain["text"]
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    assert answer.usage.input_tokens == plain["meta_info"]["prompt_tokens"]
    assert answer.usage.output_tokens == 12


def test_parts_of_messages_are_read(client, engine):
    messages = [
        {"role": "developer", "content": "be short"},
        {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        {"role": "user", "content": "d"},
    ]  # fmt: skip
    rendered = [("system", "be short"), ("user", "a\nb"), ("assistant", "c"), ("user", "d")]
    plain = alone(engine, [{"role": role, "content": content} for role, content in rendered])
    assert ask(client, messages).output_text == plain["text"]


def test_a_stream_has_the_items_of_its_response(client):
    events = streamed(client, max_output_tokens=200)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    last = events[-1].response
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta")
        == last.output_text
    )
    assert events[2].item.id == events[-2].item.id == last.output[0].id == events[4].item_id
    assert items_of(last) == items_of(ask(client, max_output_tokens=200))
    assert events[0].response.id == last.id


def test_a_stream_that_a_limit_cuts_is_incomplete(client):
    last = streamed(client)[-1]
    assert last.type == "response.incomplete"
    assert items_of(last.response) == items_of(ask(client))


def test_coroutines_have_the_same_answers(client, url):
    async def both():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as many:
            options: dict = dict(model="", input=SAID, temperature=0, max_output_tokens=12)
            text = ""
            async for event in await many.responses.create(**options, stream=True):
                text += event.delta if event.type == "response.output_text.delta" else ""
            return text, (await many.responses.create(**options)).output_text

    assert set(asyncio.run(both())) == {ask(client).output_text}


@pytest.mark.parametrize("format", [
    {"type": "json_schema", "name": "point", "schema": POINT, "strict": True}, {"type": "json_object"},
])  # fmt: skip
def test_a_format_holds(client, format):
    answer = ask(client, text={"format": format}, max_output_tokens=400, temperature=1)
    if answer.status == "completed":
        assert isinstance(json.loads(answer.output_text), dict)
    assert answer.output_text.lstrip().startswith("{")
    assert answer.text.format.type == format["type"]


def test_a_format_is_parsed_by_the_client(client):
    class Point(pydantic.BaseModel):
        x: bool

    answer = client.responses.parse(model="", input=SAID, text_format=Point)
    assert isinstance(answer.output_parsed.x, bool)
    with client.responses.stream(model="", input=SAID, text_format=Point) as stream:
        assert isinstance(stream.get_final_response().output_parsed.x, bool)


@pytest.mark.parametrize("choice", [
    "required", {"type": "function", "name": "weather"},
    {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
])  # fmt: skip
def test_a_call_that_is_demanded_has_valid_arguments(client, choice):
    tools = [WEATHER] if choice == "required" else [TIME, WEATHER]
    options = dict(
        tools=tools, tool_choice=choice, parallel_tool_calls=False, max_output_tokens=300
    )
    answer = ask(client, temperature=1, **options)
    (call,) = answer.output
    assert (call.type, call.name) == ("function_call", "weather")
    assert set(json.loads(call.arguments)) == {"city"}
    last = streamed(client, temperature=1, **options)[-1].response
    (call,) = last.output
    assert set(json.loads(call.arguments)) == {"city"}


def test_a_call_that_a_limit_cuts_is_incomplete(client):
    answer = ask(client, tools=[WEATHER], tool_choice="required", max_output_tokens=50)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize(
    ("syntax", "definition"), [("regex", "[0-9]{3}"), ("lark", 'start: "12" /[0-9]/')]
)
def test_the_input_of_a_custom_tool_keeps_its_grammar(client, syntax, definition):
    tool = {**DIAL, "format": {"type": "grammar", "syntax": syntax, "definition": definition}}
    options = dict(tools=[tool], tool_choice={"type": "custom", "name": "dial"})
    answer = ask(client, **options)
    (call,) = answer.output
    assert (call.type, call.name, len(call.input), call.input.isdigit()) == (
        "custom_tool_call",
        "dial",
        3,
        True,
    )
    events = streamed(client, **options)
    assert items_of(events[-1].response) == items_of(answer)
    inputs = [
        event.delta for event in events if event.type == "response.custom_tool_call_input.delta"
    ]
    assert "".join(inputs) == call.input


def test_log_probabilities_are_those_of_the_text(client):
    options: dict = dict(include=["message.output_text.logprobs"], top_logprobs=2)
    answer = ask(client, **options)
    entries = answer.output[0].content[0].logprobs
    assert (
        b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace")
        == answer.output_text
    )
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    events = streamed(client, **options)
    told = [
        entry.logprob
        for e in events
        if e.type == "response.output_text.delta"
        for entry in e.logprobs
    ]
    assert told == [entry.logprob for entry in entries]


def test_log_probabilities_of_reasoning_are_none_of_the_text():
    vocabulary = [b"<think>", b"</think>", b"a", b"b", b"\n", b"\xc3", b"\xa4", b"<end>"]
    logprobs = TextLogprobs(vocabulary)
    told = []
    for text, ids, content in (
        ("<think>ab", (0, 2, 3), ""),
        ("</think>\nb", (1, 4, 3), "b"),
        ("aä", (2, 5, 6, 7), "aä"),
    ):
        logprobs.append_text_and_tokens(text, [TokenLogprob(-0.5, id, "") for id in ids])
        told += logprobs.take_logprobs_of_part(content, last=True) if content else []
    assert [bytes(entry["bytes"]) for entry in told] == [b"b", b"a", b"\xc3", b"\xa4"]


# --------------------------------------------------------------------------------- stored responses


def test_a_conversation_continues_what_is_stored(client, engine):
    first = ask(client, instructions="be short")
    second = ask(client, "and now?", previous_response_id=first.id)
    plain = alone(engine, [
        {"role": "user", "content": SAID}, {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "and now?"},
    ])  # fmt: skip
    assert second.output_text == plain["text"]
    assert second.previous_response_id == first.id
    assert [item.role for item in client.responses.input_items.list(second.id, order="asc")] == [
        "user", "assistant", "user",
    ]  # fmt: skip


def test_a_stored_response_is_the_one_that_was_answered(client):
    answer = ask(client, metadata={"a": "b"}, tools=[WEATHER])
    assert client.responses.retrieve(answer.id).to_dict() == answer.to_dict()
    last = streamed(client)[-1].response
    assert client.responses.retrieve(last.id).to_dict() == last.to_dict()
    client.responses.delete(answer.id)
    for missing in (
        lambda: client.responses.retrieve(answer.id),
        lambda: client.responses.delete(answer.id),
    ):
        with pytest.raises(openai.NotFoundError):
            missing()
    assert answer.metadata == {"a": "b"}


def test_what_shall_not_be_stored_is_not(client):
    answer = ask(client, store=False)
    assert not answer.to_dict()["store"]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError, match="previous_response_id"):
        ask(client, previous_response_id=answer.id)


def test_input_items_come_in_pages(client):
    answer = ask(client, [{"role": "user", "content": f"{i}"} for i in range(5)])
    page = client.responses.input_items.list(answer.id, limit=2)
    assert [item.content[0].text for item in page.data] == ["4", "3"]
    assert [item.content[0].text for item in page] == ["4", "3", "2", "1", "0"]
    for options in (
        dict(limit=0),
        dict(extra_query={"order": "up"}),
        dict(after="x"),
        dict(extra_query={"a": "b"}),
    ):
        with pytest.raises(openai.BadRequestError):
            client.responses.input_items.list(answer.id, **options)


def test_items_can_be_referred_to(client, engine):
    first = ask(client)
    said = [
        {"type": "item_reference", "id": first.output[0].id},
        {"role": "user", "content": "so?"},
    ]
    plain = alone(
        engine,
        [{"role": "assistant", "content": first.output_text}, {"role": "user", "content": "so?"}],
    )
    assert ask(client, said).output_text == plain["text"]


def test_each_key_sees_its_own(engine):
    with serving(engine, api_key=("one", "two")) as url:
        one, two = (
            openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
            for key in ("one", "two")
        )
        with one, two:
            answer = ask(one)
            assert one.responses.retrieve(answer.id).id == answer.id
            for foreign in (
                lambda: two.responses.retrieve(answer.id),
                lambda: two.responses.delete(answer.id),
                lambda: two.responses.cancel(answer.id),
                lambda: two.responses.input_items.list(answer.id),
                lambda: ask(two, previous_response_id=answer.id),
                lambda: ask(two, [{"type": "item_reference", "id": answer.output[0].id}]),
            ):
                with pytest.raises(openai.NotFoundError):
                    foreign()


def test_the_store_keeps_the_last_ones(engine):
    with (
        serving(engine, max_stored_responses=2) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client,
    ):
        first, second = ask(client), ask(client)
        client.responses.retrieve(first.id)
        third = ask(client)
        assert [client.responses.retrieve(each.id).id for each in (first, third)] == [
            first.id,
            third.id,
        ]
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(second.id)


def test_the_store_keeps_no_more_bytes_than_it_may(engine):
    with (
        serving(engine, max_stored_mb=0.01) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client,
    ):
        answers = [ask(client, "a b c " * 200) for _ in range(8)]

        def is_stored(answer):
            try:
                return client.responses.retrieve(answer.id).id == answer.id
            except openai.NotFoundError:
                return False

        stored = [is_stored(answer) for answer in answers]
        assert stored == sorted(stored)  # the last ones
        assert 1 < sum(stored) < 8


def test_a_conversation_has_the_size_of_its_items_not_of_its_streams(engine):
    """Of eight turns some hundred bytes each are said; the events of each take thousands."""
    with (
        serving(engine, max_stored_mb=0.03) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client,
    ):
        last: str | None = None
        for _ in range(8):
            events = list(ask(client, stream=True, previous_response_id=last, max_output_tokens=40))
            last = events[0].response.id
        assert last is not None
        assert client.responses.retrieve(last).id == last


def test_a_conversation_that_is_too_large_for_the_store_is_refused(engine):
    with (
        serving(engine, max_stored_mb=0.001) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client,
    ):
        said = "a b c " * 200
        with pytest.raises(openai.APIStatusError, match="store: false") as raised:
            ask(client, said)
        assert raised.value.status_code == 413
        assert ask(client, said, store=False).output_text


# ------------------------------------------------------------------------------ of scripted answers


@pytest.mark.parametrize("whole", [False, True])
def test_reasoning_text_and_calls_are_items(scripted, whole):
    said = f"<think>\nhm, so\n</think>\n\nLook:{CALL}\n{DIALS}"
    client, _ = scripted(*([said] if whole else said), template=THINKS)
    options: dict = dict(tools=[WEATHER, DIAL])
    answer = ask(client, **options)
    events = streamed(client, **options)
    last = events[-1].response
    assert items_of(last) == items_of(answer)
    thought, message, call, dial = answer.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "hm, so\n")
    assert message.content[0].text == "Look:"
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "weather",
        {"city": "Rom"},
    )
    assert (dial.type, dial.name, dial.input) == ("custom_tool_call", "dial", "123")
    assert answer.status == "completed"
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [(item.id, item.type) for item in done] == [(item.id, item.type) for item in last.output]
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    assert added == [item.id for item in last.output]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (
        "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "hm, so\n"
    )
    arguments = next(
        e for e in events if e.type == "response.function_call_arguments.done"
    ).arguments
    assert arguments == call.arguments
    assert answer.usage.output_tokens_details.reasoning_tokens == len("hm, so\n")
    assert (answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens) == (9, 4)


def test_an_answer_can_be_sent_back_as_it_came(scripted):
    client, fake = scripted(*f"<think>hm</think>Look:{CALL}\n{DIALS}", template=THINKS)
    answer = ask(client, tools=[WEATHER, DIAL])
    calls = [item.call_id for item in answer.output[2:]]
    outputs = [
        {"type": "function_call_output", "call_id": calls[0], "output": "warm"},
        {
            "type": "custom_tool_call_output",
            "call_id": calls[1],
            "output": [{"type": "input_text", "text": "rings"}],
        },
        {"role": "user", "content": "so?"},
    ]
    expected = (
        '<user>a quick brown fox</user><assistant>(hm)Look:<tool_call>{"name": "weather", "arguments": {"city": "Rom"}}'
        '</tool_call><tool_call>{"name": "dial", "arguments": {"input": "123"}}</tool_call></assistant>'
        "<tool>warm</tool><tool>rings</tool><user>so?</user>effort="
    )
    user = {"role": "user", "content": SAID}
    for history in (
        answer.output,
        [item.model_dump() for item in answer.output],
        [i.to_dict() for i in answer.output],
    ):
        ask(client, [user, *history, *outputs])
        assert rendered(fake) == expected
    ask(client, outputs, previous_response_id=answer.id)
    assert rendered(fake) == expected


def test_effort_is_a_variable_of_the_template(scripted):
    client, fake = scripted("yes", template=THINKS)
    raw = client.responses.with_raw_response.create(
        model="",
        input=SAID,
        reasoning={"effort": "low", "summary": "auto"},
        include=["reasoning.encrypted_content"],
    )
    assert rendered(fake).endswith("effort=low")
    assert raw.headers["x-unused-fields"] == "reasoning.summary"


def test_hosted_tools_are_never_called_and_named(scripted):
    client, fake = scripted("yes", template=THINKS)
    tools = [WEATHER, SEARCH, {"type": "mcp", "server_label": "a", "server_url": "http://x"}]
    raw = client.responses.with_raw_response.create(model="", input=SAID, tools=tools)
    assert raw.headers["x-unused-fields"] == "tools[1] web_search, tools[2] mcp"
    assert "[weather]effort" in rendered(fake)
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "time"}, SEARCH],
    }
    ask(client, tools=[*tools, TIME], tool_choice=allowed)
    assert "[weather][time]effort" in rendered(fake)


def test_a_response_that_runs_can_be_cancelled(scripted):
    client, _ = scripted("a", "b", endless=True)
    stream = client.responses.create(model="", input=SAID, stream=True)
    begun = next(iter(stream)).response
    assert client.responses.retrieve(begun.id).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        ask(client, previous_response_id=begun.id)
    assert client.responses.cancel(begun.id).status == "cancelled"
    last = list(stream)[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    assert client.responses.retrieve(begun.id).to_dict() == last.response.to_dict()
    assert client.responses.cancel(begun.id).status == "cancelled"


def test_a_response_that_has_ended_can_not_be_cancelled(client):
    answer = ask(client)
    with pytest.raises(openai.BadRequestError, match="incomplete"):
        client.responses.cancel(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_1")


def test_a_client_that_leaves_cancels_its_response(scripted):
    client, fake = scripted("a", "b", endless=True)
    stream = client.responses.create(model="", input=SAID, stream=True)
    begun = next(iter(stream)).response
    stream.close()
    while client.responses.retrieve(begun.id).status == "in_progress":
        pass
    assert client.responses.retrieve(begun.id).status == "cancelled"
    assert fake.submitted[-1].aborted


def test_an_error_in_the_middle_is_a_failed_response(scripted):
    client, _ = scripted("a", "b", BackendError("the fuse blew."))
    last = list(client.responses.create(model="", input=SAID, stream=True))[-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert "fuse" in last.response.error.message
    assert last.response.output_text == "ab"
    assert client.responses.retrieve(last.response.id).status == "failed"
    with pytest.raises(openai.InternalServerError, match="fuse"):
        ask(client)


def test_a_stream_can_be_read_again_from_any_event_on(client):
    events = list(client.responses.create(model="", input=SAID, max_output_tokens=8, stream=True))
    id = events[0].response.id
    assert list(client.responses.retrieve(id, stream=True)) == events
    for after in (0, 3, len(events) - 2, len(events) - 1):
        assert (
            list(client.responses.retrieve(id, stream=True, starting_after=after))
            == events[after + 1 :]
        )
    assert client.responses.retrieve(id).to_dict() == events[-1].response.to_dict()


def test_a_stream_that_runs_can_be_followed_to_its_end(scripted):
    client, _ = scripted("a", "b", endless=True)
    stream = client.responses.create(model="", input=SAID, stream=True)
    begun = next(iter(stream)).response
    followed = iter(client.responses.retrieve(begun.id, stream=True))
    other = iter(client.responses.retrieve(begun.id, stream=True, starting_after=1))
    assert [next(followed).sequence_number for _ in range(6)] == list(range(6))
    client.responses.cancel(begun.id)
    last = list(stream)[-1]
    assert list(followed)[-1] == list(other)[-1] == last


def test_who_follows_a_stream_hears_that_its_client_has_left(scripted):
    client, _ = scripted("a", "b", endless=True)
    stream = client.responses.create(model="", input=SAID, stream=True)
    begun = next(iter(stream)).response
    followed = iter(client.responses.retrieve(begun.id, stream=True))
    next(followed)
    stream.close()
    last = list(followed)[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    assert last.response.output[0].status == "incomplete"


@pytest.mark.parametrize(("query", "message"), [
    ("stream=true", "stream: the response was not streamed"),
    ("stream=yes", "stream: 'yes' is neither true nor false"),
    ("starting_after=1", "starting_after: needs a stream"),
    ("stream=true&starting=1", "starting: is not a parameter"),
])  # fmt: skip
def test_what_can_not_be_streamed_again_is_refused(client, query, message):
    id = ask(client).id
    with pytest.raises(openai.BadRequestError, match=message):
        client.get(f"/responses/{id}?{query}", cast_to=object)


@pytest.mark.parametrize(
    ("after", "message"), [("-1", "not the number of an event"), ("999", "there is no event 999")]
)
def test_an_event_that_is_not_there_is_refused(client, after, message):
    id = next(
        iter(client.responses.create(model="", input=SAID, max_output_tokens=4, stream=True))
    ).response.id
    with pytest.raises(openai.BadRequestError, match=message):
        client.get(f"/responses/{id}?stream=true&starting_after={after}", cast_to=object)


def test_events_count_for_the_room_of_the_store(engine):
    with (
        serving(engine, max_stored_mb=0.02) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client,
    ):
        plain = [ask(client) for _ in range(4)]
        assert client.responses.retrieve(plain[0].id)
        for _ in range(4):
            list(client.responses.create(model="", input=SAID, max_output_tokens=12, stream=True))
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(plain[0].id)


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(("options", "parameter"), [
    ({"extra_body": {"max_tokens": 1}}, "max_tokens"),
    ({"max_output_tokens": -1}, "max_output_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"said": []}, "input"),
    ({"said": [{"role": "user"}]}, "input[0].content"),
    ({"said": [{"role": "cook", "content": "a"}]}, "input[0].role"),
    ({"said": [{"role": "user", "content": "a"}, {"type": "function_call", "name": "a", "arguments": "{}"}]},
     "input[1].call_id"),
    ({"said": [{"type": "function_call", "call_id": "a", "name": "a", "arguments": "{"}]}, "input[0].arguments"),
    ({"said": [{"role": "user", "content": [{"type": "input_text", "text": "a", "txt": 1}]}]}, "input[0].content[0]"),
    ({"said": [{"role": "user", "content": "a", "type": {}}]}, "input[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "functoin", "name": "a"}]}, "tools[0].type"),
    ({"tool_choice": {"type": "functoin"}}, "tool_choice"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1]"),
    ({"tools": [{**WEATHER, "type": "namespace"}]}, "tools[0].type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [SEARCH], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [SEARCH], "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "no"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "custom", "name": "weather"}}, "tool_choice"),
    ({"tools": [WEATHER, SEARCH], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [SEARCH]}},
     "tool_choice.tools"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"include": ["everything"]}, "include[0]"),
    ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"metadata": {"a": 1}}, "metadata[...]"),
])  # fmt: skip
def test_a_bad_field_is_named(client, options, parameter):
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, **options)
    assert raised.value.body["param"] == parameter, raised.value.body


@pytest.mark.parametrize(("said", "place"), [
    ([{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y.png"}]}], "input[0].content[0]"),
    ([{"type": "web_search_call", "id": "a", "status": "completed"}], "input[0]"),
])  # fmt: skip
def test_what_the_model_can_not_see_is_refused(client, said, place):
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, said)
    assert place in raised.value.body["message"]


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(client):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=r"[0-9,]{4,} tokens long; .* takes 2,048"):
            ask(client, "a b c " * 3000, stream=stream)
