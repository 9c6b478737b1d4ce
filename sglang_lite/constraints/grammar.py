"""The public door to constraints: `sgl.grammar`.

import sglang_lite as sgl

sgl.grammar.check({"type": "array", "uniqueItems": True}).refused
sgl.grammar.matches(sgl.grammar.Ebnf('root ::= "a" | "(" root ")"'), "((a))")
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, TypeAlias, cast, get_args

from sglang_lite.constraints import matching
from sglang_lite.constraints.compose import language_of
from sglang_lite.constraints.normal import normalise
from sglang_lite.constraints.sampling import sample
from sglang_lite.constraints.schema import json_schema as json_schema
from sglang_lite.protocol import (
    Choices,
    Constraint,
    ConstraintError,
    Ebnf,
    InOrder,
    JsonSchema,
    Lark,
    OneOf,
    Regex,
    Repeated,
    StructuralTag,
    Tag,
)

__all__ = [
    "Choices", "Ebnf", "InOrder", "JsonSchema", "Lark", "OneOf", "Regex", "Repeated", "Report", "StructuralTag", "Tag",
    "check", "json_schema", "matches", "validate",
]  # fmt: skip

Source: TypeAlias = Constraint | Mapping[str, Any] | Any  # a constraint, a schema, or a Python type


@dataclass(frozen=True, slots=True)
class Report:
    """What will be kept of a constraint.

    Attributes:
        refused: why it is refused, with JSON Pointers into a schema ("" elsewhere): all there is to be changed.
        checked: what is not enforced but checked in the finished value, which `enforce="best_effort"` asked for.
        rules: of the grammar.
        example: a text that it allows, None if it is refused.
        seconds: working it out took.
    """

    refused: tuple[tuple[str, str], ...] = ()
    checked: tuple[tuple[str, str], ...] = ()
    rules: int = 0
    example: str | None = None
    seconds: float = 0.0


def check(constraint: Source) -> Report:
    """Looks at a constraint, a JSON schema or a Python type, without an engine.

    Raises:
        ConstraintError: it is none.
    """
    known = as_constraint(constraint)
    began = time.perf_counter()
    refused: tuple[tuple[str, str], ...] = ()
    checked: tuple[tuple[str, str], ...] = ()
    try:
        if isinstance(known, JsonSchema):
            checked = normalise(replace(known, enforce="best_effort")).checked
            if known.enforce == "strict":
                refused, checked = checked, ()
        if not refused:
            rules = len(language_of(known).rules)
            return Report((), checked, rules, sample(known, Random(0)), time.perf_counter() - began)
    except ConstraintError as error:
        refused = ((error.pointer or "", str(error)),)
    return Report(refused, seconds=time.perf_counter() - began)


def matches(constraint: Source, text: str) -> bool:
    """The text is what a constraint, JSON schema or Python type allows; JSON with any blanks and order of members.

    Raises:
        ConstraintError: one that is not valid or can't be enforced.
    """
    return matching.matches(as_constraint(constraint), text)


def validate(constraint: Source, text: str) -> Any:
    """The value of a finished text: for a JSON schema what it spells, else the text.

    Raises:
        ValueValidationError: the text is not what the constraint allows.
        ConstraintError: a constraint that is not valid.
    """
    return matching.validate(as_constraint(constraint), text)


def as_constraint(source: Source) -> Constraint:
    """A constraint from what stands for one.

    Raises:
        ConstraintError: nothing that does.
    """
    from sglang_lite.constraints.types import value_type

    if isinstance(source, get_args(Constraint)):
        return cast(Constraint, source)
    if isinstance(source, Mapping | bool):
        return json_schema(source)
    found = value_type(source).constraint
    return Regex("(?s).*") if found is None else found
