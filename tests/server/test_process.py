"""The life of a server's process: started by its command, ended by signals, and what its engine's
death is to it.
"""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx2

from tests.children import send
from tests.server.conftest import TEMPLATE
from tests.waiting import until

LONG = {
    "text": "a",
    "stream": True,
    "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True},
}


@contextlib.contextmanager
def launched(
    folder,
    *flags,
    module="sglang_lite.launch_server",
    ready=True,
    run=("-m",),
    log=subprocess.DEVNULL,
):
    """A server in a process of its own, and its address.

    Args:
        run: Python's arguments before `module`.
        log: the file that its log goes to.
    """
    command = [
        sys.executable, *run, module, *(["serve"] if module == "sglang_lite" else []), "--model-path", folder,
        "--dtype", "float32", "--threads", "1", "--max-total-tokens", "8192", "--chat-template", TEMPLATE,
        "--port", "0", "--tp-size", "1", *flags,
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith("Serving"), line
        url = line.split()[-1]
        if ready:
            until(
                lambda: (
                    process.poll() is not None
                    or httpx2.get(f"{url}/ready", timeout=60).status_code == 200
                )
            )
            assert process.poll() is None
        yield process, url
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


# Runs a module in a process that waits little for an engine that was told to end.
HASTY = """
import runpy, sys
from sglang_lite.engine import spawned_process
spawned_process.PATIENCE_S = 0.2
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__")
"""


def children_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(each) for each in file.read().split()]


def gone(pid):
    """Waits until a process has ended."""

    def ended():
        with (
            contextlib.suppress(FileNotFoundError, ProcessLookupError),
            open(f"/proc/{pid}/stat") as file,
        ):
            return file.read().rpartition(")")[2].split()[0] == "Z"
        return True

    until(ended)


def events(response):
    return [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]


def test_the_command_serves_until_it_is_told_to_end(folder):
    with launched(folder) as (process, url):
        (engine,) = children_of(process.pid)
        with open(f"/proc/{engine}/comm") as name:
            assert name.read() == "sglang-engine\n"
        body = {"model": "", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
        assert httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200
        process.terminate()
        assert process.wait(60) == 0
        gone(engine)


def test_what_is_open_ends_well_after_sigterm(folder):
    """However long that takes."""
    # each event has all so far
    body = {**LONG, "sampling_params": {"max_new_tokens": 600, "ignore_eos": True}}
    with launched(folder, "--drain-s", "3600", module="sglang_lite") as (process, url):
        with httpx2.stream("POST", f"{url}/generate", json=body, timeout=None) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.terminate()
            last = [json.loads(line[6:]) for line in lines if line.startswith("data: {")][-1]
        assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 600}
        assert process.wait(60) == 0


def test_a_second_signal_ends_it_at_once(folder, tmp_path):
    with open(tmp_path / "log", "w+") as log, launched(folder, log=log) as (process, url):
        (engine,) = children_of(process.pid)
        begun, told = threading.Event(), []

        def read():
            body = {**LONG, "text": ["a"] * 30}
            with httpx2.stream("POST", f"{url}/generate", json=body, timeout=60) as stream:
                for line in stream.iter_lines():
                    begun.set()
                    told[:] = [*told[-3:], line]

        thread = threading.Thread(target=read)
        thread.start()
        assert begun.wait(60)
        process.terminate()
        # it has heard the first one
        until(lambda: httpx2.get(f"{url}/ready", timeout=60).status_code == 503)
        process.terminate()
        process.wait(60)
        thread.join(60)
        gone(engine)
        assert told[-2:] == ["data: [DONE]", ""]
        assert (
            json.loads(told[-4][6:])["meta_info"]["finish_reason"]["err_type"]
            == "EngineClosedError"
        )
        said = Path(log.name).read_text()
        assert "second signal: open requests are ended now" in said
        assert said.count("1 requests have not ended, and get an error") == 1
        assert "Traceback" not in said


def test_the_death_of_its_engine_is_told_at_once(folder):
    with launched(folder) as (process, url):
        (engine,) = children_of(process.pid)
        with httpx2.stream("POST", f"{url}/generate", json=LONG, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            send(engine, signal.SIGKILL)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        error = json.loads(rest[-2][6:])["error"]
        assert error["code"] == 503
        assert "SIGKILL" in error["message"]
        assert httpx2.get(f"{url}/health", timeout=60).status_code == 503
        assert httpx2.get(f"{url}/ping", timeout=60).status_code == 200
        assert httpx2.post(f"{url}/generate", json={"text": "a"}, timeout=60).status_code == 503


def test_an_engine_that_was_killed_is_unhealthy_from_then_on(folder):
    """Before its connection ends: the system takes its memory back first."""
    with launched(folder) as (process, url), httpx2.Client(base_url=url, timeout=60) as http:
        (engine,) = children_of(process.pid)
        assert http.get("/health").status_code == 200
        send(engine, signal.SIGKILL)
        assert {http.get(path).status_code for path in ("/health", "/ready") * 50} == {503}


def test_an_engine_that_stands_still_is_unhealthy_and_holds_up_no_end(folder):
    """Nor does a request that is open, for longer than `--drain-s`."""
    with launched(folder, "--health-timeout-s", "1", "--drain-s", "0.5", run=("-c", HASTY)) as (
        process,
        url,
    ):
        (engine,) = children_of(process.pid)
        with httpx2.stream("POST", f"{url}/generate", json=LONG, timeout=60) as stream:
            next(stream.iter_lines())
            send(engine, signal.SIGSTOP)
            until(lambda: httpx2.get(f"{url}/health", timeout=60).status_code == 503)
            asked = httpx2.get(f"{url}/v1/loads", timeout=60)
            assert asked.status_code == 504
            assert "has not responded" in asked.json()["error"]["message"]
            assert httpx2.get(f"{url}/health_generate", timeout=60).status_code == 504
            assert httpx2.get(f"{url}/ping", timeout=60).status_code == 200
            process.terminate()
            assert process.wait(60) == 0
        gone(engine)


def test_an_engine_that_died_is_started_again_where_that_is_wanted_and_outlives_no_server_that_is_killed(
    folder,
):
    with launched(folder, "--restart") as (process, url):
        (engine,) = children_of(process.pid)
        send(engine, signal.SIGKILL)
        gone(engine)

        def serves():
            status = httpx2.post(f"{url}/generate", json={"text": "a"}, timeout=60).status_code
            assert status in (200, 503)
            return status == 200

        until(serves)
        assert httpx2.get(f"{url}/health", timeout=60).status_code == 200
        (engine,) = children_of(process.pid)
        process.kill()
        gone(engine)


def test_a_port_in_use_is_one_line_before_the_model_is_loaded(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "sglang_lite", "serve", "--model", folder, "--port", port]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert "--port" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_flag_that_is_wrong_is_one_line(folder):
    for flags in (
        ["--tool-call-parser", "no"],
        ["--max-open", "0"],
        ["--port", "70000"],
        ["--nnodes", "2"],
    ):
        command = [sys.executable, "-m", "sglang_lite", "serve", "--model", folder, *flags]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 1
        assert len(ended.stderr.splitlines()) == 1, ended.stderr
