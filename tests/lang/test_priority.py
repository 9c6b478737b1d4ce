"""Priority of programs: all of their requests have it."""

import threading

import pytest

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.program.nodes import Fork, Gen, Join, Program, Select, Text
from sglang_lite.protocol import Played, SamplingParams
from tests.constraints.test_generation import random_model
from tests.server.conftest import serving
from tests.waiting import until


@pytest.fixture(scope="module")
def engine():
    with Engine.of(random_model(), max_running=1, policy="priority") as engine:
        yield engine


def gen(tokens=2):
    return Gen("a", SamplingParams(max_tokens=tokens, ignore_eos=True))


def test_of_waiting_programs_those_of_higher_priority_go_first(engine):
    ended, over = [], threading.Semaphore(0)

    def sink(name):
        def take(event):
            if not isinstance(event, Played):
                ended.append(name)
                over.release()

        return take

    engine.run_program("p", Program((gen(900),)), sink=sink("first"))
    until(lambda: engine.stats()["running"] == 1)
    engine.run_program("p", Program((gen(),)), sink=sink("low"))
    engine.run_program("p", Program((Select("c", ("a",)),)), sink=sink("high"), priority=5)
    engine.run_program("p", Program((Fork(((gen(),),)), Join())), sink=sink("middle"), priority=1)
    opened = engine.open_program(sink=sink("open"), priority=3)
    opened.extend((), (Text("p"), gen()))
    opened.close()
    until(lambda: engine.stats()["waiting"] == 4)
    for _ in range(5):
        over.acquire()
    assert ended == ["first", "high", "open", "middle", "low"]


class Noting(LocalBackend):
    """Notes the priorities of the programs that it is handed."""

    def __init__(self, engine):
        super().__init__(engine)
        self.noted = []

    def open_program(self, sink, *, stream, priority=0):
        self.noted.append(priority)
        return super().open_program(sink, stream=stream, priority=priority)


@sgl.function
def inner(s):
    s += "i" + sgl.gen("x", max_tokens=1)


@sgl.function
def program(s):
    s += "p" + sgl.gen("a", max_tokens=1)


@sgl.function
def calling(s):
    s += s.call(inner)["x"] + inner.run()["x"] + sgl.gen("a", max_tokens=1)


def test_runs_batches_and_programs_inside_have_it(engine):
    backend = Noting(engine)
    program.run(backend=backend, priority=2)["a"]
    program.run_batch([{}] * 2, backend=backend, priority=3)
    program.run(backend=backend)["a"]
    assert backend.noted == [2, 3, 3, 0]
    calling.run(backend=backend, priority=6)["a"]
    assert backend.noted[4:] == [6, 6, 6]


@sgl.function
def parts(s):
    s += "p" + sgl.gen("a", max_tokens=2) + sgl.select("way", ["left", "right"])
    left, right = s.fork(2)
    left += sgl.gen("b", max_tokens=2)
    right += " or " + sgl.gen("c", max_tokens=2)
    s += " and " + sgl.gen("d", max_tokens=2, n=2)


def test_what_runs_again_is_one_program_of_the_same_priority(engine):
    backend = Noting(engine)
    state = parts.run(backend=backend, priority=2, seed=1)
    before = backend.engine.stats()
    again = state.rerun("way", {"left": "right", "right": "left"}[state["way"]])
    assert again["a"] == state["a"]
    assert again.usage().completion_tokens == 8  # b, c, and d twice
    assert backend.noted == [2, 2]
    after = backend.engine.stats()
    assert after["programs_opened"] - before["programs_opened"] == 1
    assert after["requests_submitted"] == before["requests_submitted"]
    same = again.rerun("way", state["way"])
    assert same.text() == state.text()
    assert same["d"] == state["d"]
    assert same.usage().completion_tokens == 0  # as answers of the first run are known, too


def test_it_goes_over_http(engine):
    with serving(engine) as url:
        remote = sgl.RuntimeEndpoint(url, retries=0)
        assert remote.capabilities.priority
        assert program.run(backend=remote, priority=2)["a"] is not None
        assert program.run_batch([{}], backend=remote, priority=2)[0]["a"] is not None
        remote.shutdown()


def test_who_takes_none_refuses_it_by_name(engine):
    with Engine.of(random_model()) as plain:
        backend = LocalBackend(plain)
        with pytest.raises(sgl.ParameterError, match=r"priority: .*policy is 'lpm'"):
            program.run(backend=backend, priority=1)["a"]
        with serving(plain) as url:
            remote = sgl.RuntimeEndpoint(url, retries=0)
            with pytest.raises(sgl.ParameterError, match=r"priority: .*policy is 'lpm'"):
                program.run(backend=remote, priority=1)["a"]
            found = program.run_batch([{}], backend=remote, priority=1, on_error="return")
            assert isinstance(found[0], sgl.ParameterError)
            remote.shutdown()
    scripted = sgl.ScriptedBackend({"p": "a"})
    with pytest.raises(sgl.CapabilityError, match="accepts no priority"):
        program.run(backend=scripted, priority=1)
    with pytest.raises(sgl.CapabilityError, match="accepts no priority"):
        program.run(backend=LocalBackend(engine), priority=1, push_down=False)
    with pytest.raises(sgl.ParameterError, match="priority: 'high' is not a whole number"):
        program.run(backend=scripted, priority="high")  # type: ignore[arg-type] # on purpose
