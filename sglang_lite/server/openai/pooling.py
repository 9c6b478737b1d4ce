"""Routes of models that compute vectors, or numbers for labels, from texts or conversations: vLLM's
`/classify` and `/pooling`, and SGLang's `/classify`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec
from starlette.responses import Response

from sglang_lite.engine import embedding
from sglang_lite.process.random_ids import random_id
from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.embedding.request import too_long_error
from sglang_lite.runtime.embedding.spec import EncoderSpec
from sglang_lite.server.conversation.images import RequestImages
from sglang_lite.server.conversation.tools import split_template_kwargs
from sglang_lite.server.endpoint import HttpRequest, Route, json_response, read_body
from sglang_lite.server.fields import POOLING_NEUTRAL, POOLING_REFUSED, Fields
from sglang_lite.server.openai.chat_request import Message, to_template_messages
from sglang_lite.server.openai.embeddings import (
    NativeTexts,
    compute_sglang_response,
    embedding_usage,
    encode_rows,
    require_text_list,
)
from sglang_lite.server.reader import RequestReader
from sglang_lite.server.service import Service
from sglang_lite.text.chat_format import Conversation


class ClassifyRequest(NativeTexts, kw_only=True):
    """Request for `/classify`. vLLM's form asks for the labels of texts, token ids or a
    conversation. SGLang's form (`text` or `input_ids`) asks for the outputs of a reward model.
    """

    input: str | list[str | int | list[int]] | None = None
    messages: list[Message] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: int | None = None
    model: str | None = None


class PoolingRequest(msgspec.Struct, kw_only=True):
    """vLLM's request for a model's outputs: vectors, or numbers for labels."""

    input: str | list[str | int | list[int]] | None = None
    messages: list[Message] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: int | None = None
    model: str | None = None
    task: Literal["embed", "classify"] | None = None
    use_activation: bool | None = None
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    truncate: bool = False


B = TypeVar("B", ClassifyRequest, PoolingRequest)
CLASSIFY: Fields[ClassifyRequest] = Fields(ClassifyRequest, POOLING_NEUTRAL, POOLING_REFUSED)
POOLING: Fields[PoolingRequest] = Fields(PoolingRequest, POOLING_NEUTRAL, POOLING_REFUSED)


async def classify(service: Service, call: HttpRequest) -> Response:
    """Returns the labels of texts; in SGLang's form, the outputs of a reward model."""
    body, ids = await read_body(service, call, _read_pooling_request, (CLASSIFY,))
    adapter = service.find_requested_adapter(body.model)
    given = [
        name
        for name in ("input", "messages", "text", "input_ids")
        if getattr(body, name) is not None
    ]
    if len(given) != 1:
        raise ParameterError(
            "input",
            "is missing."
            if not given
            else f"{' and '.join(given)} are given together. Give one of them.",
        )
    if given[0] in ("text", "input_ids"):
        _check_template(body)
        rewards = partial(embedding.classifier_outputs, plain=True, lora_path=adapter)
        return await compute_sglang_response(service, body, rewards)
    texts, field = _texts_and_field(service, body, ids)
    found, tokens = await service.encode(
        embedding.classify_texts, texts, truncate=body.truncate, lora_path=adapter, field=field
    )
    data = [
        {
            "index": i,
            "label": each["label"],
            "probs": list(each["probs"].values()),
            "num_classes": len(each["probs"]),
        }
        for i, each in enumerate(found)
    ]
    return _list_response(service, "classify", body, data, tokens)


async def pooling(service: Service, call: HttpRequest) -> Response:
    """Returns what the model computes from texts or a conversation: vectors, or a number for each
    label, as a probability or a raw output.
    """
    body, ids = await read_body(service, call, _read_pooling_request, (POOLING,))
    adapter = service.find_requested_adapter(body.model)
    if (body.input is None) == (body.messages is None):
        raise ParameterError(
            "input",
            "is missing."
            if body.input is None
            else "and messages are both given. Give one of them.",
        )
    spec = embedding.require_encoder_spec(service.engine)
    _check_model_kind(body, spec, service.model_name)
    texts, field = _texts_and_field(service, body, ids)
    if spec.classifier is None:
        compute: Callable[..., embedding.Numbers] = partial(
            embedding.embeddings, dimensions=body.dimensions
        )
    else:
        plain = (
            spec.classifier.raw_score if body.use_activation is None else not body.use_activation
        )
        compute = partial(embedding.classifier_outputs, plain=plain)
    rows, tokens = await service.encode(
        compute, texts, truncate=body.truncate, lora_path=adapter, field=field
    )
    found = encode_rows(rows, body.encoding_format)
    data = [{"index": i, "object": "pooling", "data": each} for i, each in enumerate(found)]
    return _list_response(service, "pool", body, data, tokens)


def _check_model_kind(body: PoolingRequest, spec: EncoderSpec, model: str) -> None:
    """Raises ParameterError if a field doesn't suit the kind of model, such as `dimensions` for a
    model that computes numbers for labels.
    """
    if spec.classifier is None:
        if body.task == "classify":
            raise ParameterError(
                "task", f"'classify' is for models with labels; {model} gives vectors."
            )
        if body.use_activation not in (None, spec.normalise):
            kind = "normalised" if spec.normalise else "not normalised"
            raise ParameterError(
                "use_activation", f"the model's vectors are {kind}.", hint="Leave it out."
            )
    elif body.task == "embed":
        raise ParameterError(
            "task",
            f"'embed' is for models that give vectors; {model} gives a number for each label.",
        )
    elif body.dimensions is not None:
        raise ParameterError(
            "dimensions", f"{model} gives a number for each label, not vectors. Leave it out."
        )


def _read_pooling_request(
    reader: RequestReader, call: HttpRequest, fields: Fields[B]
) -> tuple[B, Sequence[int]]:
    """Returns the request without its messages, and the token ids of its conversation. There are no
    ids if the request has no conversation.
    """
    body = call.read_fields(fields)
    if body.priority:
        call.unused.append("priority")  # texts are processed in order of arrival
    if body.messages is None:
        return body, ()
    conversation = Conversation(
        to_template_messages(body.messages, RequestImages(frozenset())),
        complete=not body.add_generation_prompt,
        variables=split_template_kwargs(body.chat_template_kwargs),
    )
    body.messages = []
    return body, reader.ids(reader.render(conversation, call.unused).prompt)


def _texts_and_field(
    service: Service, body: ClassifyRequest | PoolingRequest, ids: Sequence[int]
) -> tuple[list[Any], str]:  # each a text or token ids
    """Returns the texts or token ids to compute outputs for, and the name of the field that they
    come from.
    """
    if body.messages is None:
        _check_template(body)
        return require_text_list(body.input, "input"), "input"
    limit = embedding.require_encoder_spec(service.engine).limit
    if len(ids) > limit and not body.truncate:
        raise too_long_error("messages", len(ids), limit)
    return [list(ids)], "messages"


def _check_template(body: ClassifyRequest | PoolingRequest) -> None:
    """Raises ParameterError if options of the chat template are given without a conversation."""
    for name in ("add_generation_prompt", "chat_template_kwargs"):
        if getattr(body, name) is not None:
            raise ParameterError(name, "needs messages.")


def _list_response(
    service: Service,
    name: str,
    body: ClassifyRequest | PoolingRequest,
    data: list[dict[str, Any]],
    tokens: Sequence[int],
) -> Response:
    return json_response(
        {
            "id": f"{name}-{random_id()}",
            "object": "list",
            "created": int(time.time()),
            "model": service.resolve_answering_model(body.model),
            "data": data,
            "usage": embedding_usage(tokens),
        }
    )


ROUTES = (
    *(
        Route(
            path,
            classify,
            "Labels or rewards of texts",
            methods,
            "openai",
            fields=CLASSIFY,
            counts_as_open=True,
        )
        for path, methods in (("/classify", ("POST", "PUT")), ("/v1/classify", ("POST",)))
    ),
    Route(
        "/pooling",
        pooling,
        "Vectors or numbers of texts",
        protocol="openai",
        fields=POOLING,
        counts_as_open=True,
    ),
)
