"""JSON schemas: creating the constraint, checking the schema itself, and validating finished text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from sglang_lite.constraints.json_schema import closed_objects, wellformed
from sglang_lite.constraints.json_schema.resources import embed_resources
from sglang_lite.constraints.json_schema.style import read_json_style
from sglang_lite.constraints.json_schema.validator import violations
from sglang_lite.protocol import ConstraintError, JsonSchema, SglError, ValueValidationError
from sglang_lite.protocol.anything import Json


def json_schema(
    source: str | Mapping[str, Json] | bool,
    *,
    enforce: Literal["strict", "best_effort", "unchecked"] = "strict",
    format: Literal["assert", "annotate"] = "assert",
    separators: tuple[str, str] = (", ", ": "),
    whitespace: str = "json",
    order: Literal["schema", "any"] = "schema",
    integers: Literal["whole", "decimal"] = "whole",
    closed: bool = False,
    resources: Mapping[str, Json] | None = None,
) -> JsonSchema:
    """Returns a checked constraint for a schema, given as text, mapping or boolean.

    Args:
        source: schema of draft 2020-12, or of the draft that its `$schema` names.
        enforce, format, separators, whitespace, order, integers: see JsonSchema.
        closed: whether objects with named members forbid further ones, unless the schema
            itself has `additionalProperties` or `unevaluatedProperties`. If False, further
            members are allowed, as in the specification.
        resources: schemas that `source` refers to, by absolute URI. They are embedded in its
            definitions. (The drafts' own meta-schemas are known.)

    Raises:
        ConstraintError: the source is not JSON or not a valid schema. The error has the JSON
            Pointer of the fault.
    """
    try:
        text = source if isinstance(source, str) else json.dumps(source, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        hint = "Give a schema as a dict or as text; a pydantic model has model_json_schema()."
        if "Circular" in str(error):
            hint = 'A schema refers to itself by name: {"$ref": "#"}.'
        raise ConstraintError(f"json_schema: not a JSON document: {error}", hint=hint) from error
    schema = JsonSchema(text, enforce, format, separators, whitespace, order, integers)
    read_json_style(schema)  # raises if the `whitespace` pattern is invalid
    if resources:
        text = _with_resources(text, resources)
    wellformed.check_schema_text(text)
    if closed:
        try:
            text = json.dumps(closed_objects.close_objects(json.loads(text)))
        except RecursionError as error:
            raise ConstraintError("json_schema: nested too deeply.") from error
    return msgspec.structs.replace(schema, schema=text)


def client_schema(
    source: str | Mapping[str, Json] | bool,
    *,
    enforce: Literal["strict", "best_effort", "unchecked"] = "strict",
) -> JsonSchema:
    """Returns the constraint for a schema sent by a client of a server.

    Objects that list their members allow no others, the same way as in SGLang, vLLM and OpenAI.
    Clients omit `additionalProperties`, and models that see the schema would write parts of it as
    members. Objects keep the specification's meaning if they restrict other members, combine
    several schemas, or require a member that they don't list.

    Args:
        source: schema, or its JSON text.
        enforce: see JsonSchema.

    Raises:
        ConstraintError: see `json_schema`.
    """
    constraint = json_schema(source, enforce=enforce)
    try:
        text = json.dumps(
            closed_objects.close_objects(json.loads(constraint.schema), simple_only=True)
        )
    # the compiler of the grammar reports the error with its location, or ignores it
    except (ConstraintError, RecursionError):
        return constraint
    return msgspec.structs.replace(constraint, schema=text)


def raise_if_example_document(constraint: JsonSchema) -> None:
    """Raises ConstraintError if a schema seems to be an example document. It then has names that
    are no keywords, and no keyword that restricts values, so any JSON would be valid.
    """
    from sglang_lite.constraints.json_schema.assertions import find_unknown_keywords

    schema = json.loads(constraint.schema)
    names = find_unknown_keywords(schema)
    if not names:
        return
    hint = 'Describe its values: {"type": "object", "properties": {…}}, or give a pydantic model.'
    problem = f"json_schema: {names[0]!r} is no keyword of JSON Schema, and no other one says what is valid"
    raise ConstraintError(problem, pointer=f"/{names[0]}", hint=hint)


def _with_resources(text: str, resources: Mapping[str, Any]) -> str:
    """Returns the JSON text of a schema with the resources embedded in its definitions."""
    wellformed.check_schema_text(text)
    for uri, resource in resources.items():
        try:
            wellformed.check_schema_text(json.dumps(resource, allow_nan=False))
        except ConstraintError as error:
            raise ConstraintError(
                f"{error.message} (in the resource {uri!r})", pointer=error.pointer
            ) from error
        except (TypeError, ValueError, RecursionError) as error:
            raise ConstraintError(
                f"json_schema: the resource {uri!r} is not a JSON document: {error}"
            ) from error
    try:
        return json.dumps(embed_resources(json.loads(text), resources))
    except RecursionError as error:
        raise ConstraintError("json_schema: nested too deeply.") from error


def parse_json(constraint: JsonSchema, text: str) -> Json:
    """Parses a JSON text in any style and validates the value against the schema.

    Raises:
        ValueValidationError: `text` is not JSON, repeats a name in an object or violates the
            schema. The error carries the text and the value.
        ConstraintError: the schema has a reference without a target, or one that refers to
            itself endlessly.
    """
    try:
        value = json.loads(
            text,
            parse_constant=wellformed.refuse_non_finite,
            parse_float=_parse_finite_number,
            object_pairs_hook=wellformed.refuse_duplicate_names,
        )
    except (ValueError, RecursionError) as error:
        raise ValueValidationError(f"the text is not JSON: {error}", text=text) from error
    try:
        for violation in violations(constraint, value):
            raise ValueValidationError(
                f"{violation.json_path}: {violation.message}", text=text, value=value
            )
    except SglError:
        raise
    # the last two are for numbers too large to write
    except (RecursionError, OverflowError, ValueError) as error:
        problem = (
            "nested too deeply" if isinstance(error, RecursionError) else f"too large: {error}"
        )
        raise ValueValidationError(f"the value is {problem}.", text=text, value=value) from error
    return value


def _parse_finite_number(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else wellformed.refuse_non_finite(text)
