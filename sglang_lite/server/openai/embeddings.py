"""Routes of models that embed or classify texts: embeddings and reranking, in the forms of OpenAI,
SGLang and vLLM.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.responses import Response

from sglang_lite.engine import embedding
from sglang_lite.process.random_ids import random_id
from sglang_lite.protocol import ParameterError
from sglang_lite.protocol.anything import Json
from sglang_lite.runtime.embedding.request import EncodeRequest, EncoderInput, is_token_id_list
from sglang_lite.server import features
from sglang_lite.server.endpoint import HttpRequest, Route, json_response, read_body, read_record
from sglang_lite.server.fields import EMBEDDINGS_NEUTRAL, Fields
from sglang_lite.server.reader import RequestReader
from sglang_lite.server.service import Service

_MAX_TEXTS = 8192  # of a request


class EmbeddingsRequest(msgspec.Struct, kw_only=True):
    """OpenAI's request for embeddings. `truncate` and `prompt_name` are extensions of this server."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    prompt_name: str | None = None
    truncate: bool = False


class NativeTexts(msgspec.Struct, kw_only=True):
    """Texts or token ids, in the form of SGLang's requests."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    truncate: bool = False


class EncodeBody(NativeTexts, kw_only=True):
    """SGLang's request for embeddings, or for the outputs of a reward model."""

    dimensions: int | None = None
    prompt_name: str | None = None
    lora_path: str | list[str | None] | None = None


class RerankRequest(msgspec.Struct, kw_only=True):
    """Request to order documents by their relevance to a query."""

    query: str
    documents: list[str]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool = True
    truncate: bool = False


EMBEDDINGS: Fields[EmbeddingsRequest] = Fields(EmbeddingsRequest, EMBEDDINGS_NEUTRAL, {})
ENCODE: Fields[EncodeBody] = Fields(EncodeBody, EMBEDDINGS_NEUTRAL, {})
RERANK: Fields[RerankRequest] = Fields(RerankRequest, EMBEDDINGS_NEUTRAL, {})


async def embeddings(service: Service, call: HttpRequest) -> Response:
    """Returns the embeddings of texts."""
    body, texts = await read_body(service, call, _read_embeddings_request)
    vectors, tokens = await service.encode(
        embedding.embeddings,
        texts,
        body.dimensions,
        truncate=body.truncate,
        prompt_name=body.prompt_name,
        lora_path=service.find_requested_adapter(body.model),
        field="input",
    )
    found = encode_rows(vectors, body.encoding_format)
    data = [{"object": "embedding", "index": i, "embedding": each} for i, each in enumerate(found)]
    model = service.resolve_answering_model(body.model)
    return json_response(
        {"object": "list", "data": data, "model": model, "usage": embedding_usage(tokens)}
    )


def _read_embeddings_request(
    reader: RequestReader, call: HttpRequest
) -> tuple[EmbeddingsRequest, Sequence[EncoderInput] | Sequence[EncodeRequest]]:
    """Returns the request without its texts, and the texts. If this reader tokenises prompts, the
    texts are returned as token ids.
    """
    body = call.read_fields(EMBEDDINGS)
    texts = require_text_list(body.input, "input")
    spec = reader.encoder
    if reader.tokenises and spec is not None and spec.classifier is None:
        prompt = embedding.find_prompt(spec, body.prompt_name)
        texts = embedding.tokenize_texts(
            reader.tokenizer, spec, texts, truncate=body.truncate, field="input", prompt=prompt
        )
    body.input = ""
    return body, texts


async def encode(service: Service, call: HttpRequest) -> Response:
    """Returns embeddings, or the outputs of a reward model, in SGLang's form; with
    `--encoder-only`, features of media (features.py).
    """
    if service.engine.config.encoder_only:
        return await features.encode(service, call)
    body = await read_record(service, call, ENCODE)
    if (body.text is None) == (body.input_ids is None):
        raise ParameterError(
            "text",
            "is missing."
            if body.text is None
            else "and input_ids are both given. Give one of them.",
        )
    spec = service.engine.core.encoder
    if spec is None or spec.classifier is None:
        options: Any = {
            "dimensions": body.dimensions,
            "prompt_name": body.prompt_name,
            "lora_path": body.lora_path,
        }
        return await compute_sglang_response(
            service, body, partial(embedding.embeddings, **options)
        )
    for name in ("dimensions", "prompt_name"):
        if getattr(body, name) is not None:
            raise ParameterError(
                name,
                f"{service.model_name} gives a number for each label, not vectors. Leave it out.",
            )
    return await compute_sglang_response(
        service, body, partial(embedding.classifier_outputs, plain=True, lora_path=body.lora_path)
    )


async def compute_sglang_response(
    service: Service, body: NativeTexts, compute: Callable[..., embedding.Numbers]
) -> Response:
    """Computes a response in SGLang's form. `compute` is `embedding.embeddings` or
    `embedding.classifier_outputs`.
    """
    field = "input_ids" if body.text is None else "text"
    given: Any = getattr(body, field)
    require_text_list(given, field)
    compute = partial(compute, truncate=body.truncate, field=field)
    return json_response(
        await service.encode(
            lambda engine: embedding.encode_in_sglang_form(partial(compute, engine), given)
        )
    )


async def rerank(service: Service, call: HttpRequest) -> Response:
    """Orders the documents of a request by their relevance to its query."""
    body = await read_record(service, call, RERANK)
    adapter = service.find_requested_adapter(body.model)
    documents: list[str] = require_text_list(body.documents, "documents")
    if body.top_n is not None and body.top_n < 1:
        raise ParameterError("top_n", f"{body.top_n} is less than 1.")
    pairs = [(body.query, document) for document in documents]
    scores, tokens = await service.encode(
        embedding.score_text_pairs,
        pairs,
        truncate=body.truncate,
        lora_path=adapter,
        field="documents",
    )
    order = np.argsort(-scores, kind="stable")[: body.top_n].tolist()
    results = [{"index": i, "relevance_score": float(scores[i])} for i in order]
    if body.return_documents:
        for result in results:
            result["document"] = {"text": documents[result["index"]]}
    return json_response(
        {
            "id": f"rerank-{random_id()}",
            "model": service.resolve_answering_model(body.model),
            "usage": embedding_usage(tokens),
            "results": results,
        }
    )


def encode_rows(rows: NDArray[np.float32], form: str | None) -> Sequence[Json]:
    """Encodes rows of numbers in an `encoding_format`: lists, or little-endian float32 in base64."""
    if form == "base64":
        return [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in rows]
    lists: Sequence[Json] = rows.tolist()
    return lists


def require_text_list(given: Any, field: str) -> list[Any]:  # each a text or token ids
    """Returns the texts of a field as a list. Raises ParameterError if there are none or too many."""
    texts = [given] if isinstance(given, str) or is_token_id_list(given) else given
    if not 1 <= len(texts) <= _MAX_TEXTS:
        raise ParameterError(field, f"has {len(texts):,} texts. Give 1 to {_MAX_TEXTS:,}.")
    return texts


def embedding_usage(tokens: Sequence[int]) -> dict[str, int]:
    """Returns OpenAI's usage object for texts with the given numbers of tokens."""
    return {"prompt_tokens": sum(tokens), "completion_tokens": 0, "total_tokens": sum(tokens)}


ROUTES = (
    Route(
        "/v1/embeddings",
        embeddings,
        "Embeddings of texts",
        protocol="openai",
        fields=EMBEDDINGS,
        counts_as_open=True,
    ),
    Route(
        "/encode",
        encode,
        "Embeddings or rewards of texts",
        ("POST", "PUT"),
        fields=ENCODE,
        counts_as_open=True,
    ),
    *(
        Route(
            path,
            rerank,
            "Order documents by a query",
            methods,
            "openai",
            fields=RERANK,
            counts_as_open=True,
        )
        for path, methods in (("/v1/rerank", ("POST", "PUT")), ("/rerank", ("POST",)))
    ),
)
