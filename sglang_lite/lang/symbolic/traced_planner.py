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

    def plan(self, expressions: Sequence[Expression], role: str | None, where: Location | None) -> Sequence[Expression]:
        planned = list(expressions)
        context = TurnContext(self._about, role, self._run, where)
        for i, (turn, index) in plan(list(map(_known, expressions)), context).items():
            expression = planned[i]
            assert isinstance(expression, SglGen | SglSelect)
            planned[i] = msgspec.structs.replace(expression, source=PlannedTurn(turn, index))
        return planned

    def share(self, added: Expression, size: int) -> Expression:
        expressions = list(added.walk())
        first = first_generation(expressions)
        if first is None or not isinstance(own := expressions[first], SglGen):
            return added
        known = _known(own)
        assert isinstance(known, SglGen)
        if may_share(known, self._run.params, self._about.shares_prompt_cost, size):
            expressions[first] = msgspec.structs.replace(own, source=SharedCall(size))
        return Expressions(expressions)

    def fork(self, size: int) -> Sequence[Planner]:
        return [self] * size


def _known(expression: Expression) -> Expression:
    match expression:
        case Symbol():
            return _SOME_TEXT
        case SglGen():
            node = expression.node
            constraint = Regex("[^\n]+") if _is_open(node.constraint) else node.constraint
            changes = {name: UNSET for name in node.params.__struct_fields__ if _is_open(getattr(node.params, name))}
            params = msgspec.structs.replace(node.params, **changes)
            return msgspec.structs.replace(
                expression, node=msgspec.structs.replace(node, params=params, constraint=constraint)
            )
        case SglSelect() if _is_open(expression.node.choices):
            return msgspec.structs.replace(
                expression, node=msgspec.structs.replace(expression.node, choices=("a", "b"))
            )
    return expression


def _is_open(value: Any) -> bool:
    """Returns True if a value contains a symbol."""
    if isinstance(value, Symbol):
        return True
    return value is not UNSET and MARK.search(msgspec.json.encode(value, enc_hook=str).decode()) is not None
