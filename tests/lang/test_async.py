"""Async programs, and plain ones called from coroutines."""

import asyncio
import sys
import threading

import pytest

import sglang_lite as sgl
from tests.children import in_a_child, interrupted
from tests.lang.fakes import Gated, Pieces, line_here, within


@sgl.function
async def program(s, word="hello"):
    s += word + sgl.gen("a")
    value = await s.get("a")
    s += sgl.gen("b")
    return value


def backend(**options):
    return sgl.ScriptedBackend(lambda call: f"<{len(call.prompt.text)}>", **options)


def test_run_and_arun_give_the_same():
    state = program.run(backend=backend())
    assert (state["a"], state["b"], state.ret_value) == ("<5>", "<8>", "<5>")

    async def main():
        state = await program.arun("hi", backend=backend())
        return state["a"], state["b"], state.ret_value

    assert asyncio.run(main()) == ("<2>", "<5>", "<2>")


def test_run_inside_a_running_loop():
    async def main():
        return program.run(backend=backend())["b"]

    assert asyncio.run(main()) == "<8>"

    async def failing():
        await sgl.function(boom).arun(backend=backend())

    async def boom(s):
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        asyncio.run(failing())

    async def run_failing():
        sgl.function(boom).run(backend=backend())

    with pytest.raises(LookupError, match="mine"):
        asyncio.run(run_failing())


def test_arun_of_a_plain_program():
    @sgl.function
    def plain(s):
        s += sgl.gen("a")
        return s["a"]

    async def main():
        return (await plain.arun(backend=backend())).ret_value

    assert asyncio.run(main()) == "<0>"


def test_blocking_reads_in_an_async_body_are_refused():
    @sgl.function
    async def blocking(s):
        s += sgl.gen("a")
        return s["a"]

    with pytest.raises(sgl.ProgramError, match=r"Use await s.get\('a'\)"):
        blocking.run(backend=Gated())

    @sgl.function
    async def syncing(s):
        s += sgl.gen("a")
        s.sync()

    with pytest.raises(sgl.ProgramError, match="async_sync"):
        syncing.run(backend=Gated())


def test_async_sync_and_errors():
    @sgl.function
    async def fine(s):
        s += sgl.gen("a")
        await s.async_sync()
        return s["a"]

    assert fine.run(backend=backend(latency=0.01)).ret_value == "<0>"

    @sgl.function
    async def failing(s):
        s += sgl.gen("a")
        await s.get("a")

    with pytest.raises(sgl.ProgramError, match="ZeroDivisionError"):
        failing.run(backend=sgl.ScriptedBackend(lambda call: str(1 / 0)))


def test_streaming_from_arun():
    async def main():
        state = await program.arun(stream=True, backend=backend(latency=0.01))
        pieces = [piece async for piece in state.text_async_iter("b")]
        with pytest.raises(sgl.UnknownVariableError):
            await state.get("c")
        return pieces

    assert asyncio.run(main()) == ["<8>"]


def test_many_async_programs_at_once():
    async def main():
        states = await asyncio.gather(
            *(program.arun("x" * i, backend=backend(latency=0.01)) for i in range(200))
        )
        return [state["a"] for state in states]

    assert asyncio.run(main()) == [f"<{i}>" for i in range(200)]


def in_loop(main):
    """Runs a coroutine function; a failure, where it blocks its event loop for good."""
    return within(5, lambda: asyncio.run(main()))


# ------------------------------------------------------------------ reading that would block itself


@pytest.mark.parametrize(
    ("read", "instead"),
    [
        (lambda s: s["a"], "await s.get\\('a'\\)"),
        (lambda s: s.get_meta_info("a"), "await s.get\\('a'\\)"),
        (lambda s: s.text(), "await s.async_sync"),
        (lambda s: s.messages(), "await s.async_sync"),
        (lambda s: s.sync(), "await s.async_sync"),
        (lambda s: s.error(), "await s.async_sync"),
    ],
    ids=["value", "metadata", "text", "messages", "sync", "error"],
)
def test_every_blocking_read_in_an_async_body_says_what_to_write(read, instead):
    script = Gated()

    @sgl.function
    async def blocking(s):
        s += sgl.gen("a")
        read(s)

    with pytest.raises(
        sgl.ProgramError, match=f"block the event loop of an async program. Use {instead}"
    ) as caught:
        within(5, lambda: blocking.run(backend=script))
    assert caught.value.where.file == __file__


def test_what_is_there_already_can_be_read_in_an_async_body():
    @sgl.function
    async def reading(s):
        s += "x" + sgl.gen("a")
        await s.async_sync()
        return s["a"], s.text()

    assert reading.run(backend=backend()).ret_value == ("<1>", "x<1>")


@pytest.mark.parametrize(
    "read", [lambda s: s["a"], lambda s: list(s.text_iter()), lambda s: list(s.text_iter("a"))]
)
def test_a_stream_whose_body_needs_this_loop_can_not_be_waited_for_in_it(read):
    async def main():
        state = await program.arun(stream=True, backend=backend())
        with pytest.raises(sgl.ProgramError, match="block the event loop"):
            read(state)
        return [piece async for piece in state.text_async_iter("b")]

    assert in_loop(main) == ["<8>"]


@pytest.mark.parametrize("read", [lambda s: s["a"], lambda s: "".join(s.text_iter("a"))])
def test_a_stream_whose_body_runs_elsewhere_can(read):
    async def main():
        return read(program.run(stream=True, backend=backend(latency=0.005)))

    assert in_loop(main) == "<5>"


def test_a_notebook_reads_an_async_program_like_any_other():
    async def notebook():
        return program.run(backend=backend(latency=0.005))["b"]

    assert in_loop(notebook) == "<8>"


def test_a_plain_programs_stream_can_be_read_in_the_loop_that_started_it():
    @sgl.function
    def plain(s):
        s += sgl.gen("a")

    async def main():
        state = await plain.arun(stream=True, backend=Pieces("one ", "two"))
        return state["a"]

    assert in_loop(main) == "one two"


# ------------------------------------------------------------------------- plain programs in a loop


@sgl.function
def counting(s, i):
    s += f"{i} " + sgl.gen("a")
    return s["a"]


def test_plain_programs_and_batches_run_inside_a_loop_with_a_backend_that_takes_its_time():
    async def notebook():
        one = counting.run(1, backend=backend(latency=0.002)).ret_value
        return one, [
            state["a"]
            for state in counting.run_batch(
                [(i,) for i in range(3)], backend=backend(latency=0.002)
            )
        ]

    assert in_loop(notebook) == ("<2>", ["<2>", "<2>", "<2>"])


@pytest.mark.parametrize("window", [1, 2, 96])
@pytest.mark.parametrize("ordered", [True, False])
def test_an_iterator_of_a_batch_is_consumed_inside_a_loop(window, ordered):
    async def notebook():
        found = []
        for each in counting.run_batch(
            [(i,) for i in range(20)],
            backend=backend(),
            num_threads=window,
            generator_style=True,
            ordered=ordered,
        ):
            found.append(each if ordered else each[1])
        return len(found)

    assert in_loop(notebook) == 20


def test_an_iterator_of_a_batch_of_async_programs_is_consumed_inside_a_loop():
    @sgl.function
    async def asking(s, i):
        s += f"{i} " + sgl.gen("a")
        return await s.get("a")

    async def notebook():
        states = asking.run_batch(
            [(i,) for i in range(20)], backend=backend(), num_threads=2, generator_style=True
        )
        return [state.ret_value for state in states]

    assert in_loop(notebook) == ["<2>"] * 10 + ["<3>"] * 10


def test_as_many_plain_bodies_as_are_awaited_are_under_way():
    meeting = threading.Barrier(40)

    @sgl.function
    def meeting_others(s, i):
        meeting.wait()
        s += f"{i}"

    async def main():
        await meeting_others.arun_batch([(i,) for i in range(40)], backend=backend())
        await asyncio.gather(*(meeting_others.arun(i, backend=backend()) for i in range(40)))

    within(10, lambda: in_loop(main))


# ------------------------------------------------------------------------------------------ batches


def test_a_batch_of_coroutines_gives_results_in_order():
    async def main():
        return await program.arun_batch(
            [("x" * i,) for i in range(50)], backend=backend(latency=0.001), num_threads=8
        )

    assert [state["a"] for state in in_loop(main)] == [f"<{i}>" for i in range(50)]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize("style", ["run_batch", "arun_batch"])
def test_whatever_a_body_raises_is_the_outcome_of_its_item(error, kind, style):
    def plain(s, i):
        if i == 1:
            raise error

    async def coroutine(s, i):
        if i == 1:
            raise error

    raising = sgl.function(plain if kind == "plain" else coroutine)

    def run():
        if style == "run_batch":
            return raising.run_batch([{"i": 0}, {"i": 1}], backend=backend(), on_error="return")

        async def main():
            return await raising.arun_batch(
                [{"i": 0}, {"i": 1}], backend=backend(), on_error="return"
            )

        return asyncio.run(main())

    fine, failed = within(5, run)
    assert isinstance(fine, sgl.ProgramState)
    assert isinstance(failed, sgl.ProgramError)
    assert failed.__cause__ is error


def test_an_interrupted_batch_takes_no_further_item():
    assert in_a_child(items_of_an_interrupted_batch) == [0]


def items_of_an_interrupted_batch():
    """Items that were started. The first is not over when Ctrl-C comes."""
    started, go_on = [], threading.Event()

    @sgl.function
    def waiting(s, i):
        started.append(i)
        go_on.wait()

    batch = [(i,) for i in range(100)]
    interrupted(lambda: waiting.run_batch(batch, backend=backend(), num_threads=1), lambda: started)
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "sglang_lite-body":
            thread.join()
    return started


# ------------------------------------------------------------------------------------------- bodies


def test_tasks_of_one_body_work_on_its_branches():
    @sgl.function
    async def branching(s):
        s += "x"
        fork = s.fork(3)

        async def work(branch, i):
            branch += "y" * i + sgl.gen("a")
            value = await branch.get("a")
            branch += value + sgl.gen("b")
            return await branch.get("b")

        return await asyncio.gather(*(work(branch, i) for i, branch in enumerate(fork)))

    assert branching.run(backend=backend(latency=0.001)).ret_value == ["<7>", "<8>", "<9>"]


def test_a_body_follows_its_own_stream():
    @sgl.function
    async def following(s):
        s += sgl.gen("a")
        return [piece async for piece in s.text_async_iter("a")]

    async def main():
        state = await following.arun(stream=True, backend=Pieces("one ", "two"))
        assert await state.get("a") == "one two"
        await state.branch.run.body
        return state.ret_value

    assert in_loop(main) == ["one ", "two"]


def test_several_event_loops_wait_for_one_program():
    script = Gated("x")
    state = sgl.function(lambda s: s.__iadd__(sgl.gen("a"))).run(backend=script)
    got = []
    threads = [
        threading.Thread(target=lambda: got.append(asyncio.run(state.get("a")))) for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    script.open()
    for thread in threads:
        thread.join()
    assert got == ["x"] * 5


def test_a_reader_that_gives_up_disturbs_nobody():
    script = Gated("x")
    state = sgl.function(lambda s: s.__iadd__(sgl.gen("a"))).run(backend=script)

    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(state.get("a"), 0.001)
        script.open()
        return await state.get("a")

    assert in_loop(main) == "x"


def test_an_unknown_variable_is_an_error_at_the_line_of_the_async_body():
    @sgl.function
    async def asking(s):
        await s.get("nothing")  # here

    with pytest.raises(sgl.UnknownVariableError) as caught:
        within(5, lambda: asking.run(backend=backend()))
    assert caught.value.where.line == line_here(asking)


def test_what_was_waited_for_can_be_read_at_once():
    """However late the thread that has played it is with saying so."""

    class Later(sgl.ScriptedBackend):
        def answer_now(self, prompt, params, constraint):
            return None

    @sgl.function
    async def program(s):
        for _ in range(40):
            s += "a" + sgl.gen("x")
            await s.async_sync()
            assert s.text().endswith("ay")
            s += "b" + sgl.gen("z")
            await s.get("z")
            assert s.text().endswith("by")
            assert s.messages() == []

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(10):
            asyncio.run(program.arun(backend=Later(default="y")))
    finally:
        sys.setswitchinterval(interval)
