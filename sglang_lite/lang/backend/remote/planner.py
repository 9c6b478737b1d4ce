"""Planner of the calls of backends that are asked generation by generation: turns, equal branches, and the wait of a
fork's branches for the first token of one of them, as by then its prompt is in the provider's cache."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec

from sglang_lite.lang.backend.apis.api import MIN_PREFIX_CHARS
from sglang_lite.lang.backend.base import Backend
from sglang_lite.lang.backend.planning import AnswerSource, NodeQuestion, Planner, RunFacts
from sglang_lite.lang.backend.remote.shared_call import SharesCost, shared
from sglang_lite.lang.backend.remote.turn import turns_of
from sglang_lite.lang.backend.remote.turn_plan import TurnContext
from sglang_lite.lang.expressions import SglGen, SglSelect
from sglang_lite.program.nodes import Expression
from sglang_lite.protocol import Delta, Generation, Location

MIN_BRANCHES = 4


class FirstTokenGate:
    """Gate before the first generations of a fork's branches. The first branch passes at once, and opens the gate for
    those whose prompts begin like its own."""

    __slots__ = ("_beginning", "_opened")

    def __init__(self) -> None:
        self._beginning: str | None = None  # of the first branch's text; None while no branch has come
        self._opened = asyncio.Event()

    async def enter(self, text: str) -> bool:
        """Waits until the gate is open, if the provider's cache is worth it. Returns True at once for the first caller,
        which must open the gate. Runs on the executor loop."""
        beginning = text[:MIN_PREFIX_CHARS]
        if self._beginning is None:
            self._beginning = beginning
            return True
        if len(beginning) == MIN_PREFIX_CHARS and beginning == self._beginning:
            await self._opened.wait()
        return False

    def open(self) -> None:
        """Lets the waiting branches through: the first token has come, or none will come."""
        self._opened.set()


class BehindGate(AnswerSource):
    """Source of a branch's first generation, behind the gate of its fork.

    Args:
        source: source behind the gate, or None for the backend.
    """

    __slots__ = ("_gate", "_leads", "source")

    def __init__(self, gate: FirstTokenGate, source: AnswerSource | None) -> None:
        self._gate, self._leads, self.source = gate, False, source

    @asynccontextmanager
    async def entered(self, text: str) -> AsyncIterator[None]:
        self._leads = await self._gate.enter(text)
        try:
            yield
        finally:
            if self._leads:  # on failure, too
                self._gate.open()

    async def agenerate(self, question: NodeQuestion) -> AsyncGenerator[Delta | Generation, None]:
        if self._leads:  # for its first token
            question = replace(question, stream=True)
        events = question.events() if self.source is None else self.source.agenerate(question)
        async for event in events:
            if self._leads:
                self._gate.open()
            yield event


class CallPlanner(Planner):
    """Planner of a branch on a backend with rules for turns.

    Args:
        shares_cost: returns True if one call for several samples is worthwhile; None if it never is.
        gate: gate before the branch's first generation, or None.
    """

    __slots__ = ("_backend", "_gate", "_run", "_shares_cost")

    def __init__(
        self,
        backend: Backend,
        run: RunFacts,
        shares_cost: SharesCost | None = None,
        gate: FirstTokenGate | None = None,
    ) -> None:
        self._backend, self._run, self._shares_cost, self._gate = backend, run, shares_cost, gate

    def plan(self, expressions: Sequence[Expression], role: str | None, where: Location | None) -> Sequence[Expression]:
        planned = list(expressions)
        for i, turn in turns_of(expressions, TurnContext(self._backend, role, self._run, where)).items():
            expression = planned[i]
            assert isinstance(expression, SglGen | SglSelect)
            planned[i] = msgspec.structs.replace(expression, source=turn)
        if self._gate is None:
            return planned
        for i, expression in enumerate(planned):
            if isinstance(expression, SglGen):
                planned[i] = msgspec.structs.replace(expression, source=BehindGate(self._gate, expression.source))
                self._gate = None
                break
        return planned

    def share(self, added: Expression, size: int) -> Expression:
        if self._shares_cost is None or not self._run.shares:
            return added
        return shared(added, self._run.params, self._shares_cost, size)

    def fork(self, size: int) -> Sequence[Planner]:
        gate = FirstTokenGate() if size >= MIN_BRANCHES and self._backend.capabilities.caches_prompts else None
        return [CallPlanner(self._backend, self._run, self._shares_cost, gate) for _ in range(size)]
