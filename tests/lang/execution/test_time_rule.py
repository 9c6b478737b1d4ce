"""What a run gives depends on its program, not on how much of it has been played when it is
cancelled or read.
"""

import asyncio
import contextvars
import threading

import pytest

import sglang_lite as sgl
from sglang_lite.lang.concurrency.variables import Variable
from tests.lang.fakes import Answers, Gated, Pieces, line_here, run, within


class Slow(sgl.BaseBackend):
    """Answers after the event loop has turned a few times."""

    async def agenerate(self, prompt, params, constraint, *, stream):
        for _ in range(20):
            await asyncio.sleep(0)
        yield sgl.protocol.Generation("y")


BACKENDS = {
    "now": lambda: sgl.ScriptedBackend(default="y"),
    "soon": lambda: Answers(lambda _: "y"),
    "later": Slow,
}


@pytest.fixture(params=list(BACKENDS))
def backend(request):
    return BACKENDS[request.param]()


def kind_of(read):
    try:
        return read()
    except sgl.SglError as error:
        return type(error).__name__


# ---------------------------------------------------------------------------- cancelled by the body


def test_a_body_that_cancels_itself_between_two_generations_gets_no_more_of_them(backend):
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")
        assert s["a"] == "y"
        s.cancel()  # here
        s += sgl.gen("b")
        return [s["a"], kind_of(lambda: s["b"]), kind_of(s.text)]

    state = program.run(backend=backend)
    assert state.ret_value == ["y", "RequestAbortedError", "RequestAbortedError"]
    assert state.error().where.line == line_here(program)


@pytest.mark.parametrize("mode", ["gather_variable", "concate_and_append"])
def test_what_a_join_took_before_a_rollback_is_cancelled_like_all_else(backend, mode):
    @sgl.function
    def program(s, reads):
        group = s.fork(1)
        with group[0].checkpoint() as before:
            group[0] += "x" + sgl.gen("a")
            group.join(mode)
            before.rollback()
        found = [s["a"]] if reads else []
        s.cancel()
        return [*found, kind_of(lambda: s["a"])]

    assert program.run(False, backend=backend).ret_value == ["RequestAbortedError"]
    assert program.run(True, backend=backend).ret_value == [["y"], ["y"]]


def test_what_nobody_has_waited_for_is_cancelled_even_if_it_has_come(backend):
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a") + sgl.gen("b")
        assert s["a"] == "y"
        s.cancel()
        return [s["a"], kind_of(lambda: s["b"]), kind_of(s.text), kind_of(s.messages)]

    assert program.run(backend=backend).ret_value == ["y", *["RequestAbortedError"] * 3]


def test_what_comes_before_a_value_that_was_read_stays(backend):
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a") + sgl.gen("b")
        assert s["b"] == "y"
        s += "."
        s.cancel()
        return [s["a"], s.text(), s.error()]

    assert program.run(backend=backend).ret_value == ["y", "xyy.", None]


def test_a_failure_that_nobody_has_seen_gives_way_to_the_cancellation(backend):
    @sgl.function
    def program(s, reads):
        s += "x" + sgl.gen("a", check=lambda value: False)
        if reads:
            assert kind_of(lambda: s["a"]) == "ValueValidationError"
        s.cancel()
        return [kind_of(lambda: s["a"]), type(s.error()).__name__]

    assert program.run(False, backend=backend).ret_value == ["RequestAbortedError"] * 2
    assert program.run(True, backend=backend).ret_value == ["ValueValidationError"] * 2


def test_a_rollback_revives_a_cancelled_branch_if_all_before_its_checkpoint_was_waited_for(backend):
    @sgl.function
    def program(s, waits):
        s += "x" + sgl.gen("a")
        if waits:
            s.sync()
        with s.checkpoint() as place:
            s += sgl.gen("b")
            s.cancel()
            place.rollback()
        s += "."
        return kind_of(s.text)

    assert program.run(True, backend=backend).ret_value == "xy."
    assert program.run(False, backend=backend).ret_value == "RequestAbortedError"


def test_a_rollback_to_behind_a_cancellation_does_not_undo_it(backend):
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")
        s.sync()
        s.cancel()
        with s.checkpoint() as place:
            s += sgl.gen("b")
            place.rollback()
        found = [kind_of(s.text)]
        s += sgl.gen("c")
        return [*found, kind_of(lambda: s["c"]), kind_of(s.text)]

    assert program.run(backend=backend).ret_value == [
        "xy",
        "RequestAbortedError",
        "RequestAbortedError",
    ]


def test_a_scope_in_which_its_program_is_cancelled_has_no_value(backend):
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a", check=lambda value: False)
        with s.var_scope("b"):
            s.cancel()
        return kind_of(lambda: s["b"])

    assert program.run(backend=backend).ret_value == "RequestAbortedError"


@pytest.mark.parametrize("mode", ["gather_variable", "concate_and_append"])
def test_what_a_join_has_taken_of_a_branch_outlives_its_cancellation(backend, mode):
    @sgl.function
    def program(s):
        s += "x"
        left, right = group = s.fork(2)
        group += sgl.gen("a")
        group.join(mode)
        left += sgl.gen("b")
        left.cancel()
        return [s["a"], kind_of(lambda: left["b"]), kind_of(left.text), right.text(), s.text()]

    appended = "yy" if mode == "concate_and_append" else ""
    assert program.run(backend=backend).ret_value == [
        ["y", "y"], "RequestAbortedError", "RequestAbortedError", "xy", f"x{appended}",
    ]  # fmt: skip


def test_a_joined_value_that_nobody_has_read_is_cancelled_with_the_run(backend):
    @sgl.function
    def program(s, reads):
        s += "x"
        group = s.fork(2)
        group += sgl.gen("a")
        group.join()
        if reads:
            assert s["a"] == ["y", "y"]
        s.cancel()
        return [kind_of(lambda: s["a"]), kind_of(lambda: group[0]["a"]), kind_of(s.text)]

    assert program.run(True, backend=backend).ret_value == [["y", "y"], "y", "x"]
    assert program.run(False, backend=backend).ret_value == [
        "RequestAbortedError",
        "RequestAbortedError",
        "x",
    ]


def test_text_that_a_join_has_appended_counts_as_waited_for_with_what_follows_it(backend):
    @sgl.function
    def program(s):
        s += "x"
        group = s.fork(2)
        group += sgl.gen("a")
        group.join("concate_and_append")
        assert s.text() == "xyy"
        s.cancel()
        return [s["a"], group[1]["a"]]

    assert program.run(backend=backend).ret_value == [["y", "y"], "y"]


# --------------------------------------------------------------------------- cancelled from outside


def test_an_agent_that_is_cancelled_between_two_nodes_ends():
    between, go_on = threading.Event(), threading.Event()
    states = []

    @sgl.function
    def agent(s):
        states.append(s)
        s += "x" + sgl.gen("a")
        assert s["a"] == "y"
        between.set()
        assert go_on.wait(60)
        s += sgl.gen("b")
        return s["b"]

    def stop():
        assert between.wait(60)
        states[0].cancel()
        go_on.set()

    threading.Thread(target=stop).start()
    with pytest.raises(sgl.RequestAbortedError, match="cancelled"):
        within(5, lambda: agent.run(backend=sgl.ScriptedBackend(default="y")))


def test_a_run_that_is_cancelled_before_it_is_read_has_nothing(backend):
    state = run("x", sgl.gen("a"), backend=backend)
    state.cancel()
    assert [kind_of(lambda: state["a"]), kind_of(state.text)] == ["RequestAbortedError"] * 2


def test_nothing_can_be_added_to_a_cancelled_run(backend):
    state = run("x", sgl.gen("a"), backend=backend)
    state.sync()
    state.cancel()
    assert (state["a"], state.text(), state.error()) == ("y", "xy", None)
    state += sgl.gen("b")
    assert [kind_of(lambda: state["b"]), kind_of(state.text)] == ["RequestAbortedError"] * 2
    assert state["a"] == "y"


@pytest.mark.parametrize("ended", [False, True])
def test_a_streamed_run_that_is_cancelled_before_it_is_read_has_nothing(backend, ended):
    done = threading.Event()

    @sgl.function
    def program(s):
        s["k"] = 1
        s += "x" + sgl.gen("a")
        s["a"]
        done.set()

    state = program.run(backend=backend, stream=True)
    if ended:
        assert done.wait(60)
    state.cancel()
    found = [
        kind_of(lambda: state["a"]),
        kind_of(lambda: state["k"]),
        kind_of(state.text),
        kind_of(state.messages),
    ]
    assert found == ["RequestAbortedError"] * 4
    assert isinstance(state.error(), sgl.RequestAbortedError)
    assert state.ret_value is None


def test_a_streamed_run_whose_stream_has_ended_keeps_all_when_it_is_cancelled(backend):
    state = run("x", sgl.gen("a"), backend=backend, stream=True)
    assert "".join(state.text_iter()) == "xy"
    state.cancel()
    assert (state["a"], state.text(), state.error()) == ("y", "xy", None)


def test_a_cancelled_streamed_run_does_not_wait_for_its_body():
    entered, leave = threading.Event(), threading.Event()

    @sgl.function
    def program(s):
        entered.set()
        assert leave.wait(60)

    state = program.run(backend=Answers(lambda _: "y"), stream=True)
    assert entered.wait(60)
    state.cancel()
    assert kind_of(lambda: within(1, lambda: state["a"])) == "RequestAbortedError"
    leave.set()


# -------------------------------------------------------------------------------- read from outside


def twice():
    """A program that sets a name twice, and the event at which it does so again."""
    again = threading.Event()

    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")
        s["a"]
        assert again.wait(60)
        s["a"] = 2
        s += "."
        return s.text()

    return program, again


@pytest.mark.parametrize(
    "read", ["name", "text", "messages", "save", "in", "usage", "trace", "ret_value", "rerun"]
)
def test_readers_of_a_streamed_run_wait_for_its_end(backend, read, tmp_path):
    program, again = twice()
    state = program.run(backend=backend, stream=True)
    path = tmp_path / "s.json"
    reads = {
        "name": lambda: state["a"],
        "text": state.text,
        "messages": state.messages,
        "save": lambda: state.save(path) or sgl.load(path)["a"],
        "in": lambda: "b" in state,
        "usage": lambda: state.usage() and state["a"],
        "trace": lambda: len(state.trace().nodes),
        "ret_value": lambda: state.ret_value,
        "rerun": lambda: state.rerun("a", "z").text(),
    }
    wanted = {
        "name": 2,
        "text": "xy.",
        "messages": [],
        "save": 2,
        "in": False,
        "usage": 2,
        "trace": 3,
    }
    wanted |= {"ret_value": "xy.", "rerun": "xz."}
    found = []
    reader = threading.Thread(target=lambda: found.append(reads[read]()))
    reader.start()
    assert "".join(state.text_iter("a")) == "y"
    assert not found
    again.set()
    reader.join(60)
    assert found == [wanted[read]]


async def read_by_coroutine(state):
    return [await state.get("a"), await state.async_sync()]


def test_coroutines_that_read_a_streamed_run_wait_for_its_end(backend):
    @sgl.function
    async def program(s):
        s += "x" + sgl.gen("a")
        await s.get("a")
        await asyncio.sleep(0)
        s["a"] = 2

    async def main():
        state = await program.arun(backend=backend, stream=True)
        with pytest.raises(sgl.ProgramError, match="block the event loop"):
            state.text()
        return await read_by_coroutine(state)

    assert asyncio.run(main()) == [2, None]


def test_what_is_added_to_a_streamed_run_comes_behind_its_body():
    program, again = twice()
    state = program.run(backend=sgl.ScriptedBackend(default="y"), stream=True)
    threading.Timer(0, again.set).start()
    state += "!"
    assert state.text() == "xy.!"


def test_the_stream_of_a_name_is_that_of_its_first_value_until_somebody_waits_for_the_end():
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a") + "," + sgl.gen("a")

    state = program.run(backend=sgl.ScriptedBackend({"x": "1", ",": "2"}), stream=True)
    assert ["".join(state.text_iter("a")) for _ in range(2)] == ["1", "1"]
    assert (state["a"], "".join(state.text_iter("a"))) == ("2", "2")


def test_a_thread_of_the_body_reads_what_the_body_has():
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")
        found = []
        thread = threading.Thread(target=lambda: found.append((s["a"], s.text())))
        thread.start()
        thread.join(60)
        return found

    state = program.run(backend=sgl.ScriptedBackend(default="y"), stream=True)
    assert within(5, lambda: state.ret_value) == [("y", "xy")]


def test_a_streamed_body_that_raises_leaves_what_it_has_read(backend):
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a") + sgl.gen("b")
        s["a"]
        raise ValueError("mine")

    state = program.run(backend=backend, stream=True)
    assert [kind_of(lambda: state["a"]), kind_of(lambda: state["b"])] == ["y", "ProgramError"]


def test_a_streamed_body_that_raises_after_a_cancellation_tells_its_own_error(backend):
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")
        s["a"]
        s.cancel()
        raise ValueError("mine")

    state = program.run(backend=backend, stream=True)
    assert [kind_of(lambda: state["a"]), kind_of(state.text)] == ["y", "ProgramError"]


# ------------------------------------------------------------------------------------------- so far


def test_so_far_tells_what_has_come_and_waits_for_nothing():
    backend = Pieces("one ", "two", stepped=True)
    state = run("x ", sgl.gen("a"), sgl.gen("b"), backend=backend, stream=True)
    backend.step()
    assert next(state.text_iter("a")) == "one "
    found = state.so_far()
    assert (found.text, dict(found.variables), found.ended) == ("x one ", {}, False)
    state.cancel()
    assert state.so_far().text == "x one "


def test_so_far_has_what_a_cancellation_took_away():
    backend = Gated()
    state = run("x", sgl.gen("a", backend=Answers(lambda _: "done")), sgl.gen("b"), backend=backend)
    assert backend.asked.wait(60)
    state.cancel()
    assert kind_of(lambda: state["a"]) == "RequestAbortedError"
    assert (state.so_far().text, dict(state.so_far().variables)) == ("xdone", {"a": "done"})


def test_so_far_of_a_run_that_has_ended_is_all(backend):
    state = run("x", sgl.gen("a"), backend=backend)
    state.sync()
    assert (state.so_far().text, dict(state.so_far().variables), state.so_far().ended) == (
        "xy",
        {"a": "y"},
        True,
    )


def test_a_run_that_takes_too_long_has_what_is_finished_in_its_error():
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a", backend=Answers(lambda _: "done")) + sgl.gen("b")
        return s["b"]

    with pytest.raises(sgl.RequestTimeoutError) as caught:
        program.run(backend=Gated(), timeout=0.05)
    state = caught.value.state
    assert (state["a"], kind_of(lambda: state["b"])) == ("done", "RequestTimeoutError")
    assert state.so_far().text == "xdone"


# ----------------------------------------------------------------- an answer that is just coming in


@pytest.fixture
def held_back(monkeypatch):
    """The thread that brings the answer "one" stands still behind it until a test lets it go on."""
    gate, plain = threading.Event(), Variable.set

    def set_and_wait(variable, value, error=None):
        plain(variable, value, error)
        if value == "one":
            assert gate.wait(60)

    monkeypatch.setattr(Variable, "set", set_and_wait)
    yield gate
    gate.set()


def test_a_rollback_undoes_a_cancellation_though_the_answer_before_it_is_just_coming_in(held_back):
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")
        assert s["a"] == "one"
        with s.checkpoint() as before:
            s += sgl.gen("b")
            s.cancel()
            before.rollback()
        s += " y" + sgl.gen("c")
        held_back.set()
        return s["c"]

    state = program.run(backend=Answers(lambda prompt: "two" if " y" in prompt else "one"))
    assert (state.ret_value, state.text(), state.error()) == ("two", "xone ytwo", None)


def test_a_branch_that_has_not_begun_is_cancelled_as_one_that_has(held_back):
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")
        assert s["a"] == "one"
        branch = s.fork(1)[0]
        with branch.checkpoint() as before:
            branch += sgl.gen("b")
            branch.cancel()
            before.rollback()
        branch += " y" + sgl.gen("c")
        held_back.set()
        return branch["c"]

    assert (
        program.run(backend=Answers(lambda prompt: "two" if " y" in prompt else "one")).ret_value
        == "two"
    )


def test_a_name_is_the_same_error_though_the_answer_before_a_cancellation_is_just_coming_in(
    held_back,
):
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")
        assert s["a"] == "one"
        s += sgl.gen("b")
        stopping = threading.Thread(target=contextvars.Context().run, args=(s.cancel,))
        stopping.start()
        stopping.join()
        found = kind_of(lambda: s["unknown"])
        held_back.set()
        return found, s["a"], kind_of(lambda: s["b"]), kind_of(s.text)

    found = program.run(backend=Answers(lambda _: "one")).ret_value
    assert found == ("RequestAbortedError", "one", "RequestAbortedError", "RequestAbortedError")
