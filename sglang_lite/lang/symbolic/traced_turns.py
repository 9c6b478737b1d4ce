"""Turns of a statement in a trace, planned as a run would plan them. Values that only a run has are replaced by
stand-ins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from sglang_lite.lang.backend.remote.explain import TracedBackend
from sglang_lite.lang.backend.remote.shared_call import SharedCall, may_share
from sglang_lite.lang.backend.remote.turn_plan import TurnContext, TurnPlan, plan
from sglang_lite.lang.expressions import SglGen, SglSelect
from sglang_lite.lang.symbolic.symbols import Symbol
from sglang_lite.program.nodes import Expression, Text
from sglang_lite.protocol import UNSET, Location, Regex

_MARK = "\ue002"  # first character of the mark of a symbol in a text
_SOME_TEXT = Text("…")


def planned(
    parts: Sequence[Expression], backend: TracedBackend, role: str | None, where: Location | None
) -> dict[int, tuple[TurnPlan, int]]:
    """Plans of a statement's turns, as `turn_plan.plan` returns them.

    Args:
        parts: expressions of the statement.
        role: role of the turn that is open before the statement, or None.
    """
    return plan(list(map(_known, parts)), TurnContext(backend.about, role, backend.facts, where))


def with_shared_call(part: Expression, backend: TracedBackend, size: int) -> Expression:
    """Generation with the call that it may share with other branches, as in a run."""
    known = _known(part)
    if not isinstance(part, SglGen) or not isinstance(known, SglGen):
        return part
    shares = may_share(known, backend.facts.params, backend.about.shares_prompt_cost, size)
    return replace(part, source=SharedCall(size)) if shares else part


def _known(part: Expression) -> Expression:
    match part:
        case Symbol():
            return _SOME_TEXT
        case SglGen():
            node = part.node
            constraint = Regex("[^\n]+") if _is_open(node.constraint) else node.constraint
            changes = {name: UNSET for name in node.params.__struct_fields__ if _is_open(getattr(node.params, name))}
            params = msgspec.structs.replace(node.params, **changes)
            return replace(part, node=msgspec.structs.replace(node, params=params, constraint=constraint))
        case SglSelect() if _is_open(part.node.choices):
            return replace(part, node=msgspec.structs.replace(part.node, choices=("a", "b")))
    return part


def _is_open(value: Any) -> bool:
    """Returns True if a value contains a symbol."""
    if isinstance(value, Symbol):
        return True
    return value is not UNSET and _MARK in msgspec.json.encode(value, enc_hook=str).decode()
