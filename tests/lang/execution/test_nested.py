"""Programs inside programs: continuing the same text, or running by themselves."""

import asyncio
import logging
from contextvars import ContextVar, copy_context

import pytest

import sglang_lite as sgl
from tests.lang.fakes import Drawing, Gated, line_here, within


@sgl.function
def ask(s, question, name="answer"):
    s += question + ": " + sgl.gen(name)
    return f"asked {question}"


def backend(**options):
    return sgl.ScriptedBackend(lambda call: f"<{len(call.prompt.text)}>", **options)


def test_an_added_program_goes_on_with_the_text_and_its_names_stay():
    @sgl.function
    def program(s):
        s += "Start. "
        s += ask("a")
        s += " " + ask("b", name="other") + "."

    state = program.run(backend=backend())
    assert state.text() == "Start. a: <10> b: <18>."
    assert (state["answer"], state["other"]) == ("<10>", "<18>")


def test_a_called_program_has_a_text_of_its_own():
    @sgl.function
    def program(s):
        s += "Start. "
        inner = s.call(ask, "a")
        s += inner["answer"]
        return inner

    state = program.run(backend=backend())
    assert state.text() == "Start. <3>"
    assert state.ret_value.text() == "a: <3>"
    assert state.ret_value.ret_value == "asked a"
    assert "answer" not in state


def test_a_program_that_is_only_read_runs_by_itself_once():
    runs = []

    @sgl.function
    def counted(s):
        runs.append(1)
        s += sgl.gen("a")

    @sgl.function
    def program(s):
        inner = counted()
        assert not runs
        return inner["a"], inner.text()

    assert program.run(backend=backend()).ret_value == ("<0>", "<0>")
    assert len(runs) == 1


def test_a_program_that_was_added_is_read_where_it_was_added():
    runs = []

    @sgl.function
    def counted(s):
        runs.append(1)
        s += sgl.gen("a")
        return "returned"

    @sgl.function
    def program(s):
        s += "1"
        inner = counted()
        s += inner
        return inner["a"], inner.ret_value

    assert program.run(backend=backend()).ret_value == ("<1>", "returned")
    assert len(runs) == 1


def test_a_program_that_was_read_can_not_be_added():
    @sgl.function
    def program(s):
        inner = ask("a")
        inner.text()
        s += inner  # here

    with pytest.raises(sgl.ProgramError, match="has already run on its own") as caught:
        program.run(backend=backend())
    assert caught.value.where.line == line_here(program)


def test_a_program_that_is_neither_added_nor_read_is_warned_about(caplog):
    @sgl.function
    def program(s):
        ask("a")  # here
        s += ask("b")
        assert "answer" in ask("c")

    with caplog.at_level(logging.WARNING, "sglang_lite"):
        program.run(backend=backend())
    (message,) = caplog.messages
    assert "ask(…) was neither added" in message
    assert f"{__file__}:{line_here(program)}" in message


def test_branches_take_programs_too():
    @sgl.function
    def program(s):
        s += "x"
        fork = s.fork(3)
        fork += ask("same", name="one")
        fork += lambda i: ask(str(i), name="two")
        fork.join()

    state = program.run(backend=backend())
    assert state["one"] == ["<7>"] * 3
    assert len(state["two"]) == 3


def test_a_turn_that_is_open_stays_open():
    @sgl.function
    def program(s):
        with s.assistant():
            s += ask("a")
        s += sgl.user("thanks")

    assert [m["content"] for m in program.run(backend=backend()).messages()] == [
        "a: <25>",
        "thanks",
    ]


def test_what_an_added_program_raises_is_raised_by_the_outer_one():
    @sgl.function
    def failing(s):
        s += "half"
        raise LookupError("mine")

    @sgl.function
    def program(s):
        with pytest.raises(LookupError, match="mine"):
            s += failing()
        s += " and on"

    assert program.run(backend=backend()).text() == "half and on"


def test_a_failing_node_is_named_by_its_line_in_the_inner_program():
    @sgl.function
    def inner(s):
        s += sgl.gen("a")  # here

    @sgl.function
    def program(s):
        s += inner()

    state = program.run(backend=sgl.ScriptedBackend(lambda call: str(1 / 0)))
    with pytest.raises(sgl.ProgramError) as caught:
        state["a"]
    assert caught.value.where.line == line_here(inner)


def test_a_called_programs_failure_does_not_fail_the_caller():
    @sgl.function
    def program(s):
        s += "1"
        with pytest.raises(sgl.ProgramError, match="ZeroDivisionError"):
            s.call(ask, "q", backend=sgl.ScriptedBackend(lambda call: str(1 / 0)))["answer"]
        s += "2"

    assert program.run(backend=backend()).text() == "12"


def test_an_added_program_runs_with_the_outer_settings():
    script = backend()

    @sgl.function
    def program(s):
        s += ask("a")

    program.run(backend=script, temperature=0.3).sync()
    assert script.calls[0].params.temperature == 0.3

    @sgl.function
    def own(s):
        s += ask("a", temperature=0.1)  # type: ignore[call-arg]  # options in the call are SGLang's  # here

    with pytest.raises(sgl.ParameterError, match="temperature") as caught:
        own.run(backend=script)
    assert caught.value.where.line == line_here(own)


def test_a_called_program_may_have_settings_and_a_backend_of_its_own():
    own = backend()

    @sgl.function
    def program(s):
        return s.call(ask, "a", temperature=0.1, backend=own)["answer"]

    assert program.run(backend=Gated()).ret_value == "<3>"
    assert own.calls[0].params.temperature == 0.1


def test_arguments_that_do_not_fit_are_told_at_the_line():
    @sgl.function
    def program(s):
        s += ask("a", "b", "c")  # type: ignore[call-arg]  # wrong on purpose  # here

    with pytest.raises(sgl.ParameterError, match="ask: too many positional arguments") as caught:
        program.run(backend=backend())
    assert caught.value.where.line == line_here(program)


def test_async_programs_call_async_programs():
    @sgl.function
    async def inner(s, question):
        s += question + sgl.gen("a")
        return await s.get("a")

    @sgl.function
    async def program(s):
        states = await asyncio.gather(*(s.call(inner, "x" * i) for i in range(3)))
        s += " ".join(state.ret_value for state in states)

    assert program.run(backend=backend()).text() == "<0> <1> <2>"


def test_an_async_program_can_not_be_added():
    @sgl.function
    async def inner(s):
        pass

    @sgl.function
    async def program(s):
        s += inner()  # here

    with pytest.raises(sgl.ProgramError, match=r"`\+=` can't await it. Use await s.call") as caught:
        program.run(backend=backend())
    assert caught.value.where.line == line_here(program)


def test_programs_may_call_themselves():
    @sgl.function
    def countdown(s, n):
        s += f"{n} "
        if n:
            s += countdown(n - 1)

    assert countdown.run(3, backend=backend()).text() == "3 2 1 0 "


# -------------------------------------------------------- what a program has from the one around it


@sgl.function
def drawn(s):
    s += "inner " + sgl.gen("x")
    return s["x"]


@sgl.function
async def drawn_async(s):
    s += "inner " + sgl.gen("x")
    return await s.get("x")


def called(s):
    return [s.call(drawn).ret_value, s.call(drawn).ret_value]


def read_from(s):
    return [drawn()["x"], drawn.run()["x"]]


def in_branches(s):
    fork = s.fork(2)
    return [branch.call(drawn).ret_value for branch in fork]


def in_batches(s):
    states = [*drawn.run_batch([{}, {}]), *drawn_async.run_batch([{}], seed=5)]
    return [state["x"] for state in states]


@pytest.mark.filterwarnings("ignore:items 0 and 1 are equal")
@pytest.mark.parametrize("body", [called, read_from, in_branches, in_batches])
def test_a_seed_reaches_the_programs_inside(body):
    program = sgl.function(body)
    first = program.run(backend=Drawing(), seed=7).ret_value
    assert program.run(backend=Drawing(3), seed=7).ret_value == first
    assert program.run(backend=Drawing(), seed=8).ret_value != first
    if body is not in_batches:  # whose items have one seed, as in any batch
        assert first[0] != first[1]


def test_a_seed_and_a_backend_that_are_arguments_of_the_called_program_are_its_own():
    @sgl.function
    def inner(s, backend="mine", seed="too"):
        s += f"{backend} {seed} " + sgl.gen("x")

    @sgl.function
    def program(s):
        return s.call(inner).text()

    assert program.run(backend=sgl.ScriptedBackend(default="!"), seed=1).ret_value == "mine too !"


@sgl.function
def calls_itself(s, depth):
    s += f"{depth} "
    if depth:
        s.call(calls_itself, depth - 1)


@sgl.function
async def awaits_itself(s, depth):
    s += f"{depth} "
    if depth:
        await s.call(awaits_itself, depth - 1)


@sgl.function
def reads_itself(s, depth):
    s += f"{depth} " + sgl.gen("a")
    return reads_itself(depth - 1)["a"] if depth else s["a"]


@pytest.mark.parametrize("program", [calls_itself, awaits_itself, reads_itself])
def test_programs_that_are_nested_too_deeply_for_python_say_so(program):
    backend = sgl.ScriptedBackend(default="!")
    assert program.run(40, backend=backend).text().startswith("40 ")
    with pytest.raises(
        sgl.ProgramError, match=r"nested in itself or in others .* frames\. Write a loop"
    ) as caught:
        program.run(2000, backend=backend)
    assert caught.value.where.file == __file__


def test_a_recursion_of_the_bodys_own_stays_pythons_error():
    def deeper(n):
        return deeper(n + 1)

    @sgl.function
    def program(s):
        deeper(0)

    with pytest.raises(RecursionError):
        program.run(backend=sgl.ScriptedBackend(default="!"))


@pytest.mark.parametrize("body", [called, read_from, in_branches, in_batches])
def test_a_time_limit_holds_for_the_programs_inside(body):
    with pytest.raises(
        (sgl.RequestTimeoutError, sgl.BatchError), match=r"longer than its timeout of 0\.1 s"
    ):
        within(5, lambda: sgl.function(body).run(backend=Gated(), timeout=0.1))


@pytest.mark.parametrize("body", [called, read_from, in_branches, in_batches])
def test_cancelling_reaches_the_programs_inside(body):
    backend = Gated()
    state = sgl.function(body).run(backend=backend, stream=True)
    assert backend.asked.wait(60)
    state.cancel()
    assert backend.cancelled.wait(60)
    with pytest.raises(sgl.RequestAbortedError):
        within(5, lambda: list(state.text_iter()))


@pytest.mark.filterwarnings("ignore:items 0 and 1 are equal")
@pytest.mark.parametrize("program", [drawn, drawn_async])
def test_bodies_of_a_batch_see_the_callers_context_variables(program):
    variable = ContextVar("variable")
    seen = []

    class Seeing(Drawing):
        async def agenerate(self, prompt, params, constraint, *, stream):
            seen.append(variable.get())
            async for event in super().agenerate(prompt, params, constraint, stream=stream):
                yield event

    def start():
        variable.set("mine")
        program.run_batch([{}, {}], backend=Seeing(), seed=1)

    copy_context().run(start)
    assert seen == ["mine", "mine"]
