"""Writes a given JSON value in the generated style: members in the schema's order, numbers as
decimals.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from sglang_lite.constraints.formal.automaton import accepts
from sglang_lite.constraints.json_schema.formulas import Formula, ValidAt, all_of, not_
from sglang_lite.constraints.json_schema.normal_form import load_schema_document, normalise
from sglang_lite.constraints.json_schema.numbers import is_finite, to_fraction
from sglang_lite.constraints.json_schema.reader import SchemaReader
from sglang_lite.constraints.json_schema.style import Style, read_json_style
from sglang_lite.constraints.json_schema.values import FEW, ArrayShape, ObjectShape
from sglang_lite.constraints.json_schema.write_numbers import decimal_text
from sglang_lite.constraints.limits import convert_limit_errors
from sglang_lite.protocol import JsonSchema


def value_text(constraint: JsonSchema, value: object) -> str | None:
    """Returns the text of a value, or None if the enforced part of the schema does not allow the
    value.

    Raises:
        ConstraintError: the schema is not valid or can't be enforced.
    """
    document = load_schema_document(constraint)
    checked = frozenset(pointer for pointer, _ in normalise(constraint).checked)
    reader = SchemaReader(
        document, assert_format=constraint.format == "assert", ignored=checked, multiplied=FEW
    )
    with convert_limit_errors("the value"):
        return _ValueWriter(reader, read_json_style(constraint)).write_formula_value(
            ValidAt(document.start), value
        )


class _ValueWriter:
    def __init__(self, reader: SchemaReader, style: Style) -> None:
        self._reader = reader
        self._gap_text = style.gap_text
        self._comma, self._colon = style.separators

    def write_formula_value(self, formula: Formula, value: Any) -> str | None:
        values = self._reader.values(formula)
        match value:
            case None:
                return "null" if values.null else None
            case bool():
                return json.dumps(value) if value in values.booleans else None
            case int() | float():
                if not is_finite(value) or not any(
                    to_fraction(value) in piece for piece in values.numbers
                ):
                    return None
                return decimal_text(to_fraction(value))
            case str():
                return _to_json(value) if accepts(values.strings, value) else None
            case list():
                return next(
                    (
                        text
                        for shape in values.arrays
                        for text in self._write_array_value(shape, value)
                    ),
                    None,
                )
        return next(
            (text for shape in values.objects for text in self._write_object_value(shape, value)),
            None,
        )

    def _write_array_value(self, shape: ArrayShape, items: list[Any]) -> Iterator[str]:
        """Yields the text of an array, or nothing if the array is not of the shape."""
        if len(items) < shape.least or (shape.most is not None and len(items) > shape.most):
            return
        for formula, start, least, most in shape.contains:
            count = sum(
                self.write_formula_value(formula, item) is not None for item in items[start:]
            )
            if count < least or (most is not None and count > most):
                return
        if shape.unique_pointer is not None and any(
            _are_equal_json(a, b) for i, a in enumerate(items) for b in items[:i]
        ):
            return
        formulas = self._item_formulas(shape, items)
        texts = [self.write_formula_value(formula, item) for formula, item in zip(formulas, items)]
        if None not in texts:
            yield f"[{self._gap_text}{self._comma.join(map(str, texts))}{self._gap_text}]"

    def _item_formulas(self, shape: ArrayShape, items: list[Any]) -> Iterator[Formula]:
        """Yields the formula with which the grammar writes each item. It includes the formulas of
        `contains` for which the item counts.
        """
        counts = [0] * len(shape.contains)
        for i, item in enumerate(items):
            formulas = [shape.item_formula(i)]
            for which, (formula, start, least, most) in enumerate(shape.contains):
                if i < start or (most is None and counts[which] >= least):
                    continue
                if self.write_formula_value(formula, item) is not None:
                    counts[which] += 1
                    formulas.append(formula)
                elif most is not None:
                    formulas.append(not_(formula))
            yield all_of(*formulas)

    def _write_object_value(self, shape: ObjectShape, members: dict[str, Any]) -> Iterator[str]:
        """Yields the text of an object, or nothing if the object is not of the shape."""
        if len(members) < shape.least or (shape.most is not None and len(members) > shape.most):
            return
        if any(member.required and member.name not in members for member in shape.members):
            return
        first = [
            member.name for member in shape.expand_finite_names().members if member.name in members
        ]
        last: list[str] = []  # members that meet requirements are written last
        for names, formula in shape.requirements:
            fitting = (n for n in (*first, *members) if accepts(names, n))
            meeting = next(
                (n for n in fitting if self.write_formula_value(formula, members[n]) is not None),
                None,
            )
            if meeting is None:
                return
            last += [meeting] if meeting not in (*first, *last) else []
        order = [*dict.fromkeys((*first, *(n for n in members if n not in last))), *last]
        listed = {member.name: member for member in shape.members}
        texts = [
            self.write_formula_value(
                (listed.get(n) or shape.member_for_unlisted(n)).formula, members[n]
            )
            for n in order
        ]
        if None not in texts and all(
            any(any(self._write_object_value(s, members)) for s in choice)
            for choice in shape.choices
        ):
            pairs = (f"{_to_json(name)}{self._colon}{text}" for name, text in zip(order, texts))
            yield (
                "{"
                + self._gap_text
                + self._comma.join(pairs)
                + (self._gap_text if texts else "")
                + "}"
            )


def _to_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _are_equal_json(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_are_equal_json, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_are_equal_json(a[name], b[name]) for name in a)
    return bool(a == b)
