"""What runs beside a loop of tools that is suspended: loops of the same coroutine, and programs in
tools.
"""

import asyncio

import pytest

import sglang_lite as sgl
from tests.lang.test_tools import answer, call

made = []


@pytest.fixture(autouse=True)
def _nothing_is_made():
    made.clear()


def refund(order: str) -> str:
    """Pays back."""
    made.append(order)
    return "paid"


async def work(n: int) -> int:
    """Works for a while."""
    made.append(f"begin {n}")
    for _ in range(9):
        await asyncio.sleep(0)
    made.append(f"end {n}")
    return n


def write(request):
    text = request.prompt.text
    count = text.count("Result of")
    if "Refund" in text:
        return answer("paid") if count else call("refund", order=text.split("Refund ")[1][0])
    return answer("worked") if count == 2 else call("work", n=count)


MODEL = sgl.ScriptedBackend(write)
WORK = ["begin 0", "end 0", "begin 1", "end 1"]


@sgl.function
async def gathered(s):
    first, second, third = s.fork(3)
    first += sgl.user("Refund 7.")
    second += sgl.user("Work!")
    third += sgl.user("Refund 8.")
    return await asyncio.gather(
        sgl.use_tools(second, [work]),
        sgl.use_tools(first, [refund], approve="ask"),
        sgl.use_tools(third, [refund], approve="ask"),
    )


@sgl.function
async def grouped(s):
    first, second, third = s.fork(3)
    first += sgl.user("Refund 7.")
    second += sgl.user("Work!")
    third += sgl.user("Refund 8.")
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(sgl.use_tools(second, [work])),
            group.create_task(sgl.use_tools(first, [refund], approve="ask")),
            group.create_task(sgl.use_tools(third, [refund], approve="ask")),
        ]
    return [task.result() for task in tasks]


@sgl.function
async def late(s):
    async def begin_late():
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return await sgl.use_tools(second, [work])

    first, second = s.fork(2)
    first += sgl.user("Refund 7.")
    second += sgl.user("Work!")
    return await asyncio.gather(
        sgl.use_tools(first, [refund], approve="ask"),
        begin_late(),
    )


def test_a_loop_that_begins_after_the_end_makes_no_call():
    async def play():
        state = await late.arun(backend=MODEL)
        for _ in range(99):
            await asyncio.sleep(0)
        assert not made
        return await state.aresume(state.pending()[0].approve())

    assert asyncio.run(play()).ret_value == ["paid", "worked"]
    assert sorted(made) == sorted(["7", *WORK])


@sgl.function
async def outer(s):
    async def delegate() -> str:
        """Does all."""
        return str((await grouped.arun()).ret_value)

    s += sgl.user("Delegate!")
    return await sgl.use_tools(s, [delegate])


@pytest.mark.parametrize("program", [gathered, grouped])
@pytest.mark.parametrize("journal", [False, True], ids=["memory", "journal"])
def test_calls_beside_a_suspended_loop_come_to_their_end(program, journal, tmp_path):
    options = {"journal": tmp_path / "run.jsonl"} if journal else {}

    async def play():
        state = await program.arun(backend=MODEL, **options)
        assert made == WORK[:2]  # no other is begun
        assert sorted(each.arguments["order"] for each in state.pending()) == ["7", "8"]
        return await state.aresume([each.approve() for each in state.pending()])

    state = asyncio.run(play())
    assert state.ret_value == ["worked", "paid", "paid"]
    assert sorted(made) == sorted(["7", "8", *WORK])


def test_a_group_in_a_tool_suspends_the_whole():
    def write_for_all(request):
        if "Delegate!" not in request.prompt.text:
            return write(request)
        return answer("done") if "Result of" in request.prompt.text else call("delegate")

    async def play():
        state = await outer.arun(backend=sgl.ScriptedBackend(write_for_all))
        assert made == WORK[:2]  # no other is begun
        assert sorted(each.arguments["order"] for each in state.pending()) == ["7", "8"]
        return await state.aresume([each.approve() for each in state.pending()])

    assert asyncio.run(play()).ret_value == "done"
    assert sorted(made) == sorted(["7", "8", *WORK])


def test_an_error_beside_a_suspended_loop_is_raised():
    @sgl.function
    async def fails(s):
        async def fail():
            raise LookupError("no row")

        s += sgl.user("Refund 7.")
        async with asyncio.TaskGroup() as group:
            group.create_task(sgl.use_tools(s, [refund], approve="ask"))
            group.create_task(fail())

    with pytest.raises(BaseExceptionGroup) as caught:
        asyncio.run(fails.arun(backend=MODEL))
    assert caught.group_contains(LookupError)
    assert not made


@pytest.mark.parametrize("read", ["text", "value", "events"])
def test_a_streamed_program_in_a_tool_suspends_the_whole(read, tmp_path):
    @sgl.function
    def clerk(s):
        s += sgl.user("Refund 7.")
        return sgl.use_tools(s, [refund], approve="ask")

    shown = []

    @sgl.function
    def boss(s):
        def delegate() -> str:
            """Lets a clerk pay."""
            inner = clerk.run(stream=True)
            if read == "text":
                shown.append("".join(inner.text_iter()))
            elif read == "events":
                shown.append(" ".join(each.kind for each in inner.events()))
            return inner.ret_value if read == "value" else "done"

        s += sgl.user("Delegate!")
        return sgl.use_tools(s, [delegate])

    def write_for_both(request):
        if "Delegate!" not in request.prompt.text:
            return write(request)
        return answer("done") if "Result of" in request.prompt.text else call("delegate")

    backend = sgl.ScriptedBackend(write_for_both)
    state = boss.run(backend=backend)
    (waiting,) = state.pending()
    assert waiting.arguments == {"order": "7"}
    assert not made
    state.save(tmp_path / "state.json")
    state = sgl.load(tmp_path / "state.json", boss, backend=backend).resume(waiting.approve())
    assert state.ret_value == "done"
    assert made == ["7"]
    if read == "events":
        assert shown[-1] == "turn call result turn answer"
