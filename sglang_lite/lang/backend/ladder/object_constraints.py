"""Converts constraints to JSON objects, because providers' structured outputs require objects.
Converts the answers back to text.
"""

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
class JsonForm:
    """Constraint in the form of a JSON object, for structured outputs.

    Attributes:
        constraint: schema of the whole answer.
        wrapped: True if the value is not an object itself but the answer's only property, `value`.
        bare: True if the text of a string value has no quotes.
    """

    constraint: JsonSchema
    wrapped: bool = True
    bare: bool = False


@lru_cache(maxsize=1024)
def json_form(constraint: Constraint | None) -> JsonForm | None:
    """Returns the JSON form of a constraint, or None if it has none. Grammars have none, and
    neither do regexes, except those of types such as int and date.
    """
    match constraint:
        case Choices(options):
            return JsonForm(_wrap_in_object({"type": "string", "enum": list(options)}), bare=True)
        case Number(kind):
            return JsonForm(
                _wrap_in_object({"type": "integer" if kind == "integer" else "number"}), bare=True
            )
        case Regex():
            schema = _TYPES.get(constraint)
            return (
                None
                if schema is None
                else JsonForm(_wrap_in_object(schema), bare=constraint != Regex(REGEX_STR))
            )
        case JsonSchema(text):
            schema = json.loads(text)
            whole = (
                isinstance(schema, dict)
                and schema.get("type") == "object"
                and not schema.keys() & _NO_ROOT
            )
            return (
                JsonForm(constraint, wrapped=False) if whole else JsonForm(_wrap_in_object(schema))
            )
    return None


_NO_ROOT = {"$ref", "anyOf", "oneOf"}  # keywords that providers do not accept at the root


def _wrap_in_object(schema: Any) -> JsonSchema:
    """Builds the schema of an object whose only property, `value`, has the given schema."""
    schema = _move_references(schema)
    definitions = (
        {"$defs": schema.pop("$defs")} if isinstance(schema, dict) and "$defs" in schema else {}
    )
    whole = {
        "type": "object",
        "properties": {"value": schema},
        "required": ["value"],
        "additionalProperties": False,
    }
    return JsonSchema(json.dumps(whole | definitions))


def _move_references(schema: Any) -> Any:
    """Adjusts the references in a schema that will be the property `value` of an object. References
    to `$defs` stay the same, because `$defs` moves to the top of the new schema.
    """
    if isinstance(schema, list):
        return [_move_references(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _move_references(value) for key, value in schema.items()}
    reference = moved.get("$ref")
    if (
        isinstance(reference, str)
        and reference.startswith("#")
        and not reference.startswith("#/$defs/")
    ):
        moved["$ref"] = f"#/properties/value{reference[1:]}"
    return moved


# JSON types of the regexes that stand for types. The type's parser checks the rest of the value.
_TYPES: dict[Any, dict[str, Any]] = {
    value_type(datetime.date).constraint: {"type": "string", "format": "date"},
    value_type(datetime.time).constraint: {"type": "string", "format": "time"},
    value_type(datetime.datetime).constraint: {"type": "string", "format": "date-time"},
    Regex(REGEX_INT): {"type": "integer"},
    Regex(REGEX_FLOAT): {"type": "number"},
    Regex(REGEX_BOOL): {"type": "string", "enum": ["True", "False"]},
    Regex(REGEX_STR): {"type": "string"},
}
NUMBER_FORMS = [
    JsonForm(_wrap_in_object({"type": kind}), bare=True) for kind in ("integer", "number")
]


def unwrap_answer(constraint: Constraint, form: JsonForm, answer: str) -> str:
    """Returns the value in an answer, as the text that a local model would have written. Objects
    are validated later, like all values.

    Raises:
        ValueValidationError: the answer does not have the form.
    """
    if not form.wrapped:
        return answer
    value = parse_json(form.constraint, answer)["value"]
    if constraint == Number("integer"):
        value = int(value)  # JSON may write an integer as 24.0
    return value if form.bare and isinstance(value, str) else json.dumps(value, ensure_ascii=False)
