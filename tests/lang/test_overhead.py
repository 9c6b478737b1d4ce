"""The language's own work and memory stay small: calls of Python functions in a program, bytes of a waiting state."""

import asyncio
import gc
import sys
import tracemalloc

import pytest

import sglang_lite as sgl
from sglang_lite.lang.concurrency.loop import executor
from sglang_lite.protocol import Generation
from tests.waiting import until

STATES = 200


@sgl.function
def four_gens(s):
    for name in "abcd":
        s += "Answer this question, please: "
        s += sgl.gen(name, max_tokens=16)


@sgl.function
def fork_of_eight(s):
    s += "Answer this question, please: "
    forks = s.fork(8)
    for branch in forks:
        branch += sgl.gen("a", max_tokens=16)
    forks.join()


@sgl.function
def one_gen(s):
    s += "Answer this question, please: "
    s += sgl.gen("a", max_tokens=16)


def calls(work):
    """Number of calls of Python functions that this thread makes."""
    count = 0

    def note(_frame, event, _arg):
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize(("program", "most"), [(four_gens, 360), (fork_of_eight, 960)])  # 298 and 802 with Python 3.11
def test_a_program_takes_so_many_calls_of_python_at_most(program, most):
    backend = sgl.ScriptedBackend(default="an answer")
    for _ in range(3):  # what is kept from run to run is there then
        program.run(backend=backend)
    assert calls(lambda: program.run(backend=backend)) <= most


class Waiting(sgl.BaseBackend):
    """Answers when it is told to."""

    def __init__(self):
        super().__init__()
        self.asked, self.told = 0, asyncio.Event()

    async def agenerate(self, prompt, params, constraint, *, stream):
        self.asked += 1
        await self.told.wait()
        yield Generation("an answer")


def test_a_state_that_waits_takes_so_much_memory_at_most():
    backend = Waiting()
    first = [one_gen.run(backend=backend) for _ in range(20)]
    until(lambda: backend.asked == len(first))
    gc.collect()
    tracemalloc.start()
    try:
        states = [one_gen.run(backend=backend) for _ in range(STATES)]
        until(lambda: backend.asked == len(first) + STATES)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        executor().post(backend.told.set)
    assert [state["a"] for state in (*first, *states)] == ["an answer"] * (len(first) + STATES)
    assert used / STATES <= 8_000  # bytes; 6,200 with Python 3.11
