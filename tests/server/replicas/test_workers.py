"""Servers behind the gateway's code without its package: one of another machine, and one of our own that keeps dying."""

import collections
import contextlib
import http.server
import importlib.util
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest

from sglang_lite.protocol import BackendError
from sglang_lite.server.replicas import gateway, supervisor
from sglang_lite.server.settings import ReplicaSettings, ServerSettings
from tests.server.conftest import serving
from tests.waiting import until

FAKE = str(Path(__file__).parent / "fake_gateway")  # a gateway that this machine always has


def status(url, path="/health"):
    try:
        return httpx2.get(url + path, timeout=10).status_code
    except httpx2.HTTPError:
        return 0


@pytest.fixture
def behind():
    """Starts the command in front of a worker. Gives it with its address."""
    started = []

    def start(worker):
        paths = [FAKE, os.environ.get("PYTHONPATH", ""), os.getcwd()]
        command = [sys.executable, "-m", "sglang_lite", "serve", "--workers", worker, "--gateway", "smg", "--port", "0"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        )
        started.append(process)
        line = process.stdout.readline()
        assert line.startswith("Serving 1 servers at "), line
        return process, line.split()[4]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_server_of_another_machine_is_put_behind_the_gateway_and_taken_out(engine, behind):
    with serving(engine) as worker:
        process, url = behind(worker)
        until(lambda: status(url) == 200)
        asked = {"text": "a quick", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
        found = httpx2.post(f"{url}/generate", json=asked, timeout=60).json()
        assert found["text"] == engine.generate("a quick", asked["sampling_params"])["text"]
        assert httpx2.get(f"{url}/workers", timeout=60).status_code == 401
    until(lambda: httpx2.get(f"{url}/health", timeout=10).json() == {"error": "no worker"})
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


TOLD = {
    "/health": {},
    "/server_info": {"model_path": "m"},
    "/model_info": {"model_path": "m", "is_generation": True},
    "/v1/models": {"object": "list", "data": [{"id": "m", "object": "model"}]},
    "/v1/loads": {"dp_rank_count": 1, "loads": [{"dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0}]},
    "/generate": {"text": "", "meta_info": {}},
}


class Reporting(http.server.BaseHTTPRequestHandler):
    """A server that only tells of itself, of its load above all, and answers requests with next to nothing."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.rfile.read(int(self.headers.get("content-length") or 0))
        path = self.path.partition("?")[0]
        self.server.asked[path] += 1
        if path == "/generate":
            self.server.at_once.wait(60)
        data = json.dumps(TOLD.get(path, {})).encode()
        self.send_response(200 if path in TOLD else 404)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self):
        self.do_GET()


@pytest.fixture
def reporting():
    """Two servers that answer as soon as 64 requests have come to one or the other, and that number."""
    at_once = threading.Barrier(64)
    with contextlib.ExitStack() as stack:
        servers = []
        for _ in range(2):
            server = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Reporting))
            server.asked = collections.Counter()
            server.at_once = at_once
            server.socket.listen(at_once.parties)
            threading.Thread(target=server.serve_forever, args=(0.02,)).start()
            stack.callback(server.shutdown)
            servers.append(server)
        yield servers, at_once.parties


@pytest.mark.parametrize("package", gateway.PACKAGES)
def test_requests_that_begin_as_no_other_are_shared_out(package, reporting):
    if importlib.util.find_spec(gateway.PACKAGES[package]) is None:
        pytest.skip(f"{package} is not installed")
    servers, count = reporting
    urls = [f"http://127.0.0.1:{each.server_port}" for each in servers]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    replicas = ReplicaSettings(workers=tuple(urls), gateway=package)
    started = gateway.Gateway(ServerSettings(log_level="error"), replicas, "127.0.0.1", port)
    try:
        for url in urls:
            started.add(url)
            until(lambda url=url: url in started.known)
        if package == "smg":  # it has asked each for its load
            until(lambda: all(each.asked["/v1/loads"] >= 2 for each in servers))
        with ThreadPoolExecutor(count) as pool:
            bodies = [{"text": f"{random.Random(i).random()}" * 10} for i in range(count)]
            answers = pool.map(lambda body: httpx2.post(f"{started.url}/generate", json=body, timeout=60), bodies)
            assert {answer.status_code for answer in answers} == {200}
    finally:
        started.kill()
    assert min(each.asked["/generate"] for each in servers) >= 0.3 * count


def test_the_gateway_hears_of_a_new_servers_load_soon(monkeypatch):
    told = []

    class Process:
        pid = 0

        def __init__(self, function, content):
            told.append(content["settings"])

        def wait(self, timeout_s):
            return None

        def kill(self):
            pass

    monkeypatch.setattr(gateway, "TiedProcess", Process)
    monkeypatch.setattr(gateway, "package_of", lambda name: name)
    gateway.Gateway(ServerSettings(), ReplicaSettings(replicas=1, gateway="smg"), "127.0.0.1", 1).kill()
    assert told[0]["load_monitor_interval"] == 1


class Gateway:
    """A gateway in name alone."""

    package, url, failed = "none", "http://127.0.0.1", False

    def __init__(self, *_):
        self.known = set()

    def add(self, url):
        self.known.add(url)

    def remove(self, url):
        self.known.discard(url)

    def terminate(self):
        pass

    def wait(self, timeout_s):
        return 0

    def kill(self):
        pass


class Dying:
    """A server that is ready, and then is not there."""

    pid = 1

    def __init__(self, *_):
        self.waits = 0

    def wait(self, timeout_s):
        self.waits += 1
        return None if self.waits == 1 else -signal.SIGKILL

    def terminate(self):
        pass

    def kill(self):
        pass


@pytest.fixture
def signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_server_that_keeps_dying_is_started_no_more(monkeypatch, caplog, signals):
    monkeypatch.setattr(supervisor, "Gateway", Gateway)
    monkeypatch.setattr(supervisor, "TiedProcess", Dying)
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE_S", 0.0)
    monkeypatch.setattr("httpx2.Client.get", lambda *_, **__: SimpleNamespace(status_code=200))
    with caplog.at_level(logging.ERROR, "sglang_lite.server"):
        ended = supervisor.serve(ServerSettings(), {"device": "cpu"}, ReplicaSettings(replicas=1), lambda _: None)
    assert ended == 1
    deaths = [record.getMessage() for record in caplog.records]
    assert len(deaths) == 8
    assert all("was ended by SIGKILL; it is restarted" in each for each in deaths[:-1])
    assert deaths[-1].endswith("was ended by SIGKILL for the 8th time within 60 s of its start; it is not restarted")


def test_a_server_that_can_not_be_started_again_has_died(monkeypatch, caplog, signals):
    """Else nobody would watch it, and nobody say so."""
    lives = iter([True])

    def started(*arguments):
        if next(lives, False):
            return Dying(*arguments)
        raise BackendError("a process can't be started: no memory.")

    monkeypatch.setattr(supervisor, "Gateway", Gateway)
    monkeypatch.setattr(supervisor, "TiedProcess", started)
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE_S", 0.0)
    monkeypatch.setattr("httpx2.Client.get", lambda *_, **__: SimpleNamespace(status_code=200))
    with caplog.at_level(logging.ERROR, "sglang_lite.server"):
        ended = supervisor.serve(ServerSettings(), {"device": "cpu"}, ReplicaSettings(replicas=1), lambda _: None)
    assert ended == 1
    deaths = [record.getMessage() for record in caplog.records]
    assert len(deaths) == 8
    assert "was ended by SIGKILL; it is restarted" in deaths[0]
    assert all("did not start: a process can't be started: no memory.; it is restarted" in s for s in deaths[1:-1])
    assert deaths[-1].endswith("it is not restarted")
