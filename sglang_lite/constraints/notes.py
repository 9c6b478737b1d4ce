"""Notes on a schema in plain words: limits that the shape of a value does not show, and the
author's descriptions and examples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from sglang_lite.constraints.json_schema.quotes import KEYWORD, describe_quote
from sglang_lite.constraints.python_types import patterns

_SILENT: Final = frozenset((  # keywords that constrain no value
    "title", "default", "deprecated", "readOnly", "writeOnly", "$schema", "$id", "id", "$defs", "definitions",
    "$comment", "$anchor", "discriminator",
))  # fmt: skip
SHAPE: Final = frozenset((  # keywords that the shape itself expresses
    "type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf", "properties", "required", "additionalProperties",
    "items", "prefixItems", "additionalItems",
))  # fmt: skip
_IN_WORDS: Final = frozenset((  # keywords that notes put into words
    "description", "examples", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength",
    "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "pattern", "format", "uniqueItems", KEYWORD,
))  # fmt: skip
_DAY = "YYYY-MM-DD"
_TIME = "HH:MM:SS"
_FORMATS: Final[Mapping[str, str]] = {
    "date": _DAY,
    "time": _TIME,
    "date-time": f"{_DAY}T{_TIME}",
    "duration": "ISO 8601 duration",
    "uuid": "UUID",
    "email": "email address",
    "uri": "URL",
    "ipv4": "IPv4 address",
    "ipv6": "IPv6 address",
}
_ZONE_ONLY: Final = "^.{17}[0-5]"  # occurs with the format of moments with a time zone
_PATTERNS: Final[Mapping[str, str]] = {
    **{
        patterns.moment_pattern(day=day, naive=naive, aware=aware): f"{_DAY}T{_TIME}"
        if day
        else _TIME
        for day in (True, False)
        for naive, aware in ((True, True), (True, False), (False, True))
    },
    **{
        f"^{pattern}$": "UUID" if name.startswith("uuid") else name
        for name, pattern in patterns.FORMATS.items()
    },
    f"^{patterns.FORMATS['email']}$": "email address",
    f"^{patterns.DURATION}$": "ISO 8601 duration",
}
# characters; a longer one teaches a model nothing, and masks enforce it anyway
_LONGEST_PATTERN: Final = 100
_LARGE: Final = 10**5  # limits of numbers that only express how many digits fit


def describe_string_type(schema: Mapping[str, Any]) -> str:  # any JSON
    """Returns a word for the strings of a schema, such as "URL", according to its format or
    pattern. The default is "string".
    """
    pattern = schema.get("pattern", "")
    if len(pattern) > _LONGEST_PATTERN and "://" in pattern:
        return "URL"
    return _FORMATS.get(schema.get("format", ""), _PATTERNS.get(pattern, "string"))


def list_schema_notes(schema: Mapping[str, Any], word: str) -> list[str]:  # any JSON
    """Returns the notes on a schema. Their order does not depend on the order of its keywords.

    Args:
        schema: the schema, a JSON object.
        word: word that the shape uses for the schema's strings.
    """
    return list(
        dict.fromkeys(
            (*_limit_notes(schema, word), *_other_keywords(schema), *_author_notes(schema))
        )
    )


def decimal_notes(schemas: Sequence[Any]) -> list[str] | None:  # any JSON
    """Returns the notes on alternatives that together describe one decimal number, as in the schema
    of `Decimal`. Returns None for other alternatives.
    """
    known = [each for each in schemas if isinstance(each, dict) and each.get("type") == "number"]
    if not known or len(known) < len(schemas):
        return None
    counts = [_count_decimals(each) for each in known]
    most = max(counts)
    if min(counts) < 0 or most == 0 or len(set(counts)) < len(counts):
        return None
    notes = [] if most == patterns.NUMBER_DIGITS else [f"at most {most} decimal{'s' * (most != 1)}"]
    widest = known[0].copy()  # fewer decimals leave more digits before the point
    for keyword in ("exclusiveMinimum", "exclusiveMaximum"):
        limit = abs(widest.get(keyword, 0))
        if limit >= _LARGE and math.log10(limit).is_integer():
            del widest[keyword]
    return notes + list(_range_notes(widest))


def _count_decimals(schema: Mapping[str, Any]) -> int:
    """Returns the number of decimals that a number may have, or -1 if its step is not a power of
    ten.
    """
    step = schema.get("multipleOf", 0)
    count = -round(math.log10(step)) if step > 0 else -1
    return count if count >= 0 and math.isclose(step, 10.0**-count) else -1


def to_json_line(value: object) -> str:
    """Returns the JSON of a value on one line."""
    return _printable(json.dumps(value, ensure_ascii=False))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def collapse_whitespace(text: object) -> str:
    """Replaces line ends and repeated blanks in a text, so that it stays within its comment."""
    return _printable(" ".join(str(text).split()))


def _limit_notes(schema: Mapping[str, Any], word: str) -> Iterator[str]:
    decimals = decimal_notes([schema])
    if decimals is not None:
        yield from decimals
    else:
        yield from _range_notes(schema)
        if "multipleOf" in schema:
            yield f"a multiple of {schema['multipleOf']}"
    if word != "URL":
        yield from _count_notes(schema.get("minLength", 0), schema.get("maxLength"), "character")
    pattern = schema.get("pattern")
    if (
        pattern is not None
        and pattern not in _PATTERNS
        and pattern != _ZONE_ONLY
        and len(pattern) <= _LONGEST_PATTERN
    ):
        yield f"matches /{_printable(pattern)}/"
    if "format" in schema and schema["format"] not in _FORMATS:
        yield f"format: {collapse_whitespace(schema['format'])}"
    first = schema.get(
        "prefixItems", schema["items"] if isinstance(schema.get("items"), list) else ()
    )
    low = schema.get("minItems", 0)
    high = schema.get("maxItems")
    yield from _count_notes(
        0 if low <= len(first) else low, None if high == len(first) else high, "item"
    )
    if schema.get("uniqueItems"):
        yield "no two alike"
    yield from _count_notes(schema.get("minProperties", 0), schema.get("maxProperties"), "member")
    if KEYWORD in schema:
        yield describe_quote(schema[KEYWORD])


def _range_notes(schema: Mapping[str, Any]) -> Iterator[str]:
    low, high = (
        None if abs(schema.get(keyword, patterns.MAX_INT)) == patterns.MAX_INT else schema[keyword]
        for keyword in ("minimum", "maximum")
    )
    if low is not None and high is not None:
        yield f"{low}" if low == high else f"{low} to {high}"
    elif low is not None or high is not None:
        yield f"at least {low}" if high is None else f"at most {high}"
    for keyword, words in (("exclusiveMinimum", "more than"), ("exclusiveMaximum", "less than")):
        if keyword in schema:
            yield f"{words} {schema[keyword]}"


def _count_notes(low: float, high: float | None, noun: str) -> Iterator[str]:
    plural = f"{noun}s"
    if high is None and low == 1:
        yield "not empty"
    elif high is None:
        yield from [f"at least {low} {plural}"] if low else ()
    elif low == high or not low:
        yield f"{'' if low == high else 'at most '}{high} {noun if high == 1 else plural}"
    else:
        yield f"{low} to {high} {plural}"


def _other_keywords(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yields each remaining keyword with its value, unless the shape or another note already
    expresses it.
    """
    for keyword in sorted(schema.keys() - _IN_WORDS - SHAPE - _SILENT):
        if not keyword.startswith("x-"):
            value = schema[keyword]
            text = value if isinstance(value, str) else to_json_line(value)
            yield collapse_whitespace(f"{keyword}: {text}")


def _author_notes(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yields the author's description and examples of the value."""
    if schema.get("description"):
        yield collapse_whitespace(schema["description"])
    if schema.get("examples"):
        yield "e.g. " + ", ".join(to_json_line(each) for each in schema["examples"])
