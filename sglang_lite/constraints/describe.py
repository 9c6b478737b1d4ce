"""Descriptions of constraints for prompts: shapes of JSON with notes on further rules, regexes, grammars."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_lite.constraints.emit.gbnf import to_gbnf
from sglang_lite.constraints.json_schema.quotes import KEYWORD, in_words
from sglang_lite.constraints.kinds import language_of
from sglang_lite.protocol import Choices, Constraint, ConstraintError, Ebnf, JsonSchema, Lark, Number, Regex

_TYPES: Mapping[Any, str] = {
    str: "text",
    datetime.date: "a date, as 2024-05-31",
    datetime.time: "a time, as 13:05:00",
    datetime.datetime: "a date and time, as 2024-05-31T13:05:00",
}
_SILENT = frozenset((  # keywords that constrain no value
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id", "id",
    "$defs", "definitions", "$comment", "$anchor",
))  # fmt: skip
_SHAPE = frozenset((  # keywords that the shape itself expresses
    "type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf", "properties", "required", "additionalProperties",
    "items", "prefixItems",
))  # fmt: skip
_NOTES: Mapping[str, str] = {
    "minimum": "at least {}", "maximum": "at most {}", "exclusiveMinimum": "more than {}", "exclusiveMaximum":
    "less than {}", "multipleOf": "a multiple of {}", "minLength": "at least {} characters", "maxLength":
    "at most {} characters", "minItems": "at least {} items", "maxItems": "at most {} items", "minProperties":
    "at least {} members", "maxProperties": "at most {} members",
}  # fmt: skip


def description(constraint: Constraint, annotation: object = None) -> str:
    """Description of a constraint in words.

    Args:
        constraint: constraint to describe.
        annotation: Python type that the constraint stands for, if any.
    """
    try:
        words = _TYPES.get(annotation)
    except TypeError:  # the type is not hashable
        words = None
    if words is not None:
        return words
    match constraint:
        case JsonSchema():
            schema = json.loads(constraint.schema)
            for pointer in constraint.sets:
                (_pointed(schema, f"#{pointer}") if pointer else schema)["uniqueItems"] = True
            return _Describer(schema).text()
        case Choices(options):
            return "one of: " + ", ".join(options)
        case Number(kind):
            return "a whole number" if kind == "integer" else "a number"
        case Regex(pattern):
            return f"text that matches the regular expression {pattern}"
        case Ebnf(grammar) | Lark(grammar):
            return f"text of the grammar:\n{grammar}"
    return f"text of the grammar:\n{to_gbnf(language_of(constraint))}"


class _Describer:
    """Describer of a schema. A subschema that refers to itself is given a name and described separately."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._named: dict[str, str] = {}  # descriptions of recursive subschemas, by reference
        self._open: list[str] = []  # references whose description is in progress

    def text(self) -> str:
        shape = "JSON: " + self._value(self._schema, "")
        named = [f"{_name(reference)} = {text}" for reference, text in self._named.items() if text]
        return shape if not named else f"{shape}\nwhere\n" + "\n".join(named)

    def _value(self, schema: Any, indent: str) -> str:
        """Description of a value, followed by notes in parentheses."""
        shape, notes = self._shape(schema, indent), self._notes(schema)
        return f"{shape} ({', '.join(notes)})" if notes else shape

    def _shape(self, schema: Any, indent: str) -> str:
        if not isinstance(schema, dict):
            return "nothing" if schema is False else "anything"
        parts = []
        if "$ref" in schema:
            parts.append(self._referred(schema["$ref"], indent))
        if "const" in schema:
            parts.append(json.dumps(schema["const"], ensure_ascii=False))
        if "enum" in schema:
            parts.append(" | ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"]))
        for keyword, between in (("anyOf", " | "), ("oneOf", " | "), ("allOf", " & ")):
            if keyword in schema:
                options = [self._value(each, indent) for each in schema[keyword]]
                parts.append(between.join(dict.fromkeys(options)))
        if not parts or "properties" in schema or "items" in schema or "prefixItems" in schema:
            parts.append(self._typed(schema, indent))
        return parts[0] if len(parts) == 1 else " & ".join(f"({part})" if " | " in part else part for part in parts)

    def _typed(self, schema: Mapping[str, Any], indent: str) -> str:
        kinds = schema.get("type")
        if kinds is None and ("properties" in schema or "required" in schema):
            kinds = "object"
        elif kinds is None and ("items" in schema or "prefixItems" in schema):
            kinds = "array"
        found = []
        for kind in kinds if isinstance(kinds, list) else [kinds]:
            if kind == "object":
                found.append(self._object(schema, indent))
            elif kind == "array":
                found.append(self._array(schema, indent))
            else:
                found.append("anything" if kind is None else str(kind))
        return " | ".join(found)

    def _array(self, schema: Mapping[str, Any], indent: str) -> str:
        first, rest = _items(schema)
        items = [self._value(each, indent + "  ") for each in first]
        if rest is not False:
            items += [self._value(rest, indent + "  "), "…"]
        return f"[{', '.join(items)}]"

    def _object(self, schema: Mapping[str, Any], indent: str) -> str:
        members, required = schema.get("properties", {}), schema.get("required", ())
        inner = indent + "  "
        lines = [
            self._member(name, members.get(name, True), name in required, inner)
            for name in dict.fromkeys((*members, *required))
        ]
        more = schema.get("additionalProperties", not members)
        if more is not False and (more is not True or not lines):
            lines.append((f"{inner}…: {self._value(more, inner)}", ""))
        commas = [","] * (len(lines) - 1) + [""]
        lines_with_commas = [f"{line}{comma}{note}" for (line, note), comma in zip(lines, commas)]
        return "{\n" + "\n".join(lines_with_commas) + f"\n{indent}}}" if lines else "{}"

    def _member(self, name: str, schema: Any, required: bool, indent: str) -> tuple[str, str]:
        """Line for a member, and the comment that follows its comma."""
        text = schema.get("description") if isinstance(schema, dict) else None
        notes = [*self._notes(schema), *([" ".join(str(text).split())] if text else [])]
        line = f"{indent}{json.dumps(name, ensure_ascii=False)}{'' if required else '?'}: {self._shape(schema, indent)}"
        return line, f"  // {', '.join(notes)}" if notes else ""

    def _notes(self, schema: Any) -> list[str]:
        if not isinstance(schema, dict):
            return []
        notes = []
        for keyword, value in schema.items():
            if keyword in ("minItems", "maxItems") and value == len(_items(schema)[0]):
                notes += ["all of them"] if keyword == "minItems" and _items(schema)[1] is not False else []
            elif keyword in _NOTES:
                notes.append(_NOTES[keyword].format(value))
            elif keyword == "pattern":
                notes.append(f"matches /{value}/")
            elif keyword == KEYWORD:
                notes.append(in_words(value))
            elif keyword == "uniqueItems":
                notes += ["no two alike"] if value else []
            elif keyword not in _SHAPE and keyword not in _SILENT and not keyword.startswith("x-"):
                notes.append(f"{keyword}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}")
        return notes

    def _referred(self, reference: str, indent: str) -> str:
        if reference == "#" or reference in self._open or self._named.get(reference):
            self._named.setdefault(reference, "")
            if reference == "#":
                self._named["#"] = self._named["#"] or self._rooted()
            return _name(reference)
        self._open.append(reference)
        target = _pointed(self._schema, reference)
        text = self._value(target, indent)
        self._open.pop()
        if reference in self._named:  # the target refers to itself
            self._named[reference] = text if not indent else self._alone(reference, target)
            return _name(reference)
        return text

    def _alone(self, reference: str, target: Any) -> str:
        """Separate description of a reference's target, without indentation."""
        self._open.append(reference)
        text = self._value(target, "")
        self._open.pop()
        return text

    def _rooted(self) -> str:
        self._named["#"] = "…"  # placeholder while the description is in progress
        return self._value(self._schema, "")


def _items(schema: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """Schemas of an array's first items, and the schema of the rest, which is False if no further items are allowed."""
    first, rest = schema.get("prefixItems", []), schema.get("items", True)
    if isinstance(rest, list):  # form of drafts before 2020-12
        first, rest = rest, schema.get("additionalItems", True)
    return first, False if schema.get("maxItems") == len(first) else rest


def _name(reference: str) -> str:
    return "Root" if reference == "#" else reference.rsplit("/", 1)[-1]


def _pointed(schema: Any, reference: str) -> Any:
    """Part of a schema that a JSON Pointer reference within it names, or True for any other reference."""
    if not reference.startswith("#/"):
        return True
    found: Any = schema
    for step in reference[2:].split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(step)] if isinstance(found, Sequence) and not isinstance(found, str) else found[step]
        except (KeyError, IndexError, ValueError, TypeError):
            raise ConstraintError(f"the schema has no {reference!r}.", pointer="/$ref") from None
    return found
