"""Values that a schema allows at one place in the JSON. Used to read texts whose strings have no
quotation marks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sglang_lite.constraints.formal.automaton import accepts
from sglang_lite.constraints.formal.nodes import NOTHING, Alternation, Node, literal_texts
from sglang_lite.constraints.json_schema.document import pointer_token
from sglang_lite.constraints.json_schema.formulas import Formula, ValidAt, any_of
from sglang_lite.constraints.json_schema.normal_form import load_schema_document
from sglang_lite.constraints.json_schema.numbers import is_finite, to_fraction
from sglang_lite.constraints.json_schema.quotes import KEYWORD, QuoteLocation, locate_quote
from sglang_lite.constraints.json_schema.reader import SchemaReader
from sglang_lite.constraints.json_schema.values import ANY_VALUE, ValueSet
from sglang_lite.constraints.json_schema.wellformed import refuse_non_finite
from sglang_lite.constraints.memo import memoize
from sglang_lite.protocol import ConstraintError, JsonSchema
from sglang_lite.protocol.anything import Json


@dataclass(frozen=True, slots=True)
class AllowedValues:
    """Values that a schema allows at one place: for the whole JSON, a member or an item. Any value
    is allowed if there is no schema, or if the schema is not supported.

    Attributes:
        schema: the schema, or None.
        formula: formula of the allowed values.
    """

    schema: JsonSchema | None
    formula: Formula

    @staticmethod
    def for_schema(schema: JsonSchema | None) -> AllowedValues:
        if schema is None:
            return AllowedValues(None, True)
        try:
            return AllowedValues(schema, ValidAt(load_schema_document(schema).start))
        except ConstraintError:
            return AllowedValues(None, True)

    def member(self, name: str) -> AllowedValues:
        shapes = [shape.expand_finite_names() for shape in self._values.objects]
        members = (
            {each.name: each for each in shape.members}.get(name) or shape.member_for_unlisted(name)
            for shape in shapes
        )
        return AllowedValues(self.schema, any_of(*(each.formula for each in members)) or True)

    def narrow_to_item(self, index: int) -> AllowedValues:
        return AllowedValues(
            self.schema,
            any_of(*(shape.item_formula(index) for shape in self._values.arrays)) or True,
        )

    @property
    def allows_strings(self) -> bool:
        return self._values.strings != NOTHING

    def quote(self, text: str) -> QuoteLocation | None:
        """Returns where a string occurs in the documents that it must quote. Returns None if the
        string need not be a quote.
        """
        return locate_quote(self._values.strings, text)

    @property
    def allows_arrays(self) -> bool:
        return bool(self._values.arrays)

    @property
    def allows_containers(self) -> bool:
        return bool(self._values.arrays or self._values.objects)

    @property
    def has_finite_strings(self) -> bool:
        """True if the allowed strings are a finite list."""
        return _list_literals(self._values.strings) is not None

    @property
    def repeats(self) -> int | None:
        """Maximum number of equal items in a row in a generated array (`x-repeats`), or None for no
        limit.
        """
        return min(
            (shape.repeats for shape in self._values.arrays if shape.repeats is not None),
            default=None,
        )

    @property
    def options(self) -> tuple[Json, ...] | None:
        """The allowed values if they are a finite list of scalars, such as an enum, booleans or
        null; else None. A range of numbers does not count as a list.
        """
        values = self._values
        strings = _list_literals(self._values.strings)
        single = [
            each.low for each in values.numbers if each.low is not None and each.low == each.high
        ]
        if strings is None or self.allows_containers or len(single) < len(values.numbers):
            return None
        numbers = [int(each) if each.denominator == 1 else float(each) for each in single]
        return (*([None] * values.null), *sorted(values.booleans, reverse=True), *numbers, *strings)

    @property
    def allows_only_strings(self) -> bool:
        found = self._values
        return self.allows_strings and not (
            found.null or found.booleans or found.numbers or self.allows_containers
        )

    def json_for_empty_text(self) -> str:
        """Returns the JSON text of the value that an empty text stands for."""
        if accepts(self._values.strings, ""):
            return '""'
        return "[]" if self.allows_arrays else "{}" if self.allows_containers else '""'

    def json(self, text: str, *, unquoted: bool) -> str:
        """Returns the JSON text of the value that a text spells. A text that is not JSON is a
        string.

        Args:
            text: text to read.
            unquoted: whether strings are written without quotes. If so, and if strings are allowed,
                text that is JSON of a forbidden value is read as a string.
        """
        try:
            value = json.loads(text, parse_constant=refuse_non_finite)
            if not (unquoted and self.allows_strings) or self._allows_value(value):
                return text.strip()
        except (ValueError, RecursionError):
            pass
        # models may add blanks around a choice
        if self.has_finite_strings and not accepts(self._values.strings, text):
            text = text.strip()
        return json.dumps(text, ensure_ascii=False)

    def _allows_value(self, value: Any) -> bool:
        """Returns True if a value that was read as JSON is allowed. Arrays and objects are judged
        by their type only. Returns False for strings, because allowed strings are written without
        quotes here.
        """
        values = self._values
        match value:
            case None:
                return values.null
            case bool():
                return value in values.booleans
            case int() | float():
                return is_finite(value) and any(
                    to_fraction(value) in piece for piece in values.numbers
                )
            case list():
                return bool(values.arrays)
            case dict():
                return bool(values.objects)
        return False

    @property
    def _values(self) -> ValueSet:
        return ANY_VALUE if self.schema is None else _read_allowed_values(self.schema, self.formula)


def list_quotes(schema: JsonSchema, value: Json) -> list[dict[str, Json]]:
    """Returns the quotes in a valid value, in order, each as {"pointer", "source", "start", "end"}.
    These are the JSON Pointer of the string, the number of the document, and the quote's position
    in the document, from `start` to before `end`.
    """
    found: list[dict[str, Json]] = []
    stack = [("", AllowedValues.for_schema(schema), value)] if KEYWORD in schema.schema else []
    while stack:
        pointer, allowed, each = stack.pop()
        below: list[tuple[str, AllowedValues, Any]] = []
        match each:
            case str():
                if (location := allowed.quote(each)) is not None:
                    source, start, end = location
                    found.append({"pointer": pointer, "source": source, "start": start, "end": end})
            case list():
                below = [
                    (f"{pointer}/{i}", allowed.narrow_to_item(i), item)
                    for i, item in enumerate(each)
                ]
            case dict():
                below = [
                    (f"{pointer}/{pointer_token(n)}", allowed.member(n), item)
                    for n, item in each.items()
                ]
        stack += reversed(below)
    return found


@memoize
def may_have_lists(schema: JsonSchema) -> bool:
    """Returns True if a value that is valid under a schema may be, or contain, an array with items."""
    start = AllowedValues.for_schema(schema)
    formulas = [start.formula]
    for formula in formulas:  # grows during the loop
        values = ANY_VALUE if start.schema is None else _read_allowed_values(schema, formula)
        if any(shape.most != 0 for shape in values.arrays):
            return True
        members = (each.formula for shape in values.objects for each in shape.members)
        others = (each for shape in values.objects for _, each in shape.others)
        formulas += [each for each in dict.fromkeys((*members, *others)) if each not in formulas]
    return False


def _list_literals(strings: Node) -> tuple[str, ...] | None:
    """Returns the texts of a literal or an alternation of literals. Alternations may be nested.
    Returns None for any other node.
    """
    if not isinstance(strings, Alternation):
        return literal_texts(strings)
    lists = [_list_literals(option) for option in strings.options]
    return (
        None
        if None in lists
        else tuple(dict.fromkeys(text for texts in lists for text in texts or ()))
    )


@memoize
def _read_allowed_values(schema: JsonSchema, formula: Formula) -> ValueSet:
    try:
        return SchemaReader(
            load_schema_document(schema), assert_format=schema.format == "assert"
        ).values(formula)
    except (ConstraintError, RecursionError):
        return ANY_VALUE
