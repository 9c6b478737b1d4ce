"""Strings that a limit may cut anywhere, as their schema says: the keyword `x-prose`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from sglang_lite.constraints.memo import memoized
from sglang_lite.protocol import JsonSchema

PROSE = "x-prose"  # keyword of ours
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_MAX_SCHEMAS = 1_000  # that are looked at for one string


@memoized
def _document(schema: JsonSchema) -> Any:
    return json.loads(schema.schema) if PROSE in schema.schema else None


def is_prose(schema: JsonSchema, path: Sequence[str | int]) -> bool:
    """Returns True if a string may end anywhere.

    Args:
        schema: schema of the JSON.
        path: names and indices that lead to the string.
    """
    root = _document(schema)
    if root is None:
        return False
    found = [*_resolve(root, root)]
    for step in path:
        found = [
            each for schema_above in found for below in _below(schema_above, step) for each in _resolve(root, below)
        ]
    return any(each.get(PROSE) is True for each in found)


def _resolve(root: Any, schema: Any) -> Iterator[dict[str, Any]]:
    """Yields a schema, and those that it refers to or combines."""
    queue = [schema]
    for each in queue:
        if not isinstance(each, dict) or len(queue) > _MAX_SCHEMAS:
            continue
        yield each
        for keyword in _ALTERNATIVES:
            queue += each.get(keyword, ())
        reference = each.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            queue.append(_at(root, reference[1:]))


def _at(root: Any, pointer: str) -> Any:
    found = root
    for token in pointer.split("/")[1:]:
        token = token.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(token)
        else:
            return None
    return found


def _below(schema: dict[str, Any], step: str | int) -> Iterator[Any]:
    """Yields the schemas of a member or an item."""
    if isinstance(step, str):
        yield schema.get("properties", {}).get(step, schema.get("additionalProperties"))
        return
    first = schema.get("prefixItems", ())
    yield first[step] if step < len(first) else schema.get("items")
