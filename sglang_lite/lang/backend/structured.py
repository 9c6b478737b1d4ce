"""Constraints as providers' structured outputs take them: JSON objects, and back to text."""

from __future__ import annotations

import datetime
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sglang_lite.constraints.emit.regex import to_python
from sglang_lite.constraints.python_types.value_type import value_type
from sglang_lite.constraints.schema import parse_json
from sglang_lite.constraints.syntax.regex import parse
from sglang_lite.lang.expressions import REGEX_BOOL, REGEX_FLOAT, REGEX_INT, REGEX_STR
from sglang_lite.protocol import Choices, Constraint, JsonSchema, Number, Regex, ValueValidationError


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


def answer_text(constraint: Constraint, answer: str) -> str:
    """The text that a local model would have written. Objects are checked where all values are."""
    form = form_of(constraint)
    if form is None:
        assert isinstance(constraint, Regex)
        if re.fullmatch(to_python(parse(constraint.pattern)), answer) is None:
            raise ValueValidationError(f"the answer does not match the regex {constraint.pattern!r}.", text=answer)
        return answer
    if not form.wrapped:
        return answer
    value = parse_json(form.constraint, answer)["value"]
    if constraint == Number("integer"):
        value = int(value)  # JSON has 24.0, too
    return value if form.bare and isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_TAKEN = frozenset({
    "type", "enum", "const", "anyOf", "properties", "required", "additionalProperties", "items", "minItems", "maxItems",
    "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "description",
    "$ref", "$defs",
})  # fmt: skip
_REMARKS = frozenset({"title", "default", "examples", "$schema", "$comment", "deprecated", "discriminator"})
_TOLD = frozenset({"minLength", "maxLength", "uniqueItems", "minProperties", "maxProperties"})
_LOOKAROUND = re.compile(r"\(\?<?[=!]")  # no automaton can
_FORMATS = frozenset({
    None, "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid",
})  # fmt: skip
_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


def strict_schema(schema: object) -> dict[str, Any] | None:
    """The schema as strict structured outputs take it: objects closed, all their properties required. What they can't
    keep is told in the description, and checked in the answer. None: they can't take it."""
    if not isinstance(schema, dict):
        return None
    told_only = {key for key in schema if key in _TOLD or (key == "pattern" and _LOOKAROUND.search(schema[key]))}
    kept = {key: value for key, value in schema.items() if key not in _REMARKS | told_only}
    if "oneOf" in kept and "anyOf" not in kept:
        kept["anyOf"] = kept.pop("oneOf")
    if not kept.keys() <= _TAKEN or kept.get("format") not in _FORMATS:
        return None
    told = ", ".join(f"{key}: {schema[key]}" for key in sorted(told_only))
    if told:
        kept["description"] = f"{kept.get('description', '')} ({told})".strip()
    if "$ref" in kept:
        return {"$ref": kept["$ref"]} if kept.keys() <= {"$ref", "description"} else None
    values = kept.get("enum", [kept["const"]] if "const" in kept else [])
    if "type" not in kept and values:
        if len({type(value) for value in values}) > 1 or type(values[0]) not in _JSON_TYPES:
            return None
        kept["type"] = _JSON_TYPES[type(values[0])]
    if "anyOf" in kept and "properties" not in kept:
        kept.pop("type", None)  # the alternatives have theirs
    elif "type" not in kept:
        return None
    if kept.get("type") == "array" and "items" not in kept:
        return None
    if "properties" in kept or kept.get("type") == "object":
        properties, required = kept.get("properties", {}), kept.get("required", ())
        optional = [each for name, each in properties.items() if name not in required]
        endless = any(isinstance(each, dict) and "$ref" in each for each in optional)
        if endless or kept.get("additionalProperties", not properties) is not False:
            return None
        kept |= {"required": list(properties), "additionalProperties": False}
    return _all_strict(kept)


def _all_strict(kept: dict[str, Any]) -> dict[str, Any] | None:
    for key in ("properties", "$defs"):
        if key in kept:
            kept[key] = {name: strict_schema(each) for name, each in kept[key].items()}
            if None in kept[key].values():
                return None
    if "items" in kept:
        kept["items"] = strict_schema(kept["items"])
    if "anyOf" in kept:
        kept["anyOf"] = [strict_schema(each) for each in kept["anyOf"]]
    return None if kept.get("items", kept) is None or None in kept.get("anyOf", ()) else kept
