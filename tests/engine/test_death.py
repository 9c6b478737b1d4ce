"""Ends: of the engine's process and of its handle's, in the middle of whatever they do. Nobody waits, nothing is left."""

import contextlib
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest

import sglang_lite as sgl
from sglang_lite.program.nodes import Gen, Program
from sglang_lite.protocol import EngineClosedError, Generation, SamplingParams
from tests.engine import load, processes
from tests.engine.collector import Collector
from tests.engine.conftest import SETTINGS

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("SGLANG_LITE_KILLS", "3"))
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)


@pytest.fixture
def mark(monkeypatch):
    """A mark of all processes that a test starts; none of them is left."""
    name = uuid.uuid4().hex
    monkeypatch.setenv(processes.MARK, name)
    yield name
    processes.gone(name)


def engine_of(mark):
    """The engine's process, not its workers."""
    (pid,) = set(processes.marked(mark)) & set(processes.children())
    return pid


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_process_that_is_killed_fails_each_request_once(folders, mark):
    for kill in range(KILLS):
        engine = sgl.Engine(folders[0], **SETTINGS)
        pid, rng = engine_of(mark), random.Random(kill)
        left, now = rng.choice([0, 0, 10, 100, 500, 1500]), threading.Event()
        killed = threading.Event()

        def told(event, moment=now):
            nonlocal left
            left -= 1
            if left <= 0:
                moment.set()

        def killer(pid=pid, moment=now, done=killed):
            moment.wait(20)  # where fewer events come, as all are compiled
            os.kill(pid, signal.SIGKILL)
            done.set()

        if left == 0:
            now.set()
        thread = threading.Thread(target=killer)
        thread.start()
        sinks = load.start(engine, kill, told=told)
        thread.join()
        processes.gone(mark)
        closed = 0
        for sink in sinks:
            for event in sink.ends():
                if isinstance(event, EngineClosedError):
                    assert "SIGKILL" in str(event)
                    closed += 1
        with pytest.raises(EngineClosedError, match="SIGKILL"):
            engine.complete("ab")
        engine.close()
        assert [len(sink.ends()) for sink in sinks] == [sink.count for sink in sinks]


def test_a_parent_that_is_killed_takes_its_processes_along(folders, mark, tmp_path):
    for kill in range(KILLS):
        moment = random.Random(kill).choice([-1, 0, 0, 1, 100, 1000])
        command = [sys.executable, "-m", "tests.engine.load", folders[0], json.dumps(SETTINGS), str(kill)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            if moment >= 0:
                assert parent.stdout.readline() == "started\n"
            for _ in range(moment):
                parent.stdout.readline()
            parent.kill()
        processes.gone(mark)


def test_an_engine_that_restarts_has_the_weights_that_were_set_last(folders, mark, monkeypatch, tmp_path):
    """Wherever its caller has gone meanwhile."""
    paths = [Path(folder) for folder in folders]
    monkeypatch.chdir(paths[0].parent)
    with sgl.Engine(paths[0].name, **SETTINGS, restart=True) as engine:
        first = engine.complete("ab", GREEDY).text
        monkeypatch.chdir(paths[1])
        engine.update_weights(f"../{paths[1].name}")
        monkeypatch.chdir(tmp_path)
        assert engine.model_name == engine.config.model == f"../{paths[1].name}"
        second = engine.complete("ab", GREEDY).text
        assert first != second
        for _ in range(3):
            sink = Collector()
            engine.submit("ab", LONG, sink=sink, stream=True)
            sink.begun()
            os.kill(engine_of(mark), signal.SIGKILL)
            assert "SIGKILL" in str(sink.end())
            assert engine.complete("ab", GREEDY).text == second
        os.kill(engine_of(mark), signal.SIGKILL)
        with pytest.raises(EngineClosedError, match="SIGKILL"):
            while True:  # until that is seen
                engine.complete("ab", GREEDY)
        with pytest.raises(EngineClosedError, match="SIGKILL"):
            engine.stats()
        assert processes.marked(mark) == []


def test_engines_one_after_the_other_leave_nothing_behind(folders, mark):
    """Closed, dropped, dropped in a cycle, and left with requests open."""
    before = None
    for i in range(max(4, KILLS * 2 // 5)):
        engine = sgl.Engine(folders[0], **SETTINGS)
        sink = Collector()
        engine.submit("ab", LONG, sink=sink, stream=True)
        sink.begun()
        match i % 4:
            case 0:
                engine.close()
                engine.close()
            case 1:
                del engine
            case 2:
                cycle: list[object] = [engine]
                cycle.append(cycle)
                del engine, cycle
                gc.collect()
            case 3:
                with contextlib.suppress(LookupError), engine:
                    raise LookupError
        assert isinstance(sink.end(), EngineClosedError)
        processes.gone(mark)
        for thread in threading.enumerate():
            if thread.name in ("sglang_lite-events", "sglang_lite-output", "sglang_lite-send"):
                thread.join(60) if thread not in OTHERS else None
        after = (processes.descriptors(), threading.active_count(), len(processes.children()))
        assert before in (None, after)
        before = after


OTHERS: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _others():
    """Threads of the session's engine."""
    OTHERS.clear()
    OTHERS.update(threading.enumerate())


def interrupted(engine, call):
    """Makes a call, and presses Ctrl-C when its request runs."""

    def press():
        while engine.stats()["running"] == 0:
            pass
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        call(engine)
    thread.join()


@sgl.function
def waits(s):
    s += "ab" + sgl.gen("x", max_tokens=1500, ignore_eos=True)


@pytest.mark.parametrize(
    "call",
    [
        lambda e: e.complete("ab", LONG),
        lambda e: e.play("ab", Program((Gen("x", LONG),))),
        lambda e: e.generate("ab", {"max_new_tokens": 1500, "ignore_eos": True}),
        lambda e: e.generate(["ab"] * 9, {"max_new_tokens": 1500, "ignore_eos": True}),
        lambda e: list(e.generate("ab", {"max_new_tokens": 1500, "ignore_eos": True}, stream=True)),
    ],
    ids=["complete", "play", "generate", "batch", "stream"],
)
def test_ctrl_c_ends_what_is_waited_for_and_nothing_else(own, call):
    interrupted(own, call)
    while own.stats()["running"]:
        pass
    assert isinstance(own.complete("ab", GREEDY), Generation)
    assert own.stats()["waiting"] == 0


@pytest.mark.parametrize("read", [lambda s: s["x"], lambda s: s.text(), lambda s: s.messages()])
def test_ctrl_c_in_a_reading_cancels_its_program(own, read):
    state = waits.run(backend=own)
    interrupted(own, lambda e: read(state))
    with pytest.raises(sgl.RequestAbortedError):
        state["x"]
    while own.stats()["running"]:
        pass
    assert isinstance(own.complete("ab", GREEDY), Generation)
