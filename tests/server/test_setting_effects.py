"""Settings of a server whose effect a client sees in one answer."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from sglang_lite.server import reader_pool
from tests.engine import processes
from tests.server.conftest import serving

DATA = Path(__file__).parent / "data"
GREEDY = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "add", "parameters": NOTHING}}


def asked(url, path="/generate", headers=None, method="POST", **body):
    body = body or {"text": "ab", "sampling_params": GREEDY}
    return httpx2.request(
        method, url + path, json=body if method == "POST" else None, headers=headers, timeout=60
    )


def program(*nodes):
    return {"path": "/program", "version": 1, "prompt": "ab", "program": {"nodes": [*nodes]}}


def generation(count):
    return {
        "kind": "Gen",
        "name": "a",
        "params": {"max_tokens": count, "temperature": 0.0, "ignore_eos": True},
    }


def test_a_body_may_be_nested_as_deeply_as_the_server_says(engine):
    with serving(engine, max_depth=4) as url:
        assert asked(url).status_code == 200
        assert asked(url, text="ab", sampling_params={"stop": [[[["a"]]]]}).status_code == 400
        assert "nested" in asked(url, text="ab", sampling_params={"stop": [[[["a"]]]]}).text


def test_a_head_may_be_as_long_as_the_server_says(engine):
    with serving(engine, max_head_kb=1) as url:
        assert asked(url, headers={"x-long": "a" * 3000}).status_code == 431


def test_a_head_may_have_as_many_lines_as_the_server_says(engine):
    with serving(engine, max_header_lines=20) as url:
        assert asked(url, headers={f"x-{i}": "a" for i in range(30)}).status_code == 431


def test_a_key_may_have_as_many_open_requests_as_the_server_says(engine):
    body = {
        "text": "a",
        "stream": True,
        "sampling_params": {"max_new_tokens": 500, "ignore_eos": True},
    }
    key = {"authorization": "Bearer one"}
    with (
        serving(engine, api_key=("one", "two"), max_open_per_key=1) as url,
        httpx2.stream("POST", f"{url}/generate", json=body, headers=key, timeout=60) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        assert asked(url, headers=key).status_code == 429
        assert asked(url, headers={"authorization": "Bearer two"}).status_code == 200


@pytest.mark.parametrize(("limit", "nodes"), [
    ({"program_max_tokens": 5}, [generation(9)]),
    ({"program_max_branches": 1}, [{"kind": "Fork", "branches": [[generation(1)], [generation(1)]]}, {"kind": "Join"}]),
])  # fmt: skip
def test_a_program_is_as_large_as_the_server_says(engine, limit, nodes):
    with serving(engine, **limit) as url:
        assert asked(url, **program(generation(1))).status_code == 200
        assert asked(url, **program(*nodes)).status_code == 400


def test_a_program_runs_as_long_as_the_server_says(engine):
    with serving(engine, program_max_s=0.02) as url:
        assert asked(url, **program(generation(1500))).status_code == 504


def test_calls_have_the_format_that_the_server_says(engine):
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [TOOL],
        "tool_choice": "required",
        "max_tokens": 300,
    }
    counts = []
    for settings in ({}, {"tool_call_parser": "mistral"}):
        with serving(engine, **settings) as url:
            counts.append(
                asked(url, "/v1/chat/completions", temperature=0, **body).json()["usage"][
                    "completion_tokens"
                ]
            )
    assert counts[0] != counts[1]


def test_a_token_for_health_takes_as_long_as_the_server_says(engine):
    with serving(engine, health_timeout_s=1e-6) as url:
        assert asked(url, "/health_generate", method="GET").status_code == 504


def test_as_many_responses_are_kept_as_the_server_says(engine):
    with serving(engine, max_stored_responses=1) as url:
        first, _ = (
            asked(url, "/v1/responses", input="a", max_output_tokens=1).json()["id"]
            for _ in range(2)
        )
        assert asked(url, f"/v1/responses/{first}", method="GET").status_code == 404


def test_a_certificate_is_spoken_with(engine):
    files = {
        "ssl_certfile": str(DATA / "localhost.pem"),
        "ssl_keyfile": str(DATA / "localhost.key"),
    }
    with (
        serving(engine, **files) as url,
        contextlib.closing(httpx2.Client(verify=False, timeout=20)) as client,
    ):
        assert client.get(f"{url.replace('http:', 'https:')}/ping").status_code == 200


def test_a_key_may_be_locked_by_a_password(engine):
    locked = str(DATA / "localhost.locked.key")
    files = {
        "ssl_certfile": str(DATA / "localhost.pem"),
        "ssl_keyfile": locked,
        "ssl_keyfile_password": "open",
    }
    with (
        serving(engine, **files) as url,
        contextlib.closing(httpx2.Client(verify=False, timeout=20)) as client,
    ):
        assert client.get(f"{url.replace('http:', 'https:')}/ping").status_code == 200


def test_large_bodies_have_as_many_processes_as_the_server_says(engine):
    others = set(processes.children(reader_pool.MODULE))  # of other tests' servers
    with serving(engine, large_body_kb=0, body_processes=1) as url, ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: asked(url).status_code, range(6)))
        assert answers == [200] * 6
        assert len(set(processes.children(reader_pool.MODULE)) - others) == 1
