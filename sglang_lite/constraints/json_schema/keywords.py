"""Keywords that assert something about values of one type, in groups, as sets of values.

Source: JSON Schema draft 2020-12, validation; from older drafts, `items` as a list with
`additionalItems`, and boolean `exclusiveMinimum` and `exclusiveMaximum`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

from sglang_lite.constraints.formal.automaton import accepts
from sglang_lite.constraints.formal.lengths import MAX_MIN_LENGTH
from sglang_lite.constraints.formal.nodes import (
    ANY_CHAR,
    ANY_TEXT,
    NOTHING,
    Node,
    Repeat,
    alternation,
    complement,
    literal,
)
from sglang_lite.constraints.json_schema import formats, numbers, quotes, write_numbers
from sglang_lite.constraints.json_schema.document import Document, SchemaLocation
from sglang_lite.constraints.json_schema.formulas import Const, Formula, all_of
from sglang_lite.constraints.json_schema.numbers import NumberRange, is_finite, to_fraction
from sglang_lite.constraints.json_schema.values import (
    ANY_VALUE,
    Algebra,
    ArrayShape,
    Contains,
    Member,
    ObjectShape,
    ValueSet,
    intersection_of_strings,
)
from sglang_lite.constraints.syntax.regex import one_line_message, parse_schema_pattern
from sglang_lite.protocol import ConstraintError

REPEATS = "x-repeats"  # our own keyword: maximum number of equal list items generated in a row
MAX_CELLS = 1_000  # maximum number of languages that patterns divide names into
# more than is ever generated; a greater maxLength or maxItems counts as no limit
MAX_LENGTH = 2**20

# If the first keyword is ignored, so must the second be, or it would apply to too much.
DEPENDENT_KEYWORDS = {"patternProperties": "additionalProperties", "prefixItems": "items"}

_TYPES = {
    "null": ValueSet(null=True),
    "boolean": ValueSet(booleans=frozenset({False, True})),
    "integer": ValueSet(numbers=numbers.WHOLE),
    "number": ValueSet(numbers=numbers.EVERY),
    "string": ValueSet(strings=ANY_TEXT),
    "array": ValueSet(arrays=(ArrayShape(),)),
    "object": ValueSet(objects=(ObjectShape(),)),
}


Schema: TypeAlias = dict[str, Any]


class Context(Protocol):
    """Interface of the schema reader for the functions that read keywords.

    Attributes:
        document: schema document.
        algebra: operations on sets of values.
        assert_format: True if `format` is an assertion, not an annotation.
        sets: JSON Pointers of arrays that spell sets.
    """

    document: Document
    algebra: Algebra
    assert_format: bool
    sets: frozenset[str]

    def values(self, formula: Formula, track_evaluated: bool = False) -> ValueSet: ...
    def formula_below(self, location: SchemaLocation, *steps: str | int) -> Formula: ...
    def pointer_if_enforced(self, location: SchemaLocation, keyword: str) -> str | None: ...


@contextmanager
def locate_errors_at_keyword(location: SchemaLocation, keyword: str) -> Iterator[None]:
    """Adds the pointer of a keyword to errors raised inside, unless they already have one."""
    try:
        yield
    except ConstraintError as error:
        if error.pointer is not None:
            raise
        message = one_line_message(error.message)
        message = message if message.startswith("json_schema") else f"json_schema: {message}"
        raise ConstraintError(
            message, pointer=location.child(keyword).pointer, hint=error.hint
        ) from error


def single_value_set(value: Any) -> ValueSet:  # any JSON value
    """Returns the set of a single JSON value."""
    match value:
        case None:
            return ValueSet(null=True)
        case bool():
            return ValueSet(booleans=frozenset({value}))
        case int() | float():
            if not is_finite(value):
                raise ConstraintError(f"json_schema: {value} is no JSON number.")
            return ValueSet(numbers=numbers.single_number_set(to_fraction(value)))
        case str():
            if len(value) > MAX_MIN_LENGTH:
                raise ConstraintError(
                    f"json_schema: texts of more than {MAX_MIN_LENGTH:,} characters are required."
                )
            return ValueSet(strings=literal(value))
        case list():
            return ValueSet(
                arrays=(
                    ArrayShape(
                        tuple(map(_singleton_formula, value)), False, len(value), len(value)
                    ),
                )
            )
    members = tuple(Member(name, _singleton_formula(each), True) for name, each in value.items())
    return ValueSet(objects=(ObjectShape(members, ()),))


def _singleton_formula(value: Any) -> Formula:
    return Const(json.dumps(value, ensure_ascii=False))


def _read_enum(
    context: Context, schema: Schema, location: SchemaLocation, track_evaluated: bool
) -> ValueSet:
    return context.algebra.unite_value_sets(map(single_value_set, schema["enum"]))


def _read_const(
    context: Context, schema: Schema, location: SchemaLocation, track_evaluated: bool
) -> ValueSet:
    return single_value_set(schema["const"])


def _type(
    context: Context, schema: Schema, location: SchemaLocation, track_evaluated: bool
) -> ValueSet:
    names = schema["type"]
    if isinstance(names, str):
        return _TYPES[names]
    return context.algebra.unite_value_sets(_TYPES[name] for name in names)


def _read_number_keywords(
    context: Context, schema: Schema, location: SchemaLocation, track_evaluated: bool
) -> ValueSet:
    piece = numbers.EVERY
    for keyword, is_low in (
        ("minimum", True),
        ("exclusiveMinimum", True),
        ("maximum", False),
        ("exclusiveMaximum", False),
    ):
        limit = schema.get(keyword)
        if limit is None or isinstance(limit, bool):
            continue
        # draft 4
        is_open = keyword.startswith("ex") or schema.get(f"exclusive{keyword.capitalize()}") is True
        end = (
            NumberRange(to_fraction(limit), None, is_open)
            if is_low
            else NumberRange(None, to_fraction(limit), False, is_open)
        )
        piece = numbers.intersect_numbers(piece, (end,))
    if "multipleOf" in schema:
        with locate_errors_at_keyword(location, "multipleOf"):
            piece = numbers.intersect_numbers(
                piece, (NumberRange(step=to_fraction(schema["multipleOf"])),)
            )
            write_numbers.texts(piece)  # raises if no small automaton recognises the multiples
    return replace(ANY_VALUE, numbers=piece)


def _read_string_keywords(
    context: Context, schema: Schema, location: SchemaLocation, track_evaluated: bool
) -> ValueSet:
    strings: Node = ANY_TEXT
    least = int(schema.get("minLength", 0))
    most = schema.get("maxLength")
    if least > MAX_MIN_LENGTH:
        raise ConstraintError(
            f"json_schema: minLength goes up to {MAX_MIN_LENGTH:,}.",
            pointer=location.child("minLength").pointer,
        )
    if least or (most is not None and most <= MAX_LENGTH):
        strings = Repeat(ANY_CHAR, least, None if most is None or most > MAX_LENGTH else int(most))
    if most is not None and most < least:
        strings = NOTHING
    if "pattern" in schema:
        with locate_errors_at_keyword(location, "pattern"):
            strings = intersection_of_strings(strings, parse_schema_pattern(schema["pattern"]))
    if context.assert_format and schema.get("format") in formats.ASSERTED:
        with locate_errors_at_keyword(location, "format"):
            strings = intersection_of_strings(strings, formats.format_language(schema["format"]))
    return replace(ANY_VALUE, strings=strings)


def _read_quote_keyword(
    context: Context, schema: Schema, location: SchemaLocation, track_evaluated: bool
) -> ValueSet:
    with locate_errors_at_keyword(location, quotes.KEYWORD):
        return replace(
            ANY_VALUE,
            strings=quotes.parse_quote(
                schema[quotes.KEYWORD], context.document.value_at_pointer
            ).node,
        )


def _read_array_keywords(
    context: Context, schema: Schema, location: SchemaLocation, track_evaluated: bool
) -> ValueSet:
    prefix = "prefixItems"
    rest = "items"
    if isinstance(schema.get("items"), list):
        prefix = "items"
        rest = "additionalItems"
    types = schema.get("type", "array")
    if (
        REPEATS in schema
        and types != "array"
        and not (isinstance(types, list) and "array" in types)
    ):
        raise ConstraintError(
            f"json_schema: {REPEATS} counts equal items of a list, and this is of type {types!r}.",
            pointer=location.child(REPEATS).pointer,
        )
    first = tuple(
        context.formula_below(location, prefix, i) for i in range(len(schema.get(prefix, ())))
    )
    least = int(schema.get("minItems", 0))
    most = schema.get("maxItems")
    most = None if most is None or most > MAX_LENGTH else int(most)
    contains: tuple[Contains, ...] = ()
    also: tuple[Formula, ...] = ()
    if "contains" in schema:
        formula = context.formula_below(location, "contains")
        counts = int(schema.get("minContains", 1)), schema.get("maxContains")
        also = (formula,)
        if counts != (0, None):
            contains = (
                Contains(formula, 0, counts[0], None if counts[1] is None else int(counts[1])),
            )
    shape = ArrayShape(
        first,
        context.formula_below(location, rest) if rest in schema else True,
        least,
        most,
        contains,
        location.child("uniqueItems").pointer if schema.get("uniqueItems") is True else None,
        (None if rest in schema else len(first), also) if track_evaluated else (0, ()),
        location.pointer if location.pointer in context.sets else None,
        schema.get(REPEATS),
    )
    return replace(ANY_VALUE, arrays=(shape,))


def _read_object_keywords(
    context: Context, schema: Schema, location: SchemaLocation, track_evaluated: bool
) -> ValueSet:
    properties = schema.get("properties", {})
    required = schema.get("required", ())
    # in draft 3, a boolean on the member
    required = dict.fromkeys(() if isinstance(required, bool) else required)
    with locate_errors_at_keyword(location, "patternProperties"):
        patterns = [
            (
                parse_schema_pattern(pattern),
                context.formula_below(location, "patternProperties", pattern),
            )
            for pattern in schema.get("patternProperties", {})
        ]
    additional = (
        context.formula_below(location, "additionalProperties")
        if "additionalProperties" in schema
        else True
    )
    inexact = False
    names: Node = ANY_TEXT
    if "propertyNames" in schema:
        allowed = context.values(context.formula_below(location, "propertyNames"))
        inexact = allowed.inexact
        names = allowed.strings

    members = []
    for name in dict.fromkeys((*properties, *required)):
        formulas = (
            [context.formula_below(location, "properties", name)] if name in properties else []
        )
        formulas += [formula for pattern, formula in patterns if accepts(pattern, name)]
        formula = all_of(*formulas) if formulas else additional
        members.append(Member(name, formula if accepts(names, name) else False, name in required))
    with locate_errors_at_keyword(location, "patternProperties"):
        others = tuple(_divide_other_names(context, patterns, additional, names))
    evaluated_names = [*map(literal, properties), *(pattern for pattern, _ in patterns)]
    most = schema.get("maxProperties")
    counting = "minProperties" if "minProperties" in schema else "maxProperties"
    shape = ObjectShape(
        tuple(members),
        others,
        int(schema.get("minProperties", 0)),
        None if most is None else int(most),
        evaluated=NOTHING
        if not track_evaluated
        else ANY_TEXT
        if "additionalProperties" in schema
        else alternation(evaluated_names),
        count_pointer=context.pointer_if_enforced(location, counting),
    )
    return replace(ANY_VALUE, objects=(shape,), inexact=inexact)


def _divide_other_names(
    context: Context, patterns: Iterable[tuple[Node, Formula]], additional: Formula, names: Node
) -> Iterator[tuple[Node, Formula]]:
    """Divides the names of unlisted members by the patterns that they match. The resulting
    languages of names are disjoint. Yields each one with the formula of the members' values.
    """
    cells: list[tuple[Node, tuple[Formula, ...]]] = [(names, ())] if names != NOTHING else []
    for pattern, formula in patterns:
        cut = []
        for cell, formulas in cells:
            inside, outside = (
                context.algebra.intersect_strings(cell, each)
                for each in (pattern, complement(pattern))
            )
            cut += [(inside, (*formulas, formula)), (outside, formulas)]
        cells = [(cell, formulas) for cell, formulas in cut if cell != NOTHING]
        if len(cells) > MAX_CELLS:
            raise ConstraintError("json_schema: too many overlapping patterns.")
    for cell, formulas in cells:
        formula = all_of(*formulas) if formulas else additional
        if formula is not False:
            yield cell, formula


_KeywordReader = Callable[[Context, Schema, SchemaLocation, bool], ValueSet]

_MEMBERS = (
    "properties",
    "patternProperties",
    "additionalProperties",
    "required",
    "minProperties",
    "maxProperties",
    "propertyNames",
)
_ITEMS = (
    "prefixItems",
    "items",
    "additionalItems",
    "minItems",
    "maxItems",
    "contains",
    "uniqueItems",
    REPEATS,
)
_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")

READERS: dict[str, _KeywordReader] = {
    "type": _type,
    "enum": _read_enum,
    "const": _read_const,
    **dict.fromkeys(_LIMITS, _read_number_keywords),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), _read_string_keywords),
    quotes.KEYWORD: _read_quote_keyword,
    **dict.fromkeys(_ITEMS, _read_array_keywords),
    **dict.fromkeys(_MEMBERS, _read_object_keywords),
}
