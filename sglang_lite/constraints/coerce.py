"""Constraints from user input: a record, a schema, a Python type, or the text of a grammar."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias, cast, get_args

from sglang_lite.constraints.python_types.value_type import ValueType, value_type
from sglang_lite.constraints.schema import json_schema
from sglang_lite.constraints.syntax.gbnf import parse as parse_ebnf
from sglang_lite.constraints.syntax.lark import parse as parse_lark
from sglang_lite.constraints.syntax.regex import parse as parse_regex
from sglang_lite.protocol import Constraint, ConstraintError, Ebnf, Lark, Regex

# a constraint record, a schema, or a Python type
ConstraintLike: TypeAlias = Constraint | Mapping[str, Any] | Any

_NAMED: Mapping[str, Constraint] = {
    "json": json_schema(True),
    "json_object": json_schema({"type": "object"}),
}
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def Grammar(text: str) -> Ebnf | Lark:  # noqa: N802 # named like the record classes
    """Returns the constraint for a grammar's text: `Ebnf` (GBNF) if a rule is defined with `::=`,
    else `Lark`.
    """
    if not isinstance(text, str):
        raise ConstraintError(f"Grammar: {text!r:.60} is not a text.")
    return Ebnf(text) if _GBNF_RULE.search(text) else Lark(text)


def as_constraint(source: ConstraintLike) -> Constraint:
    """Converts a constraint record, a schema, a Python type, or one of the names "json" and
    "json_object" to a constraint.

    Raises:
        ConstraintError: `source` is none of these.
    """
    if isinstance(source, get_args(Constraint)):
        return cast(Constraint, source)
    if isinstance(source, str) and source in _NAMED:
        return _NAMED[source]
    if isinstance(source, str):
        raise ConstraintError(
            f"{source!r:.60} is text, not a constraint.",
            hint="Say what it is: sgl.Regex(…) or sgl.Grammar(…).",
        )
    if isinstance(source, Mapping | bool):
        return json_schema(source)
    found = value_type(source).constraint
    return Regex("(?s).*") if found is None else found


def value_type_or_none(source: ConstraintLike) -> ValueType | None:
    """Returns the reader and constraint of a Python type, or None if `source` is not a Python type.

    Raises:
        ConstraintError: `source` is not a type that can be generated.
    """
    return (
        None
        if isinstance(source, (*get_args(Constraint), str, Mapping, bool))
        else value_type(source)
    )


def check_syntax(constraint: Constraint) -> Constraint:
    """Checks the syntax of a regex or grammar and returns the constraint unchanged.

    Raises:
        ConstraintError: the regex or grammar is not valid. The message shows where.
    """
    match constraint:
        case Regex(text):
            parse_regex(text)
        case Ebnf(text):
            parse_ebnf(text)
        case Lark(text):
            parse_lark(text)
    return constraint
