"""OpenAPI document, generated from the routes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sglang_lite.protocol.anything import Json
from sglang_lite.server.endpoint import Route
from sglang_lite.version import __version__

_REF = "#/components/schemas/{name}"
_ERROR = {"type": "object"}
# Descriptions of statuses: of any route, and of routes that take a body, name a model, or run
# something.
_ANY = {
    401: "The key is missing or wrong.",
    403: "A web page sent the request, and the server has no key.",
    500: "The server failed.",
    503: "The engine does not run.",
    504: "The request took too long.",
}
_OF_BODY = {
    400: "Something in the request is wrong; the error says what.",
    413: "The body is too large.",
}
_OF_MODEL = {404: "The model is not served, or the object does not exist."}
_OF_WORK = {429: "Too many requests are open.", 499: "The request was aborted."}


def openapi_document(routes: Sequence[Route]) -> dict[str, Json]:
    """Returns the OpenAPI document, version 3.1, of some routes."""
    records = {route.fields.record: route.fields for route in routes if route.fields is not None}
    found, components = msgspec.json.schema_components(list(records), ref_template=_REF)
    references = dict(zip(records, found))  # two records may have the same name
    for record, fields in records.items():
        schema = components[references[record]["$ref"].rpartition("/")[2]]
        schema["additionalProperties"] = False
        for name in (*fields.neutral, *fields.refused):
            schema["properties"].setdefault(
                name, {"description": fields.neutral.get(name) or "Refused if it is set."}
            )
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = re.sub(r":\w+}", "}", route.path)
        paths.setdefault(path, {}).update(
            {
                method.lower(): _describe_operation(route, method, references)
                for method in route.methods
            }
        )
    return {
        "openapi": "3.1.0",
        "info": {"title": "sglang_lite", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _describe_operation(route: Route, method: str, references: Mapping[Any, Any]) -> dict[str, Any]:
    statuses = {**_ANY, **({} if route.methods == ("GET",) and not route.query else _OF_BODY)}
    if route.counts_as_open:
        statuses |= _OF_WORK
    named = set() if route.fields is None else {"model", "session_id"} & route.fields.known
    if "{" in route.path or named:
        statuses |= _OF_MODEL
    media: dict[str, Any] = {} if not route.media_type else {route.media_type: {"schema": {}}}
    if route.streams:
        media["application/x-ndjson" if route.protocol == "ollama" else "text/event-stream"] = {
            "schema": {"type": "string"}
        }
    responses: dict[str, Any] = {
        "200": {"description": "The answer.", **({"content": media} if media else {})}
    }
    for status, description in sorted(statuses.items()):
        content = {"application/json": {"schema": _ERROR}}
        responses[str(status)] = {"description": description, "content": content}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{method.lower()}{re.sub(r'[^a-z0-9]+', '_', route.path.lower())}",
        "responses": responses,
    }
    parameters = [(name, "path") for name in re.findall(r"{(\w+)", route.path)]
    parameters += [(name, "query") for name in route.query]
    if parameters:
        operation["parameters"] = [
            {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}
            for name, place in parameters
        ]
    if route.fields is not None and method != "GET":
        content = {route.body_type: {"schema": references[route.fields.record]}}
        operation["requestBody"] = {"required": True, "content": content}
    if route.access != "open":
        operation["security"] = [{"key": []}, {}]
    return operation
