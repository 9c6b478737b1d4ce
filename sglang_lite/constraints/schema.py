"""JSON schemas: accepting one, refusing a broken one, validating finished text against one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from sglang_lite.protocol import ConstraintError, JsonSchema, ValueValidationError

MAX_SCHEMA_CHARS = 2_000_000


def json_schema(source: str | Mapping[str, Any] | bool) -> JsonSchema:
    """A checked constraint from schema text or a schema.

    Raises:
        ConstraintError: not JSON, or not a valid draft 2020-12 schema; with the JSON Pointer of the fault.
    """
    try:
        text = source if isinstance(source, str) else json.dumps(source)
    except (TypeError, ValueError) as error:
        raise ConstraintError(f"json_schema: not a JSON document: {error}") from error
    _check(text)
    return JsonSchema(text)


@lru_cache(maxsize=1024)
def _check(text: str) -> None:
    from jsonschema import Draft202012Validator, SchemaError

    if len(text) > MAX_SCHEMA_CHARS:
        raise ConstraintError(f"json_schema: {len(text):,} characters long, the limit is {MAX_SCHEMA_CHARS:,}.")
    try:
        schema = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConstraintError(f"json_schema: not JSON: {error}") from error
    except RecursionError as error:
        raise ConstraintError("json_schema: nested too deeply.") from error
    if not isinstance(schema, dict | bool):
        raise ConstraintError(f"json_schema: a schema is an object or a boolean, not {type(schema).__name__}.")
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        pointer = "".join(f"/{_escape_pointer(str(step))}" for step in error.absolute_path)
        raise ConstraintError(f"json_schema: {error.message}", pointer=pointer) from error
    except RecursionError as error:
        raise ConstraintError("json_schema: nested too deeply.") from error


def _escape_pointer(step: str) -> str:
    return step.replace("~", "~0").replace("/", "~1")


@lru_cache(maxsize=256)
def _validator(text: str) -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(json.loads(text))


def parse_json(constraint: JsonSchema, text: str) -> Any:
    """The value that `text` spells, validated.

    Raises:
        ValueValidationError: `text` is no JSON or breaks the schema; it carries the text and the value.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueValidationError(f"the text is not JSON: {error}", text=text) from error
    for fault in _validator(constraint.schema).iter_errors(value):
        raise ValueValidationError(f"{fault.json_path}: {fault.message}", text=text, value=value)
    return value
