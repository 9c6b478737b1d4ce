"""Reads schemas as sets of values, combining their keywords (keywords.py, applicators.py).

Source: JSON Schema draft 2020-12, core, 10 and 11.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

from sglang_lite.constraints.formal.nodes import ANY_TEXT, NOTHING
from sglang_lite.constraints.json_schema import keywords
from sglang_lite.constraints.json_schema.applicators import APPLICATORS
from sglang_lite.constraints.json_schema.document import Document, SchemaLocation
from sglang_lite.constraints.json_schema.formulas import (
    AllOf,
    AnyOf,
    Const,
    Formula,
    ValidAt,
    any_of,
    not_,
)
from sglang_lite.constraints.json_schema.values import (
    ANY_VALUE,
    NO_VALUE,
    Algebra,
    ArrayShape,
    ObjectShape,
    ValueSet,
    complement_strings,
)
from sglang_lite.protocol import ConstraintError

# Keywords that still require something when ignored: some branch fits, the object has enough
# members.
_WEAKENED_IF_IGNORED = ("oneOf", "minProperties", "maxProperties")

# Keywords that negate a schema come last, when the values have been narrowed as far as possible.
_ORDER = {keyword: 1 + (keyword in ("if", "not", "oneOf")) for keyword in APPLICATORS}


class _Circle(Exception):  # noqa: N818 # never leaves this module
    """Raised if the values of a formula are requested while they are being computed."""


class SchemaReader:
    """Reads a schema document, location by location, as sets of values.

    Args:
        document: schema document.
        assert_format: whether `format` is an assertion, not an annotation.
        ignored: JSON Pointers of keywords to ignore. Sets that they would have narrowed are
            `inexact`.
        sets: JSON Pointers of arrays that spell sets.
        multiplied: maximum number of combinations of an object's choices that become separate
            shapes; None for all.

    Attributes:
        algebra: operations on sets of values, with the work done so far.
    """

    def __init__(
        self,
        document: Document,
        *,
        assert_format: bool,
        ignored: frozenset[str] = frozenset(),
        sets: frozenset[str] = frozenset(),
        multiplied: int | None = None,
    ) -> None:
        self.document = document
        self.assert_format = assert_format
        self._ignored = ignored
        self.sets = sets
        self._multiplied = math.inf if multiplied is None else multiplied
        self.algebra = Algebra(self.is_known_empty)
        self._values: dict[tuple[Formula, bool], ValueSet] = {}
        self._empty: dict[Formula | frozenset[Formula], bool] = {}
        self._open: set[tuple[Formula, bool]] = set()

    def values(self, formula: Formula, track_evaluated: bool = False) -> ValueSet:
        """Returns the set of a formula's values. If `track_evaluated`, its shapes also record which
        members and items count as evaluated.

        Raises:
            ConstraintError: a keyword can't be enforced; the error has the keyword's JSON Pointer.
        """
        key = formula, track_evaluated
        if key in self._values:
            return self._values[key]
        if key in self._open:
            raise _Circle(formula)
        self._open.add(key)
        try:
            values = self.algebra.expand_few_choices(
                self._evaluate(formula, track_evaluated), self._multiplied
            )
            self._values[key] = values
            return values
        except _Circle as circle:
            if len(self._open) > 1:
                raise
            again = circle.args[0]
            pointer = again.location.pointer if isinstance(again, ValidAt) else None
            raise ConstraintError(
                "json_schema: the schema refers to itself without an end.",
                pointer=pointer,
                hint="Refer to it from properties, items or another keyword for parts of the value.",
            ) from None
        finally:
            self._open.discard(key)

    def is_known_empty(self, formula: Formula) -> bool:
        """Returns True if a formula is known to allow no value. Circular references are not
        followed, so the result may be False for a formula without values.
        """
        if isinstance(formula, bool):
            return not formula
        key = frozenset(formula.parts) if isinstance(formula, AllOf) else formula
        if key not in self._empty:
            self._empty[key] = False  # assumed while it is being decided
            try:
                self._empty[key] = self.algebra.is_empty(self.values(formula))
            except _Circle:
                del self._empty[key]
                return False
        return self._empty[key]

    def formula_below(self, location: SchemaLocation, *steps: str | int) -> Formula:
        """Returns the formula of the schema below a location."""
        child = self.document.child(location, *steps)
        schema = self.document.value_at_pointer(child.pointer)
        return schema if isinstance(schema, bool) else True if schema == {} else ValidAt(child)

    def pointer_if_enforced(self, location: SchemaLocation, keyword: str) -> str | None:
        pointer = location.child(keyword).pointer
        return None if pointer in self._ignored else pointer

    def _evaluate(self, formula: Formula, track_evaluated: bool) -> ValueSet:
        match formula:
            case Const(text, negated):
                values = keywords.single_value_set(json.loads(text))
                return self.algebra.complement_values(values) if negated else values
            case ValidAt(location, negated):
                return (
                    self.algebra.complement_values(self.values(not_(formula)))
                    if negated
                    else self._read_values_at(location, track_evaluated)
                )
            case AllOf(parts):
                return reduce(
                    self.algebra.intersect_value_sets,
                    (self.values(part, track_evaluated) for part in parts),
                )
            case AnyOf(parts):
                return self.algebra.unite_value_sets(
                    self.values(part, track_evaluated) for part in parts
                )
        return ANY_VALUE if formula else NO_VALUE

    # ----------------------------------------------------------------------------------- one schema

    def _read_values_at(self, location: SchemaLocation, track_evaluated: bool) -> ValueSet:
        schema = self.document.schema(location)
        if isinstance(schema, bool):
            return ANY_VALUE if schema else NO_VALUE
        if not isinstance(schema, dict):
            raise ConstraintError(
                "json_schema: a schema must be an object or a boolean.", pointer=location.pointer
            )
        ignored = {
            key for key in schema if self._ignored and location.child(key).pointer in self._ignored
        }
        if ignored:
            ignored |= {
                keywords.DEPENDENT_KEYWORDS[key]
                for key in ignored
                if key in keywords.DEPENDENT_KEYWORDS
            }
            schema = {
                key: value
                for key, value in schema.items()
                if key not in ignored or key in _WEAKENED_IF_IGNORED
            }
        inner = track_evaluated or "unevaluatedProperties" in schema or "unevaluatedItems" in schema
        values = ANY_VALUE
        done: set[Callable[..., ValueSet]] = set()
        # The order of evaluation is the order in which members are written: the schema's own, then
        # those of applied schemas.
        known = [
            keyword for keyword in schema if keyword in APPLICATORS or keyword in keywords.READERS
        ]
        for keyword in sorted(known, key=lambda keyword: _ORDER.get(keyword, 0)):
            with keywords.locate_errors_at_keyword(location, keyword):
                if keyword in APPLICATORS:
                    values = APPLICATORS[keyword](self, values, schema, location, keyword, inner)
                elif (read := keywords.READERS[keyword]) not in done:
                    done.add(read)
                    values = self.algebra.intersect_value_sets(
                        values, read(self, schema, location, inner)
                    )
        if ignored:
            values = replace(
                self._mark_evaluated(values, all_=True) if inner else values, inexact=True
            )
        if inner:
            values = self._restrict_unevaluated(values, schema, location)
        return values if track_evaluated or not inner else self._mark_evaluated(values, all_=False)

    def _mark_evaluated(self, values: ValueSet, *, all_: bool) -> ValueSet:
        """Returns the same values with all members and items counted as evaluated if `all_`, or
        none of them otherwise.
        """
        arrays = (replace(a, evaluated=(None, ()) if all_ else (0, ())) for a in values.arrays)
        objects = (replace(o, evaluated=ANY_TEXT if all_ else NOTHING) for o in values.objects)
        return replace(
            values, arrays=tuple(dict.fromkeys(arrays)), objects=tuple(dict.fromkeys(objects))
        )

    def _restrict_unevaluated(
        self, values: ValueSet, schema: dict[str, Any], location: SchemaLocation
    ) -> ValueSet:
        if "unevaluatedProperties" in schema:
            rest = self.formula_below(location, "unevaluatedProperties")
            objects: list[ObjectShape] = []
            for shape in values.objects:
                others = ((shape.evaluated, True), (complement_strings(shape.evaluated), rest))
                limits = replace(
                    NO_VALUE,
                    objects=(ObjectShape(others=tuple(o for o in others if NOTHING not in o)),),
                )
                alone = replace(NO_VALUE, objects=(replace(shape, evaluated=ANY_TEXT),))
                objects += self.algebra.intersect_value_sets(alone, limits).objects
            values = replace(values, objects=tuple(dict.fromkeys(objects)))
        if "unevaluatedItems" in schema:
            rest = self.formula_below(location, "unevaluatedItems")
            arrays: list[ArrayShape] = []
            for array in values.arrays:
                count, also = array.evaluated
                if count is None:
                    arrays.append(array)
                    continue
                limits = replace(
                    NO_VALUE, arrays=(ArrayShape((True,) * count, any_of(rest, *also)),)
                )
                alone = replace(NO_VALUE, arrays=(replace(array, evaluated=(None, ())),))
                arrays += self.algebra.intersect_value_sets(alone, limits).arrays
            values = replace(values, arrays=tuple(dict.fromkeys(arrays)))
        return values
