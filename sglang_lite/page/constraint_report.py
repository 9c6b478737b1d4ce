"""Report on a constraint that a user is typing: whether it is valid, and how it is enforced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from sglang_lite import grammar
from sglang_lite.protocol import Constraint, Ebnf, ParameterError, Regex, SglError


class ConstraintText(msgspec.Struct):
    """Constraint that is being typed: its kind, "json_schema", "regex" or "ebnf", and its text."""

    kind: str
    text: str


_KINDS: Final[Mapping[str, Callable[[str], Constraint]]] = {
    "json_schema": grammar.json_schema,
    "regex": Regex,
    "ebnf": Ebnf,
}


def parse_constraint(typed: ConstraintText) -> Constraint:
    """Parses the text of a constraint. Raises ParameterError or ConstraintError if it is invalid."""
    kind = _KINDS.get(typed.kind)
    if kind is None:
        raise ParameterError("kind", f"{typed.kind!r:.60} is not one of {', '.join(_KINDS)}.")
    return kind(typed.text)


def report_constraint(typed: ConstraintText) -> dict[str, object]:
    """Describes how a constraint is enforced: what is refused, what is only checked in the finished
    value, and an example.
    """
    try:
        found = grammar.check(parse_constraint(typed))
    except SglError as error:
        return {
            "refused": [("", str(error))],
            "checked": [],
            "remarks": [],
            "rules": 0,
            "example": None,
        }
    return {
        "refused": found.refused,
        "checked": found.checked,
        "remarks": found.remarks,
        "rules": found.rules,
        "example": found.example,
    }
