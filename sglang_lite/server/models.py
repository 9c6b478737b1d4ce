"""Lists of models in OpenAI's and Anthropic's protocols, which have only the served model."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from sglang_lite.server.endpoint import ANTHROPIC_VERSION, HttpRequest, Route, answer
from sglang_lite.server.service import Service


def _card(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "sglang_lite",
        "root": service.engine.config.model,
        "parent": None,
        "max_model_len": service.engine.context_length,
    }


def _anthropic_card(service: Service) -> dict[str, Any]:
    return {
        "type": "model",
        "id": service.model_name,
        "display_name": service.model_name,
        "created_at": datetime.fromtimestamp(int(service.started), UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": service.engine.context_length,
        "max_tokens": service.engine.context_length,
    }


async def models(service: Service, call: HttpRequest) -> Response:
    """Lists the models."""
    if ANTHROPIC_VERSION not in call.headers:
        return answer({"object": "list", "data": [_card(service)]})
    name = service.model_name
    return answer({"data": [_anthropic_card(service)], "has_more": False, "first_id": name, "last_id": name})


async def model(service: Service, call: HttpRequest) -> Response:
    """Describes a model."""
    service.check_model(call.path["model"])
    return answer(_anthropic_card(service) if ANTHROPIC_VERSION in call.headers else _card(service))


ROUTES = (
    Route("/v1/models", models, "The models", ("GET",), protocol="openai"),
    Route("/v1/models/{model:path}", model, "A model", ("GET",), protocol="openai"),
)
