"""Branches: fork, join, copy."""

import pytest

import sglang_lite as sgl
from tests.lang.fakes import Answers, Gated, Meeting, Pieces, line_here, within


def numbered(call):
    return call.prompt.text[-1].upper()


def test_branches_share_the_past_and_join_in_order():
    @sgl.function
    def program(s):
        s += "start "
        fork = s.fork(3)
        assert len(fork) == 3
        for i, branch in enumerate(fork):
            branch += "abc"[i]
        fork += sgl.gen("letter")
        fork.join()
        s += "end"
        return [branch.text() for branch in fork]

    state = program.run(backend=sgl.ScriptedBackend(numbered))
    assert state["letter"] == ["A", "B", "C"]
    assert state.ret_value == ["start aA", "start bB", "start cC"]
    assert state.text() == "start end"
    assert state.raw("letter") == ["A", "B", "C"]


def test_branches_run_at_the_same_time():
    @sgl.function
    def program(s):
        fork = s.fork(10)
        fork += sgl.gen("a")
        fork.join()
        s["a"]

    within(3, lambda: program.run(backend=Meeting(10)))


def test_a_group_takes_text_an_expression_a_list_or_a_function():
    @sgl.function
    def program(s):
        fork = s.fork(2)
        fork += "t"
        fork += sgl.gen("x")
        fork += ["a", "b"]
        fork += lambda i: str(i)
        fork[0] += "!"
        fork.join("concate_and_append")

    state = program.run(backend=sgl.ScriptedBackend(default="-"))
    assert state.text() == "t-a0!t-b1"
    assert state["x"] == ["-", "-"]


def test_joined_lists_keep_the_branch_index():
    @sgl.function
    def program(s):
        s["same"] = 0
        fork = s.fork(3)
        fork[1] += sgl.gen("only")
        fork[2]["same"] = 2
        fork.join()

    state = program.run(backend=sgl.ScriptedBackend(default="x"))
    assert state["only"] == [None, "x", None]
    assert state.raw("only") == [None, "x", None]
    assert state["same"] == [None, None, 2]
    assert state.usage("only").completion_tokens == 1


def test_copy_brings_plain_values_back():
    @sgl.function
    def program(s):
        s += "a"
        with s.copy() as branch:
            branch += "b" + sgl.gen("x")
        s += "c"

    state = program.run(backend=sgl.ScriptedBackend(default="-"))
    assert (state["x"], state.text()) == ("-", "ac")


@sgl.function
def sets_x(s):
    s += sgl.gen("x")


def by_node(s):
    s += sgl.gen("x")


def by_hand(s):
    s["x"] = "new"


def by_scope(s):
    with s.var_scope("x"):
        s += "new"


def by_program(s):
    s += sets_x()


def by_join(s):
    inner = s.fork(1)
    inner += sgl.gen("x")
    inner.join()


def by_copy(s):
    with s.copy() as branch:
        branch += sgl.gen("x")


def by_second_try(s):
    with s.checkpoint() as c:
        s["x"] = "lost"
        c.rollback()
    s["x"] = "new"


WAYS = [by_node, by_hand, by_scope, by_program, by_join, by_copy, by_second_try]


@pytest.mark.parametrize("mode", ["gather_variable", "concate_and_append"])
@pytest.mark.parametrize("way", WAYS)
def test_a_join_brings_back_what_the_branches_have_set_and_nothing_else(way, mode):
    @sgl.function
    def program(s):
        s["x"] = s["z"] = "old"
        branches = s.fork(2)
        way(s)
        way(branches[1])
        branches[0]["z"] = branches[1]["z"] = "branch's"
        with branches[1].checkpoint() as c:
            c.rollback()
        others = s.fork(2)
        way(s)
        others += sgl.gen("y")
        others.join(mode)
        return s["x"], others[0]["x"], branches

    state = program.run(backend=sgl.ScriptedBackend(default="new"))
    new = ["new"] if way is by_join else "new"
    x, inherited, branches = state.ret_value
    assert (x, inherited, state["y"], state["z"]) == (new, new, ["new", "new"], "old")
    branches.join(mode)
    assert (state["x"], state["z"]) == ([None, new], ["branch's", "branch's"])


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_brings_back_what_it_has_set_and_nothing_else(way):
    @sgl.function
    def program(s):
        s["x"] = s["z"] = "old"
        with s.copy() as branch:
            way(s)
            branch += sgl.gen("y")
        with s.copy() as branch, branch.copy() as inner:
            inner["z"] = "inner"
            branch["z"] = "outer"

    state = program.run(backend=sgl.ScriptedBackend(default="new"))
    assert (state["x"], state["y"], state["z"]) == (
        ["new"] if way is by_join else "new",
        "new",
        "inner",
    )


def test_names_of_a_rolled_back_branch_are_those_before_the_fork():
    @sgl.function
    def program(s):
        s["x"] = 1
        with s.copy() as branch:
            with branch.checkpoint() as c:
                branch["x"] = 2
                c.rollback()
            s["x"] = 3

    assert program.run(backend=sgl.ScriptedBackend(default=""))["x"] == 3


def test_branches_fork_again_and_roles_carry_over():
    @sgl.function
    def program(s):
        with s.user():
            s += "q"
            outer = s.fork(2)
            for branch in outer:
                inner = branch.fork(2)
                inner += sgl.gen("x")
                inner.join()
                branch += sgl.user_end() + sgl.assistant(sgl.gen("y"))
            outer.join()
        return outer[1].messages()

    state = program.run(backend=sgl.ScriptedBackend(default="-"))
    assert state["x"] == [["-", "-"], ["-", "-"]]
    assert state["y"] == ["-", "-"]
    assert [m["content"] for m in state.ret_value] == ["q", "-"]


def test_a_failing_branch_fails_its_reader_alone():
    backend = sgl.ScriptedBackend({"1": ValueError("no luck"), "0": "zero", "2": "two"})

    @sgl.function
    def program(s):
        fork = s.fork(3)
        fork += lambda i: str(i)
        fork += sgl.gen("x")
        fork[0] += sgl.gen("other")
        fork.join()
        s += "go on: " + sgl.gen("after")
        return fork

    state = program.run(backend=backend)
    assert state["after"] == ""
    assert state.error() is None
    assert state.ret_value[0]["x"] == "zero"
    assert state.ret_value[2]["x"] == "two"
    for read in (
        lambda: state["x"],
        lambda: state.ret_value[1]["x"],
        lambda: state.ret_value[1].text(),
    ):
        with pytest.raises(sgl.ProgramError, match="ValueError: no luck") as caught:
            read()
        assert isinstance(caught.value.__cause__, ValueError)
        assert caught.value.where.file == __file__
        assert caught.value.where.line == program.func.__code__.co_firstlineno + 4
    assert "failed" in repr(state.ret_value[1])
    with pytest.raises(sgl.ProgramError):
        state.raw("x")


def test_a_failing_parent_fails_the_branches_it_never_reached():
    @sgl.function
    def program(s):
        s += sgl.gen("a")
        fork = s.fork(2)
        fork += sgl.gen("b")
        fork.join("concate_and_append")
        return fork

    state = program.run(backend=sgl.ScriptedBackend(lambda call: str(1 / 0)))
    for read in (lambda: state.ret_value[0]["b"], lambda: state["b"], state.text, state.sync):
        with pytest.raises(sgl.ProgramError, match="ZeroDivisionError"):
            read()


@pytest.mark.parametrize("size", [0, -1, "2", True])
def test_a_fork_needs_a_size(size):
    with pytest.raises(sgl.ParameterError, match="size: "):
        sgl.function(lambda s: s.fork(size)).run(backend=sgl.ScriptedBackend())


def test_misuse_of_a_group_is_told():
    @sgl.function
    def program(s):
        fork = s.fork(2)
        with pytest.raises(sgl.ParameterError, match="3 items for 2 branches"):
            fork += ["a", "b", "c"]
        with pytest.raises(sgl.ParameterError, match="an int can't be added"):
            fork += 3
        with pytest.raises(sgl.ParameterError, match="None"):
            fork += [None, "x"]
        with pytest.raises(sgl.ProgramError, match="can't be replaced"):
            fork[0] = s
        with pytest.raises(sgl.ParameterError, match="mode: 'other'"):
            fork.join("other")
        with pytest.raises(sgl.ProgramError, match="not made by fork"):
            type(fork)([s]).join()
        with pytest.raises(sgl.ParameterError, match="position_ids_offset"):
            s.fork(2, [1])
        with pytest.raises(sgl.ParameterError, match="position_ids_offset"):
            s.copy([1])

    program.run(backend=sgl.ScriptedBackend())


def test_joined_metadata_and_usage_keep_the_branch_index():
    @sgl.function
    def program(s):
        fork = s.fork(3)
        fork[0] += sgl.gen("a")
        fork[2] += sgl.select("a", ["yes", "no"])
        fork.join()

    state = program.run(backend=sgl.ScriptedBackend({"": "yes"}))
    written, missing, picked = state.get_meta_info("a")["samples"]
    assert written["completion_tokens"] == 1
    assert missing is None
    assert len(picked["normalized_prompt_logprobs"]) == 2
    assert state.usage("a").completion_tokens == 1


def test_metadata_of_branches_of_branches_is_a_tree():
    @sgl.function
    def program(s):
        outer = s.fork(2)
        for branch in outer:
            inner = branch.fork(2)
            inner += sgl.gen("a")
            inner.join()
        outer.join()

    state = program.run(backend=sgl.ScriptedBackend(default="x y"))
    tree = [
        [leaf["completion_tokens"] for leaf in branch["samples"]]
        for branch in state.get_meta_info("a")["samples"]
    ]
    assert tree == [[2, 2], [2, 2]]
    assert state.usage("a").completion_tokens == 8


def test_text_is_joined_in_the_order_of_the_branches_not_of_their_ends():
    slow = Gated("slow")

    @sgl.function
    def program(s):
        fork = s.fork(2)
        fork[0] += "0:" + sgl.gen("a", backend=slow) + " "
        fork[1] += "1:" + sgl.gen("a")
        fork.join("concate_and_append")
        s += " end"
        fork[1]["a"]  # the second is done
        slow.open()

    assert program.run(backend=Answers(lambda text: "fast")).text() == "0:slow 1:fast end"


def test_a_text_join_fails_with_the_branch_that_failed_and_its_line():
    @sgl.function
    def program(s):
        fork = s.fork(2)
        fork[1] += "1" + sgl.gen("a")  # here
        fork.join("concate_and_append")
        s += "never"

    state = program.run(backend=sgl.ScriptedBackend({"1": ValueError("no luck")}))
    with pytest.raises(sgl.ProgramError, match="no luck") as caught:
        state.text()
    assert caught.value.where.line == line_here(program)


def test_joining_waits_for_nothing_and_reading_for_all():
    backend = Gated("x")

    @sgl.function
    def program(s):
        fork = s.fork(2)
        fork += sgl.gen("a")
        fork.join()
        backend.open()
        return within(5, lambda: s["a"])

    assert program.run(backend=backend).ret_value == ["x", "x"]


def test_a_group_adds_what_a_function_of_the_index_gives():
    @sgl.function
    def program(s):
        fork = s.fork(3)
        fork += lambda i: f"{i}: " + sgl.gen("a", stop=str(i))
        fork.join()
        return [branch.text() for branch in fork]

    backend = sgl.ScriptedBackend(lambda call: f"stop at {call.params.stop[0]}")
    assert program.run(backend=backend).ret_value == ["0: stop at ", "1: stop at ", "2: stop at "]


def test_text_that_is_joined_is_streamed_too():
    @sgl.function
    def program(s):
        s += "A"
        fork = s.fork(2)
        fork += lambda i: f"[{i}" + sgl.gen("x") + "]"
        fork.join("concate_and_append")
        s += "Z" + sgl.gen("y")

    for latency in (0.0, 0.01):
        state = program.run(stream=True, backend=sgl.ScriptedBackend(default="!", latency=latency))
        assert "".join(state.text_iter()) == state.text() == "A[0!][1!]Z!"


def test_a_copy_brings_errors_and_metadata_back():
    @sgl.function
    def program(s):
        s += "q"
        with s.copy() as branch:
            branch += sgl.gen("fine") + "now" + sgl.gen("bad")
        s += "."

    state = program.run(backend=sgl.ScriptedBackend({"now": OSError("gone"), "q": "1 2 3"}))
    assert state.get_meta_info("fine")["completion_tokens"] == 3
    with pytest.raises(sgl.ProgramError, match="OSError: gone"):
        state["bad"]
    assert state.text() == "q."


def test_a_copy_in_a_turn_goes_on_with_the_turn():
    @sgl.function
    def program(s):
        with s.user():
            s += "q"
            with s.copy() as branch:
                branch += "?" + sgl.user_end() + sgl.assistant(sgl.gen("a"))
                messages = branch.messages()
        return messages

    state = program.run(backend=sgl.ScriptedBackend(default="yes"))
    assert [(m["role"], m["content"]) for m in state.ret_value] == [
        ("user", "q?"),
        ("assistant", "yes"),
    ]
    assert [m["content"] for m in state.messages()] == ["q"]
    assert state["a"] == "yes"


def test_a_branch_streams_its_text_from_the_beginning_to_the_end_of_the_program():
    @sgl.function
    def program(s):
        s += "start "
        fork = s.fork(2)
        fork += lambda i: f"{i} " + sgl.gen("a")
        return fork

    state = program.run(stream=True, backend=Pieces("x", "y"))
    list(state.text_iter())  # ends when the body does
    for i, branch in enumerate(state.ret_value):
        assert within(5, lambda b=branch: list(b.text_iter("a"))) == ["x", "y"]
        assert within(5, lambda b=branch: "".join(b.text_iter())) == f"start {i} xy"


@pytest.mark.parametrize("join", [True, False])
def test_a_batch_has_executed_the_branches_too(join):
    @sgl.function
    def program(s, i):
        fork = s.fork(2)
        fork += sgl.gen("a")
        if join:
            fork.join()
        return fork

    states = program.run_batch(
        [{"i": 0}, {"i": 1}], backend=sgl.ScriptedBackend(default="x", latency=0.01)
    )
    for state in states:
        branches = [branch.stream_executor.variables for branch in state.ret_value]
        assert branches == [{"a": "x"}] * 2
        assert state.stream_executor.variables == ({"a": ["x", "x"]} if join else {})


def test_use_thread_false_waits_for_the_branches_too():
    @sgl.function
    def program(s):
        fork = s.fork(2)
        fork += sgl.gen("a")
        fork.join()

    state = program.run(backend=sgl.ScriptedBackend(default="x", latency=0.01), use_thread=False)
    assert state.stream_executor.variables == {"a": ["x", "x"]}
