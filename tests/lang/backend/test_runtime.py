"""Runtime: a server that is started for this process, and ends with it."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sglang_lite as sgl
from sglang_lite.compat.sglang.server_process import flags_of
from tests.children import send
from tests.engine.processes import MARK, ended, gone

FLAGS: dict[str, Any] = {
    "dtype": "float32",
    "max_total_tokens": 4096,
    "max_running": 4,
    "threads": 1,
    "deterministic": True,
}


@pytest.fixture(scope="module")
def runtime(folders):
    with sgl.Runtime(model_path=folders[0], api_key="a-long-key", **FLAGS) as runtime:
        yield runtime


@sgl.function
def program(s):
    s += "ab" + sgl.gen("x", max_tokens=5, temperature=0)


def test_a_runtime_answers_as_sglangs_does(runtime, folders):
    assert runtime.url.startswith("http://127.0.0.1:")
    assert runtime.generate_url == f"{runtime.url}/generate"
    assert runtime.endpoint.get_model_name() == folders[0]
    answer = json.loads(runtime.generate("ab", {"max_new_tokens": 5, "temperature": 0}))
    assert len(answer["output_ids"]) == 5
    assert [len(json.loads(runtime.generate(["a", "b"], {"max_new_tokens": 2}))), runtime.server_args["dtype"]] == [
        2, "float32",
    ]  # fmt: skip

    async def stream():
        return [
            text
            async for text in runtime.async_generate("ab", {"max_new_tokens": 5, "temperature": 0})
        ]

    assert "".join(asyncio.run(stream())) == answer["text"]
    assert asyncio.run(runtime.get_server_info())["max_running"] == 4
    with pytest.raises(sgl.SglError, match="embedding"):
        runtime.encode("ab")
    assert runtime.get_tokenizer().decode(answer["output_ids"]) == answer["text"]


def test_nobody_reads_a_key_from_the_command_line(runtime):
    assert b"a-long-key" not in Path(f"/proc/{runtime.pid}/cmdline").read_bytes()


def test_a_runtime_is_a_backend(runtime):
    sgl.set_default_backend(runtime)
    state = program.run()
    assert (
        state["x"]
        == json.loads(runtime.generate("ab", {"max_new_tokens": 5, "temperature": 0}))["text"]
    )
    assert sgl.flush_cache(runtime) is True
    assert sgl.get_server_info()["version"]
    assert program.run(backend=runtime)["x"] == state["x"]


def test_a_model_that_is_not_there_is_told_with_the_last_lines(tmp_path, caplog):
    caplog.set_level(logging.INFO, "sglang_lite.server")
    with pytest.raises(sgl.BackendError, match=r"(?s)ended with status 1.*last output.*nowhere"):
        sgl.Runtime(model_path=str(tmp_path / "nowhere"))
    assert "nowhere" in caplog.text


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"nonsense": 3}, "nonsense: is not a flag"),
        ({"max_running": "a"}, "max_running: invalid int"),
    ],
)
def test_a_flag_that_the_command_does_not_take_is_named(flags, told):
    with pytest.raises(sgl.ParameterError, match=rf"{told}.*sglang-lite serve --help"):
        sgl.Runtime(model_path="nowhere", **flags)


def test_one_that_is_not_ready_in_time_is_ended(folders):
    with pytest.raises(sgl.BackendError, match=r"not ready after 0.1 s.*launch_timeout"):
        sgl.Runtime(launch_timeout=0.1, model_path=folders[0], **FLAGS)


def test_shutdown_ends_the_process(runtime):
    """The last test with this one."""
    runtime.shutdown()
    runtime.shutdown()
    ended(runtime.pid)
    with pytest.raises(sgl.BackendError, match="connection failed"):
        sgl.RuntimeEndpoint(runtime.url)


@pytest.mark.parametrize("end", ["kill", "exit"])
def test_no_server_outlives_who_started_it(folders, end):
    code = (
        "import sglang_lite as sgl, sys, time\n"
        f"runtime = sgl.Runtime(model_path={folders[0]!r}, **{FLAGS!r})\n"
        "print(runtime.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    environment = {**os.environ, MARK: f"runtime-{end}-{os.getpid()}"}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        pid = int(parent.stdout.readline())
        if end == "kill":
            send(parent.pid, signal.SIGKILL)
        else:
            parent.stdin.close()
        parent.wait()
    ended(pid)
    gone(environment[MARK])  # its engine's, too


def test_settings_as_flags():
    settings = {"model_path": "a b", "port": 0, "overlap": False, "disable_radix_cache": False, "dtype": None,
                "deterministic": True, "api_key": ["x", "y"], "mem_fraction": 0.5,
                "mm_process_config": {"video": {"fps": 1}}, "enable_multimodal": False}  # fmt: skip
    assert flags_of(settings) == [
        "--model-path=a b", "--port=0", "--no-overlap", "--deterministic", "--api-key=x", "--api-key=y",
        "--mem-fraction=0.5", '--mm-process-config={"video": {"fps": 1}}', "--no-enable-multimodal",
    ]  # fmt: skip
    with pytest.raises(sgl.ParameterError, match="model_path"):
        flags_of({"model_path": object()})
