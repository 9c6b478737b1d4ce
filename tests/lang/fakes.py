"""Small backends that tests hold the strings of, and a stop watch."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from random import Random
from typing import Any

import sglang_lite as sgl
from sglang_lite.lang.concurrency.variables import Variable
from sglang_lite.protocol import ChoiceScore, Delta, Generation, Selection, TokenLogprob

_PATIENCE = 20  # how much longer a busy machine may take


class Gated(sgl.BaseBackend):
    """Answers when it is told to.

    Attributes:
        asked: set when it has been asked.
        cancelled: set when a call was cancelled while it waited.
    """

    def __init__(self, answer: str = "x") -> None:
        super().__init__()
        self.asked, self.cancelled = threading.Event(), threading.Event()
        self._answer, self._gate = answer, Variable()

    def open(self) -> None:
        self._gate.set(None)

    async def _wait(self) -> None:
        self.asked.set()
        try:
            await self._gate.wait_async()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def agenerate(self, prompt, params, constraint, *, stream):
        await self._wait()
        yield Generation(self._answer)

    async def aselect(self, prompt, choices, *, unconditional):
        await self._wait()
        return Selection((), picked=choices[0])


class Meeting(sgl.BaseBackend):
    """Answers calls when so many wait for it at the same time."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size, self._waiting = size, []

    async def agenerate(self, prompt, params, constraint, *, stream):
        mine = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        if len(self._waiting) == self._size:
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                each.set_result(None)
        await mine
        yield Generation("x")


class Pieces(sgl.BaseBackend):
    """Streams what it is given: texts, Deltas, and exceptions to raise; with `stepped` one at each
    `step()`.
    """

    def __init__(self, *pieces: str | Delta | Exception, stepped: bool = False) -> None:
        super().__init__()
        self._pieces = [Delta(piece) if isinstance(piece, str) else piece for piece in pieces]
        self._gates = [Variable() for _ in pieces]
        if not stepped:
            self.step(len(pieces))

    def step(self, count: int = 1) -> None:
        for gate in [gate for gate in self._gates if not gate.done][:count]:
            gate.set(None)

    async def agenerate(self, prompt, params, constraint, *, stream):
        deltas: list[Delta] = []
        for gate, piece in zip(self._gates, self._pieces):
            await gate.wait_async()
            if isinstance(piece, Exception):
                raise piece
            deltas.append(piece)
            if stream:
                yield piece
        logprobs = tuple(entry for delta in deltas for entry in delta.logprobs)
        yield Generation("".join(delta.text for delta in deltas), output_logprobs=logprobs)


def with_logprob(text: str, token: int) -> Delta:
    """A piece that is one token, whose log-probability is -token."""
    return Delta(text, (token,), (TokenLogprob(-float(token), token, text),))


class Drawing(sgl.BaseBackend):
    """Draws its answers with the seeds it is given, and takes its time by another dice.

    Attributes:
        seeds: of all calls, in order.
    """

    def __init__(self, shuffle: int = 0) -> None:
        super().__init__()
        self.seeds: list[Any] = []
        self._dice = Random(shuffle)

    async def agenerate(self, prompt, params, constraint, *, stream):
        self.seeds.append(params.seed)
        for _ in range(self._dice.randrange(20)):
            await asyncio.sleep(0)
        yield Generation(f"{Random(params.seed).randrange(10**6)} ")


class Scored(sgl.BaseBackend):
    """Knows the log-probability of each token of each choice: [(token id, with the prompt, without
    it), …].

    Attributes:
        asked: the choices of each call.
    """

    def __init__(self, table: Mapping[str, Sequence[tuple[int, float, float | None]]]) -> None:
        super().__init__()
        self._table = table
        self.asked: list[tuple[str, ...]] = []

    async def aselect(self, prompt, choices, *, unconditional):
        self.asked.append(tuple(choices))
        scores = []
        for choice in choices:
            ids, with_prompt, alone = zip(*self._table[choice])
            scores.append(ChoiceScore(choice, ids, with_prompt, alone if unconditional else None))
        return Selection(tuple(scores))


class Answers(sgl.BaseBackend):
    """A coroutine backend that calls a function of the prompt's text, as often as it is asked."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        super().__init__()
        self._answer = answer

    async def agenerate(self, prompt, params, constraint, *, stream):
        yield Generation(self._answer(prompt.text))


class TimeLimits:
    """Time limits of runs and nodes that end when a test says so: they are given times that nothing
    takes.
    """

    def __init__(self) -> None:
        self._begun: list[tuple[asyncio.AbstractEventLoop, asyncio.Timeout]] = []

    def timeout(self, seconds: float) -> asyncio.Timeout:
        """`asyncio.timeout`."""
        begun = asyncio.timeout(seconds)
        self._begun.append((asyncio.get_running_loop(), begun))
        return begun

    def expire(self) -> None:
        """The time of all that are under way is over."""
        for loop, limit in self._begun:
            loop.call_soon_threadsafe(_expire, loop, limit)


def _expire(loop: asyncio.AbstractEventLoop, limit: asyncio.Timeout) -> None:
    with suppress(RuntimeError):  # it has ended
        limit.reschedule(loop.time())


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """Result of `work()`, or what it raises; a failure, and not a test run that hangs, where it
    takes longer. The seconds are those of a quiet machine.
    """
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_PATIENCE * seconds)
    assert outcome, f"not done within {_PATIENCE * seconds} s"
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def line_here(program: Any) -> int:
    """The line of a program or function that ends in the comment `# here`."""
    lines, first = inspect.getsourcelines(getattr(program, "func", program))
    return next(first + i for i, line in enumerate(lines) if line.rstrip().endswith("# here"))


def run(*exprs: Any, **options: Any) -> Any:
    """A run of a program that adds these expressions."""

    @sgl.function
    def program(s):
        for expr in exprs:
            s += expr

    return program.run(**options)


class Failing(sgl.BaseBackend):
    """Fails so many times, then answers."""

    def __init__(self, *errors):
        super().__init__()
        self.errors, self.seeds = list(errors), []

    async def agenerate(self, prompt, params, constraint, *, stream):
        self.seeds.append(params.seed)
        if self.errors:
            raise self.errors.pop(0)
        yield Generation("fine")

    async def aselect(self, prompt, choices, *, unconditional):
        if self.errors:
            raise self.errors.pop(0)
        return await Scored({"a": [(1, -1.0, None)], "b": [(2, -2.0, None)]}).aselect(
            prompt, choices, unconditional=False
        )
