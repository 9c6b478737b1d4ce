"""Validates finished values with jsonschema. Replaces keywords that jsonschema interprets
differently from the normal form, such as references, patterns and formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from sglang_lite.constraints.formal.automaton import accepts
from sglang_lite.constraints.json_schema import formats, quotes
from sglang_lite.constraints.json_schema.document import REFERENCES, Document, SchemaLocation
from sglang_lite.constraints.json_schema.numbers import to_fraction
from sglang_lite.constraints.memo import memoize
from sglang_lite.constraints.syntax.regex import parse_schema_pattern
from sglang_lite.protocol import ConstraintError, JsonSchema
from sglang_lite.protocol.anything import Foreign

MAX_FOLLOWED = 100_000  # maximum number of references followed for one value

_OLDER = {"$schema": "http://json-schema.org/draft-07/schema#"}


def violations(constraint: JsonSchema, value: object) -> Iterator[Foreign]:
    """Yields the violations of a schema in a value, as errors of jsonschema.

    Raises:
        ConstraintError: the schema has a reference without a target, or one that refers to itself
            endlessly.
        RecursionError: the value or the schema is nested too deeply.
    """
    validator, path = _validator(constraint)
    return iter(
        validator.evolve(format_checker=replace(path, state=_ValidationState())).iter_errors(value)
    )


def raise_if_uncheckable(constraint: JsonSchema) -> None:
    """Raises ConstraintError if a schema has a reference without a target, or a pattern outside the
    dialect. `violations` leaves such a pattern to Python's `re`, which may take exponential time.
    """
    document = Document(json.loads(constraint.schema))
    for location in document.locations:
        schema = document.schema(location)
        if isinstance(schema, dict):
            for keyword in REFERENCES & schema.keys():
                document.resolve_reference_at(location, keyword)
            for pattern in (*schema.get("patternProperties", ()), schema.get("pattern")):
                if isinstance(pattern, str):
                    parse_schema_pattern(pattern)


@memoize
def _validator(constraint: JsonSchema) -> tuple[Any, _ReferencePath]:
    from jsonschema import Draft201909Validator, Draft202012Validator, validators
    from referencing.jsonschema import EMPTY_REGISTRY

    schema = json.loads(constraint.schema)
    draft = validators.validator_for(schema, default=Draft202012Validator)
    keywords: dict[str, Any] = {
        "pattern": _check_pattern,
        "patternProperties": _check_pattern_properties,
        "additionalProperties": _check_additional_properties,
        "multipleOf": _check_multiple_of,
        quotes.KEYWORD: _check_quote,
        "format": _check_format if constraint.format == "assert" else _no_violations,
    }
    keywords |= {
        name: partial(_check_reference, name) for name in REFERENCES if name in draft.VALIDATORS
    }
    keywords["$recursiveRef"] = partial(_check_reference, "$recursiveRef")
    if draft in (Draft201909Validator, Draft202012Validator):
        keywords["dependencies"] = validators.validator_for(_OLDER).VALIDATORS["dependencies"]
        keywords |= {
            "unevaluatedProperties": _check_unevaluated_properties,
            "unevaluatedItems": _check_unevaluated_items,
        }
    if draft is Draft202012Validator:
        keywords["items"] = _check_items
    document = Document(schema)
    keywords |= dict.fromkeys(document.unknown & draft.VALIDATORS.keys(), _no_violations)
    for (
        location
        # a nested $schema would make jsonschema switch to its own class for that dialect
    ) in document.locations:
        found = document.value_at_pointer(location.pointer)
        if isinstance(found, dict):
            found.pop("$schema", None)
    extend: Any = validators.extend  # untyped
    kind = extend(draft, keywords)
    return kind(schema, registry=EMPTY_REGISTRY), _ReferencePath(
        document, _pointers_by_id(document.roots), document.start
    )


def _pointers_by_id(roots: Mapping[str, Any]) -> dict[int, str]:
    """Returns the JSON Pointers of all dicts in a document, by their `id()`."""
    found: dict[int, str] = {}
    stack = [(root, SchemaLocation(start)) for start, root in roots.items()]
    while stack:
        each, location = stack.pop()
        if isinstance(each, dict):
            found[id(each)] = location.pointer
            stack += ((below, location.child(name)) for name, below in each.items())
        elif isinstance(each, list):
            stack += ((below, location.child(i)) for i, below in enumerate(each))
    return found


@dataclass(slots=True)
class _ValidationState:
    """State of one validation.

    Attributes:
        remaining: number of references that may still be followed.
        results: validity by (id of the schema with the reference, id of the value); None while it
            is being checked.
    """

    remaining: int = MAX_FOLLOWED
    results: dict[tuple[int, int], bool | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _ReferencePath:
    """References that a validation has followed. Passed to jsonschema as the format checker,
    because functions of keywords can find it there. Formats are checked without a format checker.

    Attributes:
        document: schema document.
        pointers: JSON Pointers of the document's dicts, by `id()`.
        entered: target of the last reference.
        state: state shared by all paths of one validation.
    """

    document: Document
    pointers: Mapping[int, str]
    entered: SchemaLocation
    state: _ValidationState = field(default_factory=_ValidationState)

    def referenced_location(self, schema: Any, keyword: str) -> SchemaLocation:
        """Returns the location that the reference in a schema points to."""
        return self.document.resolve_reference_at(
            self.document.location_below(self.entered, self.pointers[id(schema)]), keyword
        )

    def keywords_of(self, schema: Any) -> Mapping[str, Any]:
        """Returns the keywords of a schema that exist in its draft."""
        found = self.document.schema(SchemaLocation(self.pointers[id(schema)]))
        return found if isinstance(found, dict) else {}


def _follow_reference(validator: Any, schema: Any, keyword: str) -> tuple[Any, Any]:
    """Returns a validator for the target of a schema's reference, and the schema there."""
    path: _ReferencePath = validator.format_checker
    path.state.remaining -= 1
    if path.state.remaining < 0:
        raise ConstraintError(
            f"json_schema: more than {MAX_FOLLOWED:,} references are followed for a value."
        )
    location = path.referenced_location(schema, keyword)
    return validator.evolve(
        format_checker=replace(path, entered=location)
    ), path.document.value_at_pointer(location.pointer)


def _check_reference(
    keyword: str, validator: Any, reference: str, value: Any, schema: Any
) -> Iterator[Any]:
    """Checks a reference only once for each value. If each definition refers to the next one twice,
    repeated checks would take 2^n steps. Dynamic references are checked again, because their target
    depends on the path.
    """
    path: _ReferencePath = validator.format_checker
    key = id(schema), id(value)
    result = path.state.results.get(key, ...)
    if result is None and not path.entered.scope:
        raise ConstraintError(
            f"json_schema: {keyword} {reference!r} refers to itself without an end."
        )
    if isinstance(result, bool) and not path.entered.scope:
        if not result:
            yield _violation(f"{str(value)[:60]} is not valid under {reference}")
        return
    path.state.results[key] = None
    valid = True
    there, target = _follow_reference(validator, schema, keyword)
    try:
        for violation in there.descend(value, target):
            valid = False
            yield violation
    finally:  # the caller may stop after the first violation
        path.state.results[key] = valid


def _no_violations(validator: Any, keyword_value: Any, value: Any, schema: Any) -> Iterator[Any]:
    return iter(())


def _violation(message: str) -> Any:
    from jsonschema import ValidationError

    return ValidationError(message)


# ------------------------------------------------------------------------------ strings and numbers


@memoize
def _compile_finder(pattern: str) -> Callable[[str], object]:
    """Returns a function that searches a text for a pattern. A pattern outside the dialect is left
    to Python's `re`.

    Raises:
        ConstraintError: the pattern is not valid for `re` either.
    """
    try:
        return partial(accepts, parse_schema_pattern(pattern))
    except ConstraintError as refusal:
        try:
            return re.compile(pattern).search
        except (re.error, RecursionError, OverflowError):
            raise refusal from None


def _check_pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    if isinstance(value, str) and not _compile_finder(pattern)(value):
        yield _violation(f"{value!r} does not match {pattern!r}")


def _check_format(validator: Any, name: str, value: Any, schema: Any) -> Iterator[Any]:
    if isinstance(value, str) and name in formats.ASSERTED and not formats.is_valid(name, value):
        yield _violation(f"{value!r} is not a {name!r}")


def _check_quote(validator: Any, keyword: Any, value: Any, schema: Any) -> Iterator[Any]:
    if isinstance(value, str):
        path: _ReferencePath = validator.format_checker
        quote = quotes.parse_quote(keyword, path.document.value_at_pointer)
        if not accepts(quote.node, value):
            yield _violation(f"{value!r:.200} is not {quote}")


def _check_multiple_of(validator: Any, step: float, value: Any, schema: Any) -> Iterator[Any]:
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and to_fraction(value) % to_fraction(step)
    ):
        yield _violation(f"{value!r} is not a multiple of {step!r}")


# ------------------------------------------------------------------------------- objects and arrays


def _check_pattern_properties(
    validator: Any, patterns: Mapping[str, Any], value: Any, schema: Any
) -> Iterator[Any]:
    for pattern, below in patterns.items() if isinstance(value, dict) else ():
        for name, each in value.items():
            if _compile_finder(pattern)(name):
                yield from validator.descend(each, below, path=name, schema_path=pattern)


def _check_additional_properties(
    validator: Any, below: Any, value: Any, schema: Any
) -> Iterator[Any]:
    finders = [_compile_finder(pattern) for pattern in schema.get("patternProperties", ())]
    for name, each in value.items() if isinstance(value, dict) else ():
        if name not in schema.get("properties", ()) and not any(find(name) for find in finders):
            yield from _check_further_member(validator, below, name, each, "additional")


def _check_further_member(
    validator: Any, below: Any, name: str, value: Any, kind: str
) -> Iterator[Any]:
    if below is False:
        yield _violation(f"{kind} properties are not allowed: {name!r}")
    else:
        yield from validator.descend(value, below, path=name)


def _check_items(validator: Any, below: Any, value: Any, schema: Any) -> Iterator[Any]:
    """Checks `items` as in 2020-12, or as a list with `additionalItems` as in earlier drafts."""
    if not isinstance(value, list):
        return
    first = below if isinstance(below, list) else schema.get("prefixItems", ())
    rest = schema.get("additionalItems", True) if isinstance(below, list) else below
    for i, each in enumerate(value):
        if i >= len(first):
            yield from validator.descend(each, rest, path=i)
        elif isinstance(below, list):
            yield from validator.descend(each, first[i], path=i, schema_path=i)


def _check_unevaluated_properties(
    validator: Any, below: Any, value: Any, schema: Any
) -> Iterator[Any]:
    if isinstance(value, dict):
        evaluated = _evaluated_names_or_indexes(
            validator, value, schema, but="unevaluatedProperties"
        )
        for name in value.keys() - evaluated:
            yield from _check_further_member(validator, below, name, value[name], "unevaluated")


def _check_unevaluated_items(validator: Any, below: Any, value: Any, schema: Any) -> Iterator[Any]:
    if isinstance(value, list):
        evaluated = _evaluated_names_or_indexes(validator, value, schema, but="unevaluatedItems")
        for i, each in enumerate(value):
            if i not in evaluated:
                yield from validator.descend(each, below, path=i)


def _evaluated_names_or_indexes(
    validator: Any, value: Any, schema: Any, but: str = ""
) -> set[str | int]:
    """Returns the names of members, or indexes of items, that a schema evaluates, directly or
    through applied schemas. The value must be valid under the schema.

    Args:
        but: keyword to leave out.
    """
    if not isinstance(schema, dict):
        return set()
    keywords = {
        name: keyword_value
        for name, keyword_value in validator.format_checker.keywords_of(schema).items()
        if name != but
    }
    found = (
        _evaluated_member_names(keywords, value)
        if isinstance(value, dict)
        else _evaluated_item_indexes(validator, keywords, value)
    )
    for keyword in keywords.keys() & set(REFERENCES):
        there, target = _follow_reference(validator, schema, keyword)
        found |= _evaluated_names_or_indexes(there, value, target)
    applied = [
        each for keyword in ("allOf", "anyOf", "oneOf") for each in keywords.get(keyword, ())
    ]
    if "if" in keywords:
        met = _is_valid(validator, value, keywords["if"])
        applied += [keywords["if"], keywords.get("then")] if met else [keywords.get("else")]
    for keyword in ("dependentSchemas", "dependencies"):
        applied += [
            below
            for name, below in keywords.get(keyword, {}).items()
            if isinstance(value, dict) and name in value
        ]
    for each in applied:
        if isinstance(each, dict) and _is_valid(validator, value, each):
            found |= _evaluated_names_or_indexes(validator, value, each)
    return found


def _is_valid(validator: Any, value: Any, schema: Any) -> bool:
    return next(validator.descend(value, schema), None) is None


def _evaluated_member_names(keywords: Mapping[str, Any], value: dict[str, Any]) -> set[str | int]:
    if "additionalProperties" in keywords or "unevaluatedProperties" in keywords:
        return set(value)
    finders = [_compile_finder(pattern) for pattern in keywords.get("patternProperties", ())]
    return {
        name
        for name in value
        if name in keywords.get("properties", ()) or any(find(name) for find in finders)
    }


def _evaluated_item_indexes(
    validator: Any, keywords: Mapping[str, Any], value: Any
) -> set[str | int]:
    items = keywords.get("items")
    rest = "additionalItems" if isinstance(items, list) else "items"
    if not isinstance(value, list):
        return set()
    if rest in keywords or "unevaluatedItems" in keywords:
        return set(range(len(value)))
    found: set[str | int] = set(
        range(len(items if isinstance(items, list) else keywords.get("prefixItems", ())))
    )
    if "contains" in keywords:
        found |= {
            i for i, each in enumerate(value) if _is_valid(validator, each, keywords["contains"])
        }
    return found
