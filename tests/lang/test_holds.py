"""Holds of compiled programs: where the caller's Python has a say, and what goes on behind it."""

import asyncio
import json
import threading
from dataclasses import replace
from typing import Literal

import pytest
from pydantic import BaseModel

import sglang_lite as sgl
from sglang_lite.engine.engine import Engine
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.program.nodes import Fill
from sglang_lite.protocol import CompileError
from tests.constraints.test_generation import random_model
from tests.lang.fakes import Silent
from tests.waiting import until


@pytest.fixture(scope="module")
def engine():
    with Engine.of(replace(random_model(), context_length=4096), max_running=64) as engine:
        yield engine


@pytest.fixture
def backend(engine):
    backend = LocalBackend(engine)
    backend.chat_template = get_chat_template("chatml")
    return backend


def told(state, *names):
    if isinstance(state, Exception):
        return type(state)
    return state.text(), [state[name] for name in names], state.ret_value


bodies, checked, found = [], [], []


@sgl.function
def letters(s, question, tries=4):
    bodies.append(question)
    s += f"Q: {question} " + sgl.gen("x", regex="[a-e]", check=lambda x: checked.append(x) or x != "b", retries=40)
    s += f" so {s['x']}" + sgl.gen("y", max_tokens=tries)
    if s["x"] == "c":
        s += " is c" + sgl.gen("z", max_tokens=2)
    left, right = s.fork(2)
    left += " left" + sgl.gen("l", max_tokens=2)
    right += " right" + sgl.select("r", ["one", f"{question}"])
    s += " and " + left["l"] + right["r"]
    return s["y"]


def test_a_check_is_a_hold_and_the_body_is_not_run(backend):
    compiled = letters.compile(backend)
    assert compiled.compiled.program.held is not None
    compiled.run("first", backend=backend)
    for seed in range(6):
        bodies.clear()
        checked.clear()
        got = told(compiled.run("Why", tries=3, seed=seed, backend=backend), "x", "y")
        of_it = list(checked)
        assert bodies == []
        want = letters.run("Why", tries=3, seed=seed, backend=backend, push_down=False)
        assert got == told(want, "x", "y")
        assert of_it + of_it == checked  # each value once


@pytest.mark.slow
def test_a_batch_has_no_thread_a_row_and_one_program_each(backend):
    compiled = letters.compile(backend)
    rows = [{"question": f"What is {i}?"} for i in range(12)]
    want = [told(state, "x", "y") for state in letters.run_batch(rows, backend=backend, seed=1, on_error="return")]
    compiled.run_batch(rows[:1], backend=backend)
    bodies.clear()
    before = backend.engine.stats()["programs_opened"]
    got = compiled.run_batch(rows, backend=backend, seed=1, num_threads=12, on_error="return")
    assert [told(state, "x", "y") for state in got] == want
    assert backend.engine.stats()["programs_opened"] - before == 12
    assert bodies == []
    got = dict(compiled.run_batch(rows, backend=backend, seed=1, num_threads=3, ordered=False, on_error="return"))
    assert [told(got[i], "x", "y") for i in range(12)] == want


def test_coroutines_run_programs_with_holds(backend):
    compiled = letters.compile(backend)

    async def main():
        state = await compiled.arun("Why", backend=backend, seed=1)
        states = await compiled.arun_batch([{"question": "Why"}], backend=backend, seed=1)
        return [await state.get("y"), *[each["y"] for each in states]]

    assert asyncio.run(main()) == [letters.run("Why", backend=backend, seed=1)["y"]] * 2


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    young: bool


@sgl.function
def pets(s):
    s += "Pet: " + sgl.gen("pet", type=Pet) + "\n"
    s += f"A {s['pet'].kind.upper()}" + sgl.gen("x", max_tokens=2)
    if s["pet"].young:
        s += " young"
    s["kind"] = s["pet"].kind
    return {"kinds": [s["pet"].kind]}


def test_parts_and_methods_of_typed_values_are_holds(backend):
    compiled = pets.compile(backend)
    assert any(isinstance(node, Fill) and node.hold == 0 for node in compiled.compiled.program.nodes)
    for seed in range(4):
        got, want = (told(each.run(seed=seed, backend=backend), "pet", "x", "kind") for each in (compiled, pets))
        assert got == want


def double(a: int) -> int:
    """Twice as much."""
    found.append((a, threading.current_thread().name))
    return 2 * a


def call(**arguments):
    return json.dumps({"tool": "double", "arguments": arguments})


@sgl.function
def agent(s):
    s += sgl.user("Twice 3, and twice that?")
    return sgl.use_tools(s, [double], "sum", max_steps=2, max_tokens=120)


@pytest.mark.slow
def test_a_turn_of_a_tool_is_a_hold(backend):
    compiled = agent.compile(backend)
    compiled.run(seed=1, backend=backend)
    for seed in range(8):
        found.clear()
        got = outcome(compiled, backend, seed)
        calls = [a for a, _ in found]
        assert got == outcome(agent, backend, seed)
        assert [a for a, _ in found] == calls + calls


def outcome(program, backend, seed):
    try:
        state = program.run(seed=seed, backend=backend)
    except sgl.SglError as error:
        return str(error)
    return state.text(), state.ret_value, state.messages()


@sgl.function
def inner(s, question):
    s += question + " " + sgl.gen("answer", regex="[a-c]")


@sgl.function
def outer(s, question):
    s += "Start: " + inner(question)["answer"] + sgl.gen("x", max_tokens=2)
    s += s.call(inner, f"{question}!")["answer"] + inner.run(s["x"], temperature=0.5)["answer"]
    s["used"] = s.usage("x").completion_tokens
    if s.usage("x").completion_tokens > 1:
        s += " [" + s.text() + "] "
    s += sgl.gen("y", max_tokens=1)


def test_programs_inside_and_what_is_known_of_a_run_are_holds(backend):
    compiled = outer.compile(backend)
    for seed in (1, 2):
        got, want = (told(each.run("Who", seed=seed, backend=backend), "x", "used", "y") for each in (compiled, outer))
        assert got == want


def test_a_hold_fails_its_row_as_its_body_would(backend):
    class OwnError(Exception):
        pass

    def breaks(text):
        raise OwnError(text)

    @sgl.function
    def refused(s, x):
        s += x + sgl.gen("a", max_tokens=2, check=lambda text: False) + " more " + sgl.gen("b", max_tokens=2)

    @sgl.function
    def broken(s, x):
        s += x + sgl.gen("a", max_tokens=2, check=breaks)

    @sgl.function
    def raises(s, x):
        s += x + sgl.gen("a", type=Pet)
        s += s["a"].kind.nothing

    for program, kinds in ((refused, sgl.ValueValidationError), (broken, sgl.ProgramError), (raises, AttributeError)):
        for each in (program.compile(backend), program):
            (error,) = each.run_batch([{"x": "a"}], backend=backend, on_error="return", seed=1)
            assert type(error) is kinds


def test_a_run_that_is_stopped_at_a_hold_ends(backend):
    class Open(Silent):
        """Takes programs that grow."""

        def open_program(self, sink, *, stream, priority=0):
            self.started += 1
            return self

        def extend(self, path, nodes):
            pass

        def drop(self, path):
            pass

        def close(self):
            self.ended += 1

    silent = Open()

    @sgl.function
    def program(s, x):
        s += x + sgl.gen("a", max_tokens=2, check=bool)
        s += s["a"]

    compiled = program.compile(silent)
    with pytest.raises(sgl.RequestTimeoutError):
        compiled.run("x", backend=silent, timeout=0.01)
    rows = compiled.run_batch([{"x": "a"}, {"x": "b"}], backend=silent, timeout=0.01, on_error="return")
    assert [type(each) for each in rows] == [sgl.RequestTimeoutError] * 2
    states = compiled.run_batch([{"x": "a"}] * 3, backend=silent, generator_style=True, on_error="return", timeout=60)
    states.close()
    until(lambda: silent.ended == silent.started)


def test_a_stream_runs_the_body(backend):
    compiled = letters.compile(backend)
    bodies.clear()
    assert "".join(compiled.run("x", backend=backend, stream=True).text_iter()).startswith("Q: x")
    assert bodies == ["x"]


def test_what_a_hold_can_not_notice_is_refused():
    def sized(s):
        s += sgl.gen("a", max_tokens=2) + str(len(s.text()))

    def gone_through(s):
        s += sgl.gen("a", max_tokens=2)
        for line in s["a"].splitlines():
            s += line

    def of_an_argument(s, x):
        s += x.upper()

    for body, match in (
        (sized, "how long it is"), (gone_through, "go through it"), (of_an_argument, "can't call it"),
    ):  # fmt: skip
        with pytest.raises(CompileError, match=match) as error:
            sgl.function(body).compile()
        assert "test_holds.py" in str(error.value)


def test_a_program_with_holds_is_saved_and_run_again(backend, tmp_path):
    state = letters.compile(backend).run("Why", seed=2, backend=backend)
    state.save(tmp_path / "state")
    again = sgl.load(tmp_path / "state", letters, backend=backend)
    assert told(again, "x", "y") == told(state, "x", "y")
    assert state.rerun("y", "new")["y"] == "new"
