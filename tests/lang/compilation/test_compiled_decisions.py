"""Compiled programs that decide: by arguments, and by what their nodes bring."""

import random
from typing import Any

import pytest

import sglang_lite as sgl
from sglang_lite import wire
from sglang_lite.engine.engine import Engine
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.lang.compilation import merged_ways
from sglang_lite.program.compiled import Filler
from sglang_lite.program.nodes import Added, Condition, Decision, Fill, Gen, Part, Program, Text
from sglang_lite.protocol import CompileError, Regex
from tests.constraints.test_generation import random_model
from tests.lang.compilation.test_compiled import Silent


@pytest.fixture(scope="module")
def engine():
    with Engine.of(random_model(), max_running=64) as engine:
        yield engine


@pytest.fixture
def backend(engine):
    backend = LocalBackend(engine)
    backend.chat_template = get_chat_template("chatml")
    return backend


def same(program, backend, *names, seeds=range(6), **arguments):
    """Checks that the compiled program means the same. Returns the texts."""
    compiled, texts = program.compile(backend), set()
    for seed in seeds:
        got, want = (each.run(backend=backend, seed=seed, **arguments) for each in (compiled, program))
        assert (got.text(), got.ret_value) == (want.text(), want.ret_value)
        for name in names:
            assert (name in got) == (name in want)
            assert name not in want or got[name] == want[name]
        assert got.usage().completion_tokens == want.usage().completion_tokens
        texts.add(got.text())
    return texts


def test_a_decision_by_an_argument_is_made_when_the_row_is_filled(backend):
    @sgl.function
    def program(s, style, words, n=0):
        s += "Say " + sgl.gen("a", max_tokens=2)
        if style == "long":
            s += " and " + sgl.gen("b", max_tokens=2)
        elif style in words:
            s += " or"
        if n > 2 and words:
            s += "!"
        s += "."

    compiled = program.compile(backend)
    assert len(compiled.compiled.program.parts) > 2
    for style, words, n in (("long", [], 0), ("x", ["x", "y"], 3), ("x", ["y"], 1), ("long", ["z"], 5)):
        row: dict[str, Any] = {"style": style, "words": words, "n": n}
        filled = Filler(compiled.compiled.program)(Filler(compiled.compiled.program).checked(row))
        assert filled.decision is None
        want = program.run(**row, backend=backend, seed=1)
        assert compiled.run(**row, backend=backend, seed=1).text() == want.text()
    with pytest.raises(sgl.ParameterError, match=r"condition: .*'x' > 2.*test_compiled_decisions"):
        compiled.run("a", ["b"], "x", backend=backend)


def test_a_loop_ends_by_what_a_node_brings_without_a_round_trip(backend):
    @sgl.function
    def program(s, question):
        s += question
        for step in range(6):
            s += f" {step}:" + sgl.gen(f"thought{step}", max_tokens=3) + sgl.gen("go", regex="[abc]")
            if s["go"] == "a":
                break
        else:
            s += " gave up"
        s += " so " + sgl.gen("end", max_tokens=2)
        return {"last": step}

    assert len(same(program, backend, "go", "end", question="Q")) > 2
    compiled = program.compile(backend)
    compiled.run("Q", backend=backend)
    before = backend.engine.stats()
    compiled.run_batch([["Q"]] * 5, backend=backend)
    after = backend.engine.stats()
    assert after["programs_opened"] - before["programs_opened"] == 5
    assert after["programs_extended"] - before["programs_extended"] == 5  # handed over once each
    assert after["requests_submitted"] == before["requests_submitted"]


def test_what_comes_by_a_decision_is_played_from_the_pages_that_are_there(backend):
    @sgl.function
    def program(s, between):
        s += "p" * 100 + sgl.gen("x", regex="[ab]")
        if s["x"] == "a":
            s += f"{between}" + sgl.gen("y", max_tokens=2, ignore_eos=True)
        else:
            s += f"{between}" + sgl.gen("y", max_tokens=3, ignore_eos=True)

    for between in ("", " then "):
        backend.engine.flush_cache()
        usage = program.compile(backend).run(between, backend=backend).usage("y")
        assert usage.cached_tokens >= 100
        assert usage.prompt_tokens - usage.cached_tokens <= len(between) + 1


def test_decisions_by_selections_take_no_way_that_can_not_be(backend):
    @sgl.function
    def program(s):
        s += "Tool? " + sgl.select("tool", ["search", "math", "none"], temperature=1.0)
        if s["tool"] == "search":
            s += sgl.gen("query", max_tokens=2)
        elif s["tool"] == "math":
            s += sgl.gen("sum", regex="[0-9]")
        elif s["tool"] == "none":
            s += "-"
        else:
            raise AssertionError("there is no other choice")
        s += {"search": "1", "math": "2", "none": "3"}[s["tool"]]

    assert len(same(program, backend, "tool", "query", "sum", seeds=range(12))) > 2


def test_typed_values_samples_and_parts_of_them_are_decided_by(backend):
    @sgl.function
    def program(s):
        s += "n=" + sgl.gen("n", type=int, max_tokens=4) + " "
        s += "b=" + sgl.gen("b", type=bool) + " "
        s += sgl.gen("several", n=2, regex="[ab]", temperature=1.0)
        if s["n"] > 50:
            s += f" big {s['n']}"
        if s["b"]:
            s += " yes"
        if s["several"][0] == s["several"][1] or "b" in s["several"][1]:
            s += " alike"

    assert len(same(program, backend, "n", "b", "several", seeds=range(8))) > 2


@pytest.mark.slow
def test_a_typed_value_that_can_not_be_read_is_tried_again_by_the_engine(backend):
    def body(s, retries):
        s += "n=" + sgl.gen("n", type=int, max_tokens=1, retries=retries)
        with s.var_scope("rest"):
            s += " b=" + sgl.gen("b", type=bool, max_tokens=1, retries=min(retries, 1)) + "!"
        s += s["rest"] + f" {s['n']} " + sgl.gen("end", max_tokens=2)

    program = sgl.function(body).bind(retries=3)
    compiled = program.compile(backend)
    data = compiled.compiled.program
    assert data.held is None
    assert {each.attempt for each in data.seeds} == {0, 1, 2, 3}

    def read(each, **settings):
        (state,) = each.run_batch([{}], backend=backend, on_error="return", **settings)
        if isinstance(state, Exception):
            return type(state)
        used = state.usage()
        return state.text(), state["n"], state["b"], state["rest"], used.completion_tokens, used.thrown_away_tokens

    once, found = program.bind(retries=0), []
    for seed in range(20):
        found.append(read(compiled, seed=seed))
        assert found[-1] == read(program, seed=seed)
    failed = [sgl.ValueValidationError is each for each in found].count(True)
    assert failed < [sgl.ValueValidationError is read(once, seed=seed) for seed in range(20)].count(True)
    assert read(compiled, temperature=0) == read(program, temperature=0)
    before = backend.engine.stats()
    read(compiled, seed=1)
    after = backend.engine.stats()
    assert after["programs_opened"] - before["programs_opened"] == 1
    assert after["programs_extended"] - before["programs_extended"] == 1


@pytest.mark.slow
def test_a_check_with_retries_is_a_loop_with_a_checkpoint(backend):
    @sgl.function
    def program(s):
        s += "Grade: "
        with s.checkpoint() as place:
            for _ in range(3):
                s += sgl.gen("grade", type=int, max_tokens=2)
                if 1 <= s["grade"] <= 5:
                    break
                place.rollback()
            else:
                s += "none"
        s += "." + sgl.gen("end", max_tokens=2)

    texts = same(program, backend, "grade", "end", seeds=range(20))
    assert any("none" in text for text in texts)
    assert any("none" not in text for text in texts)


def test_branches_decide_for_themselves_and_for_others(backend):
    @sgl.function
    def program(s):
        s += "Start "
        branches = s.fork(3)
        for i, branch in enumerate(branches):
            branch += f"{i}:" + sgl.gen("mark", regex="[1-9]")
            if branch["mark"] < "4":
                branch += " again " + sgl.gen("more", max_tokens=2)
        best = max(range(3), key=lambda i: branches[i]["mark"])
        branches.join("concate_and_append")
        s += f"Best {best}: " + branches[best]["mark"] + sgl.gen("end", max_tokens=2)

    assert len(same(program, backend, "mark", "end")) > 2


def drawn_body(numbers):
    """A body that takes random steps, and decides by what they bring."""
    steps = [numbers.random() for _ in range(60)]

    def add(s, state, depth):
        for _ in range(1 if depth else 3):
            kind, x = steps[state[0] % 60], steps[(state[0] + 1) % 60]
            state[0] += 2
            name = f"v{state[0]}"
            if kind < 0.3 or depth > 2:
                s += f"<{x:.2f}" + sgl.gen(name, max_tokens=2, temperature=1.0)
            elif kind < 0.5:
                s += sgl.gen(name, regex="[a-c]", temperature=1.0)
                if s[name] > "a":
                    add(s, state, depth + 1)
                s += f" {s[name]}"
            elif kind < 0.65:
                for turn in range(3):
                    s += sgl.select(name, ["go", "on", "stop"], temperature=1.0) + f"{turn}"
                    if s[name] == "stop":
                        break
            elif kind < 0.85:
                with s.checkpoint() as place:
                    for _ in range(2):
                        s += "try" + sgl.gen(name, regex="[xyz]", temperature=1.0)
                        if x < 0.5 and s[name] == "x":
                            break
                        place.rollback()
            else:
                branches = s.fork(2)
                branches += lambda i: f"{i}" + sgl.gen("f", regex="[ab]", temperature=1.0)
                if branches[1]["f"] == "a":
                    add(branches[0], state, depth + 1)
                branches.join("concate_and_append")

    def body(s):
        s += "Begin "
        add(s, [0], 0)
        s += " end " + sgl.gen("end", max_tokens=2)

    return body


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8))
def test_random_bodies_that_decide_mean_the_same(backend, number):
    program = sgl.function(drawn_body(random.Random(number)))
    compiled = program.compile(backend)
    data = compiled.compiled.program
    assert wire.decode(wire.encode(data)) == data
    for seed in range(3):
        got, want = (each.run(backend=backend, seed=seed) for each in (compiled, program))
        assert (got.text(), got["end"]) == (want.text(), want["end"])


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.slow
def test_a_loop_without_a_limit_is_refused_at_its_line():
    @sgl.function
    def until_done(s):
        s += sgl.gen("x", max_tokens=2)
        while s["x"] != "done":
            s += sgl.gen("x", max_tokens=2)

    @sgl.function
    def turns(s):
        s += sgl.gen("x", max_tokens=2)
        x = s["x"]
        while x == "more":
            pass

    with pytest.raises(
        CompileError, match=r"makes more than 128 decisions.*for step in range.*test_compiled_decisions"
    ):
        until_done.compile()
    with pytest.raises(CompileError, match=r"decisions without an end.*test_compiled_decisions"):
        turns.compile()


def test_a_million_branches_are_refused_at_their_line(monkeypatch):
    monkeypatch.setattr(merged_ways, "MOST_WAYS", 20)

    @sgl.function
    def program(s):
        for i in range(20):
            s += sgl.gen(f"x{i}", max_tokens=1)
            if s[f"x{i}"] == "a":
                s += "!"

    with pytest.raises(CompileError, match=r"more than 20 ways.*test_compiled_decisions"):
        program.compile()


def test_a_body_that_does_otherwise_when_it_is_run_again_is_refused():
    runs = []

    @sgl.function
    def program(s):
        runs.append(1)
        s += f"{len(runs)}" + sgl.gen("x", max_tokens=1)
        if s["x"] == "a":
            s += "!"

    with pytest.raises(CompileError, match="does something else when it is run again"):
        program.compile()


def test_a_value_that_fails_ends_the_program(backend):
    @sgl.function
    def program(s, pattern):
        s += "p" + sgl.gen("x", regex=f"{pattern}")
        if s["x"] == "a":
            s += " yes " + sgl.gen("y", max_tokens=2)
        s += "!"

    compiled = program.compile(backend)
    good, bad = compiled.run_batch([["[ab]"], ["("]], backend=backend, on_error="return")
    assert good.text()[1] in "ab"
    assert isinstance(bad, sgl.ConstraintError)
    with pytest.raises(sgl.ConstraintError):
        compiled.run("(", backend=backend)


def test_backends_that_play_no_decisions_run_the_body():
    @sgl.function
    def program(s):
        s += sgl.gen("x", max_tokens=1)
        if s["x"] == "a":
            s += "!"

    compiled = program.compile(Silent())
    assert compiled.compiled.call((), {}, Silent(), sgl_settings()) is None
    assert compiled.run(backend=sgl.ScriptedBackend({"": "a"})).text() == "a!"


def sgl_settings():
    from sglang_lite.lang.execution.run import RunSettings

    return RunSettings()


GEN = Gen("x", constraint=Regex("[ab]"))
TEST = Condition(Fill(node=(0,)), "==", "a")


def added(*nodes, first=1, path=()):
    return Added(path, first, nodes)


def test_the_runtime_plays_decisions(engine):
    yes, no = (Part((added(Text(word), Gen("y", constraint=Regex("[cd]"))),)) for word in (" yes ", " no "))
    result, events = engine.play("p", Program((GEN,), Decision((0, 1), TEST), (yes, no)))
    first, second = (event.event.text for event in events)
    assert result.text == first + (" yes " if first == "a" else " no ") + second
    assert [event.path for event in events] == [(0,), (2,)]


@pytest.mark.parametrize(
    ("decision", "parts", "match"),
    [
        (Decision((0, 1), TEST), (Part(),), "Name later ones"),
        (Decision((0,), TEST), (Part(),), "needs two parts"),
        (Decision((0, 1)), (Part(), Part()), "needs two parts"),
        (Decision((-1,), None, ((0,),)), (Part(),), "Name later ones"),
        (Decision((0,)), (Part((), Decision((0,))),), "Name later ones"),
        (Decision((0, 0), Condition(Fill("q"))), (Part(),), "no value"),
        (Decision((0, 0), Condition(Fill(node=(7,)))), (Part(),), "never"),
        (Decision((0,), None, ((0, 0, 3),)), (Part(),), "never"),
        (Decision((0, 0), Condition(Fill(node=(0,)), "<", 3)), (Part(),), "condition"),
        (Decision((0, 0), Condition(Fill(node=(0,), read="int"))), (Part(),), "read as int"),
        (Decision((0, 0), Condition(Fill(node=(0,), steps=(5,)))), (Part(),), "no item"),
    ],
    ids=["not there", "one way", "two ways", "negative", "itself", "hole", "no node", "no branch", "kinds", "reader",
         "item"],
)  # fmt: skip
def test_a_tampered_decision_is_refused_and_nothing_waits_for_ever(engine, decision, parts, match):
    with pytest.raises(sgl.SglError, match=match):
        engine.play("p", Program((GEN,), decision, parts))
    assert engine.play("p", Program((GEN,)))[0].text in "ab"
