"""A process that is stopped: one line says so, calls wait and go on. One that is busy for as long
is not taken for it.
"""

import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import sglang_lite as sgl
from sglang_lite.engine import signs_of_life
from sglang_lite.engine.signs_of_life import SignsOfLife, is_ending
from sglang_lite.protocol import Generation, SamplingParams
from tests.children import stopped
from tests.engine import processes, processors
from tests.engine.collector import Collector
from tests.engine.conftest import SETTINGS
from tests.waiting import until

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OFTEN_S = 0.6  # between two looks; a process sends a beat meanwhile if it can


@pytest.fixture
def looks(monkeypatch):
    """Looks at processes from which nothing has come for `OFTEN_S`."""
    found = []

    def processor_time(pid, asked=signs_of_life.processor_time):
        found.append(pid)
        return asked(pid)

    monkeypatch.setattr(signs_of_life, "LOOK_S", OFTEN_S)
    monkeypatch.setattr(signs_of_life, "processor_time", processor_time)
    return found


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """A pipe that `processors.reads_with_pythons_lock` reads."""
    path = tmp_path_factory.mktemp("pipe") / "held"
    os.mkfifo(path)
    return path


@pytest.fixture(scope="module")
def running(folders, held):
    """An engine and its process."""
    before = set(processes.children())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HELD", str(held))
        patch.setattr(signs_of_life, "LOOK_S", OFTEN_S)
        with sgl.Engine(folders[0], **SETTINGS) as engine:
            yield engine, process_of(before)


@pytest.fixture
def lines(caplog):
    """Lines about processes without a sign of life."""
    with caplog.at_level(logging.ERROR, "sglang_lite"):
        yield lambda: [
            each.getMessage() for each in caplog.records if "no sign of life" in each.getMessage()
        ]


@sgl.function
def program(s):
    s += "ab" + sgl.gen("x", max_tokens=6, temperature=0, ignore_eos=True)


def process_of(before):
    """The process of an engine that was not there before."""
    (pid,) = set(processes.children()) - before
    return pid


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere the system does not tell of other processes"
)
def test_a_stopped_process_is_told_of_once_and_its_calls_go_on_when_it_does(running, looks, lines):
    engine, pid = running
    expected, sink = engine.complete("ab", GREEDY).text, Collector()
    with stopped(pid):
        engine.submit("ab", GREEDY, sink=sink)
        until(lambda: not engine.core.responds and lines())
        said, looked = lines(), len(looks)
        with pytest.raises(sgl.RequestTimeoutError):
            program.run(backend=engine, timeout=0.05)["x"]
        until(lambda: len(looks) > looked + signs_of_life.LOOKS)
        assert lines() == said
        assert (
            f"the engine's process {pid} has given no sign of life for {signs_of_life.LOOKS * OFTEN_S:g} s"
            in said[-1]
        )
        assert not sink.events
    assert sink.end().text == expected
    assert engine.core.responds
    assert isinstance(engine.complete("ab", GREEDY), Generation)


def test_c_code_that_keeps_pythons_lock_is_not_taken_for_it(running, held, looks, lines):
    """And computes nothing."""
    engine, _ = running
    sink = Collector()
    engine.submit(
        "ab",
        SamplingParams(max_tokens=1),
        logit_processor=processors.reads_with_pythons_lock,
        sink=sink,
    )
    with open(held, "wb", buffering=0) as file:  # which waits for who reads it
        del looks[:]
        until(lambda: len(looks) > signs_of_life.LOOKS + 1)
        assert engine.core.responds
        file.write(b"a token")
        assert isinstance(sink.end(), Generation)
    assert not lines()


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere the system does not tell of other processes"
)
def test_a_load_that_is_stopped_is_told_of_too(folders, looks, lines, monkeypatch, tmp_path):
    held = tmp_path / "held"
    os.mkfifo(held)
    (tmp_path / "torch.py").write_text(
        f"open({str(held)!r}).read()\nraise ImportError('it has been read')"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(processes.children())
    with ThreadPoolExecutor(1) as pool:
        # On the CPU: for a GPU an engine starts another process that imports torch, where there is
        # one.
        loading = pool.submit(lambda: sgl.Engine(folders[0], **SETTINGS, device="cpu"))
        with open(held, "wb"), stopped(process_of(before)):  # opening waits for who reads it
            until(lines)
        with pytest.raises(sgl.SglError, match="it has been read"):
            loading.result()


def test_a_process_is_ending_from_its_kill_on():
    """Also before its memory is taken back, which is much here."""
    code = "import sys; room = bytearray(300_000_000); print('ready', flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout.readline() == b"ready\n"
        assert not is_ending(child.pid)
        child.kill()
        assert all(is_ending(child.pid) for _ in range(200))
        assert SignsOfLife(child.pid).is_ending
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
    assert is_ending(child.pid)
    assert not is_ending(None)
    assert not is_ending(os.getpid())
