"""Regexes of pydantic models: what SGLang documents for them."""

from __future__ import annotations

import json

from sglang_lite.compat.sglang.texts import convert_json_schema_to_str
from sglang_lite.protocol import ConstraintError


def build_regex_from_object(object: object, whitespace_pattern: str | None = None) -> str:
    """Regex for the JSON of a pydantic model, or of a schema as text or dict. (`gen(type=Model)` keeps more.)

    Raises:
        ConstraintError: the schema has something that can't be a regex.
    """
    from outlines_core.json_schema import build_regex_from_schema

    schema = convert_json_schema_to_str(object)
    try:
        json.loads(schema)
        regex: str = build_regex_from_schema(schema, whitespace_pattern)
    except Exception as error:  # outlines-core raises its own and bare exceptions
        raise ConstraintError(f"the schema can't be turned into a regex: {error}") from error
    return regex
