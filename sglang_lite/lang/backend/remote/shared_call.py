"""Branches of a fork with equal prompts so far: their first generation is one call with a sample for each branch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import msgspec

from sglang_lite.lang.backend.planning import AnswerSource, NodeQuestion
from sglang_lite.lang.expressions import SglGen, is_constant
from sglang_lite.program.nodes import Expression, Expressions
from sglang_lite.protocol import Constraint, Delta, Generation, SamplingParams, Unset
from sglang_lite.protocol.sampling import merge

SharesCost: TypeAlias = Callable[[SamplingParams, Constraint | None, int], bool]  # a backend's `shares_prompt_cost`


def first_generation(expressions: Sequence[Expression]) -> int | None:
    """Index of a statement's first generation, or None if it has none, or if a selection, call or reasoning block comes
    first."""
    first = next((i for i, expression in enumerate(expressions) if not is_constant(expression)), None)
    return first if first is not None and isinstance(expressions[first], SglGen) else None


def may_share(own: SglGen, run_params: SamplingParams, shares_cost: SharesCost, size: int) -> bool:
    """Returns True if a generation may take a sample of another branch's call: it has no seed, sample count, tools or
    backend of its own, and the backend makes `size` samples in a call."""
    params = merge(run_params, own.node.params)
    if not isinstance(params.seed, Unset) or not isinstance(params.n, Unset) or own.tools is not None:
        return False
    elsewhere = own.options is not None and own.options.backend is not None
    return not elsewhere and shares_cost(params, own.node.constraint, size)


def shared(added: Expression, run_params: SamplingParams, shares_cost: SharesCost, size: int) -> Expression:
    """Expression that is added to `size` equal branches, whose first generation is one call for all if it may be."""
    expressions = list(added.walk())
    first = first_generation(expressions)
    if first is None or not isinstance(own := expressions[first], SglGen):
        return added
    if not may_share(own, run_params, shares_cost, size):
        return added
    expressions[first] = msgspec.structs.replace(own, source=SharedCall(size))
    return Expressions(expressions)


class SharedCall(AnswerSource):
    """Generation call shared by several branches. The first branch makes it; the other branches take its samples, if
    they ask with the same prompt, parameters and constraint. If the call fails, or its branch is stopped, each of the
    other branches makes its own call; so does a branch in a later attempt, once no sample is left.

    Args:
        size: number of branches.
    """

    __slots__ = ("_question", "_samples", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._question: NodeQuestion | None = None  # question of the shared call
        self._samples: asyncio.Future[list[Generation]] | None = None  # samples that no branch has taken yet

    async def agenerate(self, question: NodeQuestion) -> AsyncGenerator[Delta | Generation, None]:
        if self._samples is None:
            self._question, self._samples = question, asyncio.get_running_loop().create_future()
            async for event in self._call(question, self._samples):
                yield event
            return
        alike = self._question is not None and replace(question, stream=self._question.stream) == self._question
        samples = await asyncio.shield(self._samples) if alike else []
        if samples:
            yield samples.pop(0)
            return
        async for event in question.events():
            yield event

    async def _call(
        self, question: NodeQuestion, made: asyncio.Future[list[Generation]]
    ) -> AsyncGenerator[Delta | Generation, None]:
        samples: list[Generation] = []
        others: list[Generation] = []
        try:
            several = replace(question, params=msgspec.structs.replace(question.params, n=self.size))
            async for event in several.events():
                if isinstance(event, Generation):
                    samples.append(event)
                elif not event.index:
                    yield event
            samples.sort(key=lambda sample: sample.index)
            meta = {"branches": self.size, "calls": 0, "cost": 0.0}
            others = [msgspec.structs.replace(each, index=0, meta={**each.meta, **meta}) for each in samples[1:]]
        finally:
            made.set_result(others)
        if not samples:  # the caller raises the error for an answer that is missing
            return
        first = samples[0]
        yield msgspec.structs.replace(first, meta={**first.meta, "branches": self.size})
