"""A tool that a request names is called exactly once, in all protocols."""

import httpx2
import pytest

from sglang_lite.constraints.matching import matches
from tests.server.conftest import serving
from tests.server.scripted import Scripted

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "Weather of a city", "parameters": SCHEMA}
MESSAGES = [{"role": "user", "content": "a quick brown fox"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'
REQUESTS: dict = {
    "/v1/chat/completions": (
        {"messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}]},
        {"type": "function", "function": {"name": "weather"}},
        "required",
    ),
    "/v1/responses": (
        {"input": "a quick brown fox", "tools": [{"type": "function", **FUNCTION}]},
        {"type": "function", "name": "weather"},
        "required",
    ),
    "/v1/messages": (
        {
            "messages": MESSAGES,
            "max_tokens": 50,
            "tools": [
                {"name": "weather", "description": "Weather of a city", "input_schema": SCHEMA}
            ],
        },
        {"type": "tool", "name": "weather"},
        {"type": "any"},
    ),
}


@pytest.mark.parametrize("route", REQUESTS)
def test_a_named_tool_is_called_once_a_required_one_once_or_more(engine, route):
    body, named, required = REQUESTS[route]
    fake = Scripted(engine, [CALL])
    with serving(fake) as url, httpx2.Client(base_url=url) as client:
        for choice, counts in ((named, [False, True, False]), (required, [False, True, True])):
            client.post(
                route, json={"model": engine.model_name, **body, "tool_choice": choice}
            ).raise_for_status()
            constraint = fake.asked[-1][2]
            assert [matches(constraint, "\n".join([CALL] * count)) for count in range(3)] == counts
