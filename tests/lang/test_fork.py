"""Branches: fork, join, copy."""

import time

import pytest

import sglang_lite as sgl


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

    started = time.perf_counter()
    program.run(backend=sgl.ScriptedBackend(default="x", latency=0.1))
    assert time.perf_counter() - started < 0.5


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
    for read in (lambda: state["x"], lambda: state.ret_value[1]["x"], lambda: state.ret_value[1].text()):
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

    state = program.run(backend=sgl.ScriptedBackend(lambda call: 1 / 0))
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
        with pytest.raises(sgl.ParameterError, match="a int can't be added"):
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
