"""Branches of a fork with equal prompts so far: their first generation is one call with a sample for each branch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.expressions import SglCall, SglGen, SglSelect, SglSeparateReasoning
from sglang_lite.program.nodes import Expression
from sglang_lite.protocol import Constraint, Delta, Generation, Prompt, SamplingParams, Unset

_MAKERS = (SglGen, SglSelect, SglCall, SglSeparateReasoning)  # expressions whose results differ from branch to branch


def is_constant(expression: Expression) -> bool:
    """Returns True if branches remain equal when an expression is added to all of them: nothing in it is generated or
    called."""
    return not any(isinstance(part, _MAKERS) for part in expression.walk())


def first_shared(parts: Sequence[Expression]) -> int | None:
    """Index of a statement's first generation, or None if it has none, or if a selection, call or reasoning block comes
    first."""
    first = next((i for i, part in enumerate(parts) if isinstance(part, _MAKERS)), None)
    return first if first is not None and isinstance(parts[first], SglGen) else None


def may_share(
    own: SglGen, params: SamplingParams, constraint: Constraint | None, backend: BaseBackend, size: int
) -> bool:
    """Returns True if a generation may take a sample of another branch's call: it has no seed, sample count, tools or
    backend of its own, and the backend makes `size` samples in a call.

    Args:
        params: sampling parameters of the node, merged with those of the run.
        size: number of branches.
    """
    if not isinstance(params.seed, Unset) or not isinstance(params.n, Unset) or own.tools is not None:
        return False
    elsewhere = own.options is not None and own.options.backend is not None
    return not elsewhere and backend.shares_prompt_cost(params, constraint, size)


class SharedCall:
    """Generation call shared by several branches. The first branch makes it; the other branches take its samples, if
    they ask with the same prompt, parameters and constraint. If the call fails, or its branch is stopped, each of the
    other branches makes its own call.

    Args:
        size: number of branches.
    """

    __slots__ = ("_key", "_samples", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._key: tuple[Any, ...] = ()  # prompt, parameters and constraint of the shared call
        self._samples: asyncio.Future[list[Generation]] | None = None  # samples that no branch has taken yet

    async def answers(
        self,
        backend: BaseBackend,
        prompt: Prompt,
        params: SamplingParams,
        constraint: Constraint | None,
        *,
        stream: bool,
    ) -> AsyncGenerator[Delta | Generation, None]:
        """Yields the events of a branch's generation, as `BaseBackend.agenerate` does. Runs on the executor loop."""
        if self._samples is None:
            self._key, self._samples = (prompt, params, constraint), asyncio.get_running_loop().create_future()
            async for event in self._call(backend, self._samples, stream=stream):
                yield event
            return
        samples = await asyncio.shield(self._samples) if self._key == (prompt, params, constraint) else []
        if samples:
            yield samples.pop(0)
            return
        async for event in backend.agenerate(prompt, params, constraint, stream=stream):
            yield event

    async def _call(
        self, backend: BaseBackend, made: asyncio.Future[list[Generation]], *, stream: bool
    ) -> AsyncGenerator[Delta | Generation, None]:
        prompt, params, constraint = self._key
        samples: list[Generation] = []
        others: list[Generation] = []
        try:
            several = msgspec.structs.replace(params, n=self.size)
            async for event in backend.agenerate(prompt, several, constraint, stream=stream):
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
