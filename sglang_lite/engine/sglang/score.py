"""`Engine.score`, `async_score` and `rerank`: probabilities of labels or texts after a prompt, and scores of pairs."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_lite.engine import embedding
from sglang_lite.engine.sglang.api import plain_ids, read_request
from sglang_lite.errors import shown
from sglang_lite.protocol import ParameterError, Prompt, Unset
from sglang_lite.protocol.anything import Json
from sglang_lite.random_ids import random_id
from sglang_lite.runtime.core.submission import GenerateRequest

if TYPE_CHECKING:
    from sglang_lite.engine.engine import Engine

_NOT_SET: Mapping[str, tuple[object, ...]] = {  # SGLang's other parameters, and the values that mean "not set"
    **dict.fromkeys((
        "embed_override_token_id", "query_embed_overrides", "item_embed_overrides", "score_extraction_token_id",
        "stacked_query_item_embed_overrides",
    ), (None,)),
    "return_pooled_hidden_states": (False,),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """Scores of items by the probabilities of labels.

    Attributes:
        scores: for each item a list with the probability of each label, or its share among the labels.
        prompt_tokens: total number of tokens of the prompts.
        token_logprobs: for each item a list with the log-probability of each label, if requested, or None.
    """

    scores: list[list[float]]
    prompt_tokens: int
    token_logprobs: list[list[float]] | None = None


def score(
    self: Engine,
    query: Prompt | str | Sequence[int] = "",
    items: str | Sequence[str] | Sequence[Sequence[int]] = (),
    label_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    apply_softmax: bool = False,
    item_first: bool = False,
    *,
    temperature: float = 1.0,
    return_token_logprobs: bool = False,
    **unsupported: object,  # SGLang's other parameters, which are refused by name if they are set
) -> Any:  # a ScoreResult, or a tuple of ChoiceScores
    """Probabilities of label tokens after `query` and each item; without labels, scores of the items as texts after the
    query.

    Args:
        query: prompt, as text or token ids.
        items: texts to append to the query, or token ids if the query is ids; a single text counts as a list of one.
        label_token_ids: ids of the labels, or a list of ids for each item; None scores the items, as `select` does.
        apply_softmax: whether to return shares among the labels, instead of probabilities among all tokens.
        item_first: whether to put items before the query.
        temperature: temperature of the softmax of `apply_softmax`.
        return_token_logprobs: whether to return log-probabilities, too.

    Returns:
        A ScoreResult with labels; a tuple with the ChoiceScore of each item without.

    Raises:
        ParameterError, OverloadedError, EngineClosedError: as `submit`.
    """
    self.core.check_wait("score")
    texts = [items] if isinstance(items, str) else list(items)
    if label_token_ids is None:
        _check_labels_only(apply_softmax, item_first, temperature, return_token_logprobs, unsupported)
        if not isinstance(query, Prompt | str) or not all(isinstance(text, str) for text in texts):
            raise ParameterError("label_token_ids", "is missing. A query or items of token ids need it.")
        return self.select(query, [text for text in texts if isinstance(text, str)]).scores
    _check_others(unsupported)
    _check_temperature(temperature, apply_softmax=apply_softmax)
    calls = label_calls(query, texts, label_token_ids, self.vocab_size, item_first=item_first)
    from sglang_lite.engine.sglang import offline  # imports tokenizers

    answers = offline.generate(self.core, calls, is_list=True, stream=False) if calls else []
    return _result(calls, answers, apply_softmax, temperature, with_logprobs=return_token_logprobs)


async def async_score(
    self: Engine,
    query: Prompt | str | Sequence[int] = "",
    items: str | Sequence[str] | Sequence[Sequence[int]] = (),
    label_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    apply_softmax: bool = False,
    item_first: bool = False,
    *,
    temperature: float = 1.0,
    return_token_logprobs: bool = False,
    **unsupported: object,  # SGLang's other parameters, which are refused by name if they are set
) -> Any:  # a ScoreResult, or a tuple of ChoiceScores
    """Asynchronous form of `score`, for asyncio."""
    if label_token_ids is None:
        return await asyncio.to_thread(
            score, self, query, items, None, apply_softmax, item_first, temperature=temperature,
            return_token_logprobs=return_token_logprobs, **unsupported,
        )  # fmt: skip
    self.core.check_open()
    texts = [items] if isinstance(items, str) else list(items)
    _check_others(unsupported)
    _check_temperature(temperature, apply_softmax=apply_softmax)
    calls = label_calls(query, texts, label_token_ids, self.vocab_size, item_first=item_first)
    from sglang_lite.engine.sglang import offline  # imports tokenizers

    answers = await offline.async_generate(self.core, calls, is_list=True, stream=False) if calls else []
    return _result(calls, answers, apply_softmax, temperature, with_logprobs=return_token_logprobs)


def rerank(self: Engine, prompt: Sequence[Sequence[str]]) -> list[dict[str, Json]]:
    """Scores of pairs of texts by a cross-encoder (`score_pairs`), as SGLang's dictionaries.

    Args:
        prompt: pairs of a query and a document.

    Raises:
        CapabilityError, ParameterError, EngineClosedError: as `score_pairs`.
    """
    pairs: list[Any] = [tuple(pair) if isinstance(pair, list) else pair for pair in prompt]
    scores, tokens = embedding.pair_scores(self, pairs, field="prompt")
    return [
        {"embedding": score, "meta_info": {"id": random_id(), "prompt_tokens": count}}
        for score, count in zip(scores.tolist(), tokens)
    ]


def _check_labels_only(
    apply_softmax: bool, item_first: bool, temperature: float, with_logprobs: bool, others: Mapping[str, object]
) -> None:
    """Raises ParameterError if a parameter about labels is set, although no labels were given."""
    given = {"apply_softmax": apply_softmax, "item_first": item_first, "return_token_logprobs": with_logprobs}
    name = next((name for name, value in given.items() if value), "temperature" if temperature != 1.0 else None)
    if name is not None:
        raise ParameterError(name, "has an effect only with label_token_ids.", hint="Give them, or leave it out.")
    _check_others(others)


def _check_others(others: Mapping[str, object]) -> None:
    for name, value in others.items():
        if name not in _NOT_SET:
            raise ParameterError(name, "score has no such parameter.")
        if value not in _NOT_SET[name]:
            raise ParameterError(name, "is not supported by this engine.")


def _check_temperature(temperature: object, *, apply_softmax: bool) -> None:
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 < temperature < math.inf:
        raise ParameterError("temperature", f"{temperature!r:.60} is no number above 0. Use 1.0 for plain shares.")
    if temperature != 1 and not apply_softmax:
        raise ParameterError("temperature", "has an effect only with apply_softmax=True. Set both, or neither.")


def label_calls(
    query: Prompt | str | Sequence[int],
    texts: Sequence[object],
    labels: Sequence[int] | Sequence[Sequence[int]],
    vocab_size: int,
    *,
    item_first: bool,
) -> list[GenerateRequest]:
    """Requests that generate no tokens and report the log-probabilities of the labels, one for each item.

    Args:
        query, texts, labels, item_first: arguments of `score`.

    Raises:
        ParameterError: texts and token ids are mixed, there are no labels, or a label isn't a token id.
    """
    query, texts, labels = plain_ids(query), plain_ids(texts), plain_ids(labels)
    kind: Any = str if isinstance(query, str) else list  # arrays and tuples count as lists
    if not isinstance(query, str | list | tuple) or not all(isinstance(each, str) == (kind is str) for each in texts):
        raise ParameterError("items", "query and items must both be text, or both be token ids.")
    if not labels:
        raise ParameterError("label_token_ids", "is empty. Give at least one token id.")
    several = isinstance(labels[0], list | tuple)
    if several and len(labels) != len(texts):
        raise ParameterError("label_token_ids", f"{len(labels)} lists for {len(texts)} items.")
    pairs: list[tuple[Any, Any]] = [(each, query) if item_first else (query, each) for each in texts]
    prompts: list[Any] = [kind(first) + kind(second) for first, second in pairs]
    where = {"prompt": prompts} if kind is str else {"input_ids": prompts}
    if not prompts:
        return []
    labels_by_item: list[Any] = list(labels) if several else [labels] * len(prompts)
    for label in itertools.chain(*labels_by_item) if several else labels:
        if type(label) is not int or not 0 <= label < vocab_size:
            raise ParameterError("label_token_ids", f"{shown(label)} is no token id (0 to {vocab_size - 1:,}).")
    fields: Any = {**where, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    return read_request(**fields, token_ids_logprob=labels_by_item)[0]


def _result(
    calls: Sequence[GenerateRequest],
    answers: Sequence[Mapping[str, Any]],
    apply_softmax: bool,
    temperature: float,
    *,
    with_logprobs: bool,
) -> ScoreResult:
    label_entries = [answer["meta_info"]["output_token_ids_logprobs"][0] for answer in answers]
    rows = list(map(label_logprobs, calls, label_entries))
    scores = [label_scores(row, apply_softmax=apply_softmax, temperature=temperature) for row in rows]
    tokens = sum(answer["meta_info"]["prompt_tokens"] for answer in answers)
    return ScoreResult(scores, tokens, rows if with_logprobs else None)


def label_logprobs(call: GenerateRequest, label_entries: Iterable[tuple[float, int, str | None]]) -> list[float]:
    """Log-probabilities of a request's labels, in the order of the labels.

    Args:
        label_entries: log-probability, id and text of each label, in any order.
    """
    logprob_by_id = {token: logprob for logprob, token, _ in label_entries}
    labels = call.params.token_ids_logprob
    return [logprob_by_id[label] for label in labels] if not isinstance(labels, Unset) else []


def label_scores(logprobs: Sequence[float], *, apply_softmax: bool, temperature: float = 1.0) -> list[float]:
    """Scores of labels from their log-probabilities, as `score` returns them."""
    top = max(logprobs)
    if not apply_softmax or not math.isfinite(top):
        return [math.exp(each) for each in logprobs]
    weights = [math.exp((each - top) / temperature) for each in logprobs]
    total = sum(weights)
    return [weight / total for weight in weights]
