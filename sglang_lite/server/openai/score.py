"""Scores of given texts: how likely each is after a prompt."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import partial

import msgspec
from starlette.responses import Response

from sglang_lite.engine import encoding
from sglang_lite.protocol import Generation, ParameterError, SamplingParams
from sglang_lite.runtime.core.submission import GenerateRequest
from sglang_lite.server.fields import GATEWAY_NEUTRAL, Fields
from sglang_lite.server.routes import Call, Route, answer
from sglang_lite.server.service import Service

_LONGEST_S = 600.0
_MOST_TEXTS = 1024  # that are scored together: each is a request of the engine


class ScoreRequest(msgspec.Struct, kw_only=True):
    """Texts that are to be scored: our `continuations` of a `prompt`; labels after SGLang's `query` and `items`; or
    vLLM's pairs of `text_1` and `text_2`, by a cross-encoder."""

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


def softmax(logprobs: Sequence[float]) -> list[float] | None:
    """Shares of log-probabilities; None where there are none."""
    top = max(logprobs)
    if not math.isfinite(top):
        return None
    weights = [math.exp(each - top) for each in logprobs]
    total = sum(weights)
    return [weight / total for weight in weights]


async def score(service: Service, call: Call) -> Response:
    """Scores texts."""
    body = call.read(SCORE)
    service.check_model(body.model)
    if body.text_1 is not None or body.text_2 is not None:
        return await _pairs(service, body)
    ours = {"prompt": body.prompt, "continuations": body.continuations}
    theirs = {
        "query": body.query, "items": body.items, "label_token_ids": body.label_token_ids,
        "apply_softmax": body.apply_softmax, "item_first": body.item_first,
    }  # fmt: skip
    if any(value is not None for value in ours.values()):
        for name, value in theirs.items():
            if value is not None:
                raise ParameterError(name, "and continuations are both given.", hint="Give prompt and continuations.")
        return await _continuations(service, body)
    for name in ("query", "items", "label_token_ids"):
        if theirs[name] is None:
            raise ParameterError(name, "is missing.", hint="Or give prompt and continuations.")
    return await _labels(service, body)


async def _pairs(service: Service, body: ScoreRequest) -> Response:
    """Scores of pairs; one text against several, or as many against as many."""
    for name in ("prompt", "continuations", "query", "items", "label_token_ids", "apply_softmax", "item_first"):
        if getattr(body, name) is not None:
            raise ParameterError(name, "and text_1 are both given.", hint="Give text_1 and text_2.")
    for name in ("text_1", "text_2"):
        if not getattr(body, name):
            raise ParameterError(name, "is missing.")
    first, second = ([text] if isinstance(text, str) else text or [] for text in (body.text_1, body.text_2))
    if isinstance(body.text_1, str):
        first *= len(second)
    if len(first) != len(second):
        raise ParameterError("text_2", f"has {len(second)} texts, text_1 has {len(first)}.")
    if len(first) > _MOST_TEXTS:
        raise ParameterError("text_2", f"has {len(second):,} texts; 1 to {_MOST_TEXTS:,} are taken.")
    read = partial(encoding.pair_scores, service.engine, list(zip(first, second)), field="text_2")
    scores, tokens = await service.ask(read, at_most_s=_LONGEST_S)
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores.tolist())]
    usage = {"prompt_tokens": sum(tokens), "completion_tokens": 0, "total_tokens": sum(tokens)}
    return answer({"object": "list", "model": service.model_name, "data": data, "usage": usage})


async def _continuations(service: Service, body: ScoreRequest) -> Response:
    texts = body.continuations
    if not texts or not all(texts) or len(texts) > _MOST_TEXTS:
        raise ParameterError("continuations", f"1 to {_MOST_TEXTS:,} are needed, and none empty.")
    selection = await service.running.select(body.prompt or "", texts)
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
    counts = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": 0, "total_tokens": usage.prompt_tokens,
              "prompt_tokens_details": {"cached_tokens": usage.cached_tokens}}  # fmt: skip
    return answer({"object": "score", "model": service.model_name, "scores": scores, "usage": counts})


async def _labels(service: Service, body: ScoreRequest) -> Response:
    """Probability of each label as the next token, after the query with each item."""
    assert body.query is not None
    labels = body.label_token_ids
    size = service.engine.vocab_size
    if not labels:
        raise ParameterError("label_token_ids", "is empty.")
    for label in labels:
        if not 0 <= label < size:
            raise ParameterError("label_token_ids", f"{label} is no token id (0 to {size - 1:,}).")
    items = [body.items] if isinstance(body.items, str) else body.items or []
    if not 1 <= len(items) <= _MOST_TEXTS:
        raise ParameterError("items", f"1 to {_MOST_TEXTS:,} are needed.")
    params = SamplingParams(
        max_tokens=1, temperature=1.0, top_p=1.0, seed=0, ignore_eos=True, return_logprob=True,
        token_ids_logprob=tuple(labels),
    )  # fmt: skip
    prompts = [_prompt(body.query, item, first=bool(body.item_first)) for item in items]
    found = await asyncio.gather(*(service.running.results(GenerateRequest(prompt, params)) for prompt in prompts))
    scores = [_label_scores(generations[0], labels, normalised=bool(body.apply_softmax)) for generations in found]
    usages = [generations[0].usage for generations in found]
    prompt = sum(usage.prompt_tokens for usage in usages)
    counts = {"prompt_tokens": prompt, "completion_tokens": 0, "total_tokens": prompt,
              "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)}}  # fmt: skip
    return answer({"object": "scoring", "model": service.model_name, "scores": scores, "usage": counts})


def _prompt(query: str | list[int], item: str | list[int], *, first: bool) -> str | list[int]:
    parts = (item, query) if first else (query, item)
    if isinstance(parts[0], str) and isinstance(parts[1], str):
        return parts[0] + parts[1]
    if isinstance(parts[0], list) and isinstance(parts[1], list):
        return parts[0] + parts[1]
    raise ParameterError("items", "are texts where query is a text, and lists of ids where it is one.")


def _label_scores(generation: Generation, labels: Sequence[int], *, normalised: bool) -> list[float]:
    known = {id: logprob for logprob, id, _ in generation.output_logprobs[0].ids}
    logprobs = [known[label] for label in labels]
    if normalised and (shares := softmax(logprobs)) is not None:
        return shares
    return [math.exp(each) for each in logprobs]


ROUTES = (Route("/v1/score", score, "Score texts", protocol="openai", fields=SCORE, works=True),)
