"""Several servers behind a gateway: what becomes of requests when one is killed, and of processes
when all end.
"""

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

import sglang_lite as sgl
from sglang_lite.protocol import CapabilityError, ParameterError
from sglang_lite.server.replicas import gateway
from sglang_lite.server.replicas.supervisor import serve
from sglang_lite.server.settings import ReplicaSettings, ServerSettings
from tests.children import send
from tests.server.conftest import TEMPLATE
from tests.waiting import until

CLIENTS = 8


@sgl.function
def told(s, prompt):
    s += prompt + sgl.gen("a", max_tokens=48, temperature=0.8, ignore_eos=True)


PROMPTS = [f"{'abcdefgh'[i]} number {i} of {CLIENTS}" for i in range(CLIENTS)]


class Servers:
    """The command with replicas, as a process."""

    def __init__(self, folder, package, *more, count=2):
        flags = {"--model-path": folder, "--chat-template": TEMPLATE, "--dtype": "float32", "--threads": "1",
                 "--max-running": "16", "--max-total-tokens": "16384", "--port": "0", "--replicas": str(count),
                 "--gateway": package, "--drain-s": "20", "--log-level": "info"}  # fmt: skip
        command = ["env", "--default-signal=HUP"]  # also behind nohup
        command += [sys.executable, "-m", "sglang_lite.launch_server", "--deterministic"]
        command += [part for flag in flags.items() for part in flag] + list(more)
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        found = until(lambda: self._found(r"^Serving \d+ servers at (\S+)") or self.process.poll())
        assert isinstance(found, list), "\n".join(self.lines)
        self.url = found[0]
        until(lambda: len(self.healthy()) == count)

    def _read(self):
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def _found(self, pattern):
        return [found[1] for line in list(self.lines) if (found := re.search(pattern, line))]

    def servers(self):
        """Process ids of the servers that were started, by address."""
        pattern = r"the server at (\S+) is process (\d+)"
        return dict(
            found.groups() for line in list(self.lines) if (found := re.search(pattern, line))
        )

    def gateway(self):
        return int(self._found(r"the gateway at \S+ is process (\d+)")[-1])

    def healthy(self):
        """Addresses of servers that can be reached."""
        return [url for url in self.servers() if answers(url + "/ready")]

    def pids(self):
        """Of everything that was started."""
        return {
            int(pid)
            for parent in [self.process.pid, *children(self.process.pid)]
            for pid in [parent, *children(parent)]
        }

    def stop(self):
        self.process.kill()
        self.process.wait()
        self._reader.join(30)
        self.process.stdout.close()


def answers(url):
    with contextlib.suppress(httpx2.HTTPError):
        return httpx2.get(url, timeout=5).status_code == 200
    return False


def children(parent):
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            if name.isdigit():
                with open(f"/proc/{name}/stat") as file:
                    if int(file.read().rsplit(")", 1)[1].split()[1]) == parent:
                        found.append(int(name))
    return found


def alive(pids):
    """Processes that run, and are no zombies."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
            if file.read().rsplit(")", 1)[1].split()[0] != "Z":
                found.append(pid)
    return found


def asked(prompt, tokens=48):
    return {
        "text": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
    }


def answer(url, prompt):
    """The text of an answer that is no stream."""
    response = httpx2.post(url + "/generate", json=asked(prompt), timeout=120)
    assert response.status_code == 200, f"{response.status_code}: {response.text[:500]}"
    return response.json()["text"]


def streamed(url, prompt):
    """The text of a stream, or how it broke."""
    text = ""
    try:
        with httpx2.stream(
            "POST", url + "/generate", json={**asked(prompt), "stream": True}, timeout=120
        ) as response:
            assert response.status_code == 200, response.read()[:500]
            done = False
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return event
                    text = event["text"]
            return text if done else ConnectionError("cut")
    except httpx2.HTTPError as error:
        return error


@pytest.fixture(scope="module", params=gateway.PACKAGES)
def servers(request, folder):
    if importlib.util.find_spec(gateway.PACKAGES[request.param]) is None:
        pytest.skip(f"{request.param} is not installed")
    found = Servers(folder, request.param)
    yield found
    found.stop()


@pytest.fixture(scope="module")
def texts(servers):
    """Of each prompt, as one server continues it undisturbed."""
    return {prompt: answer(servers.healthy()[0], prompt) for prompt in PROMPTS}


def test_requests_are_answered_through_the_gateway(servers, texts):
    with httpx2.Client(base_url=servers.url, timeout=60) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        chat = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        found = http.post("/v1/chat/completions", json=chat)
        assert found.status_code == 200, found.text
        assert found.json()["usage"]["completion_tokens"] <= 4
        with http.stream("POST", "/v1/chat/completions", json={**chat, "stream": True}) as response:
            assert response.status_code == 200
            assert [*response.iter_lines()][-2:] == ["data: [DONE]", ""]
        legacy = http.post(
            "/v1/completions", json={"model": model, "prompt": "hi", "max_tokens": 4}
        )
        assert legacy.status_code == 200, legacy.text
    for prompt in PROMPTS[:2]:
        assert answer(servers.url, prompt) == streamed(servers.url, prompt) == texts[prompt]


def test_requests_that_begin_alike_are_shared_out(servers):
    def counts():
        return [submitted(url) for url in servers.healthy()]

    before = counts()
    prompts = [f"{'All of them begin like this. ' * 20}But number {i} ends so." for i in range(128)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        [
            *pool.map(
                lambda prompt: httpx2.post(
                    servers.url + "/generate", json=asked(prompt, 4), timeout=120
                ),
                prompts,
            )
        ]
    # How even it is depends on how fast servers answer; a gateway that only looks for prefixes
    # gives one server all.
    assert min(after - count for after, count in zip(counts(), before)) >= 0.15 * len(prompts)


def submitted(url):
    name = "sglang_lite_requests_submitted_total"
    lines = httpx2.get(url + "/metrics", timeout=20).text.splitlines()
    return float(next(line for line in lines if line.startswith(name)).split()[-1])


@pytest.mark.parametrize("loaded", [False, True])
def test_no_request_is_lost_with_a_server(servers, texts, loaded):
    before = servers.healthy()
    assert len(before) == 2
    over = threading.Event()
    counts = [0] * CLIENTS
    broken: list = []

    def client(number):
        prompt = PROMPTS[number]
        while not over.is_set():
            if number % 2 and loaded:
                found = streamed(servers.url, prompt)
                if found != texts[prompt]:
                    assert not isinstance(found, str), "a stream ended early as if it were whole"
                    broken.append(found)
            else:
                assert answer(servers.url, prompt) == texts[prompt]
            counts[number] += 1

    def kill():
        send(int(servers.servers()[before[0]]), signal.SIGKILL)

    with ThreadPoolExecutor(CLIENTS) as pool:
        if not loaded:
            kill()
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        try:
            if loaded:
                until(lambda: min(counts) >= 2)
                kill()
            until(lambda: len(servers.healthy()) == 2 and before[0] not in servers.healthy())
            reached = list(counts)
            until(
                lambda: (
                    all(a >= b + 2 for a, b in zip(counts, reached))
                    or any(each.done() for each in clients)
                )
            )
        finally:
            over.set()
        for each in clients:
            each.result()
    assert len(broken) <= CLIENTS // 2, broken  # at most what was under way


def test_a_rolling_restart_loses_no_request_and_no_stream(servers, texts):
    over, counts = threading.Event(), [0] * CLIENTS

    def client(number):
        while not over.is_set():
            assert (streamed if number % 2 else answer)(servers.url, PROMPTS[number]) == texts[
                PROMPTS[number]
            ]
            counts[number] += 1

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        try:
            for _ in range(-(-int(os.environ.get("SGLANG_LITE_RESTARTS", 3)) // 2)):
                before = set(servers.healthy())
                assert len(before) == 2
                send(servers.process.pid, signal.SIGHUP)
                until(
                    lambda before=before: len(now := servers.healthy()) == 2 and not before & {*now}
                )
                reached = list(counts)
                until(
                    lambda reached=reached: (
                        all(a >= b + 1 for a, b in zip(counts, reached))
                        or any(each.done() for each in clients)
                    )
                )
        finally:
            over.set()
        for each in clients:
            each.result()


def test_streams_of_an_endpoint_end_as_undisturbed_ones_do(servers):
    before = servers.healthy()
    assert len(before) == 2
    one, both = sgl.RuntimeEndpoint(before[1]), sgl.RuntimeEndpoint(servers.url)
    expected = [told.run(prompt, seed=i, backend=one).text() for i, prompt in enumerate(PROMPTS)]
    over, counts = threading.Event(), [0] * CLIENTS

    def client(number):
        while not over.is_set():
            state = told.run(PROMPTS[number], seed=number, backend=both, stream=True)
            text = "".join(state.text_iter())
            assert text == state.text() == expected[number]
            counts[number] += 1

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        try:
            until(lambda: min(counts) >= 2 or any(each.done() for each in clients))
            send(int(servers.servers()[before[0]]), signal.SIGKILL)
            until(lambda: len(servers.healthy()) == 2 and before[0] not in servers.healthy())
            reached = list(counts)
            until(
                lambda: (
                    all(a >= b + 2 for a, b in zip(counts, reached))
                    or any(each.done() for each in clients)
                )
            )
        finally:
            over.set()
        for each in clients:
            each.result()


def test_a_program_goes_through_a_gateway_inside_a_completion(servers):
    nodes = [
        {"kind": "Gen", "name": "a", "params": {"max_tokens": 3}},
        {"kind": "Text", "text": "!"},
    ]
    for stream in (False, True):
        inner = {"version": 1, "prompt": "ab", "program": {"nodes": nodes}, "stream": stream}
        body = {"model": "", "prompt": "", "stream": stream, "program": inner}
        body["model"] = httpx2.get(servers.url + "/v1/models", timeout=60).json()["data"][0]["id"]
        response = httpx2.post(servers.url + "/v1/completions", json=body, timeout=60)
        assert response.status_code == 200, response.text
        if stream:
            assert response.text.rstrip().endswith("data: [DONE]")
        else:
            assert response.json()["result"]["text"].endswith("!")


def test_a_server_whose_engine_dies_is_started_again(servers, texts):
    before = servers.healthy()
    server = int(servers.servers()[before[0]])
    engine = max(children(server))  # the other one waits for the end of the first process
    send(engine, signal.SIGKILL)
    until(lambda: not alive([server]))
    assert answer(servers.url, PROMPTS[0]) == texts[PROMPTS[0]]
    until(lambda: len(servers.healthy()) == 2)


def test_a_gateway_that_dies_is_started_again(servers, texts):
    before = servers.gateway()
    send(before, signal.SIGKILL)
    until(lambda: servers.gateway() != before)
    until(lambda: httpx_ok(servers.url))
    assert answer(servers.url, PROMPTS[0]) == texts[PROMPTS[0]]


def httpx_ok(url):
    with contextlib.suppress(httpx2.HTTPError):
        return httpx2.post(url + "/generate", json=asked("a", 1), timeout=20).status_code == 200
    return False


def test_what_is_open_is_answered_after_sigterm_and_nothing_is_left(servers, texts):
    pids = servers.pids()
    assert len(pids) >= 6  # and two engines
    with ThreadPoolExecutor(CLIENTS) as pool:
        begun = threading.Barrier(CLIENTS + 1)

        def client(prompt):
            body = {**asked(prompt, 600), "stream": True}
            with httpx2.stream(
                "POST", servers.url + "/generate", json=body, timeout=120
            ) as response:
                lines = response.iter_lines()
                next(lines)
                begun.wait(60)
                return [line for line in lines if line][-1]

        open_ones = [pool.submit(client, prompt) for prompt in PROMPTS]
        begun.wait(60)
        servers.process.send_signal(signal.SIGTERM)
        assert [each.result(60) for each in open_ones] == ["data: [DONE]"] * CLIENTS
    assert servers.process.wait(60) == 0
    until(lambda: not alive(pids))


@pytest.mark.parametrize("end", ["kill", "signals"])
def test_nothing_is_left_of_a_supervisor_that_is_killed(folder, end):
    try:
        package = gateway.package_of("auto")
    except CapabilityError:
        pytest.skip("no gateway is installed")
    servers = Servers(folder, package, count=1)
    pids = servers.pids()
    assert len(alive(pids)) >= 4
    if end == "kill":
        servers.process.kill()
    else:
        servers.process.send_signal(signal.SIGTERM)
        servers.process.send_signal(signal.SIGINT)
    servers.process.wait(60)
    until(lambda: not alive(pids))
    servers.stop()


def test_a_gateway_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(gateway.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CapabilityError, match="pip install smg"):
        gateway.package_of("auto")
    with pytest.raises(CapabilityError, match="pip install sglang-router"):
        gateway.package_of("sglang-router")


def test_each_server_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ParameterError, match="3 servers need a GPU each, but there are 2"):
        serve(ServerSettings(), {"model": "none"}, ReplicaSettings(replicas=3), print)
    with pytest.raises(ParameterError, match="cuda:1"):
        serve(ServerSettings(), {"device": "cuda:1"}, ReplicaSettings(replicas=2), print)


def test_a_policy_without_a_gateway_is_refused():
    with pytest.raises(ParameterError, match=r"policy: .*schedule_policy"):
        ReplicaSettings(policy="random")


@pytest.mark.parametrize("url", ["10.0.0.2:30000", "http://10.0.0.2/"])
def test_an_address_of_a_worker_has_to_be_whole(url):
    with pytest.raises(ParameterError, match="workers"):
        ReplicaSettings(workers=(url,))


def test_a_gateway_that_never_starts_ends_the_command(tmp_path):
    (tmp_path / "smg").mkdir()
    (tmp_path / "smg" / "__init__.py").touch()
    (tmp_path / "smg" / "launch_router.py").write_text("import a_package_that_is_missing")
    command = [sys.executable, "-m", "sglang_lite.launch_server", "--model-path", "none", "--port", "0",
               "--workers", "http://127.0.0.1:1", "--gateway", "smg"]  # fmt: skip
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "No module named 'a_package_that_is_missing'" in ended.stderr + ended.stdout
    assert "the gateway ended before it answered" in ended.stderr
