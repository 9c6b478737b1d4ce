"""Counts of a soak's clients: which differences from a server's `/metrics` are found."""

import asyncio
import json
import sys
from pathlib import Path

import httpx2
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from client_counts import ClientCounts, ServerCounts, differences

READER, LEAVER = "reader", "leaver"
CHAT = "/v1/chat/completions"


def metrics(*lines):
    """Counts in a text of `/metrics` with samples of the two counters."""
    return ServerCounts("".join(f"sglang_lite_{line}\n" for line in lines))


def response(count, status=200, route=CHAT, key=None, method="POST"):
    key = ClientCounts(READER, is_exact=True).hash if key is None else key
    return f'http_responses_total{{key="{key}",method="{method}",route="{route}",status="{status}"}} {count}'


def tokens(kind, count):
    return f'tokens_total{{key="{ClientCounts(READER, is_exact=True).hash}",kind="{kind}"}} {count}'


def asked(counts, path, answer="{}", status=200, method="POST"):
    """A client's request, and its answer."""

    async def ask():
        transport = httpx2.MockTransport(lambda _: httpx2.Response(status, text=answer))
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://a", event_hooks=counts.hooks()
        ) as http:
            counts.answered((await http.request(method, path)).content)

    asyncio.run(ask())


CHAT_ANSWER = json.dumps({"usage": {"prompt_tokens": 3, "completion_tokens": 5}})


@pytest.mark.parametrize(
    ("server", "told"),
    [
        ((response(2), tokens("prompt", 6), tokens("completion", 10)), []),
        ((response(1), tokens("prompt", 6), tokens("completion", 10)), ["clients 2, server 1"]),
        ((response(3), tokens("prompt", 6), tokens("completion", 10)), ["has counted 1 responses more, but 0 clients left"]),
        ((response(2), tokens("prompt", 6), tokens("completion", 11)), ["completion tokens of key", "clients 10, server 11"]),
        ((response(2), tokens("prompt", 5), tokens("completion", 10)), ["prompt tokens of key", "clients 6, server 5"]),
        ((response(1), response(1, 400), tokens("prompt", 6), tokens("completion", 10)), ["status 200", "responses more"]),
    ],
)  # fmt: skip
def test_each_difference_is_named(server, told):
    counts = ClientCounts(READER, is_exact=True)
    asked(counts, CHAT, CHAT_ANSWER)
    asked(counts, CHAT, CHAT_ANSWER)
    found = "\n".join(differences(metrics(*server), [counts]))
    assert all(each in found for each in told)
    assert bool(found) == bool(told)


def test_those_who_left_may_have_been_answered():
    counts = ClientCounts(LEAVER, is_exact=False)
    counts.sent("POST", "/generate")
    for server in (
        (),
        (response(1, 499, "/generate", counts.hash),),
        (response(1, 200, "/generate", counts.hash),),
    ):
        assert differences(metrics(*server), [counts]) == []
    (line,) = differences(metrics(response(2, 499, "/generate", counts.hash)), [counts])
    assert "2 responses more, but 1 clients left" in line


@pytest.mark.parametrize(
    ("method", "path", "route", "key"),
    [
        ("POST", "/v1/nothing", "other", ""),
        ("PATCH", "/generate", "other", ""),
        ("GET", "/health", "/health", ""),
        ("GET", "/v1/responses/resp_7", "/v1/responses/{id}", None),
        ("GET", "/v1/responses/resp_7/input_items", "/v1/responses/{id}/input_items", None),
        ("GET", "/v1/models/a/b", "/v1/models/{model:path}", None),
    ],
)
def test_paths_have_the_servers_names(method, path, route, key):
    counts = ClientCounts(READER, is_exact=True)
    asked(counts, path, method=method)
    assert differences(metrics(response(1, 200, route, key, method)), [counts]) == []


@pytest.mark.parametrize(
    "answer",
    [
        CHAT_ANSWER,
        json.dumps([{"meta_info": {"prompt_tokens": 1, "completion_tokens": 2}},
                    {"meta_info": {"prompt_tokens": 2, "completion_tokens": 3}}]),
        f'data: {{"usage": null}}\n\ndata: {CHAT_ANSWER}\n\ndata: [DONE]\n\n',
        'event: message_start\ndata: {"message": {"usage": {"input_tokens": 1}}}\n\n'
        'data: {"usage": {"input_tokens": 1, "cache_read_input_tokens": 2, "output_tokens": 5}}\n\n',
        'data: {"response": {"usage": null}}\n\ndata: {"response": {"usage": {"input_tokens": 3, "output_tokens": 5}}}\n\n',
        'data: {"version": 1, "type": "Usage", "data": {"prompt_tokens": 3, "completion_tokens": 5}}\n\n',
    ],
)  # fmt: skip
def test_tokens_are_read_from_each_protocols_answers(answer):
    counts = ClientCounts(READER, is_exact=True)
    counts.answered(answer)
    assert counts.tokens == {"prompt": 3, "completion": 5}
