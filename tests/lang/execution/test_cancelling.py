"""Programs that are cancelled, and their tasks."""

import asyncio
import threading

import pytest

import sglang_lite as sgl
from tests.lang.fakes import Answers, Gated, Pieces, line_here, run, within


def test_cancelling_stops_the_backend_and_tells_the_readers_where():
    backend = Gated()

    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a") + sgl.gen("b")
        assert backend.asked.wait(60)
        s.cancel()  # here

    state = program.run(backend=backend)
    assert backend.cancelled.wait(60)
    for name in "ab":
        with pytest.raises(sgl.RequestAbortedError, match="cancelled") as caught:
            within(1, lambda n=name: state[n])
        assert caught.value.where.line == line_here(program)


def test_cancelling_keeps_what_was_waited_for():
    backend = Gated()
    state = run(
        "x", sgl.gen("a", backend=Answers(lambda text: "done")), sgl.gen("b"), backend=backend
    )
    assert state["a"] == "done"
    assert backend.asked.wait(60)
    state.cancel()
    assert state["a"] == "done"


def test_cancelling_reaches_the_branches_of_branches():
    backends = [Gated(), Gated()]

    @sgl.function
    def program(s):
        fork = s.fork(2)
        fork[0] += sgl.gen("a", backend=backends[0])
        inner = fork[1].fork(1)
        inner += sgl.gen("a", backend=backends[1])
        inner.join()
        fork.join()

    state = program.run(backend=Gated())
    assert all(backend.asked.wait(60) for backend in backends)
    state.cancel()
    assert all(backend.cancelled.wait(60) for backend in backends)
    with pytest.raises(sgl.RequestAbortedError):
        within(1, lambda: state["a"])


def test_cancelling_a_finished_program_does_nothing():
    state = run("x", sgl.gen("a"), backend=sgl.ScriptedBackend(default="y"))
    state.sync()
    state.cancel()
    assert state["a"] == "y"
    assert state.error() is None


def test_cancelling_ends_the_streams():
    backend = Pieces("one ", "two", stepped=True)
    state = run("x ", sgl.gen("a"), backend=backend, stream=True)
    backend.step()
    pieces = state.text_iter("a")
    assert next(pieces) == "one "
    state.cancel()
    with pytest.raises(sgl.RequestAbortedError):
        within(1, lambda: next(pieces))


def test_a_body_that_is_cancelled_between_its_generations_makes_no_more_of_them():
    between, cancelled, ended = threading.Event(), threading.Event(), threading.Event()

    class Backend(sgl.ScriptedBackend):
        def end_program(self, s):
            ended.set()

    backend = Backend(default="y")

    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")
        assert s["a"] == "y"
        between.set()
        assert cancelled.wait(60)
        s += sgl.gen("b")

    async def main():
        awaiting = asyncio.ensure_future(program.arun(backend=backend))
        assert await asyncio.to_thread(between.wait, 60)
        awaiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await awaiting

    asyncio.run(main())
    cancelled.set()
    assert ended.wait(60)
    assert len(backend.calls) == 1


@pytest.mark.parametrize("stopped_by", ["cancel", "timeout"])
def test_a_body_that_tries_until_it_succeeds_ends_when_it_is_stopped(stopped_by):
    backend = Gated()
    states = []

    @sgl.function
    def program(s):
        states.append(s)
        while True:
            with s.checkpoint() as c:
                s += sgl.gen("a")
                try:
                    return s["a"]
                except sgl.SglError:
                    c.rollback()

    def run():
        return program.run(backend=backend, timeout=0.1 if stopped_by == "timeout" else None)

    def stop():
        assert backend.asked.wait(60)
        states[0].cancel()

    if stopped_by == "cancel":
        threading.Thread(target=stop).start()
    with pytest.raises(
        sgl.RequestAbortedError if stopped_by == "cancel" else sgl.RequestTimeoutError
    ):
        within(5, run)


def test_a_blocking_hook_can_not_be_stopped_but_its_readers_do_not_wait_for_it():
    entered, leave = threading.Event(), threading.Event()

    class Slow(sgl.BaseBackend):
        def generate(self, s, sampling_params):
            entered.set()
            leave.wait()
            return "late", {}

    state = run("x", sgl.gen("a"), backend=Slow())
    assert entered.wait(60)
    state.cancel()
    with pytest.raises(sgl.RequestAbortedError):
        within(1, lambda: state["a"])
    leave.set()
    assert state.stream_executor.text_ == "x"


def test_a_cancelled_program_on_the_engine_frees_it(engine):
    state = run(
        "Tell me everything:",
        sgl.gen("a", max_tokens=4000, ignore_eos=True),
        backend=engine,
        stream=True,
    )
    next(state.text_iter("a"))  # it is under way
    state.cancel()
    run("x", sgl.gen("a", max_tokens=2), backend=engine).sync()  # comes after the abort
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0
    with pytest.raises(sgl.RequestAbortedError):
        state["a"]


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_cancelling_the_task_that_awaits_a_program_stops_it(kind):
    backend = Gated()

    def plain(s):
        s += "x" + sgl.gen("a")

    async def coroutine(s):
        s += "x" + sgl.gen("a")

    async def main():
        awaiting = asyncio.ensure_future(
            sgl.function(plain if kind == "plain" else coroutine).arun(backend=backend)
        )
        await asyncio.to_thread(backend.asked.wait, 5)
        awaiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await awaiting

    asyncio.run(main())
    assert backend.cancelled.wait(60)


def test_cancelling_the_task_that_awaits_a_batch_stops_its_programs():
    backend = Gated()

    @sgl.function
    async def program(s, i):
        s += "x" + sgl.gen("a")

    async def main():
        awaiting = asyncio.ensure_future(program.arun_batch([{"i": 0}, {"i": 1}], backend=backend))
        await asyncio.to_thread(backend.asked.wait, 5)
        awaiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await awaiting

    asyncio.run(main())
    assert backend.cancelled.wait(60)
