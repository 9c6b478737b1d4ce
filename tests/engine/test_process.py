"""Starting: however the caller's Python was started, and whatever is wrong. One error each, and
nothing is left.
"""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import uuid
import zipapp
from pathlib import Path

import pytest

import sglang_lite as sgl
from sglang_lite.protocol import Generation, SamplingParams
from tests.children import in_a_child, interrupted, send
from tests.engine import processes
from tests.engine.conftest import SETTINGS
from tests.waiting import until

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
ROOT = Path(__file__).parents[2]

# Nothing guards it; a module beside the program, and what it has put into the environment, are
# there in the process; a request is open when it ends.
PROGRAM = """
import os, sys
sys.path.append({beside!r})
os.environ["LETTER"] = "36"
import sglang_lite as sgl
import their_processors
engine = sgl.Engine({folder!r}, **{settings!r})
text = engine.generate("ab", {{"max_new_tokens": 3}}, custom_logit_processor=their_processors.letter)["text"]
engine.submit("ab", sgl.protocol.SamplingParams(max_tokens=1500, ignore_eos=True), sink=lambda event: None)
loaded = [name for name in ("torch", "transformers") if name in sys.modules]
with open({out!r}, "w") as file:
    file.write(f"{{text}} {{loaded}}")
"""
PROCESSORS = """
import os
def letter(ids, logits):
    logits[:] = -100.0
    logits[int(os.environ["LETTER"])] = 0.0
    return logits
"""


@pytest.fixture
def mark(monkeypatch):
    name = uuid.uuid4().hex
    monkeypatch.setenv(processes.MARK, name)
    yield name
    processes.gone(name)


@pytest.fixture
def nothing_left(mark):
    """Check that afterwards is nothing that was not there before; what other tests have left may
    end meanwhile. The thread that reads what a process prints ends after all that have its pipe.
    """
    gc.collect()
    descriptors, threads, children = (
        processes.descriptors(),
        set(threading.enumerate()),
        set(processes.children("")),
    )
    yield
    processes.gone(mark)
    until(lambda: set(threading.enumerate()) <= threads)
    now = processes.descriptors()
    assert len(now) <= len(descriptors), [
        path for number, path in now.items() if descriptors.get(number) != path
    ]
    assert set(processes.children("")) <= children


def script(tmp_path, program):
    (tmp_path / "script.py").write_text(program)
    return [sys.executable, "script.py"], ""


def text(tmp_path, program):
    return [sys.executable, "-c", program], ""


def stdin(tmp_path, program):
    return [sys.executable, "-"], program


def archive(tmp_path, program):
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "__main__.py").write_text(program)
    zipapp.create_archive(folder, tmp_path / "app.pyz")
    return [sys.executable, "app.pyz"], ""


def notebook(tmp_path, program):
    """Cells have no file, and run on a thread with a loop."""
    cell = f"import asyncio\nasync def cell():\n    exec({program!r}, {{'__name__': '__main__'}})\nasyncio.run(cell())"
    return [sys.executable, "-c", cell], ""


def isolated(tmp_path, program):
    """Modules of the folder that it is in have names of Python's own."""
    for name in ("signal", "socket", "struct", "types", "logging"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not this one')")
    paths = os.environ["PYTHONPATH"].split(os.pathsep)
    return [sys.executable, "-I", "-c", f"import sys\nsys.path[:0] = {paths!r}\n{program}"], ""


def closed(tmp_path, program):
    """Standard input, output and error are closed."""
    (tmp_path / "script.py").write_text(program)
    return ["sh", "-c", f"exec {sys.executable} script.py <&- >&- 2>&-"], ""


def few_descriptors(tmp_path, program):
    return ["sh", "-c", 'ulimit -n 64 && exec "$0" -', sys.executable], program


def impatient_sockets(tmp_path, program):
    return [sys.executable, "-c", f"import socket\nsocket.setdefaulttimeout(0.05)\n{program}"], ""


WAYS = [
    script, text, stdin, archive, notebook, isolated, closed, few_descriptors, impatient_sockets,
]  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_it_starts_however_python_was_started(folders, mark, tmp_path, monkeypatch, way):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    beside, folder, out = tmp_path / "beside", tmp_path / "in", tmp_path / "out"
    beside.mkdir()
    folder.mkdir()
    (beside / "their_processors.py").write_text(PROCESSORS)
    program = PROGRAM.format(beside=str(beside), folder=folders[0], settings=SETTINGS, out=str(out))
    command, given = way(folder, program)
    ran = subprocess.run(
        command, input=given, cwd=folder, capture_output=True, text=True, timeout=200, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert out.read_text() == "EEE []"
    assert "Traceback" not in ran.stderr


BLOCKED = """
import sys, threading
from sglang_lite.engine import spawned_process
spawned_process.PATIENCE_S = 0.2  # Python's end waits for twice as long
import sglang_lite as sgl
engine = sgl.Engine(sys.argv[1])
begun = threading.Event()
def sink(event):
    begun.set()
    threading.Event().wait()
engine.submit("ab", sgl.protocol.SamplingParams(max_tokens=1000, ignore_eos=True), sink=sink, stream=True)
begun.wait()
"""


def test_a_sink_that_never_returns_does_not_hold_up_pythons_end(folders, mark):
    ran = subprocess.run(
        [sys.executable, "-c", BLOCKED, folders[0]],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


# ------------------------------------------------------------------------------ what does not start


@pytest.mark.parametrize(
    "name", ["/nowhere/to/be/found", "no such model", "\udcff", "x" * 5000, ""]
)
def test_a_model_that_is_not_there_is_said_to_be(nothing_left, name):
    with pytest.raises(sgl.SglError):
        sgl.Engine(name, **SETTINGS)


def copied(folder, tmp_path):
    for file in Path(folder).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", ["", "{", '{"a": 1}'])
def test_a_model_whose_files_are_damaged_is_refused(nothing_left, folders, tmp_path, file, content):
    folder = copied(folders[0], tmp_path)
    (folder / file).write_text(content)
    with pytest.raises(sgl.ModelError, match=file):
        sgl.Engine(str(folder), **SETTINGS)


def test_a_model_whose_weights_are_damaged_is_refused_as_in_process(
    nothing_left, folders, tmp_path
):
    folder = copied(folders[0], tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    said = []
    for own in (True, False):
        with pytest.raises(sgl.ModelError) as caught:
            sgl.Engine(str(folder), **SETTINGS, in_process=not own)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_a_setting_that_only_the_process_can_check_is_refused_as_in_process(nothing_left, folders):
    said = []
    for own in (True, False):
        with pytest.raises(sgl.ParameterError) as caught:
            sgl.Engine(folders[0], **{**SETTINGS, "context_length": 100_000}, in_process=not own)
        said.append(str(caught.value))
    assert said[0] == said[1]


def wrapper(tmp_path, body):
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("", "does not say where its executable is"),
        ("/nowhere/python", "can't be started: .*No such file"),
        ("/bin/false", "ended with status 1"),
        ("/bin/true", "ended with status 0"),
        ("echo out of luck; exit 3", "ended with status 3.*\n.*out of luck"),
        ("kill -9 $$", "ended by SIGKILL"),
        ("kill -35 $$", "ended by "),
        ("exec head -c 300000 /dev/zero", "ended with status 0"),
        (
            "head -c 100000 /dev/urandom >&$(ls /proc/self/fd | sort -n | tail -2 | head -1); exit 1",
            "process",
        ),
    ],
)
def test_a_python_that_is_none_is_one_error(
    nothing_left, folders, tmp_path, monkeypatch, python, message
):
    is_path = not python or (python.startswith("/") and " " not in python)
    monkeypatch.setattr(sys, "executable", python if is_path else wrapper(tmp_path, python))
    for _ in range(3):
        with pytest.raises(sgl.SglError, match=f"(?s){message}") as caught:
            sgl.Engine(folders[0], **SETTINGS)
        assert len(str(caught.value)) < 250_000


def slow_torch(tmp_path, monkeypatch):
    """A file; the process imports torch for as long as that can't be read. On the CPU: for a GPU,
    where there is one, an engine starts a process beside its own that imports torch, too.
    """
    held = tmp_path / "held"
    os.mkfifo(held)
    (tmp_path / "torch.py").write_text(f"open({str(held)!r}).read()")
    monkeypatch.syspath_prepend(str(tmp_path))
    return held


def test_a_process_that_is_killed_while_it_loads_is_one_error(
    mark, nothing_left, folders, tmp_path, monkeypatch
):
    torch = slow_torch(tmp_path, monkeypatch)

    def kill():
        with open(torch, "wb"):  # which waits for who reads it
            (pid,) = processes.marked(mark)
            send(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    with pytest.raises(sgl.EngineClosedError, match="SIGKILL"):
        sgl.Engine(folders[0], **SETTINGS, device="cpu")
    thread.join()


def test_a_process_that_lacks_what_it_needs_says_so(nothing_left, folders, tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('a broken install')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(sgl.SglError, match="a broken install"):
        sgl.Engine(folders[0], **SETTINGS)


def test_a_caller_whose_folder_was_removed_is_told_what_it_would_be_elsewhere(
    nothing_left, folders, tmp_path, monkeypatch
):
    lost = tmp_path / "lost"
    lost.mkdir()
    monkeypatch.chdir(lost)
    lost.rmdir()
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(sgl.EngineClosedError, match="ended with status 1"):
        sgl.Engine(folders[0], **SETTINGS)
    monkeypatch.undo()


def test_a_constructor_that_is_interrupted_leaves_nothing(folders, tmp_path):
    assert in_a_child(interrupted_constructor, folders[0], str(tmp_path)) == []


def interrupted_constructor(folder, slow):
    """Processes that are left of an engine whose constructor is interrupted."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as left:
        torch = slow_torch(Path(slow), patch)
        patch.setenv(processes.MARK, slow)
        opened = []

        def loading():
            """True when the engine's process imports torch, for as long as this file is open."""
            opened[:] = opened or [left.enter_context(open(torch, "wb"))]
            return True

        interrupted(lambda: sgl.Engine(folder, **SETTINGS, device="cpu"), loading)
        processes.gone(slow)
    return processes.marked(slow)


EXHAUSTED = """
import json, os, resource, sys, threading
import sglang_lite as sgl
import sglang_lite.engine.core_client
folder, settings = sys.argv[1], json.loads(sys.argv[2])
sys.executable = "/bin/false"
try:
    sgl.Engine(folder, **settings)  # what is imported is there
except sgl.EngineClosedError:
    pass
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
opened = lambda: sorted(os.listdir("/proc/self/fd"))
for left in range(12):
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    for descriptor in taken[len(taken) - left:]:
        os.close(descriptor)
    del taken[len(taken) - left:]
    for _ in range(3):
        try:
            sgl.Engine(folder, **settings)
        except sgl.SglError as error:
            said = type(error).__name__ + ": " + str(error)
    free = 0
    more = []
    try:
        while True:
            more.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    for descriptor in more + taken:
        os.close(descriptor)
    print(json.dumps([left, len(more), threading.active_count(), said]))
"""


def test_descriptors_that_run_out_are_one_error(folders, mark):
    ran = subprocess.run(
        [sys.executable, "-c", EXHAUSTED, folders[0], json.dumps(SETTINGS)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [row[0] for row in rows] == list(range(12))
    assert [row[1] for row in rows] == list(range(12)), "a descriptor was left open"
    assert {row[2] for row in rows} == {1}
    assert rows[0][3].startswith(
        "BackendError: the engine's process can't be started: [Errno 24] Too many open files"
    )
    assert rows[-1][3].startswith("EngineClosedError: the engine's process ended with status 1")
    assert "Traceback" not in ran.stderr


def test_an_engine_that_works_is_not_hurt_by_one_that_does_not_start(own, folders, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(sgl.EngineClosedError):
        sgl.Engine(folders[0], **SETTINGS)
    assert isinstance(own.complete("ab", GREEDY), Generation)
