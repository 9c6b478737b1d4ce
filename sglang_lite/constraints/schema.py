"""JSON schemas: accepting one, refusing a broken one, validating finished text against one."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any, Literal

from sglang_lite.constraints import formats
from sglang_lite.constraints.automaton import accepts
from sglang_lite.constraints.normal import wellformed
from sglang_lite.constraints.normal.document import Document
from sglang_lite.constraints.normal.numbers import exact
from sglang_lite.constraints.regex import parse_schema_pattern
from sglang_lite.protocol import ConstraintError, JsonSchema, ValueValidationError

MAX_FOLLOWED = 100_000  # references in the validation of a value


def json_schema(
    source: str | Mapping[str, Any] | bool,
    *,
    enforce: Literal["strict", "best_effort"] = "strict",
    format: Literal["assert", "annotate"] = "assert",
    separators: tuple[str, str] = (", ", ": "),
) -> JsonSchema:
    """A checked constraint from schema text or a schema.

    Args:
        source: of draft 2020-12, or the draft that its `$schema` says.
        enforce, format, separators: see JsonSchema.

    Raises:
        ConstraintError: not JSON, or not a valid schema; with the JSON Pointer of the fault.
    """
    try:
        text = source if isinstance(source, str) else json.dumps(source, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConstraintError(f"json_schema: not a JSON document: {error}") from error
    for name, value, possible in (
        ("enforce", enforce, ("strict", "best_effort")),
        ("format", format, ("assert", "annotate")),
    ):
        if value not in possible:
            raise ConstraintError(f"json_schema: {name} is {' or '.join(map(repr, possible))}, not {value!r}.")
    comma, colon = separators
    if (comma.strip(" \t\r\n"), colon.strip(" \t\r\n")) != (",", ":"):
        raise ConstraintError(f"json_schema: separators are a comma and a colon with blanks, not {separators!r}.")
    wellformed.check_text(text)
    return JsonSchema(text, enforce, format, (comma, colon))


def parse_json(constraint: JsonSchema, text: str) -> Any:
    """The value that `text` spells, in whatever style, validated.

    Raises:
        ValueValidationError: `text` is no JSON or breaks the schema; it carries the text and the value.
        ConstraintError: the schema refers to what is not there, or to itself again and again.
    """
    from referencing.exceptions import Unresolvable

    try:
        value = json.loads(text, parse_constant=wellformed.no_number, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise ValueValidationError(f"the text is not JSON: {error}", text=text) from error
    try:
        for fault in _validator(constraint).evolve(format_checker=_Followed()).iter_errors(value):
            raise ValueValidationError(f"{fault.json_path}: {fault.message}", text=text, value=value)
    except RecursionError as error:
        raise ValueValidationError("the value is nested too deeply.", text=text, value=value) from error
    except Unresolvable as error:
        raise ConstraintError(f"json_schema: the reference {error.ref!r} leads to nothing.") from error
    return value


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else wellformed.no_number(text)


@lru_cache(maxsize=256)
def _validator(constraint: JsonSchema) -> Any:
    from jsonschema import Draft202012Validator, validators
    from referencing.jsonschema import EMPTY_REGISTRY

    schema = json.loads(constraint.schema)
    draft = validators.validator_for(schema, default=Draft202012Validator)
    keywords: dict[str, Any] = {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
        "multipleOf": _multiple_of,
        "format": _format if constraint.format == "assert" else _nothing,
        **{
            name: _remembered(draft.VALIDATORS[name], dynamic="$dynamicRef" in constraint.schema)
            for name in ("$ref", "$dynamicRef")
            if name in draft.VALIDATORS
        },
    }
    dialect = schema.get("$schema") if isinstance(schema, dict) else None
    document = Document(schema)
    for place in document.places:  # where one is said, jsonschema would go on with its own class for that dialect
        found = document.at(place.pointer)
        if isinstance(found, dict):
            found.pop("$schema", None)
    if draft is Draft202012Validator and dialect is None:
        older = validators.validator_for({"$schema": "http://json-schema.org/draft-07/schema#"}).VALIDATORS
        keywords["dependencies"] = older["dependencies"]
        keywords["items"] = _items
    extend: Any = validators.extend  # which has no types
    kind = extend(draft, keywords)
    return kind(schema, registry=EMPTY_REGISTRY)  # which fetches nothing


class _Followed:
    """The references that one validation has followed. Stands where keywords find it: for the format checker, which
    ours does without."""

    def __init__(self) -> None:
        self.left = MAX_FOLLOWED
        self.valid: dict[tuple[int, int], bool] = {}  # by the objects of the reference's schema and of the value


def _remembered(follow: Callable[..., Iterator[Any]], *, dynamic: bool) -> Callable[..., Iterator[Any]]:
    """A reference that is followed once for each value: definitions that each refer twice to the next one would be
    looked at 2^n times. With `dynamic` ones what is said depends on the way, and they are only counted."""

    def check(validator: Any, reference: str, value: Any, schema: Any) -> Iterator[Any]:
        followed, key = validator.format_checker, (id(schema), id(value))
        if key in followed.valid and not dynamic:
            if not followed.valid[key]:
                yield _fault(f"{str(value)[:60]} is not valid under {reference}")
            return
        followed.left -= 1
        if followed.left < 0:
            raise ConstraintError(f"json_schema: more than {MAX_FOLLOWED:,} references are followed for a value.")
        valid = True
        for fault in follow(validator, reference, value, schema) or ():
            valid = False
            yield fault
        followed.valid[key] = valid

    return check


def _nothing(validator: Any, said: Any, value: Any, schema: Any) -> Iterator[Any]:
    return iter(())


# ------------------------------------------------------- keywords that jsonschema reads in another way than the engines


def _fault(message: str) -> Any:
    from jsonschema import ValidationError

    return ValidationError(message)


@lru_cache(maxsize=1024)
def _finder(pattern: str) -> Callable[[str], object]:
    """What finds a pattern in a text. One outside the dialect is left to Python's `re`.

    Raises:
        ConstraintError: to which it is none either.
    """
    try:
        return partial(accepts, parse_schema_pattern(pattern))
    except ConstraintError as refusal:
        try:
            return re.compile(pattern).search
        except re.error:
            raise refusal from None


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    if isinstance(value, str) and not _finder(pattern)(value):
        yield _fault(f"{value!r} does not match {pattern!r}")


def _format(validator: Any, name: str, value: Any, schema: Any) -> Iterator[Any]:
    if isinstance(value, str) and name in formats.ASSERTED and not accepts(formats.language_of(name), value):
        yield _fault(f"{value!r} is not a {name!r}")


def _multiple_of(validator: Any, step: float, value: Any, schema: Any) -> Iterator[Any]:
    if isinstance(value, int | float) and not isinstance(value, bool) and exact(value) % exact(step):
        yield _fault(f"{value!r} is not a multiple of {step!r}")


def _pattern_properties(validator: Any, patterns: Mapping[str, Any], value: Any, schema: Any) -> Iterator[Any]:
    for pattern, below in patterns.items() if isinstance(value, dict) else ():
        for name, each in value.items():
            if _finder(pattern)(name):
                yield from validator.descend(each, below, path=name, schema_path=pattern)


def _additional_properties(validator: Any, below: Any, value: Any, schema: Any) -> Iterator[Any]:
    finders = [_finder(pattern) for pattern in schema.get("patternProperties", ())]
    for name, each in value.items() if isinstance(value, dict) else ():
        if name not in schema.get("properties", ()) and not any(find(name) for find in finders):
            if below is False:
                yield _fault(f"additional properties are not allowed: {name!r}")
            yield from validator.descend(each, below, path=name)


def _items(validator: Any, below: Any, value: Any, schema: Any) -> Iterator[Any]:
    """Of 2020-12, or as a list with additionalItems as in the drafts before."""
    if not isinstance(value, list):
        return
    first = below if isinstance(below, list) else schema.get("prefixItems", ())
    rest = schema.get("additionalItems", True) if isinstance(below, list) else below
    for i, each in enumerate(value):
        if i >= len(first):
            yield from validator.descend(each, rest, path=i)
        elif isinstance(below, list):
            yield from validator.descend(each, first[i], path=i, schema_path=i)
