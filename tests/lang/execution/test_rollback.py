"""Checkpoints in a program: going back to where text, turns and variables were."""

import asyncio
import threading

import pytest

import sglang_lite as sgl
from sglang_lite.lang.concurrency.loop import executor
from sglang_lite.lang.concurrency.variables import Variable
from tests.lang.fakes import Answers, Gated, line_here, within


def backend(*answers, prompt="x"):
    return sgl.ScriptedBackend({prompt: list(answers)})


def test_going_back_takes_back_text_and_variables():
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("kept")
        with s.checkpoint() as c:
            s += " y" + sgl.gen("gone")
            s["mine"] = 1
            assert s["gone"] == "2"
            c.rollback()
            assert "gone" not in s
            assert "mine" not in s
        s += "."

    assert program.run(backend=backend("1", "2")).text() == "x1."


def test_without_going_back_everything_stays():
    @sgl.function
    def program(s):
        with s.checkpoint():
            s += "x" + sgl.gen("a")

    assert program.run(backend=backend("1"))["a"] == "1"


def test_the_prompt_that_follows_is_the_one_before():
    prompts = []

    @sgl.function
    def program(s):
        s += "x"
        with s.checkpoint() as c:
            for _ in range(3):
                c.rollback()
                s += sgl.gen("a")
                s.sync()
        return s["a"]

    program.run(backend=Answers(lambda text: prompts.append(text) or f"{len(prompts)}"))
    assert prompts == ["x", "x", "x"]


def test_a_value_that_was_overwritten_is_back():
    @sgl.function
    def program(s):
        s["a"] = "old"
        with s.checkpoint() as c:
            s += "x" + sgl.gen("a", type=int)
            assert s["a"] == 7
            c.rollback()
        return s["a"]

    assert program.run(backend=backend("7")).ret_value == "old"


def test_turns_that_were_begun_and_ended_are_undone():
    @sgl.function
    def program(s):
        s += sgl.user("Q")
        with s.checkpoint() as c:
            s += sgl.assistant("bad") + sgl.user("more")
            c.rollback()
        s += sgl.assistant("good")

    messages = program.run(backend=sgl.ScriptedBackend()).messages()
    assert [(m["role"], m["content"]) for m in messages] == [("user", "Q"), ("assistant", "good")]


def test_a_turn_that_was_open_is_open_again():
    @sgl.function
    def program(s):
        with s.assistant():
            s += "A"
            with s.checkpoint() as c:
                s += " B" + sgl.assistant_end() + sgl.user("C")
                c.rollback()
            s += " D"

    assert [m["content"] for m in program.run(backend=sgl.ScriptedBackend()).messages()] == ["A D"]


def test_a_scope_has_what_is_left():
    @sgl.function
    def program(s):
        with s.var_scope("part"):
            s += "a"
            with s.checkpoint() as c:
                s += "b"
                c.rollback()
            s += "c"

    assert program.run(backend=sgl.ScriptedBackend())["part"] == "ac"


def test_a_scope_that_began_after_it_is_gone():
    @sgl.function
    def program(s):
        with s.checkpoint() as c:
            with s.var_scope("part"):
                s += "a"
            c.rollback()
        assert "part" not in s
        with s.var_scope("part"):
            s += "b"

    assert program.run(backend=sgl.ScriptedBackend())["part"] == "b"


def test_a_program_that_failed_works_again():
    @sgl.function
    def program(s):
        s += "x"
        with s.checkpoint() as c:
            s += sgl.gen("a") + " lost " + sgl.gen("lost")
            with pytest.raises(sgl.ProgramError, match="OSError: down"):
                s["a"]
            c.rollback()
        s += sgl.gen("a")
        return s["a"]

    state = program.run(backend=backend(OSError("down"), "fine"))
    assert state.ret_value == "fine"
    assert state.text() == "xfine"
    assert state.error() is None


def test_a_failure_from_before_stays():
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")
        s.error()
        with s.checkpoint() as c:
            s += "more"
            c.rollback()

    assert isinstance(program.run(backend=backend(OSError("down"))).error(), sgl.ProgramError)


def test_an_inner_checkpoint_goes_back_less_far():
    @sgl.function
    def program(s):
        s += "a"
        with s.checkpoint() as outer:
            s += "b"
            with s.checkpoint() as inner:
                s += "c"
                inner.rollback()
                assert s.text() == "ab"
            s += "d"
            outer.rollback()
        s += "e"

    assert program.run(backend=sgl.ScriptedBackend()).text() == "ae"


def test_a_generation_under_way_is_waited_for_and_taken_back():
    slow = Gated("late")

    @sgl.function
    def program(s):
        s += "x"
        with s.checkpoint() as c:
            s += sgl.gen("a")
            c.rollback()
        s += "."
        slow.open()

    state = program.run(backend=slow)
    assert within(5, state.text) == "x."


@pytest.mark.parametrize(
    "given_up", [Gated(), Answers(lambda text: "late")], ids=["waiting", "about to answer"]
)
def test_giving_up_a_generation_and_going_on_from_before_it(given_up):
    @sgl.function
    def program(s):
        s += "x"
        for _ in range(200):
            with s.checkpoint() as c:
                s += sgl.gen("a", backend=given_up)
                s.cancel()
                c.rollback()
        s += sgl.gen("a")
        return s["a"]

    state = within(5, lambda: program.run(backend=Answers(lambda text: f"<{text}>")))
    assert state.ret_value == "<x>"
    assert state.text() == "x<x>"


def test_a_generation_that_fails_after_it_was_taken_back_fails_nothing():
    go_on = threading.Event()

    class Failing(sgl.BaseBackend):
        async def agenerate(self, prompt, params, constraint, *, stream):
            await asyncio.to_thread(go_on.wait, 5)
            raise OSError("down")
            yield

    @sgl.function
    def program(s):
        s += "x"
        with s.checkpoint() as c:
            s += sgl.gen("a", backend=Failing())
            fork = s.fork(2)
            fork += sgl.gen("b")
            c.rollback()
        s += "." + sgl.gen("a")
        go_on.set()
        return s["a"]

    state = within(5, lambda: program.run(backend=backend("fine")))
    assert (state.ret_value, state.text(), state.error()) == ("fine", "x.fine", None)


def test_an_attempt_that_raises_can_be_taken_back():
    @sgl.function
    def program(s):
        s += "x"
        with s.checkpoint() as c:
            try:
                with s.user():
                    s += "half"
                    raise LookupError
            except LookupError:
                c.rollback()
        s += "y"

    assert program.run(backend=sgl.ScriptedBackend()).text() == "xy"


def test_a_branch_goes_back_by_itself():
    @sgl.function
    def program(s):
        fork = s.fork(2)
        for i, branch in enumerate(fork):
            with branch.checkpoint() as c:
                branch += f"{i}"
                if i:
                    c.rollback()
        fork.join("concate_and_append")

    assert program.run(backend=sgl.ScriptedBackend()).text() == "0"


def test_only_inside_its_with_and_only_without_a_stream():
    @sgl.function
    def outside(s):
        with s.checkpoint() as c:
            pass
        c.rollback()  # here

    with pytest.raises(sgl.ProgramError, match="only be rolled back inside its `with`") as caught:
        outside.run(backend=sgl.ScriptedBackend())
    assert caught.value.where.line == line_here(outside)

    @sgl.function
    def streamed(s):
        with s.checkpoint() as c:
            c.rollback()  # here

    with pytest.raises(sgl.ProgramError, match="streamed can't be rolled back") as caught:
        list(streamed.run(backend=sgl.ScriptedBackend(), stream=True).text_iter())
    assert caught.value.where.line == line_here(streamed)


def test_draws_after_going_back_are_new_and_the_same_each_time():
    @sgl.function
    def program(s):
        with s.checkpoint() as c:
            s += sgl.gen("a")
            first = s["a"]
            c.rollback()
        s += sgl.gen("a")
        return first, s["a"]

    from tests.lang.fakes import Drawing

    one, two = (program.run(backend=Drawing(), seed=1).ret_value for _ in range(2))
    assert one == two
    assert one[0] != one[1]


def test_a_second_rollback_may_come_while_the_first_one_ends_a_generation():
    release, ended = threading.Event(), threading.Event()
    model = Gated()

    @sgl.function
    def program(s):
        s += "x"
        with s.checkpoint() as place:
            s += sgl.gen("a")
            model.asked.wait()
            executor().post(release.wait)
            place.rollback()  # which ends "a" on the executor's loop
            s += sgl.gen("b")
            removed = s.branch.names.variables["b"]
            removed.when_done(lambda: (release.set(), executor().post(ended.set), ended.wait()))
            place.rollback()
        return s.text()

    assert within(10, lambda: program.run(backend=model)).ret_value == "x"


# -------------------------------------------------------------- branches whose fork was rolled back


def rolled_back(s):
    """Branch of a fork that a rollback has removed."""
    s += "x"
    with s.checkpoint() as place:
        fork = s.fork(1)
        fork += sgl.gen("a")
        fork[0].sync()
        place.rollback()
        return fork[0]


def test_the_error_of_a_branch_whose_fork_was_rolled_back_says_where_and_what_to_do():
    @sgl.function
    def program(s):
        branch = rolled_back(s)
        with pytest.raises(
            sgl.RequestAbortedError, match=r"rollback.py:\d+ in rolled_back removed its fork"
        ) as caught:
            branch["a"]  # here
        assert caught.value.hint == "Fork again after the rollback."
        assert caught.value.where.line == line_here(program)
        assert "a" not in branch
        assert "failed: this branch has ended" in repr(branch)

    program.run(backend=backend("1"))


def test_coroutines_that_read_a_branch_whose_fork_was_rolled_back_fail():
    @sgl.function
    async def program(s):
        branch = rolled_back(s)
        for read in (
            branch.get("a"),
            branch.get("b"),
            branch.async_sync(),
            anext(branch.text_async_iter()),
        ):
            with pytest.raises(sgl.RequestAbortedError, match="this branch has ended"):
                await read

    asyncio.run(program.arun(backend=backend("1")))


def test_the_executor_of_a_branch_whose_fork_was_rolled_back_fails():
    @sgl.function
    def program(s):
        branch = rolled_back(s)
        executor = branch.stream_executor
        for use in (executor.text, executor.messages, executor.sync):
            with pytest.raises(sgl.RequestAbortedError, match="this branch has ended"):
                use()
        for use in (
            executor.get_var,
            lambda name: executor.set_var(name, 1),
            executor.get_meta_info,
        ):
            with pytest.raises(sgl.RequestAbortedError, match="this branch has ended"):
                use("a")
        assert not executor.variables

    program.run(backend=backend("1"))


def test_a_reader_that_waits_for_a_name_of_a_branch_gets_the_error_if_a_rollback_ends_the_branch():
    @sgl.function
    def program(s):
        s += "x"
        with s.checkpoint() as place:
            names = s.fork(1)[0].branch.names
            promise = names.promise("later", Variable(), lambda: None)
            place.rollback()
        with pytest.raises(sgl.RequestAbortedError, match="this branch has ended"):
            promise.wait()

    program.run(backend=backend("1"))
