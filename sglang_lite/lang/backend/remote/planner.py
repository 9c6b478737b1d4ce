"""Planner of the calls of backends that are asked generation by generation: turns, equal branches, and forks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.backend.planning import Planner, RunFacts
from sglang_lite.lang.backend.remote.first_token import LEAST_BRANCHES, BehindGate, FirstTokenGate
from sglang_lite.lang.backend.remote.shared_call import SharesCost, shared
from sglang_lite.lang.backend.remote.turn import turns_of
from sglang_lite.lang.backend.remote.turn_plan import TurnContext
from sglang_lite.lang.expressions import SglGen, SglSelect
from sglang_lite.program.nodes import Expression
from sglang_lite.protocol import Location


class CallPlanner(Planner):
    """Planner of a branch on a backend with rules for turns.

    Args:
        shares_cost: returns True if one call for several samples is worthwhile; None if it never is.
        gate: gate before the branch's first generation, or None.
    """

    __slots__ = ("_backend", "_gate", "_run", "_shares_cost")

    def __init__(
        self,
        backend: BaseBackend,
        run: RunFacts,
        shares_cost: SharesCost | None = None,
        gate: FirstTokenGate | None = None,
    ) -> None:
        self._backend, self._run, self._shares_cost, self._gate = backend, run, shares_cost, gate

    def plan(self, parts: Sequence[Expression], role: str | None, where: Location | None) -> Sequence[Expression]:
        planned = list(parts)
        for i, turn in turns_of(parts, TurnContext(self._backend, role, self._run, where)).items():
            part = planned[i]
            assert isinstance(part, SglGen | SglSelect)
            planned[i] = replace(part, source=turn)
        if self._gate is None:
            return planned
        for i, part in enumerate(planned):
            if isinstance(part, SglGen):
                planned[i] = replace(part, source=BehindGate(self._gate, part.source))
                self._gate = None
                break
        return planned

    def share(self, added: Expression, size: int) -> Expression:
        if self._shares_cost is None or not self._run.shares:
            return added
        return shared(added, self._run.params, self._shares_cost, size)

    def fork(self, size: int) -> Sequence[Planner]:
        gate = FirstTokenGate() if size >= LEAST_BRANCHES and self._backend.capabilities.caches_prompts else None
        return [CallPlanner(self._backend, self._run, self._shares_cost, gate) for _ in range(size)]
