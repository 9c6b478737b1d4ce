"""Objects of a client's schema have the members that it lists, whatever the route.

The model is random: an object that could have others would get some."""

import json
from typing import Any

import pytest

import sglang_lite as sgl
from sglang_lite.server.parameters.constraints import response_format

SCHEMA = {"type": "object", "properties": {"a": {"const": 1}, "b": {"enum": ["x"]}}}
LISTED = [{}, {"a": 1}, {"b": "x"}, {"a": 1, "b": "x"}]
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
LENIENT = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": SCHEMA, "strict": False},
}
TOOL = {
    "type": "function",
    "function": {"name": "act", "description": "Acts.", "parameters": SCHEMA},
}
MESSAGES = [{"role": "user", "content": "a"}]


def text_and_end(answer):
    """Text of a chat's or a completion's answer, and what ended it."""
    choice = answer["choices"][0]
    if "message" not in choice:
        return choice["text"], choice["finish_reason"]
    calls = choice["message"].get("tool_calls")
    return calls[0]["function"]["arguments"] if calls else choice["message"]["content"], choice[
        "finish_reason"
    ]


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DOORS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "chat": (CHAT, {"messages": MESSAGES, "response_format": FORM}, text_and_end),
    "not strict": (CHAT, {"messages": MESSAGES, "response_format": LENIENT}, text_and_end),
    "structured outputs": (
        CHAT,
        {"messages": MESSAGES, "structured_outputs": {"json": SCHEMA}},
        text_and_end,
    ),
    "tool": (
        CHAT,
        {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"},
        text_and_end,
    ),
    "completions": (COMPLETIONS, {"prompt": "a", "response_format": FORM}, text_and_end),
    "SGLang's completions": (
        COMPLETIONS,
        {"prompt": "a", "json_schema": json.dumps(SCHEMA)},
        text_and_end,
    ),
    "messages": (
        "/v1/messages",
        {
            "messages": MESSAGES,
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
        lambda answer: (answer["content"][0]["text"], answer["stop_reason"]),
    ),
    "Ollama": (
        "/api/chat",
        {"messages": MESSAGES, "format": SCHEMA, "stream": False, "options": {"num_predict": 140}},
        lambda answer: (answer["message"]["content"], answer["done_reason"]),
    ),
}


@pytest.mark.parametrize("door", DOORS)
def test_objects_have_the_members_that_are_listed(http, engine, door):
    path, body, read = DOORS[door]
    limits: dict[str, Any] = {} if path == "/api/chat" else {"temperature": 1.0, "max_tokens": 140}
    for _ in range(6):
        response = http.post(path, json={"model": engine.model_name, **limits, **body})
        assert response.status_code == 200, response.text
        text, end = read(response.json())
        assert json.loads(text) in LISTED
        assert end not in ("length", "max_tokens")  # which another member's name would reach


@pytest.mark.parametrize(
    "members",
    [
        {"additionalProperties": True},
        {"additionalProperties": {"type": "integer"}},
        {"required": ["c"]},
        {"dependentRequired": {"a": ["c"]}},
        {"minProperties": 3},
        {"allOf": [{"properties": {"c": {"type": "integer"}}, "required": ["c"]}]},
    ],
    ids=json.dumps,
)
def test_objects_that_need_or_name_others_have_them(members):
    constraint = response_format(
        {"type": "json_schema", "json_schema": {"schema": {**SCHEMA, **members}}}
    )
    assert sgl.grammar.matches(constraint, json.dumps({"a": 1, "b": "x", "c": 2}))


def test_a_schema_that_refers_to_nothing_is_refused_as_before(http):
    schema = {**SCHEMA, "properties": {"a": {"$ref": "#/$defs/none"}}}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    response = http.post(CHAT, json={"messages": MESSAGES, "response_format": form})
    assert response.status_code == 400
    assert "#/$defs/none" in response.json()["error"]["message"]
