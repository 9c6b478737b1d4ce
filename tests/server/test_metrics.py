"""Metrics for Prometheus: each number that the engine counts, as a counter or a gauge."""

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import serving


def families(url):
    text = httpx2.get(f"{url}/metrics", timeout=60).text
    return {family.name.removeprefix("sglang_lite_"): family for family in text_string_to_metric_families(text)}


def test_each_number_of_the_engines_stats_is_a_metric(engine):
    with serving(engine) as url:
        stats, found = engine.stats(), families(url)
    numbers = {name for name, value in stats.items() if isinstance(value, int | float)}
    assert found.keys() == numbers
    assert found["total_tokens"].type == "gauge"
    assert [sample.value for sample in found["total_tokens"].samples] == [stats["total_tokens"]]


def test_a_count_that_never_decreases_is_a_counter(engine):
    def submitted(url):
        (sample,) = families(url)["requests_submitted"].samples
        assert sample.name == "sglang_lite_requests_submitted_total"
        return sample.value

    with serving(engine) as url:
        before = submitted(url)
        httpx2.post(f"{url}/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 2}}, timeout=60)
        assert submitted(url) == before + 1
