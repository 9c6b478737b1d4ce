"""Routes that cloud platforms call: SageMaker's `/invocations` and Vertex AI's `/vertex_generate`.
Their health checks are `/ping` and `/health`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from starlette.responses import Response

from sglang_lite.protocol import ParameterError
from sglang_lite.server import native
from sglang_lite.server.endpoint import HttpRequest, Route, read_record
from sglang_lite.server.fields import Fields
from sglang_lite.server.openai import chat, chat_request
from sglang_lite.server.service import Service


class VertexInstance(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Prompt of a request, given as either `text` or `input_ids`."""

    text: str | None = None
    input_ids: list[int] | None = None
    image_data: Any = None  # text, or a list of texts; so are the next two
    video_data: Any = None
    audio_data: Any = None


class VertexRequest(msgspec.Struct, kw_only=True):
    """Vertex AI's request: prompts, and fields of `/generate` that apply to all prompts."""

    instances: list[VertexInstance]
    parameters: dict[str, Any] | None = None


VERTEX: Fields[VertexRequest] = Fields(VertexRequest, {}, {})


async def answer_vertex_request(service: Service, call: HttpRequest) -> Response:
    """Generates text for the prompts of a Vertex AI request."""
    body = await read_record(service, call, VERTEX)
    if not body.instances:
        raise ParameterError("instances", "is empty.")
    parameters = body.parameters or {}
    for name in ("text", "input_ids", "image_data", "video_data", "audio_data", "stream"):
        if parameters.get(name):
            raise ParameterError(
                f"parameters.{name}", "has no place there.", hint="Prompts are instances."
            )
    given = [msgspec.to_builtins(each) for each in body.instances]
    names = dict.fromkeys(name for each in given for name in each)
    if len(names.keys() & {"text", "input_ids"}) != 1:
        raise ParameterError("instances", "need a text each, or input_ids each.")
    fields = {name: [each.get(name) for each in given] for name in names}
    answered = await native.generate(
        service, replace(call, data=msgspec.json.encode({**parameters, **fields}))
    )
    return Response(b'{"predictions":%b}' % bytes(answered.body), media_type="application/json")


ROUTES = (
    Route(
        "/invocations", chat.complete, "Answer a conversation, for SageMaker", protocol="openai",
        fields=chat_request.CHAT, streams=True, counts_as_open=True,
    ),
    Route(
        "/vertex_generate", answer_vertex_request, "Continue texts, for Vertex AI", fields=VERTEX, counts_as_open=True
    ),
)  # fmt: skip
