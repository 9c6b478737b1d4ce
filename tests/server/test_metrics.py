"""Metrics for Prometheus: each number that the engine counts, as a counter or a gauge."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

import sglang_lite as sgl
from tests.server.conftest import serving


def families(url):
    text = httpx2.get(f"{url}/metrics", timeout=60).text
    return {
        family.name.removeprefix("sglang_lite_"): family
        for family in text_string_to_metric_families(text)
    }


def test_each_number_of_the_engines_stats_is_a_metric(engine):
    with serving(engine) as url:
        stats, found = engine.stats(), families(url)
    numbers = {name for name, value in stats.items() if isinstance(value, int | float)}
    assert numbers <= found.keys()
    assert found["total_tokens"].type == "gauge"
    assert [sample.value for sample in found["total_tokens"].samples] == [stats["total_tokens"]]


def test_a_count_that_never_decreases_is_a_counter(engine):
    def submitted(url):
        (sample,) = families(url)["requests_submitted"].samples
        assert sample.name == "sglang_lite_requests_submitted_total"
        return sample.value

    with serving(engine) as url:
        before = submitted(url)
        httpx2.post(
            f"{url}/generate",
            json={"text": "a", "sampling_params": {"max_new_tokens": 2}},
            timeout=60,
        )
        assert submitted(url) == before + 1


def samples(url, name, **labels):
    """Values of a metric's samples that have the labels, by the sample's name."""
    text = httpx2.get(f"{url}/metrics", timeout=60).text
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.name == name
        and labels.items() <= sample.labels.items()
        and "le" not in sample.labels
    }


def ask(url, route, **body):
    return httpx2.post(f"{url}{route}", json=body, timeout=60).json()


@pytest.fixture
def counted(engine):
    """(address, function of what was counted since by a name of SGLang's), once the server's own
    first token is there.
    """
    with serving(engine) as url:
        while httpx2.get(f"{url}/ready", timeout=60).status_code != 200:
            pass
        before = {}

        def since(name):
            (value,) = samples(url, f"sglang:{name}").values()
            return value - before.get(name, 0)

        before.update({name: since(name) for name in COUNTS})
        yield url, since


COUNTS = ("num_requests", "prompt_tokens", "cached_tokens", "generation_tokens")


def test_what_was_answered_is_what_clients_counted(counted):
    """Over each door of generations: the native one, chat, a stream, and a program."""
    url, since = counted
    asked = {"max_new_tokens": 5, "ignore_eos": True, "n": 2}
    usages = [
        each["meta_info"]
        for each in ask(url, "/generate", text=["a quick", "brown fox"], sampling_params=asked)
    ]
    chat = ask(
        url,
        "/v1/chat/completions",
        model="",
        messages=[{"role": "user", "content": "a"}],
        max_tokens=3,
        ignore_eos=True,
    )
    asked = {"max_new_tokens": 4, "ignore_eos": True}
    stream = httpx2.post(
        f"{url}/generate", json={"text": "a", "stream": True, "sampling_params": asked}, timeout=60
    ).text  # fmt: skip
    usages.append(
        [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")][-1][
            "meta_info"
        ]
    )
    endpoint = sgl.RuntimeEndpoint(url)
    program = legs.run(backend=endpoint, ignore_eos=True).usage()
    endpoint.shutdown()
    assert since("num_requests") == 4 + 2 + 2
    assert since("generation_tokens") == 20 + 3 + 4 + program.completion_tokens
    prompts = (
        sum(each["prompt_tokens"] for each in [*usages, chat["usage"]]) + program.prompt_tokens
    )
    assert since("prompt_tokens") == prompts
    cached = sum(
        each["cached_tokens"] for each in [*usages, chat["usage"]["prompt_tokens_details"]]
    )
    assert since("cached_tokens") == cached + program.cached_tokens
    for name in ("queue_time", "time_to_first_token", "inter_token_latency", "e2e_request_latency"):
        found = samples(url, f"sglang:{name}_seconds")
        assert found[f"sglang:{name}_seconds_count"] >= 7
        assert found[f"sglang:{name}_seconds_sum"] >= 0
    route = {"route": "/generate", "method": "POST", "status": "200"}
    assert samples(url, "sglang_lite_http_responses", **route) == {
        "sglang_lite_http_responses_total": 2
    }


def test_clients_that_leave_are_counted(counted):
    url, _ = counted
    asked = {
        "text": "a",
        "stream": True,
        "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True},
    }
    name = "sglang:num_aborted_requests"
    before = samples(url, name)[f"{name}_total"]
    with httpx2.stream("POST", f"{url}/generate", json=asked, timeout=60) as stream:
        next(stream.iter_lines())
    for _ in range(1000):
        if samples(url, name)[f"{name}_total"] == before + 1:
            return
    pytest.fail("not counted")


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_aborted_is_counted_once(counted, stream):
    url, _ = counted
    name, rid = "sglang:num_aborted_requests", f"aborted-{stream}"
    before = samples(url, name)[f"{name}_total"]
    asked = {
        "text": "a",
        "rid": rid,
        "stream": stream,
        "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True},
    }
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx2.post, f"{url}/generate", json=asked, timeout=60)
        while not answer.done():
            httpx2.post(f"{url}/abort_request", json={"rid": rid}, timeout=60)
    assert '"abort"' in answer.result().text
    ask(url, "/generate", text="a", sampling_params={"max_new_tokens": 2, "ignore_eos": True})
    assert samples(url, name)[f"{name}_total"] == before + 1


@sgl.function
def legs(s):
    s += "Legs:" + sgl.gen("legs", max_tokens=6)
    s += " Big?" + sgl.select("big", ["yes", "no"])


def test_refusals_are_counted_by_status_and_keys_by_their_hashes(engine):
    with serving(engine, api_key=("sk-secret",)) as url:
        assert httpx2.post(f"{url}/generate", json={"text": "a"}, timeout=60).status_code == 401
        headers = {"authorization": "Bearer sk-secret"}
        assert (
            httpx2.post(
                f"{url}/generate", json={"text": 3}, headers=headers, timeout=60
            ).status_code
            == 400
        )
        text = httpx2.get(f"{url}/metrics", timeout=60).text
        assert "sk-secret" not in text
        hashed = hashlib.sha256(b"sk-secret").hexdigest()[:8]
        for status, key in (("401", ""), ("400", hashed)):
            found = samples(
                url, "sglang_lite_http_responses", route="/generate", status=status, key=key
            )
            assert found == {"sglang_lite_http_responses_total": 1}


def test_names_of_vllm(engine):
    with serving(engine, metrics_names="vllm") as url:
        ask(url, "/generate", text="a", sampling_params={"max_new_tokens": 2, "ignore_eos": True})
        assert samples(url, "vllm:generation_tokens")["vllm:generation_tokens_total"] >= 2
        assert samples(url, "vllm:num_requests_running") == {"vllm:num_requests_running": 0}
        assert not samples(url, "sglang:num_running_reqs")


def test_polls_are_logged_at_debug(engine, caplog):
    with caplog.at_level("DEBUG", "sglang_lite.server"), serving(engine) as url:
        httpx2.get(f"{url}/health", timeout=60)
        httpx2.get(f"{url}/v1/loads", timeout=60)  # which gateways ask once a second
        httpx2.post(f"{url}/generate", json={"text": 3}, timeout=60)
    levels = {
        record.args[1]: record.levelname
        for record in caplog.records
        if record.msg.startswith("%s %s %d")
    }
    assert levels == {"/health": "DEBUG", "/v1/loads": "DEBUG", "/generate": "INFO"}


def test_paths_that_are_not_there_are_counted_under_one_name(engine):
    def responses(status):
        found = samples(url, "sglang_lite_http_responses", route="other", status=status)
        return sum(found.values())

    with serving(engine) as url:
        for path in ("/no", "/wp-login.php", "/v1/no"):
            assert httpx2.get(f"{url}{path}", timeout=60).status_code == 404
        assert httpx2.delete(f"{url}/generate", timeout=60).status_code == 405
        assert httpx2.post(f"{url}/api/pull", timeout=60).status_code == 501
        assert "wp-login" not in httpx2.get(f"{url}/metrics", timeout=60).text
        assert [responses(status) for status in ("404", "405", "501")] == [3, 1, 1]
