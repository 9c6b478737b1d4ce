"""Limits of thoughts in the fields of all protocols, down to a model that never stops thinking."""

import httpx2
import pytest

from sglang_lite import Engine
from tests.runtime.thinkers import thinker
from tests.server.conftest import serving

SENTENCE = "abcdefghij."
USER = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "boolean"}},
    "required": ["n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def client():
    with (
        Engine.of(thinker(SENTENCE)) as engine,
        serving(engine) as url,
        httpx2.Client(base_url=url) as client,
    ):
        yield client


def post(client, route, **body):
    found = client.post(route, json={"temperature": 0, **body})
    assert found.status_code == 200, found.text
    return found.json(), found.headers.get("x-unused-fields")


@pytest.mark.parametrize("field", [
    {"thinking_token_budget": 15}, {"max_think_tokens": 15}, {"reasoning_effort": "minimal"},
])  # fmt: skip
@pytest.mark.parametrize(
    "more", [{}, {"response_format": FORMAT}, {"tools": [TOOL]}], ids=["text", "schema", "tools"]
)
def test_chats_end_thoughts(client, field, more):
    found, unused = post(
        client, "/v1/chat/completions", messages=USER, max_tokens=150, **field, **more
    )
    message = found["choices"][0]["message"]
    assert message["reasoning_content"].strip() == 2 * SENTENCE
    assert message["content"] or message.get("tool_calls")
    assert unused is None


def test_a_chat_with_a_schema_has_room_without_a_field(client):
    found, _ = post(
        client, "/v1/chat/completions", messages=USER, max_tokens=100, response_format=FORMAT
    )
    assert found["choices"][0]["message"]["content"].strip() in ('{"n": true}', '{"n": false}')


def test_messages_and_responses_and_generate_end_thoughts(client):
    found, unused = post(
        client,
        "/v1/messages",
        messages=USER,
        max_tokens=150,
        thinking={"type": "enabled", "budget_tokens": 15},
    )
    assert [block["type"] for block in found["content"]] == ["thinking", "text"]
    assert found["content"][0]["thinking"].strip() == 2 * SENTENCE
    assert unused == "thinking.type"  # which the template does not read
    found, unused = post(
        client, "/v1/responses", input="hi", max_output_tokens=150, reasoning={"effort": "minimal"}
    )
    assert found["output"][0]["content"][0]["text"].strip() == 2 * SENTENCE
    assert unused is None
    sampling = {"temperature": 0, "max_new_tokens": 150, "max_think_tokens": 15}
    found = client.post("/generate", json={"text": "x", "sampling_params": sampling}).json()
    assert found["text"] == f"<think>{2 * SENTENCE}\n</think>\n\nABC"
    assert found["meta_info"]["thinking"]["ended_by"] == "limit"
    refused = client.post(
        "/generate", json={"text": "x", "sampling_params": {**sampling, "regex": "a"}}
    )
    assert refused.status_code == 400
    assert "max_think_tokens" in refused.text
