"""JSON schemas: accepting one, refusing a broken one, validating finished text against one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from sglang_lite.constraints.json_schema import closed_objects, wellformed
from sglang_lite.constraints.json_schema.resources import embedded
from sglang_lite.constraints.json_schema.style import style_of
from sglang_lite.constraints.json_schema.validator import faults
from sglang_lite.protocol import ConstraintError, JsonSchema, SglError, ValueValidationError
from sglang_lite.protocol.anything import Json


def json_schema(
    source: str | Mapping[str, Json] | bool,
    *,
    enforce: Literal["strict", "best_effort"] = "strict",
    format: Literal["assert", "annotate"] = "assert",
    separators: tuple[str, str] = (", ", ": "),
    whitespace: str = "json",
    order: Literal["schema", "any"] = "schema",
    integers: Literal["whole", "decimal"] = "whole",
    closed: bool = False,
    resources: Mapping[str, Json] | None = None,
) -> JsonSchema:
    """A checked constraint from schema text or a schema.

    Args:
        source: of draft 2020-12, or the draft that its `$schema` says.
        enforce, format, separators, whitespace, order, integers: see JsonSchema.
        closed: objects whose members the schema names have no others, unless it says `additionalProperties` or
            `unevaluatedProperties` itself. False: others are allowed, as the specification says.
        resources: schemas that it refers to, by their absolute URIs. They are put into its definitions. (The drafts'
            own schemas are known.)

    Raises:
        ConstraintError: not JSON, or not a valid schema; with the JSON Pointer of the fault.
    """
    try:
        text = source if isinstance(source, str) else json.dumps(source, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        hint = "Give a schema as a dict or as text; a pydantic model has model_json_schema()."
        raise ConstraintError(f"json_schema: not a JSON document: {error}", hint=hint) from error
    schema = JsonSchema(text, enforce, format, separators, whitespace, order, integers)
    style_of(schema)  # so that a pattern that is none is refused here
    if resources:
        text = _with_resources(text, resources)
    wellformed.check_text(text)
    if closed:
        try:
            text = json.dumps(closed_objects.closed(json.loads(text)))
        except RecursionError as error:
            raise ConstraintError("json_schema: nested too deeply.") from error
    return msgspec.structs.replace(schema, schema=text)


def _with_resources(text: str, resources: Mapping[str, Any]) -> str:
    """The text of a schema with others below its definitions."""
    wellformed.check_text(text)
    for uri, resource in resources.items():
        try:
            wellformed.check_text(json.dumps(resource, allow_nan=False))
        except ConstraintError as error:
            raise ConstraintError(f"{error.message} (in the resource {uri!r})", pointer=error.pointer) from error
        except (TypeError, ValueError, RecursionError) as error:
            raise ConstraintError(f"json_schema: the resource {uri!r} is not a JSON document: {error}") from error
    try:
        return json.dumps(embedded(json.loads(text), resources))
    except RecursionError as error:
        raise ConstraintError("json_schema: nested too deeply.") from error


def parse_json(constraint: JsonSchema, text: str) -> Json:
    """The value that `text` spells, in whatever style, validated.

    Raises:
        ValueValidationError: `text` is no JSON, has a name twice in an object or breaks the schema; it carries the text
            and the value.
        ConstraintError: the schema refers to what is not there, or to itself again and again.
    """
    try:
        value = json.loads(
            text,
            parse_constant=wellformed.no_number,
            parse_float=_finite,
            object_pairs_hook=wellformed.distinct_names,
        )
    except (ValueError, RecursionError) as error:
        raise ValueValidationError(f"the text is not JSON: {error}", text=text) from error
    try:
        for fault in faults(constraint, value):
            raise ValueValidationError(f"{fault.json_path}: {fault.message}", text=text, value=value)
    except SglError:
        raise
    except (RecursionError, OverflowError, ValueError) as error:  # the last two of numbers that Python can't write
        problem = "nested too deeply" if isinstance(error, RecursionError) else f"too large: {error}"
        raise ValueValidationError(f"the value is {problem}.", text=text, value=value) from error
    return value


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else wellformed.no_number(text)
