"""Async programs, and plain ones called from coroutines."""

import asyncio

import pytest

import sglang_lite as sgl


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
        blocking.run(backend=backend(latency=0.05))

    @sgl.function
    async def syncing(s):
        s += sgl.gen("a")
        s.sync()

    with pytest.raises(sgl.ProgramError, match="async_sync"):
        syncing.run(backend=backend(latency=0.05))


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
        failing.run(backend=sgl.ScriptedBackend(lambda call: 1 / 0))


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
        states = await asyncio.gather(*(program.arun("x" * i, backend=backend(latency=0.01)) for i in range(200)))
        return [state["a"] for state in states]

    assert asyncio.run(main()) == [f"<{i}>" for i in range(200)]
