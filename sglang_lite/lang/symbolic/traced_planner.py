"""Planner of the calls of a trace, for `explain`: plans as a run on the explained backend would. Values that only a run
has are replaced by stand-ins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from sglang_lite.lang.backend.planning import Planner
from sglang_lite.lang.backend.remote.explain import PlannedTurn, TracedBackend
from sglang_lite.lang.backend.remote.shared_call import SharedCall, first_generation, may_share
from sglang_lite.lang.backend.remote.turn_plan import TurnContext, plan
from sglang_lite.lang.expressions import SglGen, SglSelect
from sglang_lite.lang.symbolic.symbols import MARK, Symbol
from sglang_lite.program.nodes import Expression, Expressions, Text
from sglang_lite.protocol import UNSET, Location, Regex

_SOME_TEXT = Text("…")


class TracedPlanner(Planner):
    """Planner of a trace: the sources that it gives to generations are read by `explain`."""

    def __init__(self, backend: TracedBackend) -> None:
        self._about, self._run = backend.about, backend.facts

    def plan(self, parts: Sequence[Expression], role: str | None, where: Location | None) -> Sequence[Expression]:
        planned = list(parts)
        context = TurnContext(self._about, role, self._run, where)
        for i, (turn, index) in plan(list(map(_known, parts)), context).items():
            part = planned[i]
            assert isinstance(part, SglGen | SglSelect)
            planned[i] = msgspec.structs.replace(part, source=PlannedTurn(turn, index))
        return planned

    def share(self, added: Expression, size: int) -> Expression:
        parts = list(added.walk())
        first = first_generation(parts)
        if first is None or not isinstance(own := parts[first], SglGen):
            return added
        known = _known(own)
        assert isinstance(known, SglGen)
        if may_share(known, self._run.params, self._about.shares_prompt_cost, size):
            parts[first] = msgspec.structs.replace(own, source=SharedCall(size))
        return Expressions(parts)

    def fork(self, size: int) -> Sequence[Planner]:
        return [self] * size


def _known(part: Expression) -> Expression:
    match part:
        case Symbol():
            return _SOME_TEXT
        case SglGen():
            node = part.node
            constraint = Regex("[^\n]+") if _is_open(node.constraint) else node.constraint
            changes = {name: UNSET for name in node.params.__struct_fields__ if _is_open(getattr(node.params, name))}
            params = msgspec.structs.replace(node.params, **changes)
            return msgspec.structs.replace(
                part, node=msgspec.structs.replace(node, params=params, constraint=constraint)
            )
        case SglSelect() if _is_open(part.node.choices):
            return msgspec.structs.replace(part, node=msgspec.structs.replace(part.node, choices=("a", "b")))
    return part


def _is_open(value: Any) -> bool:
    """Returns True if a value contains a symbol."""
    if isinstance(value, Symbol):
        return True
    return value is not UNSET and MARK.search(msgspec.json.encode(value, enc_hook=str).decode()) is not None
