"""Servers behind the gateway's code without its package: one of another machine, and one of our own that keeps dying."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from sglang_lite.server.replicas import supervisor
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
        assert httpx2.get(f"{url}/workers").status_code == 401
    until(lambda: httpx2.get(f"{url}/health", timeout=10).json() == {"error": "no worker"})
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


class Gateway:
    """A gateway in name alone."""

    package, url, failed = "none", "http://127.0.0.1", False

    def __init__(self, *_):
        self.known = set()

    def add(self, url):
        self.known.add(url)

    def remove(self, url):
        self.known.discard(url)

    def ask_to_end(self):
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

    def ask_to_end(self):
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
    monkeypatch.setattr(supervisor, "_LONGEST_PAUSE_S", 0.0)
    monkeypatch.setattr("sglang_lite.server.replicas.supervisor._Worker._answer", lambda *_: 200)
    with caplog.at_level(logging.ERROR, "sglang_lite.server"):
        ended = supervisor.serve(ServerSettings(), {"device": "cpu"}, ReplicaSettings(replicas=1), lambda _: None)
    assert ended == 1
    deaths = [record.getMessage() for record in caplog.records]
    assert len(deaths) == 8
    assert all("was ended by SIGKILL; it is started again" in each for each in deaths[:-1])
    assert deaths[-1].endswith("was ended by SIGKILL for the 8th time within 60 s of its start; it is started no more")
