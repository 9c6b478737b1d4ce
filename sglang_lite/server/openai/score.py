"""Route that scores given texts by their probability after a prompt."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.responses import Response

from sglang_lite.engine import embedding
from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.core.submission import SelectRequest
from sglang_lite.server.endpoint import HttpRequest, Route, json_response, read_record
from sglang_lite.server.fields import GATEWAY_NEUTRAL, Fields
from sglang_lite.server.service import Service
from sglang_lite.server.sglang.labels import label_logprobs, label_requests, label_scores

_MAX_TEXTS = 1024  # texts that are scored together, each as one request of the engine


class ScoreRequest(msgspec.Struct, kw_only=True):
    """Request for scores, in one of three forms: `continuations` of a `prompt` (this server's),
    labels after `query` and `items` (SGLang's), or pairs of `text_1` and `text_2` for a
    cross-encoder (vLLM's).
    """

    model: str | None = None
    prompt: str | None = None
    continuations: list[str] | None = None
    query: str | list[int] | None = None
    items: str | list[str | list[int]] | None = None
    label_token_ids: list[int] | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None


SCORE: Fields[ScoreRequest] = Fields(ScoreRequest, GATEWAY_NEUTRAL, {})


async def score(service: Service, call: HttpRequest) -> Response:
    """Scores the texts of a request."""
    body = await read_record(service, call, SCORE)
    service.find_requested_adapter(body.model)  # rejects an unknown model
    if body.text_1 is not None or body.text_2 is not None:
        return await _score_pairs(service, body)
    ours = {"prompt": body.prompt, "continuations": body.continuations}
    theirs = {
        "query": body.query,
        "items": body.items,
        "label_token_ids": body.label_token_ids,
        "apply_softmax": body.apply_softmax,
        "item_first": body.item_first,
    }
    if any(value is not None for value in ours.values()):
        for name, value in theirs.items():
            if value is not None:
                raise ParameterError(
                    name, "and continuations are both given.", hint="Give prompt and continuations."
                )
        return await _score_continuations(service, body)
    for name in ("query", "items", "label_token_ids"):
        if theirs[name] is None:
            raise ParameterError(name, "is missing.", hint="Or give prompt and continuations.")
    return await _score_labels(service, body)


async def _score_pairs(service: Service, body: ScoreRequest) -> Response:
    """Scores pairs of texts with a cross-encoder. `text_1` is one text to pair with each of
    `text_2`, or a list of the same length.
    """
    for name in (
        "prompt",
        "continuations",
        "query",
        "items",
        "label_token_ids",
        "apply_softmax",
        "item_first",
    ):
        if getattr(body, name) is not None:
            raise ParameterError(name, "and text_1 are both given.", hint="Give text_1 and text_2.")
    for name in ("text_1", "text_2"):
        if not getattr(body, name):
            raise ParameterError(name, "is missing.")
    first, second = (
        [text] if isinstance(text, str) else text or [] for text in (body.text_1, body.text_2)
    )
    if isinstance(body.text_1, str):
        first *= len(second)
    if len(first) != len(second):
        raise ParameterError(
            "text_2", f"has {len(second)} texts, but text_1 has {len(first)}. Give as many."
        )
    if len(first) > _MAX_TEXTS:
        raise ParameterError("text_2", f"has {len(second):,} texts. Give 1 to {_MAX_TEXTS:,}.")
    adapter = service.find_requested_adapter(body.model)
    pairs = list(zip(first, second))
    scores, tokens = await service.encode(
        embedding.score_text_pairs, pairs, lora_path=adapter, field="text_2"
    )
    data = [
        {"index": i, "object": "score", "score": score} for i, score in enumerate(scores.tolist())
    ]
    usage = {"prompt_tokens": sum(tokens), "completion_tokens": 0, "total_tokens": sum(tokens)}
    return json_response(
        {
            "object": "list",
            "model": service.resolve_answering_model(body.model),
            "data": data,
            "usage": usage,
        }
    )


async def _score_continuations(service: Service, body: ScoreRequest) -> Response:
    texts = body.continuations
    if not texts or not all(texts) or len(texts) > _MAX_TEXTS:
        raise ParameterError(
            "continuations", f"Give 1 to {_MAX_TEXTS:,} texts, none of them empty."
        )
    selection = await service.async_engine.select(
        SelectRequest(
            body.prompt or "", texts, lora_path=service.find_requested_adapter(body.model)
        )
    )
    scores = [
        {
            "index": i,
            "text": each.text,
            "logprob": sum(each.logprobs),
            "token_ids": each.token_ids,
            "token_logprobs": each.logprobs,
        }
        for i, each in enumerate(selection.scores)
    ]
    usage = selection.usage
    counts = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": 0,
        "total_tokens": usage.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    return json_response(
        {
            "object": "score",
            "model": service.resolve_answering_model(body.model),
            "scores": scores,
            "usage": counts,
        }
    )


async def _score_labels(service: Service, body: ScoreRequest) -> Response:
    """Returns the probability of each label as the next token after the query and each item."""
    assert body.query is not None
    assert body.label_token_ids is not None
    items = [body.items] if isinstance(body.items, str) else body.items or []
    if not 1 <= len(items) <= _MAX_TEXTS:
        raise ParameterError("items", f"Give 1 to {_MAX_TEXTS:,} texts.")
    size = service.engine.vocab_size
    first = bool(body.item_first)
    calls = [
        service.select_requested_adapter(body.model, each)
        for each in label_requests(body.query, items, body.label_token_ids, size, item_first=first)
    ]
    found = await asyncio.gather(*(service.async_engine.results(call) for call in calls))
    rows = [
        label_logprobs(call, generations[0].output_logprobs[0].ids)
        for call, generations in zip(calls, found)
    ]
    scores = [label_scores(row, apply_softmax=bool(body.apply_softmax)) for row in rows]
    usages = [generations[0].usage for generations in found]
    prompt = sum(usage.prompt_tokens for usage in usages)
    counts = {
        "prompt_tokens": prompt,
        "completion_tokens": 0,
        "total_tokens": prompt,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }
    return json_response(
        {
            "object": "scoring",
            "model": service.resolve_answering_model(body.model),
            "scores": scores,
            "usage": counts,
        }
    )


ROUTES = (
    Route("/v1/score", score, "Score texts", protocol="openai", fields=SCORE, counts_as_open=True),
)
