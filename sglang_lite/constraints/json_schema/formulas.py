"""Formulas over the schemas of a document: which values are meant, without looking into them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from sglang_lite.constraints.json_schema.document import Place


@dataclass(frozen=True, slots=True)
class At:
    """The values that are valid under the schema at a place; not valid if `negated`."""

    place: Place
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Just:
    """The value that a JSON text spells; any other if `negated`."""

    text: str
    negated: bool = False


@dataclass(frozen=True, slots=True)
class All:
    parts: tuple[Formula, ...]


@dataclass(frozen=True, slots=True)
class Some:
    """At least one of them."""

    parts: tuple[Formula, ...]


Formula: TypeAlias = "bool | At | Just | All | Some"


def all_of(*parts: Formula) -> Formula:
    flat = [each for part in parts for each in (part.parts if isinstance(part, All) else (part,))]
    kept = tuple(dict.fromkeys(each for each in flat if each is not True))
    if False in kept or any(isinstance(each, At | Just) and each.negated and not_(each) in kept for each in kept):
        return False
    return True if not kept else kept[0] if len(kept) == 1 else All(kept)


def some_of(*parts: Formula) -> Formula:
    flat = [each for part in parts for each in (part.parts if isinstance(part, Some) else (part,))]
    kept = tuple(dict.fromkeys(each for each in flat if each is not False))
    if True in kept or any(isinstance(each, At | Just) and each.negated and not_(each) in kept for each in kept):
        return True
    return False if not kept else kept[0] if len(kept) == 1 else Some(kept)


def not_(formula: Formula) -> Formula:
    match formula:
        case At() | Just():
            return replace(formula, negated=not formula.negated)
        case All(parts):
            return some_of(*map(not_, parts))
        case Some(parts):
            return all_of(*map(not_, parts))
    return not formula
