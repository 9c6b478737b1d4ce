"""Strings that a generation limit may cut off anywhere, because their type or schema is marked with
`sgl.prose` or the keyword `x-prose`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_lite.constraints.memo import memoize
from sglang_lite.protocol import ConstraintError, JsonSchema
from sglang_lite.protocol.anything import Json

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler

PROSE = "x-prose"  # our own keyword
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_MAX_SCHEMAS = 1_000  # maximum number of schemas examined for one string


@dataclass(frozen=True, slots=True)
class Prose:
    """Mark that allows a limit to cut a string off anywhere. `sgl.prose` is the only instance."""

    def __repr__(self) -> str:
        return "sgl.prose"

    def __get_pydantic_json_schema__(
        self,
        schema: Any,  # pydantic's dict
        handler: GetJsonSchemaHandler,
    ) -> dict[str, Json]:
        found = handler(schema)
        kinds = [each.get("type", "string") for each in found.get("anyOf", [found])]
        if "string" not in kinds:
            named = " or ".join(map(repr, kinds))
            raise ConstraintError(
                f"sgl.prose: only strings may be cut anywhere, and this is of the type {named}.",
                hint="Write it beside the string's type, as in list[Annotated[str, sgl.prose]].",
            )
        return {**found, PROSE: True}


prose = Prose()
"""Metadata of a `str`, as in `Annotated[str, sgl.prose]`: where a limit cuts its value, what has come of it is kept,
and `shortened` names it. Other strings are left out then, as half a name or address would be another one."""


@memoize
def _load_prose_schema(schema: JsonSchema) -> Any:
    return json.loads(schema.schema) if PROSE in schema.schema else None


def is_prose(schema: JsonSchema, path: Sequence[str | int]) -> bool:
    """Returns True if the schema marks the string at a path as prose, which may end anywhere.

    Args:
        schema: schema of the JSON.
        path: names and indices that lead to the string.
    """
    root = _load_prose_schema(schema)
    if root is None:
        return False
    found = [*_walk_combined_schemas(root, root)]
    for step in path:
        found = [
            each
            for schema_above in found
            for below in _schema_at_step(schema_above, step)
            for each in _walk_combined_schemas(root, below)
        ]
    return any(each.get(PROSE) is True for each in found)


def _walk_combined_schemas(root: Any, schema: Any) -> Iterator[dict[str, Any]]:
    """Yields a schema, and the schemas that it refers to or combines."""
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


def _schema_at_step(schema: dict[str, Any], step: str | int) -> Iterator[Any]:
    """Yields the schema of a member or item."""
    if isinstance(step, str):
        yield schema.get("properties", {}).get(step, schema.get("additionalProperties"))
        return
    first = schema.get("prefixItems", ())
    yield first[step] if step < len(first) else schema.get("items")
