"""Nodes that a rerun or a branch names: which of several it is, which values it takes, and what was
known there.
"""

import itertools
import threading

import pytest

import sglang_lite as sgl
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from sglang_lite.lang.concurrency.variables import Variable
from sglang_lite.lang.runs import rerun
from sglang_lite.protocol import ChoiceScore, Generation, Selection
from tests.lang.fakes import Answers
from tests.lang.runs.test_saved import add, saved, scripted, tree
from tests.waiting import until


@sgl.function
def equal_prompts(s):
    s += "Write: "
    with s.copy() as c:
        c += sgl.gen("draft")
    with s.checkpoint() as c:
        s += sgl.gen("try")
        s.sync()
        c.rollback()
    with s.copy() as c:
        c += sgl.gen("try")
    s += sgl.gen("other")


def numbered():
    numbers = itertools.count(1)
    return sgl.ScriptedBackend(lambda call: str(next(numbers)))


def test_of_nodes_with_one_prompt_the_named_one_is_changed(tmp_path):
    state = equal_prompts.run(backend=numbered())
    names = ("draft", "try", "other")
    assert [state[name] for name in names] == ["1", "3", "4"]
    for each in (state, saved(state, tmp_path, equal_prompts, backend=state.branch.backend)):
        calls = len(state.branch.backend.calls)
        for name, want in (
            ("draft", ["MINE", "3", "4"]), ("try", ["1", "MINE", "4"]), ("other", ["1", "3", "MINE"])
        ):  # fmt: skip
            rerun = each.rerun(name, "MINE")
            assert [rerun[name] for name in names] == want
        assert len(state.branch.backend.calls) == calls
        rerun = each.rerun("try")
        assert [rerun[name] for name in names] == ["1", str(calls + 1), "4"]
        assert len(state.branch.backend.calls) == calls + 1


def test_of_several_nodes_of_a_name_the_last_is_changed():
    @sgl.function
    def program(s):
        s += sgl.gen("x") + " " + sgl.gen("x")
        s["x"] = s["x"] + "!"

    state = program.run(backend=numbered())
    assert state["x"] == "2!"
    assert state.rerun("x", "MINE").text() == "1 MINE"
    assert state.rerun("x", "MINE")["x"] == "MINE!"
    assert state.fork_at("x")[0]["x"] == "2"


class Least(ChoicesSamplingMethod):
    def __call__(self, *, choices, normalized_prompt_logprobs, **_):
        return ChoicesDecision(
            choices[normalized_prompt_logprobs.index(min(normalized_prompt_logprobs))]
        )


class Indifferent(sgl.BaseBackend):
    """Writes "7", and finds all choices equally good."""

    async def agenerate(self, prompt, params, constraint, *, stream):
        for i in range(params.samples):
            yield Generation("7", index=i)

    async def aselect(self, prompt, choices, *, unconditional):
        return Selection(
            tuple(ChoiceScore(choice, (i,), (-1.0,)) for i, choice in enumerate(choices))
        )


def possible():
    """Nodes, values that they take and values that they refuse."""
    yield sgl.gen("n", check=lambda text: text != "no", retries=3), ["yes"], ["no"]
    yield sgl.gen("n", check=lambda text: 1 / len(text) > 0), ["yes"], [""]
    yield sgl.gen("n", type=int), ["12"], ["twelve"]
    yield sgl.gen("n", json_schema={"type": "boolean"}), ["true"], ["7"]
    yield sgl.gen("n", regex="[a-z]+", reasoning="qwen3"), ["abc"], ["7"]
    yield sgl.gen("n", n=2), [], ["one text"]
    yield sgl.gen("n", backend=sgl.ScriptedBackend(default="7"), regex="[0-9]"), ["8"], ["eight"]
    yield sgl.select("n", ["a", "b"], temperature=1.0), ["a", "b"], ["c"]
    yield sgl.select("n", ["a", "b"], choices_method=Least()), ["a", "b"], ["c"]
    yield (
        sgl.select("n", ["a", "b", "c, a"], multi=True),
        ["a", "b, a", "c, a, b", "c, a, a"],
        ["", "a, a", "a, d", "a,b"],
    )


@pytest.mark.parametrize(("node", "fine", "wrong"), [*possible()])
def test_a_value_that_its_node_would_refuse_is_refused(node, fine, wrong):
    @sgl.function
    def program(s):
        s += "Say "
        s += node
        s += "."

    state = program.run(backend=Indifferent())
    state.error()
    for value in fine:
        assert state.rerun("n", value).text() == f"Say {value}."
    for value in wrong:
        with pytest.raises(sgl.ParameterError, match=r"^value: "):
            state.rerun("n", value)


def test_a_value_is_refused_also_where_the_end_of_the_run_is_told_first(monkeypatch):
    """The branch has failed before its node's variable has."""
    failed, told, caller = threading.Event(), threading.Event(), threading.current_thread()
    really_set, really_finished = Variable.set, rerun.call_when_done

    def set_(self, value, error=None):
        if error is not None and threading.current_thread() is not caller:
            failed.set()
            assert told.wait(60)
        really_set(self, value, error)

    def when_finished(branch, callback):
        assert failed.wait(60)
        really_finished(branch, callback)
        told.set()

    node = sgl.gen("n", check=lambda text: text != "no")
    state = sgl.function(lambda s: s.__iadd__(node)).run(backend=Indifferent())
    state.sync()
    monkeypatch.setattr(Variable, "set", set_)
    monkeypatch.setattr(rerun, "call_when_done", when_finished)
    with pytest.raises(sgl.ParameterError, match=r"^value: "):
        state.rerun("n", "no")


def test_a_value_is_held_against_the_open_grammar():
    @sgl.function
    def program(s):
        with s.grammar(sgl.Regex("y[0-9]+z")):
            s += "y" + sgl.gen("n", regex="[0-9]{2}") + "z"

    state = program.run(backend=sgl.ScriptedBackend(default="12"))
    assert state.rerun("n", "34").text() == "y34z"
    for value in ("a", "345"):
        with pytest.raises(sgl.ParameterError, match="is not possible for 'n'"):
            state.rerun("n", value)


def test_a_drawn_choice_keeps_its_decision():
    @sgl.function
    def program(s):
        for i in range(20):
            s += sgl.select(f"way{i}", ["left", "right"], temperature=100.0)
        s += sgl.gen("end")

    state = program.run(backend=Indifferent())
    assert state.rerun("end", "!").text() == state.text().removesuffix("7") + "!"


def test_a_failed_node_takes_a_value():
    @sgl.function
    def program(s):
        s += (
            "first"
            + sgl.gen("a")
            + "second"
            + sgl.gen("b", check=lambda text: text == "two", retries=1)
        )

    state = program.run(backend=sgl.ScriptedBackend({"first": "one", "second": "wrong"}))
    assert isinstance(state.error(), sgl.ValueValidationError)
    assert state.rerun("b", "two").text() == "firstonesecondtwo"
    calls = len(state.branch.backend.calls)
    assert isinstance(state.rerun("b").error(), sgl.ValueValidationError)
    assert len(state.branch.backend.calls) == calls + 2


def test_what_is_no_node_of_the_body_can_not_be_changed(tmp_path):
    @sgl.function
    def program(s, more=""):
        s += "a" + sgl.gen("n")
        s += more + sgl.gen("late") if outside else "b"

    outside = False
    state = tree.run(backend=scripted())
    add(state, sgl.gen("added"))
    for each in (state, saved(state, tmp_path, tree, backend=scripted())):
        for value in ("x", None):
            with pytest.raises(sgl.ParameterError, match="no node of the program set 'added'"):
                each.rerun("added", value)
    (branch,) = state.fork(1)
    with pytest.raises(sgl.ProgramError, match="a branch of a fork can't run again by itself"):
        branch.rerun("a")
    outside = True
    state = program.run(backend=scripted())
    outside = False
    with pytest.raises(sgl.ParameterError, match="the program did not ask for 'late' again"):
        state.rerun("late", "x")


def test_variables_at_a_node_are_those_that_were_set_before(tmp_path):
    @sgl.function
    def program(s):
        s["k"] = s["w"] = 1
        s += "a" + sgl.gen("x", reasoning="qwen3")
        s["k"] = object()
        s["k"] = 2
        s += "b" + sgl.gen("y")
        with s.copy() as c:
            c += "long aside" + sgl.gen("aside")
        s["later"] = 3
        with s.checkpoint() as c:
            s["lost"] = 4
            s += sgl.gen("x")
            s.sync()
            c.rollback()
        s["k"], s["w"] = 5, s["w"]
        with s.var_scope("scope"):
            s += "c" + sgl.gen("x", reasoning="qwen3")

    answers = iter(
        ["<think>\n1\n</think>\none", "two", "aside", "lost", "<think>\n3\n</think>\nthree"]
    )
    state = program.run(backend=sgl.ScriptedBackend(lambda call: next(answers)))
    state.sync()
    for each in (state, saved(state, tmp_path, backend=scripted())):
        (at_y,) = each.fork_at("y")
        names = ["k", "w", "x_reasoning_content", "x", "y"]
        assert list(at_y.branch.names.variables) == names
        assert [at_y[name].strip() for name in names[2:]] == ["1", "one", "two"]
        assert (at_y["k"], at_y["w"]) == (2, 1)
        (at_x,) = each.fork_at("x")
        assert list(at_x.branch.names.variables) == [
            "k",
            "w",
            "x_reasoning_content",
            "x",
            "y",
            "aside",
            "later",
        ]
        assert (at_x["k"], at_x["x"].strip(), at_x.text()) == (5, "three", each.text())
        (first,) = at_y.fork_at("x")
        assert (first["k"], first["x"].strip(), "y" in first) == (1, "one", False)
        with pytest.raises(sgl.ParameterError, match="no node of this text set 'aside'"):
            each.fork_at("aside")
        with pytest.raises(sgl.ParameterError, match="no node of this text set 'scope'"):
            each.fork_at("scope")


def test_a_replaced_value_that_can_not_be_saved_says_so_where_it_is_read(tmp_path):
    @sgl.function
    def program(s):
        s["k"] = object()
        s += sgl.gen("x")
        s["k"] = 2

    state = program.run(backend=scripted())
    loaded = saved(state, tmp_path, backend=scripted())
    assert (state["k"], loaded["k"]) == (2, 2)
    with pytest.raises(sgl.ProgramError, match="'k' is a object, which can't be saved"):
        loaded.fork_at("x")[0]["k"]
    assert type(state.fork_at("x")[0]["k"]) is object  # a copy needs no file


@sgl.function
def equal_generations(s):
    s += "Write: "
    with s.copy() as c:
        c += sgl.gen("draft", max_tokens=4)
    with s.checkpoint() as c:
        s += sgl.gen("try", max_tokens=4) + " and " + sgl.select("way", ["left", "right"])
        s.sync()
        c.rollback()
    s += (
        sgl.gen("other", max_tokens=4)
        + " or "
        + sgl.select("way", ["left", "right"], temperature=5.0)
    )
    s += sgl.gen("checked", max_tokens=4, check=lambda text: text != "no")


def test_on_an_engine_the_named_node_is_changed_and_nothing_else(engine):
    backend = LocalBackend(engine)
    for seed in (None, 1):
        state = equal_generations.run(backend=backend, temperature=1.0, seed=seed)
        text = f"Write: {state['other']} or {state['way']}{state['checked']}"
        assert state.text() == text
        before = engine.stats()["requests_submitted"]
        assert state.rerun("draft", "MINE").text() == text
        assert state.rerun("checked", "MINE").text() == text.removesuffix(state["checked"]) + "MINE"
        assert engine.stats()["requests_submitted"] == before
        with pytest.raises(
            sgl.ParameterError, match="'no' is not possible for 'checked': the check refused"
        ):
            state.rerun("checked", "no")
        for way in ("left", "right"):
            rerun = state.rerun("way", way)
            assert rerun.text() == f"Write: {state['other']} or {way}{rerun['checked']}"
        (branch,) = state.fork_at("way")
        assert branch.text() == text.removesuffix(state["checked"])


# ----------------------------------------------------------------- runs that ended before their end


class Busy(Answers):
    """Answers the first question, and no other until it is told to."""

    def __init__(self, answer):
        super().__init__(answer)
        self.asked, self.free = threading.Event(), Variable()
        self._answered = False

    async def agenerate(self, prompt, params, constraint, *, stream):
        if self._answered:
            self.asked.set()
            await self.free.wait_async()
        self._answered = True
        async for event in super().agenerate(prompt, params, constraint, stream=stream):
            yield event


def three_letters(prompt):
    return {"a": "A", "b": "B", "c": "C"}[prompt[-1]]


@sgl.function
def letters(s):
    s += (
        "a" + sgl.gen("first") + "b" + sgl.gen("second") + "c" + sgl.gen("third", reasoning="qwen3")
    )


@pytest.mark.parametrize("asked", ["all", "some"])
def test_a_cancelled_run_knows_its_nodes_whether_they_were_asked_for_or_not(asked):
    backend = Answers(three_letters) if asked == "all" else Busy(three_letters)
    state = letters.run(backend=backend)
    assert state["first"] == "A"
    if asked == "all":
        until(lambda: "third" in state.so_far().variables)
    else:
        assert backend.asked.wait(60)
    state.cancel()
    assert isinstance(state.error(), sgl.RequestAbortedError)
    if asked == "some":
        backend.free.set(None)
    assert state.rerun("third", "new").text() == "aAbBcnew"
    assert state.rerun("second", "new").text() == "aAbnewcC"
    assert state.rerun("first", "new").text() == "anewbBcC"
    assert state.rerun("third").text() == "aAbBcC"


def test_a_failed_run_knows_the_nodes_behind_the_failure():
    @sgl.function
    def program(s):
        s += "a" + sgl.gen("first", check=lambda text: text == "new") + "b" + sgl.gen("second")

    state = program.run(backend=Answers(three_letters))
    assert isinstance(state.error(), sgl.ValueValidationError)
    assert state.rerun("first", "new").text() == "anewbB"
    again = state.rerun("second", "new")
    assert isinstance(again.error(), sgl.ValueValidationError)
    assert state.rerun("first", "new").rerun("second", "too").text() == "anewbtoo"


NOT_KNOWN = {
    "first_reasoning_content": ("it is the reasoning of 'first'", "Give at='first'."),
    "value": ("the body has set it to a value", "Change the node that the value comes from."),
    "scope": ("the text of a scope", "Change the node that the value comes from."),
    "lost": ("a rollback has removed the one that did", "Change a node before the checkpoint"),
    "inside": ("nodes of branches did", "before the fork or after the join"),
    "later": (
        "before the run ended with RequestAbortedError",
        "change one before it, or run the program again",
    ),
}


@pytest.mark.parametrize("name", NOT_KNOWN)
def test_why_a_node_is_not_known_is_said(name):
    @sgl.function
    def program(s):
        s += "a" + sgl.gen("first", reasoning="qwen3")
        s["value"] = 1
        with s.var_scope("scope"):
            s += "b"
        with s.checkpoint() as before:
            s += sgl.gen("lost")
            s.sync()
            before.rollback()
        branches = s.fork(2)
        branches[1] += sgl.gen("inside")
        s += sgl.gen("last")
        s.cancel()

    state = program.run(backend=Answers(lambda _: "y"))
    problem, hint = NOT_KNOWN[name]
    with pytest.raises(sgl.ParameterError) as caught:
        state.rerun(name, "x")
    assert f"no node of the program set {name!r}" in str(caught.value)
    assert problem in str(caught.value)
    assert hint in (caught.value.hint or "")
    assert "Nodes set: 'first', 'last'." in str(caught.value)
