"""Compiled runs afterwards and inside others: they are added to, run again, kept and ended as any other run."""

import copy
import pickle

import pytest

import sglang_lite as sgl
from sglang_lite.engine.engine import Engine
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.lang.chat_template import get_chat_template
from tests.constraints.test_generation import random_model
from tests.lang.fakes import Silent
from tests.waiting import until


@pytest.fixture(scope="module")
def engine():
    with Engine.of(random_model(), max_running=64) as engine:
        yield engine


@pytest.fixture
def backend(engine):
    backend = LocalBackend(engine)
    backend.chat_template = get_chat_template("chatml")
    return backend


def told(state, *names):
    return state.text(), [state[name] for name in names], state.messages(), state.ret_value


@sgl.function
def one(s, x):
    s += x + sgl.gen("a", max_tokens=2)


@sgl.function
def parts(s, topic, length=3):
    s += sgl.user(f"Plan {topic}.") + sgl.assistant(sgl.gen("plan", max_tokens=length))
    forks = s.fork(2)
    forks += lambda i: f"Part {i} of {topic}:" + sgl.gen("part", max_tokens=2)
    forks.join()
    s += "Best: " + sgl.select("best", [f"{topic} 0", f"{topic} 1"]) + sgl.gen("end", max_tokens=2)


@pytest.mark.parametrize(("name", "hint"), [("answer", r"is read as s\['answer'\]"), ("gen", r"Write s \+= sgl\.gen")])
def test_an_attribute_that_a_state_does_not_have_is_explained(backend, name, hint):
    for program in (one, one.compile(backend)):
        state = program.run("x", backend=backend)
        with pytest.raises(AttributeError, match=hint):
            getattr(state, name)
        state.sync()


def state_of(program, backend, **options):
    return program.run("bees", backend=backend, seed=4, **options)


def more(state):
    state += " And " + sgl.gen("more", max_tokens=3)
    return state["more"], state.text()


def asked(backend, state, at, value):
    """Results of a run that runs again, and how many requests that makes."""
    before = backend.engine.stats()["requests_submitted"]
    found = state.rerun(at, value)
    found.error()
    return found, backend.engine.stats()["requests_submitted"] - before


def test_what_is_added_to_a_compiled_run_is_played_as_after_any_other(backend):
    compiled = parts.compile(backend)
    assert more(state_of(compiled, backend)) == more(state_of(parts, backend))
    (in_batch,) = compiled.run_batch([["bees"]], backend=backend, seed=4)
    assert more(in_batch) == more(state_of(parts, backend))
    for branches in (lambda state: state.fork_at("plan", 2), lambda state: state.fork(2)):
        found, want = ([more(each) for each in branches(state_of(p, backend))] for p in (compiled, parts))
        assert found == want


def test_a_compiled_run_runs_again_where_a_value_is_another(backend):
    compiled = parts.compile(backend)
    for name, value in (("end", "over"), ("best", "bees 1"), ("plan", "p"), ("end", None)):
        found, want = [asked(backend, state_of(program, backend), name, value) for program in (compiled, parts)]
        assert told(found[0], "plan", "part", "best", "end") == told(want[0], "plan", "part", "best", "end")
        assert found[1] == want[1]
    drawn = parts.compile(backend).run("bees", backend=backend)  # without a seed
    again, requests = asked(backend, drawn, "end", "over")
    assert (again["plan"], again["part"], requests) == (drawn["plan"], drawn["part"], 0)


def test_compiled_runs_are_loaded_copied_and_pickled_as_others(backend, tmp_path):
    compiled = parts.compile(backend)
    want = told(state_of(parts, backend).rerun("end", "over"), "plan", "part", "end")
    state = state_of(compiled, backend)
    assert state.restored is None
    state.save(tmp_path / "state")
    for program in (parts, compiled):
        loaded = sgl.load(tmp_path / "state", program, backend=backend)
        assert loaded.restored == "tokens"
        assert told(loaded.rerun("end", "over"), "plan", "part", "end") == want
    assert told(copy.deepcopy(state).rerun("end", "over"), "plan", "part", "end") == want
    assert pickle.loads(pickle.dumps(state)).text() == state.text()


def test_bound_and_positional_arguments_are_those_of_the_rerun(backend):
    @sgl.function
    def program(s, x, /, n, *, y="y"):
        for i in range(n):
            s += x + y + sgl.gen(f"g{i}", max_tokens=1)

    state = program.bind(n=2).compile(backend).run("a", backend=backend, seed=1)
    again, requests = asked(backend, state, "g1", "end")
    assert (again.text(), requests) == ("ay" + state["g0"] + "ayend", 0)


def test_a_run_that_failed_runs_again_from_where_it_did(backend):
    @sgl.function
    def program(s, x):
        s += x + sgl.gen("a", max_tokens=2) + sgl.gen("n", type=int, max_tokens=0) + sgl.gen("b", max_tokens=1)

    state = program.compile(backend).run("x", backend=backend, seed=1)
    assert isinstance(state.error(), sgl.ValueValidationError)
    again = state.rerun("a", "7")
    assert again["a"] == "7"
    assert isinstance(again.error(), sgl.ValueValidationError)


def test_a_compiled_program_is_pickled_and_copied_compiled(backend):
    for compiled in (parts.compile(backend), parts.bind(length=2).compile(backend)):
        for made in (pickle.loads(pickle.dumps(compiled)), copy.deepcopy(compiled)):
            assert made.compiled.program == compiled.compiled.program
            assert state_of(made, backend).text() == state_of(compiled, backend).text()
    assert pickle.loads(pickle.dumps(parts)).compiled is None


# ------------------------------------------------------------------------------------------------- inside others


def run_inside(compiled, **options):
    return [compiled.run("x", **options)["a"]]


def batch_inside(compiled, **options):
    return compiled.run_batch([["x"]] * 3, num_threads=1, on_error="return", **options)


def iterator_inside(compiled, **options):
    return list(compiled.run_batch([["x"]] * 3, num_threads=1, on_error="return", generator_style=True, **options))


@sgl.function
def around(s, work, compiled, found):
    for _ in range(2):
        try:
            found += work(compiled)
        except sgl.SglError as error:
            found.append(error)


INSIDE = [(run_inside, 1), (batch_inside, 3), (iterator_inside, 3)]


@pytest.mark.parametrize(("work", "rows"), INSIDE)
def test_what_runs_inside_a_body_is_cancelled_with_its_run(work, rows):
    silent, found = Silent(), []
    compiled = one.compile(silent)
    state = around.run(work, compiled, found, backend=silent, stream=True)
    until(lambda: silent.started)
    state.cancel()
    until(lambda: len(found) == 2 * rows)  # those of the body's second try, too, which are never started
    assert {type(each) for each in found} == {sgl.RequestAbortedError}
    assert {each.message for each in found} == {"the program was cancelled."}
    assert silent.started == silent.ended == 1


@pytest.mark.parametrize(("work", "rows"), INSIDE)
def test_what_runs_inside_a_body_has_its_runs_time(work, rows):
    silent, found = Silent(), []
    around.run(work, one.compile(silent), found, backend=silent, timeout=0.05)
    assert len(found) == 2 * rows
    assert {type(each) for each in found} == {sgl.RequestTimeoutError}
    assert "the run took longer than its timeout of 0.05 s" in str(found[0])
    until(lambda: silent.started == silent.ended)


def test_what_runs_inside_a_body_is_asked_node_by_node_with_it(backend):
    compiled, found = one.compile(backend), []
    before = backend.engine.stats()["programs_opened"]
    around.run(run_inside, compiled, found, backend=backend, push_down=False, seed=1)
    assert backend.engine.stats()["programs_opened"] == before
    assert len(found) == 2
