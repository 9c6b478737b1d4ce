"""Routes of models that read texts: embeddings, reranking and classes, as OpenAI, SGLang and vLLM spell them."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np
from starlette.responses import Response

from sglang_lite.engine import encoding
from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.encoding.request import are_ids
from sglang_lite.server.fields import GATEWAY_NEUTRAL, Fields
from sglang_lite.server.routes import Call, Route, answer
from sglang_lite.server.service import Service

_LONGEST_S = 600.0
_MOST_TEXTS = 8192  # of a request
_NAMES = "It names the caller or the request, and no model sees it."


class EmbeddingsRequest(msgspec.Struct, kw_only=True):
    """OpenAI's request of embeddings. `truncate` and `prompt_name` are ours."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    prompt_name: str | None = None
    truncate: bool = False


class EncodeBody(msgspec.Struct, kw_only=True):
    """SGLang's request of embeddings."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    dimensions: int | None = None
    prompt_name: str | None = None
    truncate: bool = False


class RerankRequest(msgspec.Struct, kw_only=True):
    """Documents that are to be ordered by how well they answer a query."""

    query: str
    documents: list[str]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool = True
    truncate: bool = False


class ClassifyRequest(msgspec.Struct, kw_only=True):
    """Texts whose labels are wanted."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    truncate: bool = False


EMBEDDINGS: Fields[EmbeddingsRequest] = Fields(EmbeddingsRequest, {**GATEWAY_NEUTRAL, "user": _NAMES}, {})
ENCODE: Fields[EncodeBody] = Fields(EncodeBody, {**GATEWAY_NEUTRAL, "rid": _NAMES}, {})
RERANK: Fields[RerankRequest] = Fields(RerankRequest, {**GATEWAY_NEUTRAL, "rid": _NAMES, "user": _NAMES}, {})
CLASSIFY: Fields[ClassifyRequest] = Fields(ClassifyRequest, {**GATEWAY_NEUTRAL, "user": _NAMES}, {})


async def embeddings(service: Service, call: Call) -> Response:
    """Gives the embeddings of texts."""
    body = call.read(EMBEDDINGS)
    service.check_model(body.model)
    read = partial(
        encoding.embeddings, service.engine, _texts(body.input, "input"), body.dimensions, truncate=body.truncate,
        prompt_name=body.prompt_name, field="input",
    )  # fmt: skip
    vectors, tokens = await service.ask(read, at_most_s=_LONGEST_S)
    if body.encoding_format == "base64":
        found: Sequence[Any] = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
    else:
        found = vectors.tolist()
    data = [{"object": "embedding", "index": i, "embedding": each} for i, each in enumerate(found)]
    return answer({"object": "list", "data": data, "model": service.model_name, "usage": _usage(tokens)})


async def encode(service: Service, call: Call) -> Response:
    """Gives embeddings in SGLang's shape."""
    body = call.read(ENCODE)
    if (body.text is None) == (body.input_ids is None):
        raise ParameterError("text", "is missing." if body.text is None else "and input_ids are both given.")
    field = "input_ids" if body.text is None else "text"
    given: Any = getattr(body, field)
    _texts(given, field)
    read = partial(
        encoding.encoded, service.engine, given, body.dimensions, prompt_name=body.prompt_name, truncate=body.truncate,
        field=field,
    )  # fmt: skip
    return answer(await service.ask(read, at_most_s=_LONGEST_S))


async def rerank(service: Service, call: Call) -> Response:
    """Orders documents by a query."""
    body = call.read(RERANK)
    service.check_model(body.model)
    documents: list[str] = _texts(body.documents, "documents")
    if body.top_n is not None and body.top_n < 1:
        raise ParameterError("top_n", f"{body.top_n} is below 1.")
    pairs = [(body.query, document) for document in documents]
    read = partial(encoding.pair_scores, service.engine, pairs, truncate=body.truncate, field="documents")
    scores, tokens = await service.ask(read, at_most_s=_LONGEST_S)
    order = np.argsort(-scores, kind="stable")[: body.top_n].tolist()
    results = [{"index": i, "relevance_score": float(scores[i])} for i in order]
    if body.return_documents:
        for result in results:
            result["document"] = {"text": documents[result["index"]]}
    return answer({
        "id": f"rerank-{uuid.uuid4().hex}", "model": service.model_name, "usage": _usage(tokens), "results": results,
    })  # fmt: skip


async def classify(service: Service, call: Call) -> Response:
    """Gives the labels of texts."""
    body = call.read(CLASSIFY)
    service.check_model(body.model)
    read = partial(encoding.classes, service.engine, _texts(body.input, "input"), truncate=body.truncate, field="input")
    found, tokens = await service.ask(read, at_most_s=_LONGEST_S)
    data = [
        {"index": i, "label": each["label"], "probs": list(each["probs"].values()), "num_classes": len(each["probs"])}
        for i, each in enumerate(found)
    ]
    return answer({
        "id": f"classify-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()),
        "model": service.model_name, "data": data, "usage": _usage(tokens),
    })  # fmt: skip


def _texts(given: Any, field: str) -> list[Any]:  # each a text or token ids
    texts = [given] if isinstance(given, str) or are_ids(given) else given
    if not 1 <= len(texts) <= _MOST_TEXTS:
        raise ParameterError(field, f"has {len(texts):,} texts; 1 to {_MOST_TEXTS:,} are taken.")
    return texts


def _usage(tokens: Sequence[int]) -> dict[str, int]:
    return {"prompt_tokens": sum(tokens), "completion_tokens": 0, "total_tokens": sum(tokens)}


ROUTES = (
    Route("/v1/embeddings", embeddings, "Embeddings of texts", protocol="openai", fields=EMBEDDINGS, works=True),
    Route("/encode", encode, "Embeddings of texts", fields=ENCODE, works=True),
    *(
        Route(path, rerank, "Order documents by a query", protocol="openai", fields=RERANK, works=True)
        for path in ("/v1/rerank", "/rerank")
    ),
    Route("/classify", classify, "Labels of texts", protocol="openai", fields=CLASSIFY, works=True),
)
