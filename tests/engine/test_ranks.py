"""An engine whose model is cut over processes: what it answers, what it refuses, and how it ends."""

import contextlib
import os
import random
import signal
import threading
import uuid
from pathlib import Path

import pytest

import sglang_lite as sgl
from sglang_lite.protocol import EngineClosedError, SamplingParams
from tests.children import send
from tests.engine import load, processes
from tests.engine.collector import Collector
from tests.waiting import until

KILLS = int(os.environ.get("SGLANG_LITE_KILLS", "1"))
SETTINGS = dict(device="cpu", dtype="float32", max_running=4, max_total_tokens=4096, threads=2)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)


@pytest.fixture
def mark(monkeypatch):
    """A mark of all processes that a test starts; none of them is left."""
    name = uuid.uuid4().hex
    monkeypatch.setenv(processes.MARK, name)
    yield name
    processes.gone(name)


def answer(engine, prompt):
    """Text of an answer; None while the process is ending."""
    with contextlib.suppress(EngineClosedError):
        return engine.complete(prompt, GREEDY).text


def pids(engine):
    return {each["rank"]: each["pid"] for each in engine.stats()["ranks"]}


def test_ranks_answer_like_one_process_and_a_dead_one_fails_all_by_name(folders, own, mark):
    with sgl.Engine(folders[0], **SETTINGS, tp_size=2, restart=True) as engine:
        prompts = ["ab", "abc" * 20, "b"]
        assert [engine.complete(p, GREEDY).text for p in prompts] == [
            own.complete(p, GREEDY).text for p in prompts
        ]
        with pytest.raises(
            sgl.CapabilityError, match="update_weights: is not here with tp_size above 1"
        ):
            engine.update_weights(folders[1])
        assert Path(f"/proc/{pids(engine)[1]}/comm").read_text() == "sgl-rank-1\n"
        assert engine.get_all_child_pids() == list(pids(engine).values())
        for number, named in (
            (signal.SIGKILL, "rank 1 of 2 was ended by SIGKILL"),
            (signal.SIGSTOP, "no sign of life"),
        ):
            running = [Collector() for _ in range(3)]
            for sink in running:
                engine.submit("ab", LONG, sink=sink, stream=True)
            running[0].begun()
            send(pids(engine)[1], number)
            for sink in running:
                error = sink.end()
                assert isinstance(error, EngineClosedError)
                assert named in str(error)
            if number == signal.SIGKILL or KILLS > 1:  # ranks start anew in one way
                assert until(lambda: answer(engine, "ab")) == own.complete("ab", GREEDY).text


@pytest.mark.slow
def test_whichever_rank_is_killed_and_whenever_nobody_waits_and_nothing_is_left(
    folders, mark, monkeypatch, tmp_path
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for kill in range(KILLS - 1):  # the first is in the test above
        dice = random.Random(kill)
        engine = sgl.Engine(folders[0], **SETTINGS, tp_size=2 + kill % 2 * 2)
        victims, left, now = pids(engine), dice.choice([0, 1, 10, 100, 400]), threading.Event()

        def told(_, moment=now):
            nonlocal left
            left -= 1
            if left <= 0:
                moment.set()

        sinks = load.start(engine, kill, stop=now.is_set, told=told)
        now.wait(20)
        victim = dice.choice([*victims])
        send(victims[victim], signal.SIGKILL)
        for sink in sinks:
            for event in sink.ends():
                if isinstance(event, EngineClosedError):
                    assert (
                        "SIGKILL"
                        if victim == 0
                        else f"rank {victim} of {len(victims)} was ended by SIGKILL"
                    ) in str(event)
        engine.close()
        processes.gone(mark)
        assert not list(tmp_path.glob("sglang_lite-ranks-*"))
