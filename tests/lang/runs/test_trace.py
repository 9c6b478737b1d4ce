"""`state.trace()`: each node that was played, with its text, tokens, attempts and errors."""

from itertools import pairwise

import pytest

import sglang_lite as sgl
from sglang_lite.lang.state import ProgramState
from sglang_lite.lang.trace import Trace
from tests.conformance.case import cases

CASES = cases()


class Waiting(sgl.ScriptedBackend):
    """Answers on the executor loop."""

    def answer_now(self, prompt, params, constraint):
        return None

    def select_now(self, prompt, choices, *, unconditional):
        return None


def own_text(trace: Trace) -> str:
    """Text of the main branch, by its pieces."""
    nodes = [node for node in trace.nodes if not node.path and not node.rejected]
    return "".join(text for node in nodes for text, _ in node.pieces)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("backend", [sgl.ScriptedBackend, Waiting])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.raises is None])
def test_tokens_and_texts_of_a_trace_are_those_of_the_run(name, backend, tmp_path):
    case = CASES[name]
    state = case.program.run(backend=backend(case.answers), **case.arguments, **case.settings)
    assert isinstance(state, ProgramState)
    trace = state.trace()
    if state.error() is None:
        usage = state.usage()
        for field in ("prompt_tokens", "cached_tokens", "completion_tokens", "forced_tokens"):
            assert getattr(trace.usage, field) == getattr(usage, field), field
        assert own_text(trace) == state.text()
    elif state.branch.player.failure is not None:
        assert any(node.error for node in trace.nodes)
    assert all(0 <= node.start <= node.end <= trace.head.seconds for node in trace.nodes)
    trace.save(tmp_path / "run.jsonl")
    assert Trace.load(tmp_path / "run.jsonl") == trace


def test_nodes_have_the_users_lines_branches_and_names():
    @sgl.function
    def program(s):
        s += "begin "
        forks = s.fork(2)
        forks += sgl.gen("x")
        forks.join("concate_and_append")
        s += sgl.select("end", ["yes", "no"])

    state = program.run(backend=sgl.ScriptedBackend(default="word"))
    trace = state.trace()
    assert [(node.kind, node.path, node.name, node.text) for node in trace.nodes] == [
        ("text", (), None, "begin "),
        ("fork", (), None, ""),
        ("gen", (1, 0), "x", "word"),
        ("gen", (1, 1), "x", "word"),
        ("join", (), None, "wordword"),
        ("select", (), "end", state["end"]),
    ]
    first = program.func.__code__.co_firstlineno + 2
    assert [node.where[1] - first for node in trace.nodes] == [0, 1, 2, 2, 3, 4]
    assert {node.where[0] for node in trace.nodes} == {__file__}


def test_a_branchs_trace_is_of_itself_and_those_forked_from_it():
    @sgl.function
    def program(s):
        s += "a"
        branch = s.fork(2)[1]
        branch += "b"
        inner = branch.fork(1)
        inner += "c"
        return branch

    state = program.run(backend=sgl.ScriptedBackend())
    texts = [(node.text, node.path) for node in state.trace().nodes if node.text]
    assert texts == [("a", ()), ("b", (1, 1)), ("c", (1, 1, 1, 0))]
    texts = [(node.text, node.path) for node in state.ret_value.trace().nodes if node.text]
    assert texts == [("b", ()), ("c", (1, 0))]


def test_text_that_was_taken_back_is_rejected_and_its_tokens_thrown_away():
    @sgl.function
    def program(s):
        s += "keep "
        with s.checkpoint() as c:
            s += "lose "
            s += sgl.gen("a")
            s["a"]
            branches = s.fork(1)
            branches += "in a branch"
            c.rollback()
        s += sgl.gen("b")

    state = program.run(backend=sgl.ScriptedBackend(default="two words"))
    trace = state.trace()
    assert [node.text for node in trace.nodes if node.rejected] == [
        "lose ",
        "two words",
        "",
        "in a branch",
    ]
    assert own_text(trace) == state.text() == "keep two words"
    assert trace.thrown_away == 2
    assert trace.usage.completion_tokens == 4


def test_failed_attempts_are_told_with_their_answers():
    answers = iter(["bad one", "bad two", "good"])

    @sgl.function
    def program(s):
        s += "?"
        s += sgl.gen("a", retries=3, check=lambda value: value == "good", temperature=1)

    state = program.run(backend=sgl.ScriptedBackend(lambda call: next(answers)))
    node = state.trace().nodes[-1]
    assert [attempt.answers[0].text for attempt in node.attempts] == ["bad one", "bad two"]
    assert all("refused the value" in attempt.error for attempt in node.attempts)
    assert (node.text, node.error, node.thrown_away) == ("good", None, 4)


def test_a_node_that_failed_tells_its_error_and_nothing_is_raised():
    @sgl.function
    def program(s):
        s += "?"
        s += sgl.gen("a")
        s += "never played"

    state = program.run(backend=sgl.ScriptedBackend(lambda call: str(1 / 0)))
    nodes = state.trace().nodes
    assert [node.kind for node in nodes] == ["text", "gen"]
    assert nodes[1].error == "ProgramError: ZeroDivisionError: division by zero"


def test_an_answer_that_can_not_be_read_is_a_failed_attempt():
    @sgl.function
    def program(s):
        s += sgl.gen("n", type=int)

    class Free(sgl.ScriptedBackend):
        enforces = False

        def answer_now(self, prompt, params, constraint):
            return super().answer_now(prompt, params, None)

    state = program.run(backend=Free(default="no number"))
    node = state.trace().nodes[0]
    assert node.error is not None
    assert node.attempts[0].answers[0].text == "no number"
    assert node.thrown_away == 2
    with pytest.raises(sgl.ValueValidationError) as caught:
        state["n"]
    assert caught.value.usage.completion_tokens == 2


def test_a_trace_in_the_body_is_of_what_was_played_so_far():
    @sgl.function
    def program(s):
        s += "a"
        s += sgl.gen("x")
        so_far = s.trace()
        s += "b"
        return so_far

    state = program.run(backend=Waiting(default="word"))
    assert [node.text for node in state.ret_value.nodes] == ["a", "word"]
    assert [node.text for node in state.trace().nodes] == ["a", "word", "b"]


def test_time_is_relative_to_the_run_and_grows_along_a_branch():
    @sgl.function
    def program(s):
        for name in "abc":
            s += name
            s += sgl.gen(name)

    nodes = program.run(backend=Waiting(default="word", latency=0.001)).trace().nodes
    gens = [node for node in nodes if node.kind == "gen"]
    assert all(node.seconds > 0 for node in gens)
    assert all(before.end <= after.start for before, after in pairwise(nodes))
