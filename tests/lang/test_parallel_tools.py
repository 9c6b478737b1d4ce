"""Async tools and calls that run together: in plain bodies and in coroutines."""

import asyncio
import contextvars
import json
import threading

import pytest
from mcp.server import MCPServer

import sglang_lite as sgl
from tests.lang.test_tool_errors import add, agent, results, run
from tests.lang.test_tool_limits import BOTH, async_agent, calls, workers
from tests.lang.test_tools import answer, call
from tests.waiting import until


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    until(lambda: not workers())


class Meeting:
    """Lets go of those who wait when there are so many."""

    def __init__(self, size):
        self.size, self.here, self.all_here = size, 0, asyncio.Event()

    async def join(self):
        self.here += 1
        if self.here == self.size:
            self.all_here.set()
        await self.all_here.wait()


async def fetch(page: str) -> str:
    return f"<{page}>"


def later(page: str) -> object:
    """A plain function that returns a coroutine."""
    return fetch(page)


@BOTH
@pytest.mark.parametrize("tool", [fetch, later], ids=lambda tool: tool.__name__)
@pytest.mark.parametrize("options", [{}, {"tool_timeout": 600}, {"parallel": True}])
def test_async_tools_are_awaited(play, tool, options):
    state = play([call(tool.__name__, page="a"), answer("ok")], [tool], **options)
    assert state.ret_value == "ok"
    assert results(state) == [f'Result of {tool.__name__}: "<a>"']


@BOTH
def test_async_calls_of_a_turn_run_together_and_keep_their_order(play):
    meeting = Meeting(3)

    async def meets(number: int) -> int:
        await meeting.join()
        return number

    turn = calls(*[call("meets", number=i) for i in range(3)])
    state = play([turn, answer("ok")], [meets], parallel_tool_calls=True)
    assert results(state)[0].splitlines() == [f"Result of meets: {i}" for i in range(3)]


@BOTH
def test_plain_functions_run_in_order_unless_they_may_run_together(play):
    order = []

    def note(number: int) -> int:
        order.append(number)
        return number

    turn = calls(*[call("note", number=i) for i in range(5)])
    play([turn, answer("ok")], [note], parallel_tool_calls=True)
    assert order == [0, 1, 2, 3, 4]
    barrier = threading.Barrier(3)

    def meets(number: int) -> int:
        barrier.wait(600)
        return number

    turn = calls(*[call("meets", number=i) for i in range(3)])
    state = play([turn, answer("ok")], [meets], parallel=True, parallel_tool_calls=True)
    assert results(state)[0].splitlines() == [f"Result of meets: {i}" for i in range(3)]


@BOTH
def test_async_and_plain_tools_of_a_turn(play):
    async def slow(a: int) -> int:
        await asyncio.to_thread(plain_ran.wait, 600)
        return a

    plain_ran = threading.Event()

    def plain(a: int) -> int:
        plain_ran.set()
        return a

    turn = calls(call("slow", a=1), call("plain", a=2))
    state = play([turn, answer("ok")], [slow, plain], parallel_tool_calls=True)
    assert results(state) == ["Result of slow: 1\nResult of plain: 2"]


@BOTH
def test_calls_of_servers_run_together(play):
    server = MCPServer("meeting")
    here = []

    @server.tool()
    async def meets(number: int) -> int:
        here.append(number)
        while len(here) < 3:
            await asyncio.sleep(0)
        return number

    turn = calls(*[call("meets", number=i) for i in range(3)])
    with sgl.mcp(server) as tools:
        state = play([turn, answer("ok")], tools, parallel_tool_calls=True)
    assert [
        json.loads(line.partition(": ")[2])["result"] for line in results(state)[0].splitlines()
    ] == [0, 1, 2]


@BOTH
def test_a_server_is_told_of_a_call_that_is_given_up(play):
    server = MCPServer("waiting")
    cancelled = threading.Event()

    @server.tool()
    async def waits() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return ""

    with sgl.mcp(server) as tools:
        state = play([call("waits"), answer("ok")], tools, tool_timeout=0.2)
        assert cancelled.wait(60)
    assert results(state) == ["Result of waits: Error: it did not end within 0.2 s."]


place = contextvars.ContextVar("place", default="nowhere")


@BOTH
@pytest.mark.parametrize("options", [{}, {"tool_timeout": 600}, {"parallel": True}])
def test_tools_see_the_context_of_the_program(play, options):
    @sgl.function
    def inner(s):
        s += sgl.user("Where?") + sgl.assistant(sgl.gen("a", max_tokens=5))

    def plain() -> str:
        return f"{place.get()} {inner.run()['a']}"

    async def later() -> str:
        return f"{place.get()} {(await inner.arun())['a']}"

    token = place.set("here")
    try:
        texts = [call("plain"), "Rome", call("later"), "Oslo", answer("ok")]
        state = play(texts, [plain, later], **options)
    finally:
        place.reset(token)
    assert results(state) == ['Result of plain: "here Rome"', 'Result of later: "here Oslo"']


@BOTH
def test_failures_of_async_tools_are_shown(play):
    async def fails() -> str:
        raise LookupError("none")

    assert results(play([call("fails"), answer("ok")], [fails])) == [
        "Result of fails: Error: LookupError: none"
    ]
    with pytest.raises(sgl.ToolError, match="the tool fails raised LookupError: none") as caught:
        play([call("fails"), answer("ok")], [fails], on_tool_error="raise")
    assert caught.value.state["answer_call_0"].name == "fails"


@BOTH
def test_what_still_runs_when_the_loop_ends_is_cancelled(play):
    cancelled = threading.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def fails() -> None:
        raise LookupError("none")

    turn = calls(call("fails"), call("waits"))
    with pytest.raises(sgl.ToolError):
        play([turn], [fails, waits], on_tool_error="raise", parallel_tool_calls=True)
    assert cancelled.wait(60)


def test_a_plain_program_may_have_async_tools_where_a_loop_runs():
    async def main():
        return run([call("fetch", page="a"), answer("ok")], [fetch])

    assert results(asyncio.run(main())) == ['Result of fetch: "<a>"']


def test_a_coroutine_that_is_cancelled_cancels_its_tools():
    async def main():
        started, ended = asyncio.Event(), asyncio.Event()

        async def waits() -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        backend = sgl.ScriptedBackend(lambda _: call("waits"))
        task = asyncio.ensure_future(async_agent.arun([waits], backend=backend))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await ended.wait()

    asyncio.run(main())


def test_async_programs_are_traced_too():
    state = async_agent.trace(tools=[add])
    assert [node.node.name for node in state.graph().nodes if node.kind == "Gen"] == [
        "answer_call_0"
    ]


def test_a_plain_function_does_not_block_the_event_loop():
    async def main():
        free = threading.Event()

        def waits() -> str:
            free.wait(600)
            return "ok"

        texts = iter([call("waits"), answer("ok")])
        backend = sgl.ScriptedBackend(lambda _: next(texts))
        task = asyncio.ensure_future(async_agent.arun([waits], backend=backend))
        for _ in range(20):
            await asyncio.sleep(0)  # the loop goes round
        free.set()
        return await task

    assert asyncio.run(main()).ret_value == "ok"


def test_the_loop_is_an_agent_for_the_batch_too():
    backend = sgl.ScriptedBackend({"?": call("fetch", page="a"), "Result": answer("ok")})
    states = agent.run_batch([{"tools": [fetch]}] * 8, backend=backend)
    assert [state.ret_value for state in states] == ["ok"] * 8


# ------------------------------------------------------------------------------------------- events


def seen(event):
    return (
        event.kind,
        event.name,
        None if event.call is None else event.call.name,
        event.text,
        event.error is not None,
    )


EVENTS = [
    ("turn", "answer_call_0", None, call("add", a=1), False),
    ("call", "answer_call_0", "add", "", False),
    ("result", "answer_call_0", "add", "2", False),
    ("turn", "answer_call_1", None, call("fails"), False),
    ("call", "answer_call_1", "fails", "", False),
    ("result", "answer_call_1", "fails", "Error: LookupError: none", True),
    ("turn", "answer_call_2", None, answer("2"), False),
    ("answer", "answer", None, "2", False),
]


async def fails() -> str:
    raise LookupError("none")


@BOTH
def test_what_an_agent_does_can_be_read_afterwards(play):
    state = play([call("add", a=1), call("fails"), answer("2")], [add, fails])
    events = list(state.events())
    assert [seen(event) for event in events] == EVENTS
    usages = [event.usage for event in events if event.kind == "turn"]
    assert usages == [state.usage(f"answer_call_{i}") for i in range(3)]
    assert [event.usage for event in events if event.kind != "turn"] == [None] * 5


def test_an_agent_can_be_followed():
    called, free = threading.Event(), threading.Event()

    def waits() -> str:
        called.set()
        free.wait(600)
        return "ok"

    state = run([call("waits"), answer("done")], [waits], stream=True)
    events = state.events()
    assert [next(events).kind for _ in range(2)] == ["turn", "call"]
    assert called.wait(600)
    free.set()
    assert [event.kind for event in events] == ["result", "turn", "answer"]
    assert [seen(event)[0] for event in state.events()] == [
        "turn",
        "call",
        "result",
        "turn",
        "answer",
    ]


def test_an_agent_in_a_coroutine_can_be_followed():
    async def main():
        texts = iter([call("add", a=1), call("fails"), answer("2")])
        backend = sgl.ScriptedBackend(lambda _: next(texts))
        state = await async_agent.arun([add, fails], backend=backend, stream=True)
        return [seen(event) async for event in state.async_events()]

    assert asyncio.run(main()) == EVENTS


def test_the_events_end_where_the_agent_fails():
    state = run([call("add", a=1), call("fails")], [add, fails], stream=True, on_tool_error="raise")
    kinds = []
    with pytest.raises(sgl.ToolError, match="the tool fails raised"):
        for event in state.events():
            kinds.append(event.kind)
        state.sync()
    assert kinds == ["turn", "call", "result", "turn", "call"]


def test_a_program_without_an_agent_has_no_events():
    program = sgl.function(lambda s: s.__iadd__("x" + sgl.gen("a")))
    for stream in (False, True):
        state = program.run(backend=sgl.ScriptedBackend(default="x"), stream=stream)
        assert list(state.events()) == []
