"""Regexes for pydantic models, as SGLang documents them."""

from __future__ import annotations

import json

from sglang_lite.compat.sglang.texts import convert_json_schema_to_str
from sglang_lite.protocol import ConstraintError


def build_regex_from_object(object: object, whitespace_pattern: str | None = None) -> str:
    """Regex of the JSON documents that are valid under a schema. (`gen(type=Model)` enforces more of a schema.)

    Args:
        object: pydantic model, or schema as JSON text or dict.
        whitespace_pattern: regex of the whitespace between tokens; None for the default of outlines-core.

    Raises:
        ConstraintError: the schema can't be expressed as a regex.
    """
    from outlines_core.json_schema import build_regex_from_schema

    schema = convert_json_schema_to_str(object)
    try:
        json.loads(schema)
        regex: str = build_regex_from_schema(schema, whitespace_pattern)
    except Exception as error:  # outlines-core raises its own and bare exceptions
        raise ConstraintError(f"the schema can't be turned into a regex: {error}") from error
    return regex
