"""Quotas of API keys: by time, by protocol, and their settings."""

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx2
import pytest
from smg_grpc_proto import sglang_scheduler_pb2 as pb

import sglang_lite as sgl
from sglang_lite.program.nodes import Gen, Program, Text
from sglang_lite.protocol import SamplingParams
from sglang_lite.server.errors import RateLimitError
from sglang_lite.server.quotas import Quotas
from sglang_lite.server.replicas.gateway import Gateway
from sglang_lite.server.settings import QUOTAS, ReplicaSettings, ServerSettings
from tests.server.conftest import serving
from tests.server.programs.test_program import data_of
from tests.server.test_grpc import Client
from tests.waiting import until

KEYS = ("one", "two")


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def refused(quotas, key="one"):
    with pytest.raises(RateLimitError) as error:
        quotas.charge_request(key)
    return error.value.retry_after_s


def test_requests_beyond_a_quota_wait_until_it_has_refilled(clock):
    quotas = Quotas(ServerSettings(max_requests_per_minute=6), clock)
    for _ in range(6):
        quotas.charge_request("one")
    assert refused(quotas) == 10
    quotas.charge_request("two")  # has its own
    clock.now += 4
    assert refused(quotas) == 6
    clock.now += 6
    quotas.charge_request("one")
    assert refused(quotas) == 10
    clock.now += 3600  # a quota does not grow beyond its limit
    for _ in range(6):
        quotas.charge_request("one")
    assert refused(quotas) == 10


def test_an_answer_may_take_more_than_is_left_and_the_next_request_waits_for_it(clock):
    quotas = Quotas(ServerSettings(max_tokens_per_minute=60, max_tokens_per_day=86_400), clock)
    quotas.charge_request("one")
    quotas.charge_tokens("one", 59)
    quotas.charge_request("one")
    quotas.charge_tokens("one", 31)
    assert refused(quotas) == 31  # of the minute's; the day has some left
    quotas.charge_tokens("one", 86_400)
    clock.now += 60
    assert refused(quotas) > 80_000
    quotas.charge_request("two")


def test_the_longest_wait_of_all_quotas_is_told(clock):
    quotas = Quotas(ServerSettings(max_requests_per_minute=1, max_tokens_per_day=10), clock)
    quotas.charge_request("one")
    quotas.charge_tokens("one", 10)
    assert refused(quotas) == 8_640


def generate(url, key, path="/generate", **more):
    text = {"text": "ab"} if path == "/generate" else {"model": "tiny", "max_tokens": 3, **more}
    body = {
        **text,
        **(
            {"sampling_params": {"max_new_tokens": 3, "ignore_eos": True}} if "text" in text else {}
        ),
    }
    return httpx2.post(f"{url}{path}", json=body, headers={"x-api-key": key}, timeout=60)


MESSAGES = {"messages": [{"role": "user", "content": "a"}]}
FORMS = {
    "/generate": ({}, ("error", "type"), "rate_limit_error"),
    "/v1/chat/completions": (MESSAGES, ("error", "code"), "rate_limit_exceeded"),
    "/v1/messages": (MESSAGES, ("error", "type"), "rate_limit_error"),
    "/api/chat": (MESSAGES, ("error",), "the quota of tokens of this key is used up."),
}


def test_the_quota_of_a_key_is_refused_in_each_protocols_form_and_counted(engine):
    with serving(engine, api_key=KEYS, served_model_name="tiny", max_tokens_per_day=5) as url:
        # two tokens of the prompt, three of the answer
        assert generate(url, "one").status_code == 200
        for path, (more, at, told) in FORMS.items():
            answered = generate(url, "one", path, **more)
            found = answered.json()
            for name in at:
                found = found[name]
            assert (answered.status_code, found[: len(told)]) == (429, told)
            assert int(answered.headers["retry-after"]) == 86_400 // 5
        assert generate(url, "two").status_code == 200
        # runs nothing
        assert httpx2.get(f"{url}/v1/models", headers={"x-api-key": "one"}).status_code == 200
        counts = httpx2.get(f"{url}/metrics").text
        assert 'sglang_lite_tokens_total{key="7692c3ad",kind="prompt"} 2.0' in counts
        assert 'sglang_lite_tokens_total{key="7692c3ad",kind="completion"} 3.0' in counts
        assert 'sglang_lite_over_quota_total{key="7692c3ad"} 4.0' in counts  # SHA-256 of "one"


SAMPLING = {"max_new_tokens": 4000, "ignore_eos": True}
PROGRAM = data_of(
    Program((Text("ab" * 20), Gen("a", SamplingParams(max_tokens=4000, ignore_eos=True))))
)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/generate", {"text": "ab" * 20, "sampling_params": SAMPLING}),
        ("/generate", {"text": "ab" * 20, "sampling_params": SAMPLING, "stream": True}),
        ("/program", {"version": 1, "prompt": "", "program": PROGRAM}),
        ("/program", {"version": 1, "prompt": "", "program": PROGRAM, "stream": True}),
    ],
    ids=["whole", "stream", "program", "program's stream"],
)
def test_a_client_that_leaves_has_used_its_tokens(engine, path, asked):
    aborted = "sglang:num_aborted_requests_total{"

    def count(name):
        lines = httpx2.get(f"{url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    until(lambda: not engine.stats()["running"])  # of the case before
    steps = engine.stats()["steps"]
    with serving(engine, api_key=KEYS, max_tokens_per_day=10) as url:
        with socket.create_connection(urlsplit(url).netloc.split(":")) as client:
            body = json.dumps(asked).encode()
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nx-api-key: one\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            # some of the case before may follow
            until(lambda: engine.stats()["steps"] > steps + 20)
        until(lambda: count(aborted) >= 1)
        assert generate(url, "one").status_code == 429
        assert generate(url, "two").status_code == 200


def test_a_prompt_with_several_answers_is_charged_once(engine):
    with serving(engine, api_key=KEYS, max_tokens_per_day=100) as url:
        body = {"text": "ab" * 20, "sampling_params": {"max_new_tokens": 1, "n": 8}}
        for status in (200, 200, 200, 429):
            answered = httpx2.post(
                f"{url}/generate", json=body, headers={"x-api-key": "one"}, timeout=60
            )
            assert answered.status_code == status


def test_grpc_calls_are_counted_too(engine):
    with Client(engine, max_requests_per_minute=1) as client:
        client.whole()
        with pytest.raises(grpc.RpcError, match="the quota of requests") as error:
            client.whole()
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert client.call("HealthCheck", pb.HealthCheckRequest()).healthy


@pytest.mark.parametrize("name", QUOTAS)
def test_a_quota_is_a_number_above_0_and_of_one_server(name):
    wrong: Any = {name: 0}
    right: Any = {name: 1}
    with pytest.raises(sgl.ParameterError, match=f"{name}: 0 is not a number greater than 0"):
        ServerSettings(**wrong)
    with pytest.raises(
        sgl.ParameterError, match=f"{name}: each server behind a gateway counts by itself"
    ):
        Gateway(ServerSettings(**right), ReplicaSettings(replicas=2), "127.0.0.1", 1)
