"""Tests whether a constraint is so small and plain that it compiles in milliseconds and needs no
worker process.

The test reads only the constraint's text, in time linear in its length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import prod
from typing import Any

from sglang_lite.protocol import Choices, Constraint, Ebnf, JsonSchema, Number, Regex

MAX_PATTERN_CHARS = 200
MAX_GRAMMAR_CHARS = 300
MAX_SCHEMA_CHARS = 4_000
MAX_CHOICES_CHARS = 20_000
MAX_COUNT = 1_000  # largest product of a pattern's repeat counts, and largest length in a schema

_COUNTS = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}")
# Keywords that each add one rule and multiply nothing.
_SCHEMAS = frozenset({"items", "additionalProperties"})
_MAPS = frozenset({"properties", "$defs", "definitions"})
_NUMBERS = frozenset({"minLength", "maxLength", "minItems", "maxItems"})
_PLAIN = frozenset(
    {"type", "enum", "const", "required", "$ref", "$schema", "title", "description", "default", "examples",
     "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
)  # fmt: skip


def can_compile_in_process(constraint: Constraint) -> bool:
    """Returns True if a constraint may be compiled in this process."""
    match constraint:
        case Regex(pattern):
            return (
                len(pattern) <= MAX_PATTERN_CHARS and _multiply_repeat_counts(pattern) <= MAX_COUNT
            )
        case Ebnf(grammar):
            return len(grammar) <= MAX_GRAMMAR_CHARS and "{" not in grammar
        case Number():
            return True
        case Choices(options):
            return sum(map(len, options)) + len(options) <= MAX_CHOICES_CHARS
        case JsonSchema(text):
            try:
                return len(text) <= MAX_SCHEMA_CHARS and _is_simple_schema(json.loads(text))
            except (ValueError, RecursionError):
                return False
    return False


def _multiply_repeat_counts(pattern: str) -> int:
    found = _COUNTS.findall(pattern)
    return prod(max([1, *(int(count[:6]) for count in counts if count)]) for counts in found)


def _is_simple_schema(schema: Any) -> bool:
    if isinstance(schema, bool):
        return True
    if not isinstance(schema, Mapping):
        return False
    return all(_is_simple_keyword(name, value) for name, value in schema.items())


def _is_simple_keyword(name: str, value: Any) -> bool:
    if name in _SCHEMAS:
        return _is_simple_schema(value)
    if name in _MAPS:
        return isinstance(value, Mapping) and all(map(_is_simple_schema, value.values()))
    if name in _NUMBERS:
        return isinstance(value, int) and value <= MAX_COUNT
    if name == "anyOf":  # the form of Optional[T]
        return (
            isinstance(value, list)
            and len(value) == 2
            and {"type": "null"} in value
            and all(map(_is_simple_schema, value))
        )
    return name in _PLAIN
