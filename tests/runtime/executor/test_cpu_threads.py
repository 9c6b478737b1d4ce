"""Threads of a step on a CPU: one fewer beside a stream, while constraints are compiled."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime import executor
from sglang_lite.runtime.structured_output.compiler import Compiler
from tests.runtime.scripted import ScriptedModel, SteppedEngine, loaded

LONG = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


@pytest.fixture(autouse=True)
def three_threads(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    monkeypatch.setattr(executor.os, "sched_getaffinity", lambda _: {0, 1, 2})
    yield
    torch.set_num_threads(before)


def threads_of_steps(monkeypatch, *, busy=True, stream=True, **config):
    """Thread counts of forwards and of logits."""
    monkeypatch.setattr(Compiler, "is_busy", lambda _: busy)
    seen = SimpleNamespace(forward=set(), logits=set())

    class Noting(ScriptedModel):
        def forward(self, *given):
            seen.forward.add(torch.get_num_threads())
            return super().forward(*given)

        def logits(self, *given):
            seen.logits.add(torch.get_num_threads())
            return super().logits(*given)

    engine = SteppedEngine(model=replace(loaded(), model=Noting()), **config)
    engine.start([1, 2, 3], LONG, stream=stream)
    while not engine.scheduler.queues.decoding:
        engine.step()
    for counts in vars(seen).values():
        counts.clear()
    for _ in range(3):
        engine.step()
    assert torch.get_num_threads() == 3
    return [*seen.forward, *seen.logits]


def test_a_stream_leaves_a_core_to_what_compiles(monkeypatch):
    assert threads_of_steps(monkeypatch) == [2, 2]


@pytest.mark.parametrize(
    "other", [{"busy": False}, {"stream": False}, {"deterministic": True}], ids=str
)
def test_else_all_threads_compute(monkeypatch, other):
    assert threads_of_steps(monkeypatch, **other) == [3, 3]


def test_where_cores_are_left_all_threads_compute(monkeypatch):
    monkeypatch.setattr(executor.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert threads_of_steps(monkeypatch) == [3, 3]
