"""Prompt caches of providers: marks, keys, and branches of a fork that wait for the first token of
one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import sglang_lite as sgl
from sglang_lite.lang.backend.apis.api import MIN_PREFIX_CHARS, cache_key, cacheable_prefixes
from sglang_lite.lang.backend.capabilities import Capabilities, TurnRules
from sglang_lite.lang.backend.remote.planner import CallPlanner
from sglang_lite.lang.concurrency.loop import executor
from sglang_lite.lang.concurrency.variables import Variable
from sglang_lite.protocol import Delta, Generation, Message, Prompt, Span
from sglang_lite.testing import Say
from tests.waiting import until

LONG = "A long text. " * 400
MARK = {"type": "ephemeral"}


@pytest.fixture
def connected() -> Iterator[Any]:
    """Makes a backend on a local server: both."""
    servers = []

    def connect(kind: Any, model: str, said: Any = "Yes."):
        server = sgl.server_for_tests(said).__enter__()
        backend = kind(
            model, **(server.openai if kind is sgl.OpenAI else server.anthropic), max_retries=0
        )
        servers.append((server, backend))
        return server, backend

    yield connect
    for server, backend in servers:
        backend.shutdown()
        server.__exit__(None, None, None)


def cached_after(body: Any) -> list[str]:
    """Roles of what ends in a mark."""
    turns = [
        ("system", body.get("system", "")),
        *((m["role"], m["content"]) for m in body["messages"]),
    ]
    return [
        role
        for role, content in turns
        if isinstance(content, list) and content[-1].get("cache_control") == MARK
    ]


def asked(s, question):
    s += sgl.user(question) + sgl.assistant(sgl.gen("a", max_tokens=8))
    return s["a"]


# ----------------------------------------------------------------------------------- what is shared


def prompt(*lengths: int, shared: tuple[int, ...]) -> Prompt:
    return Prompt(
        (Span(""),),
        tuple(Message("user", ("x" * length,)) for length in lengths),
        "assistant",
        "",
        (),
        shared,
    )


def test_only_long_prefixes_are_marked_and_four_at_most():
    assert cacheable_prefixes(prompt(MIN_PREFIX_CHARS - 1, 1, shared=(1, 2))) == (2,)
    # the likeliest, in order
    assert cacheable_prefixes(prompt(*[MIN_PREFIX_CHARS] * 6, shared=(5, 1, 4, 2, 3))) == (
        1,
        2,
        4,
        5,
    )
    assert cacheable_prefixes(prompt(MIN_PREFIX_CHARS, shared=())) == ()


def test_a_key_is_of_the_shortest_shared_prefix():
    one = prompt(10, MIN_PREFIX_CHARS, shared=(1,))
    assert cache_key(one) == cache_key(prompt(10, MIN_PREFIX_CHARS + 1, shared=(2, 1)))
    assert cache_key(one) != cache_key(prompt(11, MIN_PREFIX_CHARS, shared=(1,)))
    assert cache_key(prompt(10, MIN_PREFIX_CHARS, shared=())) is None
    assert cache_key(prompt(10, 10, shared=(1,))) is None  # nothing is cached of so little


def test_what_is_shared_ends_at_forks_and_before_turns_of_the_user():
    backend = sgl.ScriptedBackend(default="x")

    @sgl.function
    def program(s):
        s += sgl.system("Short.")
        s += sgl.user(LONG)
        asked(s, "One?")
        for branch in s.fork(2):
            asked(branch, "Two?")

    program.run(backend=backend).sync()
    assert [call.prompt.shared for call in backend.calls] == [(2, 1), (4, 2, 1), (4, 2, 1)]


# -------------------------------------------------------------------------------------- on the wire


def test_claude_is_told_where_prefixes_end(connected):
    server, claude = connected(sgl.Anthropic, "claude-opus-5")

    @sgl.function
    def program(s):
        s += sgl.system(LONG)
        asked(s, "One?")
        for branch in s.fork(2):
            asked(branch, "Two?")

    program.run(backend=claude).sync()
    assert [cached_after(request.body) for request in server.requests] == [
        ["system"], ["system", "assistant"], ["system", "assistant"],
    ]  # fmt: skip
    assert server.requests[0].body["system"] == [
        {"type": "text", "text": LONG, "cache_control": MARK}
    ]


def test_short_prompts_are_sent_as_ever(connected):
    server, claude = connected(sgl.Anthropic, "claude-opus-5")
    other, gpt = connected(sgl.OpenAI, "gpt-4o")

    @sgl.function
    def program(s):
        s += sgl.system("Be brief.")
        asked(s, "One?")

    for backend in (claude, gpt):
        program.run(backend=backend).sync()
    assert server.last["system"] == "Be brief."
    assert "prompt_cache_key" not in other.last


def test_gpt_is_given_a_key_that_runs_of_a_program_share(connected):
    server, gpt = connected(sgl.OpenAI, "gpt-4o", Say("Yes.", cached=1024))

    @sgl.function
    def program(s, question):
        s += sgl.system(LONG)
        asked(s, question)

    states = program.run_batch([{"question": "One?"}, {"question": "Two?"}], backend=gpt)
    first, second = (request.body["prompt_cache_key"] for request in server.requests)
    assert first == second
    assert states[0].usage().cached_tokens == 1024


# -------------------------------------------------------------------------------------------- forks


class Cached(sgl.BaseBackend):
    """Streams two pieces, the first one when it is told to; a provider keeps its prompts.

    Attributes:
        asked: how many calls were made.
    """

    enforces = True

    def __init__(self, *, caches: bool = True) -> None:
        super().__init__()
        self.capabilities = Capabilities(
            turns=TurnRules("continued", "continued"), caches_prompts=caches
        )
        self.asked = 0
        self._gate = Variable()

    def planner(self, run):
        return CallPlanner(self, run)

    def open(self) -> None:
        self._gate.set(None)

    async def agenerate(self, prompt, params, constraint, *, stream):
        self.asked += 1
        await self._gate.wait_async()
        if stream:
            yield Delta("x")
        yield Generation("xy")


def turns_of_the_loop(count: int = 20) -> None:
    """Lets everything happen that waits for nothing but the executor loop's turn."""
    for _ in range(count):
        turn = Variable()
        executor().post(turn.set, None)
        turn.wait()


def forked(size: int, text: str = LONG):
    @sgl.function
    def program(s):
        s += text
        for branch in s.fork(size):
            branch += sgl.gen("a") + sgl.gen("b")

    return program


@pytest.mark.parametrize(
    ("size", "text", "caches", "early"),
    [
        (4, LONG, True, 1),
        (8, LONG, True, 1),
        (3, LONG, True, 3),
        (4, "short", True, 4),
        (4, LONG, False, 4),
    ],
)
def test_branches_wait_for_the_first_token_of_one(size, text, caches, early):
    backend = Cached(caches=caches)
    state = forked(size, text).run(backend=backend)
    turns_of_the_loop()
    assert backend.asked == early
    backend.open()
    state.usage()  # waits for all
    assert backend.asked == 2 * size


def test_they_are_let_through_when_the_first_fails():
    class Failing(Cached):
        async def agenerate(self, prompt, params, constraint, *, stream):
            self.asked += 1
            raise sgl.BackendError("down.")
            yield

    backend = Failing()
    forked(4).run(backend=backend).usage()
    assert backend.asked == 4


def test_they_are_let_through_when_the_first_is_cancelled():
    class First(Cached):
        async def agenerate(self, prompt, params, constraint, *, stream):
            self.asked += 1
            if self.asked == 1:
                await asyncio.Event().wait()
            yield Generation("x")

    @sgl.function
    def cancels(s):
        s += LONG
        branches = s.fork(4)
        branches += sgl.gen("a")
        until(lambda: backend.asked)
        branches[0].cancel()
        s["found"] = [branch["a"] for branch in branches[1:]]

    backend = First()
    assert cancels.run(backend=backend)["found"] == ["x"] * 3


def test_what_is_read_of_a_stream_is_the_same_behind_the_gate():
    backend = Cached()
    backend.open()
    state = forked(4).run(backend=backend, stream=True)
    assert "".join(state.text_iter()) == LONG
