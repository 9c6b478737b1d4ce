"""Requests as widespread packages send them at their defaults: all are served, and nothing in them
is unused.
"""

import httpx2
import pytest

from tests.server.conftest import TEMPLATE, serving
from tests.server.scripted import Scripted

USER = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "title": "User",
}
CLOSED = {**USER, "additionalProperties": False}
FUNCTION = {"name": "User", "description": "A user", "parameters": USER}
CALLED = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "User", "arguments": '{"name": "Ada"}'},
}
TURNS = [{"role": "system", "content": "be short"}, {"role": "user", "content": "who?"}]
FLAT = {
    "type": "function",
    "name": "User",
    "description": "A user",
    "parameters": CLOSED,
    "strict": True,
}
INPUT = {"name": "User", "description": "A user", "input_schema": USER}
EPHEMERAL = {"type": "ephemeral"}

CHAT = {
    "langchain": {
        "model": "", "stream": True, "stream_options": {"include_usage": True},
        "messages": [
            {"content": "be short", "role": "system"}, {"content": "who?", "role": "user"},
            {"content": None, "role": "assistant", "tool_calls": [CALLED]},
            {"content": "ok", "role": "tool", "tool_call_id": "call_1"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
    },
    "langchain, structured": {
        "model": "", "messages": TURNS, "stream": False,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "User", "description": "A user", "schema": CLOSED, "strict": True},
        },
    },
    "pydantic-ai": {
        "model": "", "stream": False, "tool_choice": "required",
        "messages": [
            *TURNS, {"role": "assistant", "content": "", "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "call_1", "content": "ok"},
            {"role": "user", "content": [{"text": "and?", "type": "text"}]},
        ],
        "tools": [{"type": "function", "function": {**FUNCTION, "parameters": CLOSED, "strict": True}}],
    },
    "instructor": {
        "model": "", "messages": TURNS, "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "User"}},
    },
    "instructor, json": {"model": "", "messages": TURNS, "response_format": {"type": "json_object"}},
    "openai-agents": {
        "model": "", "stream": False, "messages": TURNS, "tools": [{"type": "function", "function": FUNCTION}],
    },
    "litellm": {
        "model": "", "temperature": 0.2, "max_tokens": 4, "user": "u", "messages": [
            *TURNS, {"role": "assistant", "content": "me", "function_call": None, "tool_calls": None},
            {"role": "user", "content": "you?"},
        ],
    },
    "dspy": {"model": "", "temperature": 0.0, "max_tokens": 1000, "messages": TURNS},
    "a gateway of SGLang's": {
        "model": "", "messages": TURNS, "max_completion_tokens": 4, "separate_reasoning": True,
        "stream_reasoning": True, "log_metrics": True, "no_logs": False, "return_hidden_states": False,
    },
}  # fmt: skip
RESPONSES = {
    "langchain": {
        "model": "", "stream": True, "include": ["reasoning.encrypted_content"], "store": False,
        "input": [{"content": "be short", "role": "system", "type": "message"}, {"role": "user", "content": "who?"}],
        "tools": [FLAT],
    },
    "pydantic-ai": {
        "model": "", "stream": False, "tool_choice": "auto", "tools": [FLAT], "instructions": "be short",
        "include": ["reasoning.encrypted_content"],
        "input": [
            {"role": "user", "content": "who?"},
            {"type": "function_call", "call_id": "call_1", "name": "User", "arguments": '{"name": "Ada"}', "id": "fc_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": "ok"},
        ],
    },
    "openai-agents": {
        "model": "", "include": [], "instructions": "be short", "stream": False, "tools": [FLAT],
        "text": {"format": {"type": "json_schema", "name": "final_output", "schema": CLOSED, "strict": True}},
        "input": [
            {"content": "who?", "role": "user"},
            {"id": "rs_1", "summary": [], "type": "reasoning", "content": [{"text": "hm", "type": "reasoning_text"}]},
            {"id": "msg_1", "role": "assistant", "status": "completed", "type": "message", "content": [
                {"annotations": [], "text": "me", "type": "output_text", "logprobs": []}]},
            {"arguments": '{"name": "Ada"}', "call_id": "call_1", "name": "User", "type": "function_call", "id": "fc_1",
             "status": "completed"},
            {"call_id": "call_1", "output": "ok", "type": "function_call_output"},
        ],
    },
    "litellm": {"model": "", "input": "who?", "stream": False, "metadata": {"a": "b"}, "user": "u"},
}  # fmt: skip
MESSAGES = {
    "langchain": {
        "model": "", "max_tokens": 1024, "messages": [
            {"role": "user", "content": "who?"},
            {"role": "assistant", "content": [
                {"type": "text", "text": "look"}, {"type": "tool_use", "name": "User", "input": {}, "id": "toolu_1"}]},
            {"role": "user", "content": [
                {"type": "tool_result", "content": "ok", "tool_use_id": "toolu_1", "is_error": False}]},
        ],
        "system": "be short", "tools": [INPUT], "stream": True,
    },
    "pydantic-ai": {
        "model": "", "max_tokens": 4096, "stream": False, "system": "be short", "tools": [INPUT],
        "tool_choice": {"type": "any"}, "messages": [{"role": "user", "content": [{"text": "who?", "type": "text"}]}],
    },
    "instructor": {
        "model": "", "max_tokens": 1024, "messages": [{"role": "user", "content": "who?"}],
        "system": [{"type": "text", "text": "be short"}], "tools": [INPUT],
        "tool_choice": {"type": "tool", "name": "User", "disable_parallel_tool_use": True},
    },
    "litellm": {
        "model": "", "max_tokens": 4096, "temperature": 0.5, "metadata": {"user_id": "u"},
        "system": [{"type": "text", "text": "be short"}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "who?", "cache_control": EPHEMERAL}]}],
        "tools": [{**INPUT, "type": "custom", "cache_control": EPHEMERAL}],
    },
    "an agent in a terminal": {
        "model": "", "max_tokens": 32000, "stream": True, "metadata": {"user_id": "u"}, "thinking": {"type": "adaptive"},
        "output_config": {"effort": "medium"}, "temperature": 1,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "system": [{"type": "text", "text": "be short", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "who?", "cache_control": EPHEMERAL}]}],
        "tools": [{**INPUT, "eager_input_streaming": True}],
    },
}  # fmt: skip
BODIES = [
    pytest.param(path, body, id=f"{path} {name}")
    for path, bodies in (
        ("chat/completions", CHAT),
        ("responses", RESPONSES),
        ("messages", MESSAGES),
    )
    for name, body in bodies.items()
]


@pytest.fixture(scope="module")
def http(engine):
    template = TEMPLATE + "{% if enable_thinking %}{{ reasoning_effort }}{% endif %}"
    with (
        serving(Scripted(engine, ["yes"], template=template)) as url,
        httpx2.Client(base_url=f"{url}/v1/", timeout=60) as client,
    ):
        yield client


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_body_is_served(http, path, body):
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert "x-unused-fields" not in response.headers
    assert "yes" in response.text
    assert '"error":{' not in response.text
