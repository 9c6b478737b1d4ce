"""Checks that every keyword of a schema has a valid value, for all drafts and much faster than
validation against a meta-schema.

Source: JSON Schema draft 2020-12, core and validation; older drafts where they differ.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from sglang_lite.constraints.json_schema.document import (
    HOLDERS,
    LISTS,
    NAMED,
    REFERENCES,
    Document,
    SchemaLocation,
    pointer_token,
    subschemas,
)
from sglang_lite.constraints.json_schema.numbers import is_finite
from sglang_lite.constraints.memo import memoize
from sglang_lite.protocol import ConstraintError
from sglang_lite.protocol.anything import Json

MAX_SCHEMA_CHARS = 2_000_000
MAX_DEPTH = 200
MAX_SCHEMAS = 200_000

_TOO_OLD = re.compile(r"json-schema\.org/draft-0[0-3]\b")
_WRAPPERS = (
    ("json_schema", "schema"),
    ("schema",),
    ("function", "parameters"),
    ("parameters",),
    ("input_schema",),
)
# next to a schema in requests to OpenAI and Anthropic
_BESIDE = frozenset({"type", "name", "description", "strict"})
_WRAPPING = ["json_schema", "function"]
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})


@memoize
def check_schema_text(text: str) -> None:
    """Checks the JSON text of a schema.

    Raises:
        ConstraintError: the text is not a valid schema; the error has the JSON Pointer of the
            fault.
    """
    if len(text) > MAX_SCHEMA_CHARS:
        raise ConstraintError(
            f"json_schema: {len(text):,} characters long, the limit is {MAX_SCHEMA_CHARS:,}."
        )
    try:
        check(json.loads(text, parse_constant=refuse_non_finite))
    except ConstraintError:
        raise
    except ValueError as error:  # also raised for numbers with too many digits for Python
        hint = "Give a schema's text or a dict; of a file, what it has: json.load(file)."
        if text[:1] == "{":
            hint = 'Write JSON, such as {"type": "object", "properties": {"name": {"type": "string"}}}, or give a dict.'
        raise ConstraintError(f"json_schema: not JSON: {error}", hint=hint) from error
    except RecursionError as error:
        raise ConstraintError("json_schema: nested too deeply.") from error


def refuse_non_finite(text: str) -> NoReturn:
    """Raises an error for NaN and Infinity. Used as `parse_constant` of `json.loads`."""
    raise json.JSONDecodeError(f"{text} is no number", text, 0)


def refuse_duplicate_names(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """Returns the members of an object. Raises ValueError if a name is repeated. Used as
    `object_pairs_hook` of `json.loads` (RFC 7493, 2.3).
    """
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        again = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"the name {again!r} is written twice in one object")
    return members


def check(schema: object) -> None:
    """Checks a schema, including parts that are only reachable through a reference, for example in
    `default`.

    Raises:
        ConstraintError: the value is not a valid schema; the error has the JSON Pointer of the
            fault.
    """
    if isinstance(schema, dict) and _TOO_OLD.search(str(schema.get("$schema"))):
        raise ConstraintError(
            f"json_schema: {schema['$schema']} is too old a draft: its required, extends, disallow and divisibleBy "
            "mean something else since draft 4.",
            pointer="/$schema",
            hint="Rewrite the schema for draft 4 or a later one.",
        )
    _refuse_request_field(schema)
    # Remaining subschemas of each level, as lazy iterators: lists of 100,000 would trigger garbage
    # collections, which traverse all of the caller's objects and block its threads.
    levels: list[Iterator[tuple[str, object]]] = [iter((("", schema),))]
    seen = set[str]()
    references = list[str]()
    document: Document | None = None
    count = 0
    while levels or references:
        if not levels:
            try:
                document = document or Document(schema)
            except ConstraintError:  # an invalid URI, which raises an error when it is resolved
                return
            targets = [
                target
                for target in _reference_targets(document, references.pop())
                if target not in seen
            ]
            levels.append(zip(targets, map(document.value_at_pointer, targets)))
            continue
        found = next(levels[-1], None)
        if found is None:
            levels.pop()
            continue
        pointer, each = found
        count += 1
        if count > MAX_SCHEMAS:
            raise ConstraintError(f"json_schema: more than {MAX_SCHEMAS:,} schemas in one.")
        seen.add(pointer)
        if len(levels) > MAX_DEPTH + 1:
            raise ConstraintError("json_schema: nested too deeply.", pointer=pointer)
        if isinstance(each, bool):
            continue
        if not isinstance(each, dict):
            raise ConstraintError(
                f"json_schema: a schema must be an object or a boolean, not {str(each)[:60]!r}.",
                pointer=pointer,
            )
        for keyword, value in each.items():
            value_check = _VALUE_CHECKS.get(keyword)
            if value_check is not None and not value_check[0](value):
                where = f"{pointer}/{pointer_token(keyword)}"
                raise ConstraintError(
                    f"json_schema: {keyword} must be {value_check[1]}, not {str(value)[:60]!r}.",
                    pointer=where,
                )
        if not each.keys().isdisjoint(HOLDERS):
            levels.append(_direct_subschemas(each, pointer))
        if not each.keys().isdisjoint(REFERENCES):
            references.append(pointer)


def _refuse_request_field(schema: object) -> None:
    """Raises ConstraintError for an API's request field that has the schema inside. Read as a
    schema, the request field would allow any value.
    """
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "json_object":
        raise ConstraintError(
            "json_schema: 'json_object' is no type of a schema.",
            pointer="/type",
            hint='Any object is {"type": "object"}.',
        )
    for path in _WRAPPERS:
        inner = schema
        outer = set[str]()
        for key in path:
            outer |= (inner.keys() if isinstance(inner, dict) else set()) - {key}
            inner = inner.get(key) if isinstance(inner, dict) else None
        if isinstance(inner, dict) and outer <= _BESIDE and ("name" in outer or kind in _WRAPPING):
            keys = "".join(f'["{key}"]' for key in path)
            raise ConstraintError(
                "json_schema: this is a request field that wraps a schema; read as a schema, it would allow anything.",
                pointer="",
                hint=f"Pass the schema inside: json_schema=wrapped{keys}.",
            )


def _direct_subschemas(schema: dict[str, Json], pointer: str) -> Iterator[tuple[str, Json]]:
    """Yields the direct subschemas of a schema, each as (JSON Pointer, subschema)."""
    for steps, each in subschemas(schema):
        yield pointer + steps, each


def _reference_targets(document: Document, pointer: str) -> Iterator[str]:
    """Yields the targets of a schema's references in its own document. References without a target
    are rejected when they are followed.
    """
    location = SchemaLocation(pointer)
    for keyword in document.schema(location).keys() & REFERENCES:
        with contextlib.suppress(ConstraintError):
            target = document.resolve_reference_at(location, keyword).pointer
            if target[:1] in ("", "/"):
                yield target


def _is_finite_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and is_finite(value)


def _is_nonnegative_integer(value: Any) -> bool:
    return _is_finite_number(value) and value >= 0 and int(value) == value


def _is_list_of_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_type_keyword(value: Any) -> bool:
    return (
        value in _TYPES
        if isinstance(value, str)
        else bool(value) and _is_list_of_strings(value) and _TYPES.issuperset(value)
    )


_VALUE_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(LISTS, (lambda v: isinstance(v, list) and bool(v), "a list of one or more schemas")),
    **dict.fromkeys(NAMED, (lambda v: isinstance(v, dict), "an object whose values are schemas")),
    "dependencies": (
        lambda v: isinstance(v, dict) and all(map(_is_list_of_strings, (e for e in v.values() if isinstance(e, list)))),
        "an object whose values are schemas or lists of names",
    ),
    **dict.fromkeys(("minimum", "maximum"), (_is_finite_number, "a number")),
    **dict.fromkeys(
        ("exclusiveMinimum", "exclusiveMaximum"), (lambda v: _is_finite_number(v) or isinstance(v, bool), "a number")
    ),
    "multipleOf": (lambda v: _is_finite_number(v) and v > 0, "a number above 0"),
    **dict.fromkeys((
        "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains",
        "maxContains",
    ), (_is_nonnegative_integer, "a whole number of at least 0")),
    **dict.fromkeys(
        ("pattern", "format", "$ref", "$dynamicRef", "$recursiveRef", "$schema", "$id", "$anchor", "$dynamicAnchor"),
        (lambda v: isinstance(v, str), "a string"),
    ),
    "required": (_is_list_of_strings, "a list of names"),
    "dependentRequired": (
        lambda v: isinstance(v, dict) and all(map(_is_list_of_strings, v.values())),
        "an object whose values are lists of names",
    ),
    "enum": (lambda v: isinstance(v, list), "a list"),
    "uniqueItems": (lambda v: isinstance(v, bool), "true or false"),
    "x-repeats": (lambda v: _is_nonnegative_integer(v) and v >= 3, "a whole number of at least 3"),
    "type": (_is_type_keyword, f"one of {', '.join(sorted(_TYPES))}, or a list of these"),
}  # fmt: skip
