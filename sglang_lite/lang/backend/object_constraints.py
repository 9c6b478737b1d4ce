"""Constraints as providers' structured outputs take them: JSON objects, and back to text."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sglang_lite.constraints.python_types.value_type import value_type
from sglang_lite.constraints.schema import parse_json
from sglang_lite.lang.expressions import REGEX_BOOL, REGEX_FLOAT, REGEX_INT, REGEX_STR
from sglang_lite.protocol import Choices, Constraint, JsonSchema, Number, Regex


@dataclass(frozen=True, slots=True)
class Form:
    """A constraint as structured outputs take it: a JSON object.

    Attributes:
        constraint: what the whole answer must be.
        wrapped: the value is the answer's only property, `value`, as it is no object itself.
        bare: the text of a value that is a string has no quotes.
    """

    constraint: JsonSchema
    wrapped: bool = True
    bare: bool = False


@lru_cache(maxsize=1024)
def form_of(constraint: Constraint | None) -> Form | None:
    """The form of a constraint; None for none, for a regex that is not one of the types', and for grammars."""
    match constraint:
        case Choices(options):
            return Form(_wrapped({"type": "string", "enum": list(options)}), bare=True)
        case Number(kind):
            return Form(_wrapped({"type": "integer" if kind == "integer" else "number"}), bare=True)
        case Regex():
            schema = _TYPES.get(constraint)
            return None if schema is None else Form(_wrapped(schema), bare=constraint != Regex(REGEX_STR))
        case JsonSchema(text):
            schema = json.loads(text)
            whole = isinstance(schema, dict) and schema.get("type") == "object" and not schema.keys() & _NO_ROOT
            return Form(constraint, wrapped=False) if whole else Form(_wrapped(schema))
    return None


_NO_ROOT = {"$ref", "anyOf", "oneOf"}  # what a provider does not take at the root


def _wrapped(schema: Any) -> JsonSchema:
    """An object whose only property is a value of the schema."""
    schema = _moved(schema)
    definitions = {"$defs": schema.pop("$defs")} if isinstance(schema, dict) and "$defs" in schema else {}
    whole = {"type": "object", "properties": {"value": schema}, "required": ["value"], "additionalProperties": False}
    return JsonSchema(json.dumps(whole | definitions))


def _moved(schema: Any) -> Any:
    """A schema with its references changed to where it is put; `$defs` stays at the top."""
    if isinstance(schema, list):
        return [_moved(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value) for key, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#") and not reference.startswith("#/$defs/"):
        moved["$ref"] = f"#/properties/value{reference[1:]}"
    return moved


# The regexes that types stand for, as JSON types. What came is read by the type, which checks the rest.
_TYPES: dict[Any, dict[str, Any]] = {
    value_type(datetime.date).constraint: {"type": "string", "format": "date"},
    value_type(datetime.time).constraint: {"type": "string", "format": "time"},
    value_type(datetime.datetime).constraint: {"type": "string", "format": "date-time"},
    Regex(REGEX_INT): {"type": "integer"},
    Regex(REGEX_FLOAT): {"type": "number"},
    Regex(REGEX_BOOL): {"type": "string", "enum": ["True", "False"]},
    Regex(REGEX_STR): {"type": "string"},
}
NUMBERS = [Form(_wrapped({"type": kind}), bare=True) for kind in ("integer", "number")]


def unwrapped(constraint: Constraint, form: Form, answer: str) -> str:
    """The text that a local model would have written. Objects are checked where all values are.

    Raises:
        ValueValidationError: the answer is not of the form.
    """
    if not form.wrapped:
        return answer
    value = parse_json(form.constraint, answer)["value"]
    if constraint == Number("integer"):
        value = int(value)  # JSON has 24.0, too
    return value if form.bare and isinstance(value, str) else json.dumps(value, ensure_ascii=False)
