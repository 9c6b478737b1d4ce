"""Large bodies are read in other processes, with the same answers; nothing of them is read in the
server's process.
"""

import asyncio
import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

import sglang_lite as sgl
from sglang_lite.server import endpoint
from sglang_lite.server.endpoint import BodyTask
from sglang_lite.server.reader import ModelFacts
from sglang_lite.server.reader_pool import ReaderPool
from sglang_lite.server.settings import ServerSettings
from sglang_lite.wire.limits import Limits
from tests.server.body_tasks import die, fail, process_id
from tests.server.conftest import serving

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 3}},
    "required": ["city"],
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
SAID = [{"role": "system", "content": "Be <|end|> brief."}, {"role": "user", "content": "Where?"}]
ITEMS = [
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "There."},
    {"role": "user", "content": "No"},
]
SHORT = {"max_new_tokens": 4, "temperature": 0}
GREEDY = {"model": "", "max_tokens": 6, "temperature": 0}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {**GREEDY, "messages": SAID}),
    "chat with tools": ("/v1/chat/completions", {**GREEDY, "messages": SAID, "tools": [TOOL], "tool_choice": "required"}),
    "chat with a schema": ("/v1/chat/completions", {**GREEDY, "max_tokens": 40, "messages": SAID, "response_format": {
        "type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}),
    "messages": ("/v1/messages", {**GREEDY, "messages": SAID[1:], "system": "Be <|end|> brief."}),
    "counted messages": ("/v1/messages/count_tokens", {"model": "", "messages": SAID[1:]}),
    "response": ("/v1/responses", {"model": "", "input": ITEMS, "max_output_tokens": 6, "temperature": 0}),
    "counted response": ("/v1/responses/input_tokens", {"model": "", "input": ITEMS}),
    "text": ("/generate", {"text": "a <|end|> b", "sampling_params": SHORT}),
    "texts": ("/generate", {"text": ["a", "bc"], "sampling_params": SHORT, "return_logprob": True}),
    "ids": ("/generate", {"input_ids": [[5, 6], [7]], "sampling_params": SHORT}),
    "prompt record": ("/generate", {"prompt": {"spans": [{"text": "<|end|>", "special": False}]}, "sampling_params": SHORT}),
    "completion": ("/v1/completions", {**GREEDY, "prompt": ["a <|end|>", "b"], "echo": True, "logprobs": 1}),
    "completed ids": ("/v1/completions", {**GREEDY, "prompt": [5, 6, 7], "echo": True}),
    "completed program": ("/v1/completions", {"prompt": "", "program": {"version": 1, "program": {"nodes": [
        {"kind": "Text", "text": "a"}, {"kind": "Gen", "name": "x", "params": {"max_tokens": 2, "temperature": 0}}]}}}),
    "program": ("/program", {"version": 1, "program": {"nodes": [{"kind": "Select", "choices": ["a", "b"]}]}}),
    "decision": ("/v1/decisions", {"model": "", "input": SAID, "questions": [
        {"type": "predicate", "name": "a", "instructions": "Is it?"}]}),
    "Ollama's chat": ("/api/chat", {"model": "", "messages": SAID, "stream": False, "format": SCHEMA, "tools": [TOOL],
                                    "options": {"num_predict": 6, "temperature": 0}}),
    "Ollama's raw text": ("/api/generate", {"model": "", "prompt": "a <|end|> b", "raw": True, "stream": False,
                                            "options": {"num_predict": 6, "temperature": 0}}),
    "no program": ("/program", {"version": 1, "program": {"nodes": [{"kind": "Nothing"}]}}),
    "no open program": ("/program/prog-none/answer", {"version": 1, "answers": [{"path": [], "drop": True}]}),
    "tokens": ("/tokenize", {"prompt": ["a <|end|>", "b"]}),
    "text of tokens": ("/detokenize", {"tokens": [5, 6]}),
    "reasoning": ("/separate_reasoning", {"text": "<think>a</think>b", "reasoning_parser": "qwen3"}),
    "calls": ("/parse_function_call", {"text": "a", "tools": [TOOL], "tool_call_parser": "qwen25"}),
    "score": ("/v1/score", {"prompt": "a", "continuations": ["b", "c"]}),
    "no field": ("/v1/chat/completions", {"messages": SAID, "temperatur": 0}),
    "no message": ("/v1/messages", {"messages": [], "max_tokens": 1}),
    "no model": ("/v1/chat/completions", {"model": "other", "messages": SAID}),
    "too long": ("/v1/completions", {"prompt": "a" * 3000}),
    "no id": ("/generate", {"input_ids": [2**40]}),
    "empty": ("/generate", {"text": ""}),
    "no response": ("/v1/responses", {"input": "a", "previous_response_id": "resp_none"}),
    "no item": ("/v1/responses", {"input": [{"type": "item_reference", "id": "msg_none"}]}),
    "no schema": ("/v1/chat/completions", {"messages": SAID, "response_format": {"type": "json_schema", "json_schema": {
        "name": "a", "schema": {"type": "nothing"}}}}),
}  # fmt: skip
CHANGING = (
    r'"(id|created|created_at|completed_at|e2e_latency|queue_time|[a-z_]*_s|[a-z_]*duration|request_id)":("[^"]*"|[0-9.e-]+|null)'
    r'|"cache_miss":\{[^}]*\}'
)


@pytest.fixture(scope="module")
def here(engine):
    with serving(engine) as url, httpx2.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def apart(engine):
    with serving(engine, large_body_kb=0) as url, httpx2.Client(base_url=url, timeout=60) as client:
        yield client


def told(response):
    """What must be the same in two answers."""
    return response.status_code, re.sub(CHANGING, "", response.text)


@pytest.mark.parametrize("name", REQUESTS)
def test_an_answer_is_the_same_wherever_its_body_is_read(engine, here, apart, name, monkeypatch):
    path, body = REQUESTS[name]
    engine.flush_cache()
    expected = told(here.post(path, json=body))

    def parse(*_):
        raise AssertionError("a body was parsed in the server's process")

    monkeypatch.setattr(endpoint, "parse_object", parse)
    engine.flush_cache()
    assert told(apart.post(path, json=body)) == expected


def test_a_stream_says_the_same_wherever_its_body_is_read(here, apart):
    said = []
    for client in (here, apart):
        lines = client.post(
            "/v1/chat/completions", json={**REQUESTS["chat"][1], "stream": True}
        ).text.split("\n")
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        said.append("".join(event["choices"][0]["delta"].get("content", "") for event in events))
    assert said[0] == said[1] != ""


def test_a_body_above_the_limit_leaves_the_process_and_a_smaller_one_stays(engine, monkeypatch):
    read = []
    monkeypatch.setattr(
        endpoint, "parse_object", lambda data, limits: read.append(len(data)) or {"text": "a"}
    )
    with serving(engine, large_body_kb=8) as url, httpx2.Client(base_url=url, timeout=60) as client:
        for size in (10, 5000, 9000):
            client.post("/tokenize", json={"prompt": "a" * size})
    assert [count > 8192 for count in read] == [False, False]


def test_a_conversation_goes_on_from_what_the_server_has_stored(here, apart):
    texts = []
    for client in (here, apart):
        first = client.post("/v1/responses", json=REQUESTS["response"][1]).json()
        body = {
            "input": "Where?",
            "previous_response_id": first["id"],
            "max_output_tokens": 6,
            "temperature": 0,
        }
        second = client.post("/v1/responses", json=body).json()
        reference = {"type": "item_reference", "id": first["output"][0]["id"]}
        third = client.post("/v1/responses", json={"input": [*ITEMS, reference, *ITEMS[:1]], "max_output_tokens": 6,
                                                   "temperature": 0}).json()  # fmt: skip
        items = client.get(f"/v1/responses/{second['id']}/input_items?order=asc").json()["data"]
        counted = client.post(
            "/v1/responses/input_tokens",
            json={k: body[k] for k in ("input", "previous_response_id")},
        )
        assert [item["role"] for item in items] == [
            "user",
            "assistant",
            "user",
            "assistant",
            "user",
        ]
        assert (
            counted.json()["input_tokens"]
            == second["usage"]["input_tokens"]
            == third["usage"]["input_tokens"]
        )
        texts.append(
            [each["output"] and each["output"][0]["content"] for each in (first, second, third)]
        )
    assert texts[0] == texts[1]


def test_a_short_body_that_goes_on_from_a_long_conversation_leaves_the_process(engine, monkeypatch):
    with serving(engine, large_body_kb=1) as url, httpx2.Client(base_url=url, timeout=60) as client:
        long = {"input": "a" * 1100, "max_output_tokens": 2}
        first = client.post("/v1/responses", json=long).json()
        rendered = []
        monkeypatch.setattr(
            "sglang_lite.server.reader.RequestReader.render", lambda *_: rendered.append(1)
        )
        body = {"input": "b", "previous_response_id": first["id"], "max_output_tokens": 2}
        assert client.post("/v1/responses", json=body).status_code == 200
    assert rendered == []


def test_a_field_without_effect_is_reported(engine):
    with serving(engine, large_body_kb=0, unknown_fields="report") as url:
        response = httpx2.post(
            f"{url}/generate", json={"text": "a", "more": 1, "sampling_params": SHORT}, timeout=60
        )
    assert (response.status_code, response.headers["x-unused-fields"]) == (200, "more")


# ------------------------------------------------------------------------------------ the processes


def task(function):
    return BodyTask(function, b"{}", Limits(), False, ())


@pytest.fixture
def pool(engine):
    pool = ReaderPool(2, partial(ModelFacts.from_engine, engine, ServerSettings()))
    yield pool
    pool.close()


def test_a_process_that_dies_fails_its_body_alone(pool):
    async def run():
        first, _ = await pool.run_task(task(process_id))
        with pytest.raises(
            sgl.BackendError, match="the process that reads large bodies ended with status 3"
        ):
            await pool.run_task(task(die))
        second, _ = await pool.run_task(task(process_id))
        return first, second

    first, second = asyncio.run(run())
    assert len({first, second, os.getpid()}) == 3


def test_a_bug_fails_its_body_alone_and_is_logged(pool, caplog):
    async def run():
        first, _ = await pool.run_task(task(process_id))
        with pytest.raises(sgl.BackendError, match="the server failed"):
            await pool.run_task(task(fail))
        return first, (await pool.run_task(task(process_id)))[0]

    with caplog.at_level("INFO"):
        first, second = asyncio.run(run())
    assert first == second


def test_no_more_processes_than_the_limit_are_started_and_all_end_with_the_pool(pool):
    async def run():
        return {
            found
            for found, _ in await asyncio.gather(
                *(pool.run_task(task(process_id)) for _ in range(8))
            )
        }

    processes = asyncio.run(run())
    assert 1 <= len(processes) <= 2
    pool.close()
    assert not [process for process in processes if Path(f"/proc/{process}").exists()]


@pytest.mark.parametrize(
    ("name", "value"), [("large_body_kb", -1), ("large_body_kb", 2000), ("body_processes", 0)]
)
def test_a_setting_out_of_range_is_refused(name, value):
    with pytest.raises(sgl.ParameterError, match=f"^{name}: "):
        ServerSettings(**{name: value})
