"""Plans the calls to backends that are called for one generation at a time.

It plans turns. It also lets the branches of a fork whose prompts are equal so far share one call
for their first generation, with one sample per branch. And it makes the branches of a fork wait for
the first token of one of them, because by then the prompt is in the provider's cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeAlias

import msgspec

from sglang_lite.lang.backend.apis.api import MIN_PREFIX_CHARS
from sglang_lite.lang.backend.base import Backend
from sglang_lite.lang.backend.planning import AnswerSource, NodeQuestion, Planner, RunFacts
from sglang_lite.lang.backend.remote.turn import create_turn_sources
from sglang_lite.lang.backend.remote.turn_plan import TurnContext
from sglang_lite.lang.expressions import SglGen, SglSelect, is_constant
from sglang_lite.program.nodes import Expression, Expressions
from sglang_lite.protocol import Constraint, Delta, Generation, Location, SamplingParams, Unset
from sglang_lite.protocol.sampling import merge

MIN_BRANCHES = 4
# a backend's `shares_prompt_cost`
SharesCost: TypeAlias = Callable[[SamplingParams, Constraint | None, int], bool]


class FirstTokenGate:
    """Gate before the first generations of a fork's branches. The first branch passes immediately
    and opens the gate when its first token arrives. Until then, branches whose prompts have the
    same beginning wait.
    """

    __slots__ = ("_beginning", "_opened")

    def __init__(self) -> None:
        # first characters of the first branch's text; None until a branch arrives
        self._beginning: str | None = None
        self._opened = asyncio.Event()

    async def pass_or_wait(self, text: str) -> bool:
        """Passes the first caller immediately and returns True; that caller must open the gate.
        Other callers wait until the gate is open, but only if their prompt has the same beginning
        and is long enough for the provider's cache. Runs on the executor loop.
        """
        beginning = text[:MIN_PREFIX_CHARS]
        if self._beginning is None:
            self._beginning = beginning
            return True
        if len(beginning) == MIN_PREFIX_CHARS and beginning == self._beginning:
            await self._opened.wait()
        return False

    def open_gate(self) -> None:
        """Lets the waiting branches pass. Called when the first token has arrived, or can no longer
        arrive.
        """
        self._opened.set()


class BehindGate(AnswerSource):
    """Source of the answer to a branch's first generation. Before it asks, it waits at the gate of
    the branch's fork.

    Args:
        source: source to use after the gate, or None for the backend.
    """

    __slots__ = ("_gate", "_leads", "source")

    def __init__(self, gate: FirstTokenGate, source: AnswerSource | None) -> None:
        self._gate = gate
        self._leads = False
        self.source = source

    @asynccontextmanager
    async def guard_attempts(self, text: str) -> AsyncIterator[None]:
        self._leads = await self._gate.pass_or_wait(text)
        try:
            yield
        finally:
            if self._leads:  # also after a failure
                self._gate.open_gate()

    async def agenerate(self, question: NodeQuestion) -> AsyncGenerator[Delta | Generation, None]:
        if self._leads:  # streams, to notice the first token
            question = replace(question, stream=True)
        events = (
            question.request_events() if self.source is None else self.source.agenerate(question)
        )
        async for event in events:
            if self._leads:
                self._gate.open_gate()
            yield event


class CallPlanner(Planner):
    """Planner of a branch on a backend that is called for one generation at a time.

    Args:
        shares_cost: returns True if one call for several samples is worthwhile; None if it never
            is.
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
        self._backend = backend
        self._run = run
        self._shares_cost = shares_cost
        self._gate = gate

    def plan(
        self, expressions: Sequence[Expression], role: str | None, where: Location | None
    ) -> Sequence[Expression]:
        planned = list(expressions)
        for i, turn in create_turn_sources(
            expressions, TurnContext(self._backend, role, self._run, where)
        ).items():
            expression = planned[i]
            assert isinstance(expression, SglGen | SglSelect)
            planned[i] = msgspec.structs.replace(expression, source=turn)
        if self._gate is None:
            return planned
        for i, expression in enumerate(planned):
            if isinstance(expression, SglGen):
                planned[i] = msgspec.structs.replace(
                    expression, source=BehindGate(self._gate, expression.source)
                )
                self._gate = None
                break
        return planned

    def share_among_branches(self, added: Expression, size: int) -> Expression:
        expressions = list(added.walk())
        first = next(
            (i for i, expression in enumerate(expressions) if not is_constant(expression)), 0
        )
        own = expressions[first] if expressions else None
        if not isinstance(own, SglGen) or not self.may_share_call(own, size):
            return added
        expressions[first] = msgspec.structs.replace(own, source=SharedCall(size))
        return Expressions(expressions)

    def may_share_call(self, own: SglGen, size: int) -> bool:
        """Returns True if a generation may take a sample of another branch's call. The generation
        must have no seed, sample count, tools or backend of its own. Sharing a call for `size`
        samples must also be worthwhile.
        """
        params = merge(self._run.params, own.node.params)
        if (
            not isinstance(params.seed, Unset)
            or not isinstance(params.n, Unset)
            or own.tools is not None
            or own.options.code is not None
        ):
            return False
        if self._shares_cost is None or not self._run.shares:
            return False
        return own.options.backend is None and self._shares_cost(params, own.node.constraint, size)

    def fork(self, size: int) -> Sequence[Planner]:
        gate = (
            FirstTokenGate()
            if size >= MIN_BRANCHES and self._backend.capabilities.caches_prompts
            else None
        )
        return [CallPlanner(self._backend, self._run, self._shares_cost, gate) for _ in range(size)]


class SharedCall(AnswerSource):
    """Generation call that several branches share. The first branch makes the call. The others take
    its samples if their prompt, parameters and constraint are the same. A branch for which no
    sample is left makes its own call, for example after a failure or in a later attempt.

    Args:
        size: number of branches.
    """

    __slots__ = ("_question", "_samples", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._question: NodeQuestion | None = None  # question of the shared call
        # samples that no branch has taken yet
        self._samples: asyncio.Future[list[Generation]] | None = None

    async def agenerate(self, question: NodeQuestion) -> AsyncGenerator[Delta | Generation, None]:
        if self._samples is None:
            self._question = question
            self._samples = asyncio.get_running_loop().create_future()
            async for event in self._generate_all_samples(question, self._samples):
                yield event
            return
        alike = (
            self._question is not None
            and replace(question, stream=self._question.stream) == self._question
        )
        samples = await asyncio.shield(self._samples) if alike else []
        if samples:
            yield samples.pop(0)
            return
        async for event in question.request_events():
            yield event

    async def _generate_all_samples(
        self, question: NodeQuestion, made: asyncio.Future[list[Generation]]
    ) -> AsyncGenerator[Delta | Generation, None]:
        samples: list[Generation] = []
        others: list[Generation] = []
        try:
            several = replace(
                question, params=msgspec.structs.replace(question.params, n=self.size)
            )
            async for event in several.request_events():
                if isinstance(event, Generation):
                    samples.append(event)
                elif not event.index:
                    yield event
            samples.sort(key=lambda sample: sample.index)
            meta = {"branches": self.size, "calls": 0, "cost": 0.0}
            others = [
                msgspec.structs.replace(each, index=0, meta={**each.meta, **meta})
                for each in samples[1:]
            ]
        finally:
            made.set_result(others)
        if not samples:  # the caller raises the error for an answer that is missing
            return
        first = samples[0]
        yield msgspec.structs.replace(first, meta={**first.meta, "branches": self.size})
