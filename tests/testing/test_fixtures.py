"""The fixture that replays a test's recording, and the guard against the network."""

import os
import socket
import subprocess
import sys

import pytest

import sglang_lite as sgl
from sglang_lite.testing import no_network

CONFTEST = 'pytest_plugins = ["sglang_lite.testing.fixtures"]\n'
TEST = """
import sglang_lite as sgl

@sgl.function
def capital(s, country):
    s += sgl.user(f"What is the capital of {country}?") + sgl.assistant(sgl.gen("answer"))

def make():
    open("made", "a").write("x")
    return sgl.ScriptedBackend(default="Paris")

def test_france(recorded):
    assert capital.run("France", backend=recorded(make))["answer"] == "Paris"
"""


def test_a_test_is_recorded_once_and_replays(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TEST)

    def run(**environment):
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(tmp_path),
        ]
        environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True
        )
        return done.returncode, done.stdout

    code, told = run()
    assert code == 1
    assert "SGLANG_LITE_RECORD=1" in told
    assert run(SGLANG_LITE_RECORD="1")[0] == 0
    assert (tmp_path / "recordings" / "test_it.test_france.jsonl").exists()
    assert run()[0] == 0
    assert (tmp_path / "made").read_text() == "x"


def test_no_network_refuses_sockets_and_names_while_it_lasts():
    with no_network():
        with (
            socket.socket() as each,
            pytest.raises(
                sgl.ProgramError,
                match=r"no_network\(\): a connection to 127\.0\.0\.1:9 was opened inside",
            ),
        ):
            each.connect(("127.0.0.1", 9))
        with pytest.raises(sgl.ProgramError, match="the name localhost was looked up inside"):
            socket.getaddrinfo("localhost", 80)
    assert socket.getaddrinfo("127.0.0.1", 80)
