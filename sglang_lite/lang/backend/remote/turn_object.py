"""Turn of several generations as one JSON object: its schema, and the texts in an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_lite.constraints.matching import validate
from sglang_lite.constraints.schema import parse_json
from sglang_lite.lang.backend.ladder.object_constraints import json_form, unwrap
from sglang_lite.protocol import Constraint, JsonSchema, Regex
from sglang_lite.text.stop import StopMatcher

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class TurnField:
    """Generation of the turn.

    Attributes:
        name: name of the generation's variable, or None.
        constraint: constraint on the text, or None for any text.
        stops: stop strings of a text without a constraint.
    """

    name: str | None
    constraint: Constraint | None
    stops: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnObject:
    """Object with the generations of a turn.

    Attributes:
        constraint: schema of an answer.
        fields: generations in order, by the name of their property.
    """

    constraint: JsonSchema
    fields: dict[str, TurnField]

    def parse_texts(self, answer: str) -> list[str]:
        """Texts of the generations, in order, as separate calls would return them.

        Raises:
            ValueValidationError: the answer, or a value in it, breaks its constraint.
        """
        values = parse_json(self.constraint, answer)
        return [_text(field, values[name]) for name, field in self.fields.items()]


def turn_object(parts: Sequence[str | TurnField]) -> TurnObject | None:
    """Object of a turn, with a property for each generation, in order; its description shows the turn's text. None if a
    generation has no schema, or the schemas' definitions conflict."""
    fields, properties, definitions = dict[str, TurnField](), dict[str, Any](), dict[str, Any]()
    form = ""
    for part in parts:
        if isinstance(part, str):
            form += part
            continue
        name = part.name if part.name and _NAME.fullmatch(part.name) else ""
        if not name or name in fields:
            name = f"value_{len(fields) + 1}"
        schema = _schema(part.constraint)
        if schema is None:
            return None
        for key, each in schema.pop("$defs", {}).items():
            if definitions.setdefault(key, each) != each:
                return None
        fields[name], properties[name] = part, schema
        form += f"{{{name}}}"
    whole = {
        "type": "object", "description": f"The values of this text: {form}", "properties": properties,
        "required": list(properties), "additionalProperties": False,
    }  # fmt: skip
    return TurnObject(JsonSchema(json.dumps(whole | ({"$defs": definitions} if definitions else {}))), fields)


def _schema(constraint: Constraint | None) -> dict[str, Any] | None:
    """Schema of a value inside the object, or None if the constraint has none."""
    if constraint is None:
        return {"type": "string"}
    form = json_form(constraint)
    if form is None:
        return {"type": "string", "pattern": f"^(?:{constraint.pattern})$"} if isinstance(constraint, Regex) else None
    schema = json.loads(form.constraint.schema)
    if form.wrapped:
        definitions = schema.get("$defs")
        schema = schema["properties"]["value"]
        if isinstance(schema, dict) and definitions:
            schema["$defs"] = definitions
    if not isinstance(schema, dict) or re.search(r'"\$ref": "#(?!/\$defs/)', json.dumps(schema)):
        return None  # a reference that would lead to another place
    return schema


def _text(field: TurnField, value: Any) -> str:
    if field.constraint is None:
        stops = StopMatcher(field.stops)
        text = stops.push(value)
        return text if stops.matched is not None else text + stops.flush()
    form = json_form(field.constraint)
    if form is None:
        validate(field.constraint, value)
        return str(value)
    wrapped = {"value": value} if form.wrapped else value
    return unwrap(field.constraint, form, json.dumps(wrapped, ensure_ascii=False))
