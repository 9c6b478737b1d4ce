"""Servers behind the gateway's code without its package: one of another machine, and one of our own
that keeps dying.
"""

import asyncio
import collections
import contextlib
import http.server
import importlib.util
import itertools
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
from typing import Any

import httpx2
import pytest

from sglang_lite.protocol import BackendError, ParameterError
from sglang_lite.server.app import application
from sglang_lite.server.http_server import HttpServer
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
        command = [
            sys.executable,
            "-m",
            "sglang_lite",
            "serve",
            "--workers",
            worker,
            "--gateway",
            "smg",
            "--port",
            "0",
        ]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
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
    "/v1/loads": {
        "dp_rank_count": 1,
        "loads": [{"dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0}],
    },
    "/generate": {"text": "", "meta_info": {}},
}


class Reporting(http.server.BaseHTTPRequestHandler):
    """A server that only tells of itself, of its load above all, and answers requests with next to
    nothing.
    """

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
    """Two servers that answer as soon as 64 requests have come to one or the other, and that
    number.
    """
    at_once = threading.Barrier(64)
    with contextlib.ExitStack() as stack:
        servers = []
        for _ in range(2):
            server = stack.enter_context(
                http.server.ThreadingHTTPServer(("127.0.0.1", 0), Reporting)
            )
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
            started.add_worker(url)
            until(lambda url=url: url in started.known)
        if package == "smg":  # it has asked each for its load
            until(lambda: all(each.asked["/v1/loads"] >= 2 for each in servers))
        with ThreadPoolExecutor(count) as pool:
            bodies = [{"text": f"{random.Random(i).random()}" * 10} for i in range(count)]
            answers = pool.map(
                lambda body: httpx2.post(f"{started.url}/generate", json=body, timeout=60), bodies
            )
            assert {answer.status_code for answer in answers} == {200}
    finally:
        started.kill()
    assert min(each.asked["/generate"] for each in servers) >= 0.3 * count


@pytest.fixture
def of_no_process(monkeypatch):
    """Makes a gateway whose process is none, and the settings that it was given."""
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
    started = gateway.Gateway(
        ServerSettings(), ReplicaSettings(replicas=1, gateway="smg"), "127.0.0.1", 1
    )
    yield started, told[0]
    started.kill()


def test_the_gateway_hears_of_a_new_servers_load_soon(of_no_process):
    _, told = of_no_process
    assert told["load_monitor_interval"] == 1


def test_a_server_of_two_sources_stays_until_both_have_lost_it(of_no_process):
    started, _ = of_no_process
    for _ in range(2):
        started.add_worker("http://10.0.0.1:1")
    started.remove_worker("http://10.0.0.1:1")
    assert started.wanted_workers == {"http://10.0.0.1:1"}
    started.remove_worker("http://10.0.0.1:1")
    assert started.wanted_workers == set()


class Late(http.server.BaseHTTPRequestHandler):
    """A gateway that takes a server in and fails to say so, and sends it requests some looks later."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        looks, workers = next(self.server.looks), self.server.workers
        told = [
            {"id": url, "url": url, "is_healthy": looks > 4, "status": "ready"} for url in workers
        ]
        data = json.dumps({"workers": told}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self):
        self.server.workers.add(
            json.loads(self.rfile.read(int(self.headers["content-length"])))["url"]
        )
        self.send_error(504)


def test_a_server_that_the_gateway_took_in_without_an_answer_becomes_reachable(
    of_no_process, monkeypatch
):
    monkeypatch.setattr(gateway, "_LOOK_S", 0.01)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Late) as server:
        server.looks, server.workers = itertools.count(), set()
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        settings, url = (
            ReplicaSettings(workers=("http://10.0.0.1:1",), gateway="smg"),
            "http://10.0.0.1:1",
        )
        started = gateway.Gateway(
            ServerSettings(log_level="error"), settings, "127.0.0.1", server.server_port
        )
        try:
            started.add_worker(url)
            until(lambda: started.healthy == {url})
        finally:
            started.kill()
            server.shutdown()


class Gateway:
    """A gateway in name alone."""

    package, url, failed = "none", "http://127.0.0.1", False

    def __init__(self, *_):
        self.known = self.healthy = set()

    def add_worker(self, url):
        self.known.add(url)

    def remove_worker(self, url):
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
        ended = supervisor.serve(
            ServerSettings(), {"device": "cpu"}, ReplicaSettings(replicas=1), lambda _: None
        )
    assert ended == 1
    deaths = [record.getMessage() for record in caplog.records]
    assert len(deaths) == 8
    assert all("was ended by SIGKILL; it is restarted" in each for each in deaths[:-1])
    assert deaths[-1].endswith(
        "was ended by SIGKILL for the 8th time within 60 s of its start; it is not restarted"
    )


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
        ended = supervisor.serve(
            ServerSettings(), {"device": "cpu"}, ReplicaSettings(replicas=1), lambda _: None
        )
    assert ended == 1
    deaths = [record.getMessage() for record in caplog.records]
    assert len(deaths) == 8
    assert "was ended by SIGKILL; it is restarted" in deaths[0]
    assert all(
        "did not start: a process can't be started: no memory.; it is restarted" in s
        for s in deaths[1:-1]
    )
    assert deaths[-1].endswith("it is not restarted")


@pytest.fixture
def gateways(monkeypatch, signals):
    """Gateways that were made; each server that is looked at is ready."""
    made = []

    class Told(Gateway):
        def __init__(self, *_):
            super().__init__()
            made.append(self)

    monkeypatch.setattr(supervisor, "Gateway", Told)
    monkeypatch.setattr(supervisor, "FIND_S", 0.01)
    monkeypatch.setattr(supervisor, "_LOOK_S", 0.01)
    monkeypatch.setattr("httpx2.Client.get", lambda *_, **__: SimpleNamespace(status_code=200))
    return made


@contextlib.contextmanager
def supervised(source, told):
    """The command in front of the servers of a source, on this thread's behalf."""
    settings, replicas = ServerSettings(port=0), ReplicaSettings(workers=(source,))
    serving = threading.Thread(target=supervisor.serve, args=(settings, {}, replicas, told.append))
    with pytest.MonkeyPatch.context() as patch:
        handlers = {}
        patch.setattr(signal, "signal", handlers.__setitem__)  # of the main thread alone
        serving.start()
        try:
            yield
        finally:
            until(lambda: signal.SIGINT in handlers)
            handlers[signal.SIGTERM]()
            serving.join(60)


def test_the_servers_of_a_file_follow_its_lines(gateways, tmp_path, caplog):
    file, new, told = tmp_path / "workers.txt", tmp_path / "new.txt", []

    def write(text):
        new.write_text(text)
        new.replace(file)

    write("# ours\nhttp://10.0.0.1:1\n\nhttp://10.0.0.2:1\n")
    with supervised(f"file:{file}", told):
        until(lambda: gateways and gateways[0].known == {"http://10.0.0.1:1", "http://10.0.0.2:1"})
        write("http://10.0.0.2:1\nhttps://other:1\n")
        until(lambda: gateways[0].known == {"http://10.0.0.2:1", "https://other:1"})
        write("10.0.0.3:1\n")
        until(lambda: any("its servers stay" in each.getMessage() for each in caplog.records))
        file.unlink()
        until(lambda: any("No such file" in each.getMessage() for each in caplog.records))
        write("")
        until(lambda: any("names no server" in each.getMessage() for each in caplog.records))
        assert gateways[0].known == {"http://10.0.0.2:1", "https://other:1"}
        write("http://10.0.0.4:1\n")
        until(lambda: gateways[0].known == {"http://10.0.0.4:1"})
    assert told == [f"Serving 0 servers and those of file:{file} at http://127.0.0.1 by none"]
    problems = [each.getMessage() for each in caplog.records]
    assert len(problems) == 3, problems  # each once
    assert f"{file}: '10.0.0.3:1' is not an address" in problems[0]


def test_the_servers_of_a_name_are_its_addresses(gateways, monkeypatch):
    known = [
        (socket.AF_INET, 0, 0, "", ("10.0.0.1", 30000)),
        (socket.AF_INET6, 0, 0, "", ("fe80::1", 30000, 0, 0)),
    ]
    asked = []

    def resolve(name, port, **_):
        asked.append((name, port))
        return known

    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", resolve)
        with supervised("dns+http://pool.lan:30000", []):
            until(
                lambda: (
                    gateways
                    and gateways[0].known == {"http://10.0.0.1:30000", "http://[fe80::1]:30000"}
                )
            )
            del known[0]
            until(lambda: gateways[0].known == {"http://[fe80::1]:30000"})
    assert set(asked) == {("pool.lan", 30000)}


@pytest.mark.parametrize(
    "source",
    [
        "10.0.0.2:1",
        "http://a/",
        "dns+https://a:1",
        "dns+a:1",
        "http://a:x",
        "http://:1",
        "dns+http://me:it@a:1",
        "dns+http://a:1/b",
    ],
)
def test_what_is_no_address_is_refused(source):
    with pytest.raises(ParameterError, match=r"workers: .* is not an address"):
        ReplicaSettings(workers=(source,))


class Threaded:
    """A server of our own in a thread of this process, in place of a process."""

    engine: Any = None
    started = 0

    def __init__(self, _, content, environment, descriptors):
        Threaded.started += 1
        self.pid = Threaded.started
        given = content["settings"].items()
        settings: Any = {
            name: tuple(each) if isinstance(each, list) else each for name, each in given
        }
        told = ServerSettings(**settings)
        self._server = HttpServer(application(self.engine, told), told)
        listening = socket.socket(fileno=os.dup(content["descriptor"]))
        listening.listen(64)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve([listening])))
        self._thread.start()

    def wait(self, timeout_s):
        self._thread.join(timeout_s)
        return None if self._thread.is_alive() else 0

    def terminate(self):
        self._server.handle_exit(signal.SIGTERM, None)

    def kill(self):
        self.terminate()
        self._thread.join()


class Living:
    """A server that is ready, as long as the new version works."""

    works, started = True, 0

    def __init__(self, *_):
        if not Living.works:
            raise BackendError("the new version is broken.")
        Living.started += 1
        self.pid = Living.started
        self._ended = threading.Event()

    def wait(self, timeout_s):
        return 0 if self._ended.wait(min(timeout_s, 0.01)) else None

    def terminate(self):
        self._ended.set()

    kill = terminate


def test_a_rolling_restart_ends_at_a_server_that_does_not_come_back(gateways, monkeypatch, caplog):
    monkeypatch.setattr(supervisor, "TiedProcess", Living)
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE_S", 0.0)
    monkeypatch.setattr(Living, "started", 0)
    monkeypatch.setattr(Living, "works", True)
    handlers: dict[int, Any] = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)  # of the main thread alone
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_DFL)
    arguments = (
        ServerSettings(port=0),
        {"device": "cpu"},
        ReplicaSettings(replicas=3),
        lambda _: None,
    )
    ended = []
    serving = threading.Thread(target=lambda: ended.append(supervisor.serve(*arguments)))
    serving.start()

    def messages(text):
        return [each for each in caplog.messages if text in each]

    try:
        until(lambda: gateways and len(gateways[0].known) == 3)
        before = set(gateways[0].known)
        Living.works = False
        handlers[signal.SIGHUP]()
        until(lambda: messages("the others keep running") and messages("it is not restarted"))
        assert len(gateways[0].known) == 2
        assert gateways[0].known < before
        Living.works = True
        handlers[signal.SIGHUP]()
        until(lambda: Living.started == 6 and len(gateways[0].known) == 3)
        assert not gateways[0].known & before
        assert len(messages("the others keep running")) == 1
    finally:
        handlers[signal.SIGTERM]()
        serving.join(60)
    assert ended == [0]


def test_a_hangup_that_is_ignored_stays_so(monkeypatch):
    handlers: dict[int, Any] = {}
    monkeypatch.setattr(supervisor, "Gateway", Gateway)
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_IGN)  # as nohup leaves it
    monkeypatch.setattr(Gateway, "failed", True)  # ends it at once
    supervisor.serve(
        ServerSettings(port=0), {}, ReplicaSettings(workers=("http://10.0.0.1:1",)), lambda _: None
    )
    assert handlers.keys() == {signal.SIGTERM, signal.SIGINT}


def test_a_rolling_restart_loses_no_request(engine, monkeypatch, signals):
    """SIGHUP restarts one server after the other; the gateway sends requests to the others
    meanwhile.
    """
    wanted = int(os.environ.get("SGLANG_LITE_RESTARTS", 3))
    monkeypatch.syspath_prepend(FAKE)
    monkeypatch.setattr(Threaded, "engine", engine)
    monkeypatch.setattr(Threaded, "started", 0)
    monkeypatch.setattr(supervisor, "TiedProcess", Threaded)
    monkeypatch.setattr(supervisor, "_LOOK_S", 0.02)
    told, answered, over = [], [], threading.Event()
    replicas, handlers = ReplicaSettings(replicas=2, gateway="smg"), {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)  # of the main thread alone
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_DFL)  # also behind nohup
    settings = {"engine": {"device": "cpu"}, "replicas": replicas, "announce": told.append}
    serving = threading.Thread(
        target=supervisor.serve, args=(ServerSettings(port=0),), kwargs=settings
    )
    serving.start()
    until(lambda: told)
    url = told[0].split()[4]

    def ask(body):
        with httpx2.Client(timeout=60) as client:
            while not over.is_set():
                answered.append(client.post(f"{url}/generate", json=body).status_code)

    body = {"text": "a", "sampling_params": {"max_new_tokens": 20, "ignore_eos": True}}
    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask, body) for _ in range(4)]
        try:
            for times in range(1, -(-wanted // 2) + 1):
                before = len(answered)
                handlers[signal.SIGHUP]()
                until(lambda times=times: Threaded.started == 2 + 2 * times)
                until(lambda before=before: len(answered) > before + 8)
        finally:
            over.set()
            failed = [each.exception() for each in asking]
            handlers[signal.SIGTERM]()
            serving.join(60)
    assert failed == [None] * 4
    assert set(answered) == {200}
