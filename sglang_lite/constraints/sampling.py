"""Texts drawn at random from a constraint: for scripted backends and tests."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from sglang_lite.constraints.nodes import Alternation, CharSet, Concat, Node, Repeat
from sglang_lite.constraints.regex import parse
from sglang_lite.constraints.schema import parse_json
from sglang_lite.protocol import Choices, Constraint, ConstraintError, JsonSchema, Regex, ValueValidationError

_MORE = 3  # how far beyond its minimum an unbounded repeat or array goes


def sample(constraint: Constraint, random: Random) -> str:
    """A text the constraint allows.

    Raises:
        ConstraintError: a schema with keywords that this simple generator can't satisfy.
    """
    match constraint:
        case Regex(pattern):
            return _from_regex(parse(pattern), random)
        case Choices(options):
            return random.choice(options)
        case JsonSchema(schema):
            root = json.loads(schema)
            text = json.dumps(_from_schema(root, root, random, 0), ensure_ascii=False)
            try:
                parse_json(constraint, text)
            except ValueValidationError as error:
                raise ConstraintError(f"no sample could be drawn from the schema: {error}") from error
            return text


def _from_regex(node: Node, random: Random) -> str:
    match node:
        case CharSet(ranges):
            printable = [(max(a, 32), min(b, 126)) for a, b in ranges if b >= 32 and a <= 126]
            low, high = random.choice(printable or list(ranges))
            return chr(random.randint(low, high))
        case Concat(parts):
            return "".join(_from_regex(part, random) for part in parts)
        case Alternation(options):
            return _from_regex(random.choice(options), random)
        case Repeat(inner, least, most):
            count = random.randint(least, least + _MORE if most is None else min(most, least + _MORE))
            return "".join(_from_regex(inner, random) for _ in range(count))
    raise AssertionError("parse() leaves no other node")


def _from_schema(schema: Any, root: Any, random: Random, depth: int) -> Any:
    if schema is True or schema == {}:
        return random.choice([None, True, 1, "text"])
    if schema is False or depth > 20:
        raise ConstraintError("no sample could be drawn from the schema.")
    if "$ref" in schema:
        return _from_schema(_resolve(schema["$ref"], root), root, random, depth + 1)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return random.choice(schema["enum"])
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return _from_schema(random.choice(schema[key]), root, random, depth + 1)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = random.choice(kind)
    match kind:
        case "object":
            properties = schema.get("properties", {})
            required = schema.get("required", [])
            names = [n for n in properties if n in required or (depth < 3 and random.random() < 0.5)]
            return {name: _from_schema(properties[name], root, random, depth + 1) for name in names}
        case "array":
            least = schema.get("minItems", 0)
            count = random.randint(least, min(schema.get("maxItems", least + _MORE), least + _MORE))
            return [_from_schema(schema.get("items", True), root, random, depth + 1) for _ in range(count)]
        case "integer" | "number":
            low = schema.get("minimum", schema.get("exclusiveMinimum", 0) + ("exclusiveMinimum" in schema))
            high = schema.get("maximum", schema.get("exclusiveMaximum", low + 101) - 1)
            return random.randint(int(-(-low // 1)), int(high))
        case "boolean":
            return random.random() < 0.5
        case "null":
            return None
    if "pattern" in schema:
        return _from_regex(parse(schema["pattern"]), random)
    least = schema.get("minLength", 1)
    return "".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=min(max(least, 4), schema.get("maxLength", 99))))


def _resolve(reference: str, root: Any) -> Any:
    found = root
    for step in reference.removeprefix("#").split("/")[1:]:
        found = found[step.replace("~1", "/").replace("~0", "~")]
    return found
