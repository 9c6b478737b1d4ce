"""Compound documents: external schemas embedded in the schema that refers to them by URI.

Source: JSON Schema draft 2020-12, core, 9.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_lite.constraints.json_schema.document import Document, pointer_token
from sglang_lite.protocol import ConstraintError
from sglang_lite.protocol.anything import Json


def embed_resources(schema: object, resources: Mapping[str, Json]) -> object:
    """Returns a schema with external schemas embedded in its definitions, each under its URI.

    Args:
        schema: schema that refers to the resources.
        resources: external schemas by absolute URI.

    Raises:
        ConstraintError: a URI is not absolute or has a fragment, the schema already has a
            definition of that name, or a resource is of another draft than the schema.
    """
    if not resources:
        return schema
    if not isinstance(schema, dict):
        return schema  # true and false have no references
    document = Document(schema)
    keyword = "definitions" if document.ref_hides_siblings else "$defs"
    name = "id" if document.draft == "draft-04" else "$id"
    definitions = dict(schema.get(keyword, {}))
    for uri, resource in resources.items():
        if not isinstance(uri, str) or ":" not in uri or uri.partition("#")[2]:
            raise ConstraintError(
                f"json_schema: resources: {uri!r} is no absolute URI without a fragment."
            )
        pointer = f"/{keyword}/{pointer_token(uri)}"
        if uri in definitions:
            raise ConstraintError(
                "json_schema: resources: the schema has a definition of this name.", pointer=pointer
            )
        if (
            isinstance(resource, dict)
            and "$schema" in resource
            and Document(resource).draft != document.draft
        ):
            raise ConstraintError(
                f"json_schema: resources: {uri} is of another draft than the schema.",
                pointer=f"{pointer}/$schema",
            )
        definitions[uri] = _identify_by_uri(resource, uri, name)
    return {**schema, keyword: definitions}


def _identify_by_uri(resource: Any, uri: str, name: str) -> Any:
    """Returns a schema whose identifier is the URI. This is the resource itself, or a wrapper if
    the resource can't have that identifier.
    """
    uri = uri.partition("#")[0]
    if isinstance(resource, dict) and name not in resource and "$ref" not in resource:
        return {name: uri, **resource}
    if isinstance(resource, dict) and resource.get(name) == uri:
        return resource
    return {name: uri, "allOf": [resource]}
