"""Table of all routes. A protocol's file has its own handlers and records; endpoint.py serves any
of them.
"""

from __future__ import annotations

from starlette.responses import Response

from sglang_lite.server import adapters, clouds, metrics, models, native, openapi, weight_routes
from sglang_lite.server.anthropic import messages
from sglang_lite.server.endpoint import HttpRequest, Route, json_response
from sglang_lite.server.ollama import catalog, lines
from sglang_lite.server.openai import (
    chat,
    completions,
    decisions,
    embeddings,
    pooling,
    responses,
    score,
    transcriptions,
)
from sglang_lite.server.programs import program
from sglang_lite.server.service import Service


async def _show_openapi_document(_: Service, __: HttpRequest) -> Response:
    """Returns the OpenAPI document."""
    return json_response(openapi.openapi_document(ROUTES))


ROUTES: tuple[Route, ...] = (
    *native.ROUTES,
    *weight_routes.ROUTES,
    *chat.ROUTES,
    *completions.ROUTES,
    *messages.ROUTES,
    *responses.ROUTES,
    *decisions.ROUTES,
    *score.ROUTES,
    *embeddings.ROUTES,
    *pooling.ROUTES,
    *transcriptions.ROUTES,
    *clouds.ROUTES,
    *lines.ROUTES,
    *catalog.ROUTES,
    *program.ROUTES,
    *models.ROUTES,
    *adapters.ROUTES,
    *metrics.ROUTES,
    Route("/openapi.json", _show_openapi_document, "This document", ("GET",), access="open"),
)
