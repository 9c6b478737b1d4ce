"""A schema document: looks up JSON Pointers and resolves references.

The drafts' meta-schemas are bundled (meta_schemas.json). Pointers into one begin with its
URI and `#`.

Source: JSON Schema draft 2020-12, core, 8 and 9; RFC 6901 (pointers), RFC 3986
(references).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin

from sglang_lite.protocol import ConstraintError
from sglang_lite.protocol.anything import Json

# Keywords whose value is a schema, a list of schemas, or schemas by name.
_ONE = frozenset({
    "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
})  # fmt: skip
LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
NAMED = frozenset(
    {"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"}
)
HOLDERS = _ONE | LISTS | NAMED

# Keywords that a draft does not have, because they were added later or removed earlier.
_SINCE_2019 = frozenset({
    "$anchor", "$defs", "$recursiveRef", "dependentRequired", "dependentSchemas", "maxContains", "minContains",
    "unevaluatedItems", "unevaluatedProperties",
})  # fmt: skip
_SINCE_2020 = frozenset({"$dynamicRef", "prefixItems"})
_SINCE_7 = _SINCE_2020 | _SINCE_2019 | {"if"}
_KEYWORDS_UNKNOWN_TO = {
    "draft-04": _SINCE_7 | {"const", "contains", "propertyNames"},
    "draft-06": _SINCE_7,
    "draft-07": _SINCE_7 - {"if"},
    "2019-09": _SINCE_2020,
}

# Keywords of the vocabulary for validation, which a meta-schema may leave out.
_VALIDATION = frozenset({
    "type", "enum", "const", "multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum", "maxLength",
    "minLength", "pattern", "maxItems", "minItems", "uniqueItems", "maxContains", "minContains", "maxProperties",
    "minProperties", "required", "dependentRequired",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class SchemaLocation:
    """A schema in a document, as reached along some path of references.

    Attributes:
        pointer: JSON Pointer of the schema.
        scope: pointers of the resources that references entered along the path, outermost
            first. Only resources with relevant dynamic anchors are included.
    """

    pointer: str
    scope: tuple[str, ...] = ()

    def child(self, *steps: str | int) -> SchemaLocation:
        return SchemaLocation(
            self.pointer + "".join(f"/{pointer_token(str(step))}" for step in steps), self.scope
        )


REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_RECURSIVE = "$recursiveAnchor"  # stored as an anchor of this name, which no other anchor can have
_INDEX = re.compile("0|[1-9][0-9]{0,8}")


@cache
def _meta_schemas() -> dict[str, str]:
    """Returns the JSON texts of the drafts' meta-schemas by URI, from the package
    jsonschema-specifications 2025.9.1 (MIT, © 2022 Julian Berman).
    """
    found = json.loads(Path(__file__).with_name("meta_schemas.json").read_text(encoding="utf-8"))
    return {uri: json.dumps(schema) for uri, schema in found.items()}


def _resolve_uri(base: str, reference: str, pointer: str) -> str:
    try:
        return urljoin(base, reference)
    except ValueError as error:
        raise ConstraintError(
            f"json_schema: {reference!r} is no reference: {error}.", pointer=pointer
        ) from error


def pointer_token(step: str) -> str:
    """Escapes a name as a step of a JSON Pointer."""
    return step.replace("~", "~0").replace("/", "~1")


class Document:
    """Schema document: its draft, its locations, and the targets of its references.

    Args:
        root: the schema. Its `$schema` selects the draft, which is 2020-12 by default.
            `dependencies` is known in every draft.

    Attributes:
        root: the schema.
        draft: name of the draft, as in the URI of `$schema`.
        ref_hides_siblings: True if `$ref` hides the keywords next to it in this draft.
        unknown: keywords that the schema's dialect does not have.
        roots: the schema and the meta-schemas that it refers to, by the prefix of pointers into
            them.
        start: location of the whole schema.
    """

    def __init__(self, root: object) -> None:
        self.root = root
        self.roots: dict[str, Any] = {"": root}
        schema_uri = str(root.get("$schema")) if isinstance(root, dict) else ""
        self.draft = next((name for name in _KEYWORDS_UNKNOWN_TO if name in schema_uri), "2020-12")
        self.unknown = _KEYWORDS_UNKNOWN_TO.get(self.draft, frozenset[str]())
        self.ref_hides_siblings = "$defs" in self.unknown
        # may embed the schema's own meta-schema
        own = root.get("$defs") if isinstance(root, dict) else None
        vocabulary = (
            own[schema_uri].get("$vocabulary")
            if isinstance(own, dict) and schema_uri in own
            else None
        )
        if isinstance(vocabulary, dict) and not any(
            each.endswith("/vocab/validation") for each in vocabulary
        ):
            self.unknown |= _VALIDATION
        # base URI and pointer of the resource, by a schema's pointer
        self._bases: dict[str, tuple[str, str]] = {}
        self._schemas: dict[str, Any] = {}  # schemas by pointer
        self._resources: dict[str, str] = {"": ""}
        self._anchors: dict[tuple[str, str], str] = {}  # (resource, name) to pointer
        self._dynamic: set[tuple[str, str]] = set()
        for uri in (queue := list(self._index_subschemas(root, "", ""))):
            address = f"{uri}#"
            # unless embedded by the user
            if address not in self.roots and uri not in self._resources:
                self.roots[address] = json.loads(_meta_schemas()[uri])
                self._resources[uri] = address
                queue += self._index_subschemas(self.roots[address], address, uri)
        self.start = SchemaLocation("", ("",) if self._dynamic else ())

    def value_at_pointer(self, pointer: str) -> Json:
        """Returns the value at a JSON Pointer.

        Raises:
            KeyError: the document has no value there.
        """
        if pointer in self._schemas:
            return self._schemas[pointer]
        start = "" if pointer[:1] in ("", "/") else pointer.partition("#")[0] + "#"
        found = self.roots[start]
        for step in pointer.removeprefix(start).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and _INDEX.fullmatch(step) and int(step) < len(found):
                found = found[int(step)]
            elif isinstance(found, dict):
                found = found[step]
            else:
                raise KeyError(pointer)
        return found

    @property
    def size(self) -> int:
        """Approximate memory in bytes."""
        return 2_000 * len(self._bases)

    @property
    def locations(self) -> Iterable[SchemaLocation]:
        """Locations of all schemas in the document."""
        return map(SchemaLocation, self._bases)

    def schema(self, location: SchemaLocation) -> Json:
        """Returns the schema at a location, without keywords that its draft does not have."""
        found = self.value_at_pointer(location.pointer)
        if not isinstance(found, dict) or not self.unknown:
            return found
        if self.ref_hides_siblings and "$ref" in found:
            return {"$ref": found["$ref"]}
        return {keyword: value for keyword, value in found.items() if keyword not in self.unknown}

    def resolve_reference_at(self, location: SchemaLocation, keyword: str) -> SchemaLocation:
        """Returns the location that the reference in a schema points to.

        Raises:
            ConstraintError: the target is outside the document or does not exist.
        """
        reference = self.value_at_pointer(location.pointer)[keyword]
        base, resource = self._base_and_resource_at(location.pointer)
        address, _, fragment = reference.partition("#")
        where = location.child(keyword).pointer
        if address:
            address = _resolve_uri(base, address, where)
            if address not in self._resources:
                raise ConstraintError(
                    f"json_schema: the reference {reference!r} leads out of the schema.",
                    pointer=where,
                    hint="Nothing is fetched: put what it refers to into $defs.",
                )
            resource = self._resources[address]
        fragment = unquote(fragment)
        found: str | None
        if keyword == "$recursiveRef":
            found = self._outermost_anchor(location, resource, _RECURSIVE, resource)
        elif fragment and not fragment.startswith("/"):
            found = self._anchors.get((resource, fragment))
            if keyword == "$dynamicRef":
                found = self._outermost_anchor(location, resource, fragment, found)
        else:
            found = resource + fragment
            try:
                self.value_at_pointer(found)
            except KeyError:
                found = None
        if found is None:
            raise ConstraintError(
                f"json_schema: the reference {reference!r} leads to nothing.", pointer=where
            )
        return self._enter_resource(SchemaLocation(found, location.scope))

    def _outermost_anchor(
        self, location: SchemaLocation, resource: str, name: str, found: str | None
    ) -> str | None:
        """Returns the pointer of a dynamic anchor in the outermost resource of the scope that has
        it. Returns `found` if the current resource has no dynamic anchor of this name.
        """
        if (resource, name) not in self._dynamic:
            return found
        return next(
            (self._anchors[r, name] for r in location.scope if (r, name) in self._dynamic), found
        )

    def child(self, location: SchemaLocation, *steps: str | int) -> SchemaLocation:
        """Returns the location of a schema below another."""
        return self._enter_resource(location.child(*steps))

    def location_below(self, location: SchemaLocation, pointer: str) -> SchemaLocation:
        """Returns the location of a pointer below another location. Its scope includes the
        resources entered on the way.
        """
        for step in pointer.removeprefix(location.pointer).split("/")[1:] if location.scope else ():
            location = self._enter_resource(
                SchemaLocation(f"{location.pointer}/{step}", location.scope)
            )
        return SchemaLocation(pointer, location.scope)

    def _enter_resource(self, location: SchemaLocation) -> SchemaLocation:
        resource = self._base_and_resource_at(location.pointer)[1]
        names = [name for each, name in self._dynamic if each == resource]
        if not location.scope or all(
            any((r, name) in self._dynamic for r in location.scope) for name in names
        ):
            # only the outermost anchor of each name counts, so this resource changes nothing
            return location
        return SchemaLocation(location.pointer, (*location.scope, resource))

    def _base_and_resource_at(self, pointer: str) -> tuple[str, str]:
        while pointer not in self._bases:  # not a schema position, only the target of a reference
            pointer = pointer.rpartition("/")[0]
        return self._bases[pointer]

    def _index_subschemas(self, root: Any, start: str, base: str) -> Iterator[str]:
        """Records the base URI, resource and anchors of each schema in a root. Yields the URIs of
        the meta-schemas that the root refers to.
        """
        stack: list[tuple[Any, str, str, str]] = [(root, start, base, start)]
        while stack:
            schema, pointer, base, resource = stack.pop()
            if isinstance(schema, dict):
                base, resource = self._base_and_resource(schema, pointer, base, resource)
                for keyword in ("$anchor", "$dynamicAnchor"):
                    if isinstance(schema.get(keyword), str):
                        self._anchors[resource, schema[keyword]] = pointer
                if isinstance(schema.get("$dynamicAnchor"), str):
                    self._dynamic.add((resource, schema["$dynamicAnchor"]))
                if schema.get(_RECURSIVE) is True and pointer == resource:
                    self._anchors[resource, _RECURSIVE] = pointer
                    self._dynamic.add((resource, _RECURSIVE))
                stack += ((s, pointer + steps, base, resource) for steps, s in subschemas(schema))
                yield from _meta_schemas_in(schema, base)
            self._bases[pointer] = (base, resource)
            self._schemas[pointer] = schema

    def _base_and_resource(
        self, schema: dict[str, Any], pointer: str, base: str, resource: str
    ) -> tuple[str, str]:
        """Returns the base URI and the resource of a schema. A schema with its own identifier
        starts a new resource.
        """
        name = schema.get("$id", schema.get("id") if self.ref_hides_siblings else None)
        if not isinstance(name, str) or (self.ref_hides_siblings and "$ref" in schema):
            return base, resource
        if self.ref_hides_siblings and name.startswith("#"):
            self._anchors[resource, name[1:]] = pointer
            return base, resource
        base = _resolve_uri(base, name, f"{pointer}/$id").partition("#")[0]
        self._resources[base] = pointer
        return base, pointer


def _meta_schemas_in(schema: dict[str, Any], base: str) -> Iterator[str]:
    """Yields the URIs of the meta-schemas that a schema refers to."""
    for keyword in ("$ref", "$dynamicRef"):
        reference = schema.get(keyword)
        if isinstance(reference, str) and (
            "json-schema.org/" in reference or "json-schema.org/" in base
        ):
            try:
                uri = urljoin(base, reference).partition("#")[0]
            except ValueError:  # refused when the reference is followed
                continue
            if uri in _meta_schemas():
                yield uri


def subschemas(schema: dict[str, Json]) -> Iterator[tuple[str, Json]]:
    """Yields the direct subschemas of a schema, each as (JSON Pointer steps, subschema)."""
    for keyword, value in schema.items():
        if isinstance(value, dict) and keyword in NAMED:
            named = ((f"/{keyword}/{pointer_token(name)}", each) for name, each in value.items())
            yield from (
                each for each in named if keyword != "dependencies" or not isinstance(each[1], list)
            )
        elif isinstance(value, list) and keyword in (*LISTS, "items"):
            yield from ((f"/{keyword}/{i}", each) for i, each in enumerate(value))
        elif keyword in _ONE:
            yield f"/{keyword}", value
