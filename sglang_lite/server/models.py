"""Lists of models in OpenAI's and Anthropic's protocols: the served model, and its adapters."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from sglang_lite.server.endpoint import ANTHROPIC_VERSION, HttpRequest, Route, json_response
from sglang_lite.server.service import Service


def _openai_model_card(service: Service, adapter: str | None = None) -> dict[str, Any]:
    return {
        "id": service.model_name if adapter is None else adapter,
        "object": "model",
        "created": int(service.started),
        "owned_by": "sglang_lite",
        "root": service.engine.config.model if adapter is None else service.adapters[adapter],
        "parent": None if adapter is None else service.model_name,
        "max_model_len": service.engine.context_length,
    }


def _anthropic_card(service: Service, adapter: str | None = None) -> dict[str, Any]:
    name = service.model_name if adapter is None else adapter
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(int(service.started), UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": service.engine.context_length,
        "max_tokens": service.engine.context_length,
    }


async def models(service: Service, call: HttpRequest) -> Response:
    """Returns the served model and its adapters, in OpenAI's or Anthropic's form."""
    if ANTHROPIC_VERSION not in call.headers:
        return json_response(
            {
                "object": "list",
                "data": [_openai_model_card(service, each) for each in (None, *service.adapters)],
            }
        )
    cards = [_anthropic_card(service, each) for each in (None, *service.adapters)]
    return json_response(
        {"data": cards, "has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
    )


async def model(service: Service, call: HttpRequest) -> Response:
    """Describes a model."""
    adapter = service.find_requested_adapter(call.path["model"])
    return json_response(
        (_anthropic_card if ANTHROPIC_VERSION in call.headers else _openai_model_card)(
            service, adapter
        )
    )


ROUTES = (
    Route("/v1/models", models, "The models", ("GET",), protocol="openai"),
    Route("/v1/models/{model:path}", model, "A model", ("GET",), protocol="openai"),
)
