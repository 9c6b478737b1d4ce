"""Closes a schema's objects: objects with named members allow no others, unless the schema has a
keyword for them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from sglang_lite.constraints.json_schema.document import REFERENCES, Document, SchemaLocation
from sglang_lite.protocol import ConstraintError
from sglang_lite.protocol.anything import Json

_NAMING = ("properties", "patternProperties")
_OTHERS_KEYWORDS = ("additionalProperties", "unevaluatedProperties")
_ALTERNATIVES = ("anyOf", "oneOf")
_IN_PLACE = ("allOf", *_ALTERNATIVES, "then", "else", "dependentSchemas", "dependencies")
_BELOW = (
    *_NAMING,
    *_OTHERS_KEYWORDS,
    "items",
    "prefixItems",
    "additionalItems",
    "unevaluatedItems",
)


def close_objects(schema: object, *, simple_only: bool = False) -> Json:
    """Returns a schema with its objects closed.

    Objects of alternatives and references are closed separately, objects composed of several
    schemas as a whole. Conditions (`if`, `not`, `contains`) and meta-schemas stay unchanged.

    Args:
        simple_only: whether to leave objects open that are composed of several schemas, or that
            require a member that they don't list. The result then forbids nothing that the schema
            allows, except unlisted members.

    Raises:
        ConstraintError: an object can't be closed by one keyword in the draft that the schema
            names. The error has its JSON Pointer.
    """
    document = Document(schema)
    parts: frozenset[str] = frozenset()
    # repeat until all definitions that are parts of composed objects, and stay open, are known
    while True:
        found = _Closer(document, parts, simple_only=simple_only)
        found.visit(document.start, part=False)
        if found.parts == parts:
            break
        parts = found.parts
    result = copy.deepcopy(schema)
    written = Document(result)
    for pointer, keyword in found.closings.items():
        if pointer[:1] not in ("", "/"):  # the location is in a meta-schema
            continue
        written.value_at_pointer(pointer)[keyword] = False
        if keyword not in written.schema(SchemaLocation(pointer)):
            raise ConstraintError(
                "json_schema: closed: an object composed of several schemas can't be closed in this draft.",
                pointer=pointer,
                hint="Leave $schema out, or set additionalProperties.",
            )
    return result


class _Closer:
    """Visitor that finds which objects to close, and by which keyword.

    Args:
        document: schema document.
        parts: pointers of schemas that are known to be parts of composed objects.
        simple_only: see `close_objects`.

    Attributes:
        parts: all such pointers found so far.
        closings: keyword that closes an object, by the object's pointer.
    """

    def __init__(self, document: Document, parts: frozenset[str], *, simple_only: bool) -> None:
        self._document = document
        self._parts_before = parts
        self._simple_only = simple_only
        self.parts = parts
        self.closings: dict[str, str] = {}  # keyword by pointer
        self._seen: set[tuple[str, bool]] = set()

    def visit(self, location: SchemaLocation, *, part: bool) -> None:
        """Visits a schema and all schemas below it. With `part`, the schema is part of another
        schema and is not closed itself.
        """
        if (location.pointer, part) in self._seen:
            return
        self._seen.add((location.pointer, part))
        schema = self._document.schema(location)
        if not isinstance(schema, dict):
            return
        if part:
            self.parts |= {location.pointer}
        here = [
            self._document.resolve_reference_at(location, keyword)
            for keyword in REFERENCES
            if keyword in schema
        ]
        here += self._children(location, schema, _IN_PLACE)
        names = any(keyword in schema for keyword in _NAMING)
        has_others_keyword = any(keyword in schema for keyword in _OTHERS_KEYWORDS)
        kinds = [keyword for keyword in (*REFERENCES, *_IN_PLACE) if keyword in schema]
        together = (
            names
            or has_others_keyword
            or len(kinds) > 1
            or (len(here) > 1 and kinds[0] not in _ALTERNATIVES)
        )
        together = together or any(each.pointer in self._parts_before for each in here)
        if (
            not part
            and not has_others_keyword
            and together
            and (names or any(self._has_named_members(each, set()) for each in here))
            and not (self._simple_only and (here or _requires_unlisted_members(schema)))
        ):
            self.closings[location.pointer] = (
                "unevaluatedProperties" if here else "additionalProperties"
            )
        for each in here:
            self.visit(each, part=part or together)
        for each in self._children(location, schema, _BELOW):
            self.visit(each, part=False)

    def _has_named_members(self, location: SchemaLocation, seen: set[str]) -> bool:
        """Returns True if a schema, or a schema applied to the same value, names members."""
        schema = self._document.schema(location)
        if location.pointer in seen or not isinstance(schema, dict):
            return False
        seen.add(location.pointer)
        here = [
            self._document.resolve_reference_at(location, keyword)
            for keyword in REFERENCES
            if keyword in schema
        ]
        here += self._children(location, schema, _IN_PLACE)
        return any(keyword in schema for keyword in _NAMING) or any(
            self._has_named_members(each, seen) for each in here
        )

    def _children(
        self, location: SchemaLocation, schema: dict[str, Any], keywords: tuple[str, ...]
    ) -> Iterator[SchemaLocation]:
        for keyword in keywords:
            value = schema.get(keyword)
            if isinstance(value, list):
                yield from (self._document.child(location, keyword, i) for i in range(len(value)))
            elif isinstance(value, dict) and keyword in (
                *_NAMING,
                "dependentSchemas",
                "dependencies",
            ):
                yield from (self._document.child(location, keyword, name) for name in value)
            elif isinstance(value, dict):
                yield self._document.child(location, keyword)


def _requires_unlisted_members(schema: dict[str, Any]) -> bool:
    """Returns True if an object requires more members than it lists."""
    listed = schema.get("properties", {})
    if "patternProperties" in schema:
        return not {"required", "dependentRequired", "minProperties"}.isdisjoint(schema)
    needed = set(schema.get("required", ()))
    for names in schema.get("dependentRequired", {}).values():
        needed.update(names)
    return bool(needed - listed.keys()) or schema.get("minProperties", 0) > len(listed)
