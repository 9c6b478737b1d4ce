"""Compiled programs: what is data in them, how they run, and what is refused."""

import asyncio
import re
from dataclasses import dataclass

import msgspec
import pytest

import sglang_lite as sgl
from sglang_lite.engine.engine import Engine
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.program.compiled import CompiledProgram, Filler, Hole, Parameter
from sglang_lite.program.nodes import Fill, Fork, Gen, Program, Text
from sglang_lite.protocol import CompileError, Played, ProgramResult, Regex
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


calls = []


@sgl.function
def ask(s, question, length=4, style={"tone": "dry"}):  # noqa: B006 # it is data
    calls.append(question)
    s += sgl.user(f"Q: {question} ({style['tone']})")
    s += sgl.assistant(sgl.gen("a", max_tokens=length))
    s += "Again: " + s["a"] + sgl.select("b", [f"{question}!", "no"])
    return {"first": s["a"], "text": f"<{s['b']}>"}


def told(state, *names):
    return state.text(), [state[name] for name in names], state.messages(), state.ret_value


def test_a_run_is_filled_and_its_body_is_not_run(backend):
    compiled = ask.compile(backend)
    compiled.run("Who", backend=backend)  # a first row is compared with what the body does
    calls.clear()
    got = told(compiled.run("Why", length=3, backend=backend, seed=1), "a", "b")
    assert calls == []
    assert got == told(ask.run("Why", length=3, backend=backend, seed=1), "a", "b")


def test_metadata_and_usage_are_those_of_the_nodes(backend):
    got, want = (p.run("Why", backend=backend, seed=1) for p in (ask.compile(backend), ask))
    assert got.usage().completion_tokens == want.usage().completion_tokens > 0
    assert got.get_meta_info("a")["finish_reason"] == want.get_meta_info("a")["finish_reason"]
    assert got.probs("b").keys() == want.probs("b").keys()
    assert got.error() is None
    heads = [state.trace().head for state in (got, want)]
    assert heads[0].backend == heads[1].backend == "LocalBackend"
    assert [(each.kind, each.text) for each in got.trace().nodes if each.kind == "gen"] == [
        (each.kind, each.text) for each in want.trace().nodes if each.kind == "gen"
    ]


def test_one_form_serves_all_rows_and_settings_make_another(backend):
    compiled = ask.compile(backend)
    compiled.run_batch([{"question": str(i)} for i in range(5)], backend=backend)
    assert len(compiled.compiled.specializations) == 1
    compiled.run("Why", backend=backend, temperature=0.5)
    backend.chat_template = get_chat_template("llama-2-chat")
    state = compiled.run("Why", backend=backend, seed=1)
    assert len(compiled.compiled.specializations) == 3
    assert told(state, "a") == told(ask.run("Why", backend=backend, seed=1), "a")


def test_an_engine_sees_one_program_a_row(backend):
    compiled = ask.compile(backend)
    before = backend.engine.stats()
    compiled.run_batch([{"question": str(i)} for i in range(7)], backend=backend)
    after = backend.engine.stats()
    assert after["programs_opened"] - before["programs_opened"] == 7
    assert after["requests_submitted"] == before["requests_submitted"]


def test_a_batch_is_what_its_runs_are(backend):
    rows = [{"question": f"What is {i}?", "length": i % 3 + 1} for i in range(9)]

    def all_of(program, **options):
        return [told(state, "a", "b") for state in program.run_batch(rows, backend=backend, seed=2, **options)]

    want = all_of(ask)
    compiled = ask.compile(backend)
    assert all_of(compiled) == want
    assert all_of(compiled, generator_style=True, num_threads=2) == want
    found = dict(compiled.run_batch(rows, backend=backend, seed=2, ordered=False))
    assert [told(found[i], "a", "b") for i in range(9)] == want


def test_coroutines_run_compiled_programs(backend):
    compiled = ask.compile(backend)

    async def main():
        state = await compiled.arun("Why", backend=backend, seed=1)
        states = await compiled.arun_batch([{"question": "Why"}], backend=backend, seed=1)
        return [await state.get("a"), *[each["a"] for each in states]]

    assert asyncio.run(main()) == [ask.run("Why", backend=backend, seed=1)["a"]] * 2


def test_a_checkpoint_keeps_compiled_rows(backend, tmp_path):
    compiled, file = one.compile(backend), tmp_path / "batch"
    rows = [{"x": str(i)} for i in range(3)]
    first = [told(s, "a") for s in compiled.run_batch(rows, backend=backend, seed=1, checkpoint=file)]
    before = backend.engine.stats()["programs_opened"]
    again = compiled.run_batch(rows, backend=backend, seed=1, checkpoint=file)
    assert [told(s, "a") for s in again] == first
    assert backend.engine.stats()["programs_opened"] == before


@sgl.function
def one(s, x):
    s += x + sgl.gen("a", max_tokens=2)


def test_a_timeout_ends_the_whole(backend):
    silent = Silent()
    with pytest.raises(sgl.RequestTimeoutError, match=r"timeout of 0\.01 s"):
        one.compile(silent).run("x", backend=silent, timeout=0.01)["a"]
    found = one.compile(silent).run_batch([{"x": "a"}, {"x": "b"}], backend=silent, timeout=0.01, on_error="return")
    assert [type(each) for each in found] == [sgl.RequestTimeoutError] * 2
    assert silent.ended == silent.started == 3


def test_cancelling_ends_a_run_and_leaving_ends_a_batch(backend):
    silent = Silent()
    state = one.compile(silent).run("x", backend=silent)
    state.cancel()
    with pytest.raises(sgl.RequestAbortedError):
        state["a"]
    assert silent.ended == 1

    class FirstAlone(Silent):
        def play_program(self, program, sink, flush=None, priority=0):
            end = super().play_program(program, sink, flush)
            if self.started == 1:
                sink(Played((1,), "a", sgl.RefusalError("no.")))
                sink(ProgramResult(""))
                flush()
            return end

    first = FirstAlone()
    states = one.compile(first).run_batch([{"x": "a"}] * 3, backend=first, generator_style=True, on_error="return")
    assert isinstance(next(states), sgl.RefusalError)
    states.close()
    until(lambda: first.ended == 2)


def test_a_failure_is_its_rows_alone(backend):
    @sgl.function
    def program(s, pattern):
        s += "a" + sgl.gen("x", max_tokens=2) + sgl.gen("y", regex=f"{pattern}") + sgl.gen("z", max_tokens=2)

    rows = [{"pattern": p} for p in ("[ab]", "(", "c")]
    good, bad, other = program.compile(backend).run_batch(rows, backend=backend, on_error="return")
    assert isinstance(bad, sgl.ConstraintError)
    assert good["y"] in "ab"
    assert other["y"] == "c"
    state = program.compile(backend).run("(", backend=backend)
    with pytest.raises(sgl.ConstraintError):
        state["z"]
    with pytest.raises(sgl.ConstraintError):
        state.text()
    assert isinstance(state["x"], str)


def test_a_value_that_does_not_parse_fails_its_row(backend):
    @sgl.function
    def program(s, x):
        s += x + sgl.gen("n", type=int, max_tokens=0) + sgl.gen("after", max_tokens=1)

    for each in (program.compile(backend), program):
        found = each.run_batch([["a"]], backend=backend, seed=1, on_error="return")
        assert type(found[0]) is sgl.ValueValidationError


def test_other_backends_run_the_body():
    compiled = one.compile()
    calls_of = sgl.ScriptedBackend({"x": "yes"})
    assert compiled.run("x", backend=calls_of)["a"] == "yes"
    assert [state["a"] for state in compiled.run_batch([["x"]], backend=calls_of)] == ["yes"]


def test_what_the_callers_python_decides_on_is_held(backend):
    seen = []

    @sgl.function
    def program(s, x):
        s += x + sgl.gen("a", max_tokens=2, check=lambda value: seen.append(value) or True)

    compiled = program.compile(backend)
    assert compiled.compiled.program.held == (1,)
    assert compiled.run("x", backend=backend)["a"] == seen[0]
    assert compiled.run("x", backend=backend, stream=True).text().startswith("x")


# ------------------------------------------------------------------------------------------------------- bad input


@dataclass
class Thing:
    name: str


@pytest.mark.parametrize(
    "value", [Thing("x"), ("a",), {1: "a"}, b"a", {"a": {"b": object()}}, lambda: None, 1j],
    ids=["object", "tuple", "key", "bytes", "inside", "function", "complex"],
)  # fmt: skip
def test_an_argument_that_is_no_data_is_refused_by_its_name(backend, value):
    compiled = one.compile(backend)
    with pytest.raises(sgl.ParameterError, match=r"x: .* is not plain data"):
        compiled.run(value, backend=backend)
    with pytest.raises(sgl.ParameterError, match="x: "):
        compiled.run_batch([{"x": "a"}, {"x": value}], backend=backend)


def test_an_argument_that_nests_too_deeply_is_refused(backend):
    value = []
    for _ in range(40):
        value = [value]
    with pytest.raises(sgl.ParameterError, match="nest deeper than 32"):
        one.compile(backend).run(value, backend=backend)


def test_an_unknown_or_missing_argument_is_refused(backend):
    compiled = one.compile(backend)
    with pytest.raises(sgl.ParameterError, match="unexpected keyword"):
        compiled.run("x", y=1, backend=backend)
    with pytest.raises(sgl.ParameterError, match="missing"):
        compiled.run(backend=backend)


def test_an_item_that_is_not_there_names_argument_and_line(backend):
    with pytest.raises(sgl.ParameterError, match=r"style: .* has no item 'tone'.*test_compiled.py"):
        ask.compile(backend).run("Why", style={}, backend=backend)


def test_a_parameter_of_a_wrong_type_names_its_line(backend):
    with pytest.raises(sgl.ParameterError, match=r"max_tokens: 'many'.*test_compiled.py"):
        ask.compile(backend).run("Why", length="many", backend=backend)


def refused(body, match):
    with pytest.raises(CompileError, match=match) as error:
        sgl.function(body).compile()
    assert "test_compiled.py" in str(error.value)


def test_what_can_not_be_compiled_is_refused_at_its_line():
    def loop(s, n):
        for i in range(n):
            s += f"{i}"

    def shown(s, x):
        s += f"{x!r}"

    def attribute(s, x):
        s += x.name + "!"

    def formatted(s, x):
        s += f"{x:>5}"

    def joined(s, xs):
        s += ", ".join([xs[0], xs[1]])

    def typed(s):
        s += sgl.gen("n", type=int)
        s += s["n"]

    def parameter(s):
        s += sgl.gen("a", max_tokens=2)
        s += sgl.gen("b", max_tokens=s["a"])

    def json(s, x):
        s += sgl.gen("a", json_schema={"const": f"{x}"})

    def anything(s, *args):
        s += "a"

    def length(s, xs):
        s.fork(len(xs))

    def look_up(s):
        s += sgl.gen("a", regex="[ab]")
        s += {"a": "1", "b": "2"}[s["a"]]

    def listed(s):
        s += sgl.gen("a", n=2, max_tokens=1)
        if s["a"] == ["x", "y"]:
            s += "same"

    refused(loop, "turn it into a number")
    refused(shown, "show it")
    refused(attribute, "only Python's objects have")
    refused(formatted, "format it")
    refused(joined, "can't be run with symbols")
    refused(typed, "a value that Python makes")
    refused(parameter, "not a parameter, choice or constraint")
    refused(json, "into JSON")
    refused(anything, "any number of arguments")
    refused(length, r"how long it is: xs is only known.*program\.bind\(xs=…\)")
    refused(look_up, "look it up")
    refused(listed, "compare it")


def test_a_body_that_works_on_the_text_of_an_argument_is_seen_through(backend):
    def upper(s, x):
        s += f"{x}".upper() + sgl.gen("a", max_tokens=1)

    def escaped(s, x):
        s += "a" + sgl.gen("a", regex=re.escape(f"{x}"))

    def asked(s, x):
        s += "yes" if "y" in f"{x}" else "no"
        s.fork(2)[1].__iadd__("b")
        s += sgl.gen("a", max_tokens=1)

    for body in (upper, escaped, asked):
        compiled = sgl.function(body).compile(backend)
        with pytest.raises(CompileError, match=r"works on a text.*test_compiled"):
            compiled.run("y.", backend=backend)
        with pytest.raises(CompileError, match="works on a text"):
            compiled.run_batch([["y."]], backend=backend)


def test_an_argument_can_be_all_choices_and_a_whole_pattern(backend):
    @sgl.function
    def program(s, options, pattern):
        s += "Pick " + sgl.select("a", options) + sgl.gen("b", regex=pattern) + sgl.gen("c", choices=options)

    rows = [{"options": [f"{i}a", f"{i}b", "no"], "pattern": f"[{i}x]"} for i in range(3)]
    compiled = program.compile(backend)
    found = [told(state, "a", "b", "c") for state in compiled.run_batch(rows, backend=backend, seed=1)]
    assert found == [told(state, "a", "b", "c") for state in program.run_batch(rows, backend=backend, seed=1)]
    for wrong in ([], "ab", ["a", 1], 3):
        with pytest.raises(sgl.ParameterError, match=r"choices: .*test_compiled.py"):
            compiled.run(wrong, "a", backend=backend)


def test_an_empty_argument_is_no_difference(backend):
    compiled = one.compile(backend)
    with pytest.raises(sgl.ParameterError, match="is empty"):
        compiled.run("", backend=backend)["a"]

    @sgl.function
    def program(s, x):
        s += "a" + sgl.gen("a", max_tokens=1) + f"{x}" + sgl.gen("b", max_tokens=1)

    assert (
        program.compile(backend).run("", backend=backend, seed=1).text()
        == program.run("", backend=backend, seed=1).text()
    )


def test_bound_arguments_are_constants_that_bodies_may_decide_by(backend):
    @sgl.function
    def program(s, n, x):
        for i in range(n):
            s += f"{x}{i}" + sgl.gen(f"g{i}", max_tokens=1)

    compiled = program.bind(n=3).compile(backend)
    assert [each.name for each in compiled.compiled.program.parameters] == ["x"]
    assert compiled.run(x="a", backend=backend, seed=1).text() == program.run(3, "a", backend=backend, seed=1).text()
    with pytest.raises(sgl.ParameterError, match="no parameter 'n'"):
        compiled.run(x="a", n=4, backend=backend)


@pytest.mark.slow
def test_a_body_without_an_end_is_ended():
    @sgl.function
    def adds(s):
        while True:
            s += "a"

    @sgl.function
    def reads(s):
        s += sgl.gen("x")
        while True:
            s.sync()

    @sgl.function
    def itself(s):
        s += itself()

    for program in (adds, reads, itself):
        with pytest.raises(CompileError, match=r"more than 100,000 nodes|without an end"):
            program.compile()


def test_a_kept_program_that_is_another_one_names_the_first_difference(backend):
    def program(s, x):
        s += sgl.user(f"Q: {x}")
        s += sgl.assistant(sgl.gen("a", max_tokens=3))

    kept = sgl.function(program).compile(backend).compiled.program
    assert sgl.function(program).compile(backend, saved=kept).compiled.program == kept

    def changed(s, x):
        s += sgl.user(f"Q! {x}")
        s += sgl.assistant(sgl.gen("a", max_tokens=3))

    def longer(s, x):
        program(s, x)
        s += "more"

    with pytest.raises(sgl.ProgramError, match=r"node \[2\] was Text\('Q: '.* and is Text\('Q! '.*test_compiled"):
        sgl.function(changed).compile(backend, saved=kept)
    with pytest.raises(sgl.ProgramError, match=r"node \[11\], Text\('more'\), is only in the body"):
        sgl.function(longer).compile(backend, saved=kept)
    backend.chat_template = get_chat_template("llama-2-chat")
    with pytest.raises(sgl.ProgramError, match="a chat template other than"):
        sgl.function(program).compile(backend, saved=kept)


GEN = Gen("a")
NAMED = (Parameter("x", required=True),)


@pytest.mark.parametrize(
    ("program", "match"),
    [
        (CompiledProgram("p", (Fill("y"),), NAMED), "'y' is not a parameter"),
        (CompiledProgram("p", (Fill(node=(3,)),)), "not the path of a generation"),
        (CompiledProgram("p", (Text("a"), Fill(node=(0,)))), "not the path of a generation"),
        (CompiledProgram("p", (GEN,), NAMED, (Hole((0,), ("params", "nothing"), (Fill("x"),)),)), "has no params/nothing"),
        (CompiledProgram("p", (GEN,), NAMED, (Hole((0,), ("where",), (Fill("x"),)),)), "has no where"),
        (CompiledProgram("p", (GEN,), NAMED, (Hole((9,), ("name",), (Fill("x"),)),)), "not the path of a node"),
        (CompiledProgram("p", (GEN,), NAMED, (Hole((0,), ("name",), (Fill("z"),)),)), "'z' is not a parameter"),
        (CompiledProgram("p", (GEN,), NAMED, (Hole((0,), (), (Fill("x"),)),)), "a hole needs a field"),
        (CompiledProgram("p", (GEN,), NAMED, (Hole((0,), ("name",), ("a",), whole=True),)), "a whole one exactly one argument"),
    ],
)  # fmt: skip
def test_a_tampered_program_is_refused(program, match):
    with pytest.raises(sgl.ParameterError, match=match):
        Filler(program)


def test_a_hole_gets_no_value_of_another_type():
    program = CompiledProgram(
        "p", (Gen("a", constraint=Regex("a")),), NAMED, (Hole((0,), ("constraint",), (Fill("x"),), True),)
    )
    with pytest.raises(sgl.ParameterError, match="constraint"):
        Filler(program)({"x": "text"})


def test_the_runtime_refuses_holes_that_nothing_fills(engine):
    def played(*nodes):
        with pytest.raises(sgl.SglError) as error:
            engine.play("", Program(nodes))
        return str(error.value)

    gen = Gen("x", msgspec.structs.replace(sgl.SamplingParams(), max_tokens=2))
    assert "no value" in played(Fill("question"))
    assert "were never added" in played(Fill(node=(7,)), gen)
    assert "were never added" in played(Fill(node=(1,)), gen)  # it waits for what waits for it
    assert "were never added" in played(Fork(((Fill(node=(2,)),),)), Fill(node=(0, 0, 5)), gen)
    assert "has no item" in played(Text("a"), gen, Fill(node=(1,), steps=("a",)))
    result, events = engine.play("a", Program((gen, Text("|"), Fill(node=(0,)))))
    first = events[0].event.text
    assert result.text == f"{first}|{first}"


def test_a_hole_of_a_node_that_fails_fails_with_it(engine):
    bad = Gen("y", constraint=Regex("("))
    with pytest.raises(sgl.ConstraintError):
        engine.play("a", Program((Fork(((bad,),)), Text("a"), Fill(node=(0, 0, 0)))))
