"""Calls that a model writes as JSON in a code fence, in all protocols, whole and streamed."""

import json

import httpx2
import pytest

from tests.server.conftest import serving
from tests.server.scripted import Scripted

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "Weather of a city", "parameters": SCHEMA}
MESSAGES = [{"role": "user", "content": "a quick brown fox"}]
CALL = '{\n  "name": "weather",\n  "arguments": {"city": "Rom"}\n}'
SAID = f"Let me see:\n```json\n{CALL}\n```\nand\n```json\n{CALL.replace('Rom', 'Bari')}\n```"
CALLS = [("weather", {"city": "Rom"}), ("weather", {"city": "Bari"})]
TEXT = "Let me see:\n\nand\n"
CHAT = {"messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}]}
BODIES: dict = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": {
        "input": "a quick brown fox",
        "tools": [{"type": "function", "strict": False, **FUNCTION}],
    },
    "/v1/messages": {
        "messages": MESSAGES,
        "max_tokens": 50,
        "tools": [{"name": "weather", "description": "Weather of a city", "input_schema": SCHEMA}],
    },
    "/api/chat": CHAT,
}


def events_of(answer):
    """The events of a stream, of SSE or of lines."""
    for line in answer.text.splitlines():
        line = line.removeprefix("data:").strip()
        if line.startswith("{"):
            yield json.loads(line)


def read_whole(route, found):
    """Text, calls and finish reason of an answer."""
    if route == "/v1/chat/completions":
        message, reason = found["choices"][0]["message"], found["choices"][0]["finish_reason"]
        calls = [each["function"] for each in message.get("tool_calls") or ()]
        return (
            message["content"] or "",
            [(each["name"], json.loads(each["arguments"])) for each in calls],
            reason,
        )
    if route == "/api/chat":
        calls = [each["function"] for each in found["message"].get("tool_calls") or ()]
        return (
            found["message"]["content"],
            [(each["name"], each["arguments"]) for each in calls],
            found["done_reason"],
        )
    if route == "/v1/messages":
        text = "".join(each["text"] for each in found["content"] if each["type"] == "text")
        calls = [each for each in found["content"] if each["type"] == "tool_use"]
        return text, [(each["name"], each["input"]) for each in calls], found["stop_reason"]
    text = "".join(
        part["text"]
        for each in found["output"]
        if each["type"] == "message"
        for part in each["content"]
    )
    calls = [each for each in found["output"] if each["type"] == "function_call"]
    return text, [(each["name"], json.loads(each["arguments"])) for each in calls], found["status"]


def read_stream(route, events):
    """The same of a stream, from its deltas alone."""
    text, calls, reason = "", [], None
    for event in events:
        if route == "/v1/chat/completions":
            for choice in event["choices"]:
                delta, reason = choice["delta"], choice["finish_reason"] or reason
                text += delta.get("content") or ""
                for each in delta.get("tool_calls") or ():
                    if each["function"].get("name"):
                        calls.append([each["function"]["name"], ""])
                    calls[each["index"]][1] += each["function"].get("arguments") or ""
        elif route == "/api/chat":
            text, reason = text + event["message"]["content"], event.get("done_reason") or reason
            for each in event["message"].get("tool_calls") or ():
                calls.append([each["function"]["name"], json.dumps(each["function"]["arguments"])])
        elif route == "/v1/messages":
            reason = event.get("delta", {}).get("stop_reason") or reason
            if event.get("content_block", {}).get("type") == "tool_use":
                calls.append([event["content_block"]["name"], ""])
            text += event.get("delta", {}).get("text") or ""
            if "partial_json" in event.get("delta", {}):
                calls[-1][1] += event["delta"]["partial_json"]
        elif event["type"] == "response.output_text.delta":
            text += event["delta"]
        elif (
            event["type"] == "response.output_item.added"
            and event["item"]["type"] == "function_call"
        ):
            calls.append([event["item"]["name"], ""])
        elif event["type"] == "response.function_call_arguments.delta":
            calls[-1][1] += event["delta"]
        elif event["type"] in ("response.completed", "response.incomplete"):
            reason = event["response"]["status"]
    return text, [(name, json.loads(arguments)) for name, arguments in calls], reason


def ask(engine, route, said, **options):
    """What an answer has, whole, and in a stream of characters."""
    more = options.pop("more", {})
    body = {"model": engine.model_name, **BODIES[route], **more}
    with (
        serving(Scripted(engine, list(said), **options)) as url,
        httpx2.Client(base_url=url) as client,
    ):
        whole = client.post(route, json={**body, "stream": False}).raise_for_status().json()
        streamed = client.post(route, json={**body, "stream": True}).raise_for_status()
    return read_whole(route, whole), read_stream(route, events_of(streamed))


@pytest.mark.parametrize("route", BODIES)
def test_a_fence_with_a_call_is_one_whole_and_in_pieces(engine, route):
    whole, streamed = ask(engine, route, SAID)
    assert whole[:2] == (TEXT, CALLS)
    assert streamed == whole
    assert whole[2] in ("tool_calls", "tool_use", "completed", "stop")


ANSWER = '```json\n{\n  "name": "Alice",\n  "age": 30\n}\n```'


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("said", [ANSWER, SAID.replace("weather", "add"), f"Use {CALL}"])
def test_other_json_stays_text(engine, route, said):
    whole, streamed = ask(engine, route, said)
    assert whole[:2] == (said, [])
    assert streamed == whole


@pytest.mark.parametrize("route", BODIES)
def test_a_call_that_a_limit_cuts_is_marked_as_any_other(engine, route):
    fenced = "Let me see:\n```json\n" + CALL
    marked = (
        'Let me see:\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'
    )
    for cut in ('"Ro', '"Rom"}'):
        ends = [said[: said.index(cut) + len(cut)] for said in (fenced, marked)]
        with (
            serving(Scripted(engine, [ends[0]], finish="length")) as url,
            httpx2.Client(base_url=url) as client,
        ):
            bare = client.post(
                route, json={"model": engine.model_name, **BODIES[route], "stream": False}
            ).json()
        with (
            serving(Scripted(engine, [ends[1]], finish="length")) as url,
            httpx2.Client(base_url=url) as client,
        ):
            other = client.post(
                route, json={"model": engine.model_name, **BODIES[route], "stream": False}
            ).json()
        assert without_ids(bare) == without_ids(other)
        assert '"shortened": [""]' in json.dumps(bare)


def without_ids(found):
    """An answer without what differs from request to request."""
    if isinstance(found, dict):
        drawn = ("id", "call_id", "created", "created_at", "completed_at", "usage", "metrics")
        return {
            key: without_ids(value)
            for key, value in found.items()
            if key not in drawn and not key.endswith(("duration", "_at"))
        }
    return [*map(without_ids, found)] if isinstance(found, list) else found


def test_an_answer_with_a_format_of_its_own_stays_one(engine):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "arguments": {"type": "object"}},
    }
    more = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    }
    whole, streamed = ask(engine, "/v1/chat/completions", CALL, more=more)
    assert whole[:2] == streamed[:2] == (CALL, [])


def test_where_calls_are_not_parallel_the_first_one_counts(engine):
    whole, streamed = ask(engine, "/v1/chat/completions", SAID, more={"parallel_tool_calls": False})
    assert whole[1] == streamed[1] == CALLS[:1]


def test_text_can_be_read_for_calls_without_a_model(http):
    tools = [
        {"type": "function", "function": {**FUNCTION, "name": name}} for name in ("add", "weather")
    ]
    for given, count in ((tools, 2), (tools[:1], 0)):
        asked = {"text": SAID, "tools": given, "tool_call_parser": "qwen25"}
        found = http.post("/parse_function_call", json=asked).json()
        assert len(found["calls"]) == count
        assert found["normal_text"] == (TEXT if count else SAID)
        assert all(call["tool_index"] == 1 for call in found["calls"])
