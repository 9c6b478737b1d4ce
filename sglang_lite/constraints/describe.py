"""Descriptions of constraints for prompts: the shape of JSON with notes on further rules, or the
regex or grammar itself.
"""

from __future__ import annotations

import datetime
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from sglang_lite.constraints.emit.gbnf import to_gbnf
from sglang_lite.constraints.kinds import language_for_constraint
from sglang_lite.constraints.notes import (
    SHAPE,
    decimal_notes,
    describe_string_type,
    list_schema_notes,
    to_json_line,
)
from sglang_lite.protocol import (
    Choices,
    Constraint,
    ConstraintError,
    Ebnf,
    JsonSchema,
    Lark,
    Number,
    Regex,
)

_TYPES: Mapping[Any, str] = {
    str: "text",
    datetime.date: "a date, as 2024-05-31",
    datetime.time: "a time, as 13:05:00",
    datetime.datetime: "a date and time, as 2024-05-31T13:05:00",
}

_NO_SCHEMAS: Final = frozenset(("$defs", "definitions", "enum", "const", "default", "examples"))
_ALTERNATIVES: Final = frozenset(("anyOf", "oneOf", "allOf", "$ref", "const", "enum"))
# up to this many uses, an object is described in each place; small models understand that better
_OFTEN: Final = 2


def description(constraint: Constraint, annotation: object = None) -> str:
    """Describes a constraint in words.

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
                (_resolve_reference(schema, f"#{pointer}") if pointer else schema)[
                    "uniqueItems"
                ] = True
            return _Describer(schema).describe_schema()
        case Choices(options):
            return "one of: " + ", ".join(options)
        case Number(kind):
            return "a whole number" if kind == "integer" else "a number"
        case Regex(pattern):
            return f"text that matches the regular expression {pattern}"
        case Ebnf(grammar) | Lark(grammar):
            return f"text of the grammar:\n{grammar}"
    return f"text of the grammar:\n{to_gbnf(language_for_constraint(constraint))}"


_Line: TypeAlias = tuple[str, str]  # a line, and the comment that follows it


@dataclass(slots=True)
class _Shape:
    """Description of a value's form.

    Attributes:
        lines: lines of the description, each with its comment.
        notes: further remarks about the value, which the surrounding description places.
        is_union: True for alternatives, which need parentheses next to an `&`.
    """

    lines: list[_Line]
    notes: list[str] = field(default_factory=list)
    is_union: bool = False

    def lines_with_notes(self) -> list[_Line]:
        """Returns the lines with the notes: in parentheses after a single line, or as a comment
        after the first of several.
        """
        if not self.notes:
            return self.lines
        (code, comment), *rest = self.lines
        if not rest:
            return [(f"{code} ({', '.join(self.notes)})", comment)]
        return [(code, _join_notes(*self.notes, comment)), *rest]


def _join_notes(*notes: str) -> str:
    return "; ".join(dict.fromkeys(filter(None, notes)))


def _join_parts(parts: Sequence[list[_Line]], between: str) -> list[_Line]:
    """Joins several parts: the last line of each runs on into the first line of the next."""
    found = list(parts[0])
    for (code, comment), *rest in parts[1:]:
        last, before = found[-1]
        found[-1] = f"{last}{between}{code}", _join_notes(before, comment)
        found += rest
    return found


class _Describer:
    """Describes a schema. A subschema that is recursive or often referenced is described once,
    under a name.
    """

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._names = _names(schema)

    def describe_schema(self) -> str:
        whole = (
            [(self._names["#"], "")]
            if "#" in self._names
            else self._shape_of(self._schema).lines_with_notes()
        )
        parts = ["JSON: " + _format_lines(whole)]
        if least := self._describe_shortest_object():
            parts.append(f"If nothing more is known: {least}")
        for reference, name in self._names.items():
            lines = self._shape_of(_resolve_reference(self._schema, reference)).lines_with_notes()
            parts.append(f"{name} = {_format_lines(lines)}")
        return "\n".join(parts)

    def _describe_shortest_object(self) -> str:
        """Returns the shortest object that the schema allows: each member is null or left out
        wherever possible. Returns "" if no member may be null.

        A 1.5B model that sees this object, and null as the first option, invents fewer values
        that a text doesn't state (docs/typing.md).
        """
        schema = self._schema
        if "#" in self._names or not isinstance(schema, dict) or schema.keys() & _ALTERNATIVES:
            return ""
        required = schema.get("required", ())
        nullable = {
            name: self._may_be_null(each) for name, each in schema.get("properties", {}).items()
        }
        said = [
            f"{to_json_line(name)}: {'null' if may else '…'}"
            for name, may in nullable.items()
            if may or name in required
        ]
        return f"{{{', '.join(said)}}}" if any(nullable.values()) else ""

    def _may_be_null(self, schema: Any) -> bool:
        if not isinstance(schema, dict):
            return False
        if "$ref" in schema:
            return schema["$ref"] not in self._names and self._may_be_null(
                _resolve_reference(self._schema, schema["$ref"])
            )
        kinds = schema.get("type")
        return (
            kinds == "null"
            or None in schema.get("enum", ())
            or (isinstance(kinds, list) and "null" in kinds)
            or any(
                self._may_be_null(each)
                for word in ("anyOf", "oneOf")
                for each in schema.get(word, ())
            )
        )

    def _shape_of(self, schema: Any) -> _Shape:
        if not isinstance(schema, dict):
            return _Shape([("nothing" if schema is False else "anything", "")])
        notes = list_schema_notes(schema, describe_string_type(schema))
        shapes = [self._shape_of_reference(schema["$ref"])] if "$ref" in schema else []
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            shapes.append(
                _Shape([(" | ".join(map(to_json_line, values)), "")], is_union=len(values) > 1)
            )
        shapes += [
            self._describe_union(schema[keyword])
            for keyword in ("anyOf", "oneOf")
            if keyword in schema
        ]
        for each in schema.get("allOf", ()):
            shape = self._shape_of(each)
            if isinstance(each, dict) and not each.keys() & SHAPE:  # it has only limits, no form
                notes += shape.notes
            else:
                shapes.append(shape)
        if not shapes or schema.keys() & {"properties", "items", "prefixItems"}:
            shapes.append(self._shape_by_type(schema))
        if len(shapes) == 1:
            notes = [*notes, *shapes[0].notes]
            lines = shapes[0].lines
        else:
            lines = _join_parts([_in_parentheses(shape) for shape in shapes], " & ")
        return _Shape(
            lines, list(dict.fromkeys(notes)), is_union=len(shapes) == 1 and shapes[0].is_union
        )

    def _describe_union(self, schemas: Sequence[Any]) -> _Shape:
        # models choose the first alternative more often
        schemas = sorted(schemas, key=lambda each: not _is_null(each))
        decimals = decimal_notes(schemas)
        if decimals is not None:
            return _Shape([("number", "")], decimals)
        shapes = [self._shape_of(each) for each in schemas]
        known = [shape for shape in shapes if shape.lines != [("null", "")]]
        if len(known) == 1:  # then all notes are about it
            return _Shape(
                _join_parts([shape.lines for shape in shapes], " | "),
                known[0].notes,
                is_union=len(shapes) > 1,
            )
        parts: list[list[_Line]] = []
        for shape in shapes:
            lines = shape.lines_with_notes()
            if lines not in parts:
                parts.append(lines)
        return _Shape(_join_parts(parts, " | "), is_union=len(parts) > 1)

    def _shape_by_type(self, schema: Mapping[str, Any]) -> _Shape:
        kinds = schema.get("type")
        if kinds is None and ("properties" in schema or "required" in schema):
            kinds = "object"
        elif kinds is None and ("items" in schema or "prefixItems" in schema):
            kinds = "array"
        parts = []
        for kind in (
            sorted(kinds, key=lambda each: each != "null") if isinstance(kinds, list) else [kinds]
        ):
            if kind == "object":
                parts.append(self._describe_object(schema))
            elif kind == "array":
                parts.append(self._describe_array(schema))
            else:
                parts.append([(_type_word(kind, schema), "")])
        return _Shape(_join_parts(parts, " | "), is_union=len(parts) > 1)

    def _describe_array(self, schema: Mapping[str, Any]) -> list[_Line]:
        first, rest = _item_schemas(schema)
        parts = [self._shape_of(each).lines_with_notes() for each in first]
        if rest is not False:
            parts += [self._shape_of(rest).lines_with_notes(), [("…", "")]]
        inside = _join_parts(parts, ", ") if parts else [("", "")]
        return _join_parts([[("[", "")], inside, [("]", "")]], "")

    def _describe_object(self, schema: Mapping[str, Any]) -> list[_Line]:
        members = schema.get("properties", {})
        required = schema.get("required", ())
        found = []
        for name in dict.fromkeys((*members, *required)):
            each = members.get(name, True)
            must = name in required or self._may_be_null(each)  # null means the same as omission
            found.append(self._describe_member(f"{to_json_line(name)}{'' if must else '?'}", each))
        more = schema.get("additionalProperties", not members)
        if more is not False and (more is not True or not found):
            found.append(self._describe_member("…", more))
        if not found:
            return [("{}", "")]
        for lines in found[:-1]:
            code, comment = lines[-1]
            lines[-1] = f"{code},", comment
        return [
            ("{", ""),
            *((f"  {code}", comment) for lines in found for code, comment in lines),
            ("}", ""),
        ]

    def _describe_member(self, name: str, schema: Any) -> list[_Line]:
        shape = self._shape_of(schema)
        (code, comment), *rest = shape.lines
        return [(f"{name}: {code}", _join_notes(*shape.notes, comment)), *rest]

    def _shape_of_reference(self, reference: str) -> _Shape:
        if reference in self._names:
            return _Shape([(self._names[reference], "")])
        return self._shape_of(_resolve_reference(self._schema, reference))


def _is_null(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "null"


def _in_parentheses(shape: _Shape) -> list[_Line]:
    lines = shape.lines_with_notes()
    return _join_parts([[("(", "")], lines, [(")", "")]], "") if shape.is_union else lines


def _type_word(kind: object, schema: Mapping[str, Any]) -> str:
    if kind == "string":
        return describe_string_type(schema)
    return "anything" if kind is None else str(kind)


def _format_lines(lines: Iterable[_Line]) -> str:
    return "\n".join(f"{code}{f'  // {comment}' if comment else ''}" for code, comment in lines)


def _item_schemas(schema: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """Returns the schemas of an array's first items, and the schema of the remaining ones, which is
    False if none are allowed.
    """
    first = schema.get("prefixItems", [])
    rest = schema.get("items", True)
    if isinstance(rest, list):  # as in drafts before 2020-12
        first = rest
        rest = schema.get("additionalItems", True)
    return first, False if schema.get("maxItems") == len(first) else rest


def _names(schema: Any) -> dict[str, str]:
    """Returns names for the subschemas that are described once and then referenced by name, in the
    order of their first use. Objects are named if they are used often. Other subschemas are named
    if they contain references and are used more than once, so that a description is never longer
    than its schema.
    """
    counts = {"#": 1}
    composed: set[str] = set()
    queue = [("#", schema)]
    for reference, target in queue:
        for each in _references(target):
            composed.add(reference)
            counts[each] = counts.get(each, 0) + 1
            if counts[each] == 1:
                queue.append((each, _resolve_reference(schema, each)))
    names: dict[str, str] = {}
    for reference, count in counts.items():
        target = _resolve_reference(schema, reference)
        is_object = isinstance(target, dict) and "properties" in target
        if count > 1 and (reference in composed or (is_object and count > _OFTEN)):
            wanted = (
                "Root" if reference == "#" else re.sub(r"\W", "_", _pointer_steps(reference)[-1])
            )
            numbered = (f"{wanted}{number}" for number in itertools.count(2))
            names[reference] = next(
                n for n in itertools.chain([wanted], numbered) if n not in names.values()
            )
    return names


def _references(schema: Any) -> Iterator[str]:
    """Yields every occurrence of a reference in a schema, except those in its definitions."""
    queue = [schema]
    for each in queue:
        if isinstance(each, list):
            queue += each
        elif isinstance(each, dict):
            if isinstance(each.get("$ref"), str):
                yield each["$ref"]
            for keyword, value in each.items():
                if keyword == "properties" and isinstance(value, dict):
                    queue += value.values()
                elif keyword not in _NO_SCHEMAS:
                    queue.append(value)


def _resolve_reference(schema: Any, reference: str) -> Any:
    """Returns the part of a schema that a local JSON Pointer reference points to, or True for any
    other reference.
    """
    if reference == "#":
        return schema
    if not reference.startswith("#/"):
        return True
    found: Any = schema
    for step in _pointer_steps(reference):
        try:
            found = (
                found[int(step)]
                if isinstance(found, Sequence) and not isinstance(found, str)
                else found[step]
            )
        except (KeyError, IndexError, ValueError, TypeError):
            raise ConstraintError(f"the schema has no {reference!r}.", pointer="/$ref") from None
    return found


def _pointer_steps(reference: str) -> list[str]:
    """Returns the unescaped steps of a JSON Pointer reference."""
    return [
        step.replace("~1", "/").replace("~0", "~")
        for step in reference.removeprefix("#/").split("/")
    ]
