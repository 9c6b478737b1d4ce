"""The dashboard of `deploy/`, and SGLang's: each panel finds its metrics, and data in a real
Prometheus if there is one.

`apt-get install prometheus` brings it, or PROMETHEUS names its program.
"""

import json
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import httpx2
import pytest

from tests.server.conftest import serving

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS = os.environ.get("PROMETHEUS") or shutil.which("prometheus")
# What the panels of SGLang's dashboard ask for (sgl-project/sglang, examples/monitoring/grafana,
# dashboard 11).
SGLANG = [
    *(
        f"histogram_quantile({share}, sum by (le) (rate(sglang:{name}_bucket[$__rate_interval])))"
        for name in ("e2e_request_latency_seconds", "time_to_first_token_seconds") for share in (0.99, 0.9, 0.5)
    ),
    *(
        f'sum(increase(sglang:{name}_bucket{{model_name=~"$model_name"}}[$__rate_interval])) by (le)'
        for name in ("e2e_request_latency_seconds", "time_to_first_token_seconds")
    ),
    "sglang:num_running_reqs", "sglang:gen_throughput", "sglang:cache_hit_rate", "sglang:num_queue_reqs",
]  # fmt: skip
BOARD = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
QUERIES = [*SGLANG, *(target["expr"] for panel in BOARD["panels"] for target in panel["targets"])]


def ask(url):
    """A few requests of the kinds that panels show."""
    turns = {
        "model": "",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 4,
        "ignore_eos": True,
    }
    for _ in range(3):
        assert httpx2.post(f"{url}/v1/chat/completions", json=turns, timeout=60).status_code == 200


def test_the_metrics_of_all_panels_are_there(engine):
    with serving(engine) as url:
        ask(url)
        served = httpx2.get(f"{url}/metrics", timeout=60).text
    names = {
        line.partition("{")[0].partition(" ")[0]
        for line in served.splitlines()
        if not line.startswith("#")
    }
    for query in QUERIES:
        asked = set(re.findall(r"sglang(?:_lite_|:)\w+", query))
        assert asked
        assert asked <= names, query


@pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not installed")
def test_each_panel_finds_data(engine, tmp_path):
    assert PROMETHEUS is not None
    with serving(engine) as url:
        config = (DEPLOY / "prometheus.yml").read_text()
        config = config.replace("127.0.0.1:30000", url.removeprefix("http://")).replace(
            "5s", "200ms"
        )
        (tmp_path / "prometheus.yml").write_text(config)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        flags = (
            "config.file=prometheus.yml",
            "storage.tsdb.path=data",
            f"web.listen-address=127.0.0.1:{port}",
        )
        with subprocess.Popen(
            [PROMETHEUS, *(f"--{flag}" for flag in flags)], cwd=tmp_path, stderr=subprocess.DEVNULL
        ) as prometheus:
            try:
                left = list(QUERIES)
                for _ in range(1000):
                    ask(url)
                    left = [query for query in left if not _data(port, query)]
                    if not left:
                        break
            finally:
                prometheus.terminate()
    assert not left


def _data(port, query):
    """True if Prometheus finds a number for a query."""
    query = query.replace("$__rate_interval", "10s").replace("$model_name", ".*")
    try:
        found = httpx2.get(
            f"http://127.0.0.1:{port}/api/v1/query", params={"query": query}, timeout=60
        ).json()
    except httpx2.TransportError:  # it starts
        return False
    assert found["status"] == "success", found
    return any(each["value"][1] != "NaN" for each in found["data"]["result"])
