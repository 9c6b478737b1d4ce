"""Formulas over the schemas of a document: symbolic sets of values that are not evaluated here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from sglang_lite.constraints.json_schema.document import SchemaLocation


@dataclass(frozen=True, slots=True)
class ValidAt:
    """Values that are valid under the schema at a location, or invalid if `negated`."""

    location: SchemaLocation
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Const:
    """The value of a JSON text, or all other values if `negated`."""

    text: str
    negated: bool = False


@dataclass(frozen=True, slots=True)
class AllOf:
    """Values in all of the parts."""

    parts: tuple[Formula, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Values in at least one of the parts."""

    parts: tuple[Formula, ...]


Formula: TypeAlias = "bool | ValidAt | Const | AllOf | AnyOf"


def all_of(*parts: Formula) -> Formula:
    flat = [each for part in parts for each in (part.parts if isinstance(part, AllOf) else (part,))]
    distinct = tuple(dict.fromkeys(each for each in flat if each is not True))
    if False in distinct or any(
        isinstance(each, ValidAt | Const) and each.negated and not_(each) in distinct
        for each in distinct
    ):
        return False
    return True if not distinct else distinct[0] if len(distinct) == 1 else AllOf(distinct)


def any_of(*parts: Formula) -> Formula:
    flat = [each for part in parts for each in (part.parts if isinstance(part, AnyOf) else (part,))]
    distinct = tuple(dict.fromkeys(each for each in flat if each is not False))
    if True in distinct or any(
        isinstance(each, ValidAt | Const) and each.negated and not_(each) in distinct
        for each in distinct
    ):
        return True
    return False if not distinct else distinct[0] if len(distinct) == 1 else AnyOf(distinct)


def not_(formula: Formula) -> Formula:
    match formula:
        case ValidAt() | Const():
            return replace(formula, negated=not formula.negated)
        case AllOf(parts):
            return any_of(*map(not_, parts))
        case AnyOf(parts):
            return all_of(*map(not_, parts))
    return not formula


def find_first_pointer(formula: Formula) -> str:
    """Returns the JSON Pointer of the first schema that a formula refers to, or "" if it refers to
    none.
    """
    parts = formula.parts if isinstance(formula, AllOf | AnyOf) else (formula,)
    return next((part.location.pointer for part in parts if isinstance(part, ValidAt)), "")
