"""Following each way through a body: `trace(explore=n)`."""

import tracemalloc

import pytest

import sglang_lite as sgl
from sglang_lite.program.graph import MAX_BRANCHINGS
from sglang_lite.program.nodes import Text


def ways(body, explore=50, **arguments):
    """The texts of all paths, the type of the error where one ends with it, and whether these are
    all.
    """
    state = sgl.function(body).trace(explore=explore, **arguments)
    found = [
        (
            "".join(node.text for node in path.state.nodes if isinstance(node, Text)),
            type(path.error).__name__ if path.error else None,
        )
        for path in state.paths
    ]
    return found, state.complete


def test_a_question_of_yes_or_no_is_followed_both_ways():
    def body(s, x):
        s += "yes" if x else "no"
        if x:  # the same question has the same answer
            s += "!"

    assert ways(body) == ([("yes!", None), ("no", None)], True)


def test_a_selection_is_each_of_its_choices():
    def body(s):
        s += sgl.select("kind", ["a", "b", "c"])
        if s["kind"] == "a":
            s += "one"
        elif s["kind"] in ("b", "x"):
            s += "two"
        elif s["kind"] == "nothing":
            s += "never"
        else:
            s += {"c": "three"}[s["kind"]]

    assert ways(body) == ([("one", None), ("two", None), ("three", None)], True)


def test_what_is_equal_to_one_text_is_not_equal_to_another():
    def body(s, x):
        for word in ("a", "b"):
            if x == word:
                s += word

    assert ways(body) == ([("a", None), ("b", None), ("", None)], True)


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x < 3,
        lambda x: x >= 3,
        lambda x: "a" in x,
        lambda x: x != 1,
        lambda x: x.attribute["key"],
    ],
)
def test_comparisons_have_both_outcomes(ask):
    found, complete = ways(lambda s, x: s.__iadd__("1" if ask(x) else "0"))
    assert sorted(found) == [("0", None), ("1", None)]
    assert complete


def test_a_loop_until_an_answer_is_followed_to_the_bound():
    def body(s):
        while True:
            s += "again " + sgl.gen("done", type=bool)
            if s["done"]:
                break

    found, complete = ways(body, explore=3)
    assert found == [("again ", None), ("again again ", None), ("again again again ", None)]
    assert not complete


def test_a_loop_that_no_outcome_ends_is_cut():
    def body(s):
        while True:
            s += "x" + sgl.select("a", ["go", "stop"])
            if s["a"] == "stop":
                break

    state = sgl.function(body).trace(explore=2)
    assert [path.cut for path in state.paths] == [True, False]
    assert len(state.graph().ways[0].outcomes) == MAX_BRANCHINGS
    assert not state.complete


def test_a_million_branches_stop_at_the_bound():
    def body(s, x):
        for i in range(20):
            if x[i]:
                s += str(i)

    found, complete = ways(body, explore=40)
    assert len(found) == len(set(found)) == 40
    assert not complete


def test_choices_that_will_not_have_their_turn_are_not_kept():
    choices = [f"{n}" for n in range(1000)]

    def body(s):
        for i in range(60):
            s += sgl.select(f"a{i}", choices)
            if s[f"a{i}"] == "x":
                s += "never"

    tracemalloc.start()
    found, complete = ways(body, explore=3)
    assert tracemalloc.get_traced_memory()[1] < 10e6  # 55 MB with all of them
    tracemalloc.stop()
    assert len(found) == 3
    assert not complete


def test_an_error_ends_its_path_alone():
    def body(s, x):
        if x:
            s += "fine" + sgl.gen("a")
        s += s["a"]

    assert ways(body) == ([("fine", None), ("", "UnknownVariableError")], True)


@pytest.mark.parametrize(
    "ask", [len, list, int, lambda x: x + 1, lambda x: x.strip(), lambda x: {}[x]]
)
def test_other_questions_are_errors_at_their_line(ask):
    def body(s, x):
        s += "x"
        ask(x)

    with pytest.raises(sgl.TraceError, match="only known when the program runs"):
        ways(body)


@pytest.mark.parametrize("explore", [0, -1, True, 1.5, "2"])
def test_a_bound_that_is_none_is_refused(explore):
    with pytest.raises(sgl.ParameterError, match="explore"):
        ways(lambda s: None, explore)


# ---------------------------------------------------------------------------- bodies without an end


@sgl.function
def itself(s):
    s += "x" + itself()


@sgl.function
def read_itself(s):
    s += read_itself()["x"]


@pytest.mark.parametrize("program", [itself, read_itself])
@pytest.mark.parametrize("explore", [None, 5])
def test_a_program_that_calls_itself_for_ever_is_an_error_at_its_line(program, explore):
    with pytest.raises(sgl.TraceError, match="calls itself without an end") as caught:
        program.trace(explore=explore)
    assert caught.value.where.line == program.func.__code__.co_firstlineno + 2


@pytest.mark.parametrize("explore", [None, 5])
def test_a_body_that_adds_for_ever_is_an_error_at_its_line(explore):
    def body(s):
        while True:
            s += "x"

    with pytest.raises(sgl.TraceError, match="100,000 times") as caught:
        sgl.function(body).trace(explore=explore)
    assert caught.value.where.line == body.__code__.co_firstlineno + 2


def test_a_body_that_asks_for_ever_is_an_error_at_its_line():
    def body(s, x):
        while x:
            pass

    with pytest.raises(sgl.TraceError, match="100,000 times"):
        ways(body)


# ---------------------------------------------------------------------------------- programs inside


def test_a_called_program_is_traced_not_run():
    @sgl.function
    def inner(s, word):
        s += f"inner {word}" + sgl.gen("a")

    def body(s, x):
        state = s.call(inner, word=x, temperature=0)
        s += state["a"]

    state = sgl.function(body).trace()
    assert [repr(node) for node in state.nodes] == ["Variable('a')"]
    assert [repr(node) for node in state.child_states[0].nodes] == [
        "Text('inner ')", "Argument(name='x')", "Gen('a')"
    ]  # fmt: skip
