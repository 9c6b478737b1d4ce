"""Scores by labels: the probabilities of some tokens after a prompt, in `Engine.score` and a
server's `/v1/score`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_lite.errors import short_repr
from sglang_lite.protocol import ParameterError, Prompt, Unset
from sglang_lite.protocol.anything import Json
from sglang_lite.runtime.core.submission import GenerateRequest
from sglang_lite.server.sglang.request import arrays_to_lists, read_request

# SGLang's other parameters, and the values that mean "not set"
_NOT_SET: Mapping[str, tuple[object, ...]] = {
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
        scores: for each item a list with the probability of each label, or its share among the
            labels.
        prompt_tokens: total number of tokens of the prompts.
        token_logprobs: for each item a list with the log-probability of each label, if requested,
            or None.
    """

    scores: list[list[float]]
    prompt_tokens: int
    token_logprobs: list[list[float]] | None = None


@dataclass(frozen=True, slots=True)
class ScoreArguments:
    """Checked arguments of `Engine.score`; without labels, `items` are texts to select from."""

    query: Any  # text, or token ids
    items: list[Any]
    labels: Sequence[int] | Sequence[Sequence[int]] | None
    apply_softmax: bool
    item_first: bool
    temperature: float
    with_logprobs: bool

    def calls(self, vocab_size: int) -> list[GenerateRequest]:
        """Returns the requests that compute the labels' probabilities: see `label_requests`."""
        assert self.labels is not None
        return label_requests(
            self.query, self.items, self.labels, vocab_size, item_first=self.item_first
        )

    def result(
        self, calls: Sequence[GenerateRequest], answers: Sequence[Mapping[str, Json]]
    ) -> ScoreResult:
        """Computes the scores from the answers to `calls`."""
        label_entries = [answer["meta_info"]["output_token_ids_logprobs"][0] for answer in answers]
        rows = list(map(label_logprobs, calls, label_entries))
        scores = [
            label_scores(row, apply_softmax=self.apply_softmax, temperature=self.temperature)
            for row in rows
        ]
        tokens = sum(answer["meta_info"]["prompt_tokens"] for answer in answers)
        return ScoreResult(scores, tokens, rows if self.with_logprobs else None)


def parse_score_arguments(
    query: Prompt | str | Sequence[int] = "",
    items: str | Sequence[str] | Sequence[Sequence[int]] = (),
    label_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    apply_softmax: bool = False,
    item_first: bool = False,
    *,
    temperature: float = 1.0,
    return_token_logprobs: bool = False,
    **unsupported: object,  # SGLang's other parameters, which are refused by name if they are set
) -> ScoreArguments:
    """Checks the given fields, which `Engine.score` documents.

    Raises:
        ParameterError: a field is invalid, unknown, or one of SGLang's that this engine doesn't
            support.
    """
    texts = [items] if isinstance(items, str) else list(items)
    if label_token_ids is None:
        _refuse_label_options(apply_softmax, item_first, temperature, return_token_logprobs)
    for name, value in unsupported.items():
        if name not in _NOT_SET:
            raise ParameterError(name, "score has no such parameter.")
        if value not in _NOT_SET[name]:
            raise ParameterError(name, "is not supported by this engine.")
    if label_token_ids is not None:
        if (
            isinstance(temperature, bool)
            or not isinstance(temperature, int | float)
            or not 0 < temperature < math.inf
        ):
            raise ParameterError(
                "temperature",
                f"{temperature!r:.60} is no number above 0. Use 1.0 for plain shares.",
            )
        if temperature != 1 and not apply_softmax:
            raise ParameterError(
                "temperature", "has an effect only with apply_softmax=True. Set both, or neither."
            )
    elif not isinstance(query, Prompt | str) or not all(isinstance(text, str) for text in texts):
        raise ParameterError(
            "label_token_ids", "is missing. A query or items of token ids need it."
        )
    return ScoreArguments(
        query, texts, label_token_ids, apply_softmax, item_first, temperature, return_token_logprobs
    )


def _refuse_label_options(
    apply_softmax: bool, item_first: bool, temperature: float, with_logprobs: bool
) -> None:
    """Raises ParameterError if a parameter about labels is set, although no labels were given."""
    given = {
        "apply_softmax": apply_softmax,
        "item_first": item_first,
        "return_token_logprobs": with_logprobs,
    }
    name = next(
        (name for name, value in given.items() if value),
        "temperature" if temperature != 1.0 else None,
    )
    if name is not None:
        raise ParameterError(
            name, "has an effect only with label_token_ids.", hint="Give them, or leave it out."
        )


def label_requests(
    query: Prompt | str | Sequence[int],
    texts: Sequence[object],
    labels: Sequence[int] | Sequence[Sequence[int]],
    vocab_size: int,
    *,
    item_first: bool,
) -> list[GenerateRequest]:
    """Returns one request for each item. It generates no tokens, and reports the log-probabilities
    of the labels.

    Args:
        query, texts, labels, item_first: arguments of `score`.

    Raises:
        ParameterError: texts and token ids are mixed, there are no labels, or a label isn't a token
            id.
    """
    query = arrays_to_lists(query)
    texts = arrays_to_lists(texts)
    labels = arrays_to_lists(labels)
    kind: Any = str if isinstance(query, str) else list  # arrays and tuples count as lists
    if not isinstance(query, str | list | tuple) or not all(
        isinstance(each, str) == (kind is str) for each in texts
    ):
        raise ParameterError("items", "query and items must both be text, or both be token ids.")
    if not labels:
        raise ParameterError("label_token_ids", "is empty. Give at least one token id.")
    several = isinstance(labels[0], list | tuple)
    if several and len(labels) != len(texts):
        raise ParameterError("label_token_ids", f"{len(labels)} lists for {len(texts)} items.")
    pairs: list[tuple[Any, Any]] = [
        (each, query) if item_first else (query, each) for each in texts
    ]
    prompts: list[Any] = [kind(first) + kind(second) for first, second in pairs]
    where = {"prompt": prompts} if kind is str else {"input_ids": prompts}
    if not prompts:
        return []
    labels_by_item: list[Any] = list(labels) if several else [labels] * len(prompts)
    for label in itertools.chain(*labels_by_item) if several else labels:
        if type(label) is not int or not 0 <= label < vocab_size:
            raise ParameterError(
                "label_token_ids", f"{short_repr(label)} is no token id (0 to {vocab_size - 1:,})."
            )
    fields: Any = {**where, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    return read_request(**fields, token_ids_logprob=labels_by_item).calls


def label_logprobs(
    call: GenerateRequest, label_entries: Iterable[tuple[float, int, str | None]]
) -> list[float]:
    """Returns the log-probabilities of a request's labels, in the order of the labels.

    Args:
        label_entries: log-probability, id and text of each label, in any order.
    """
    logprob_by_id = {token: logprob for logprob, token, _ in label_entries}
    labels = call.params.token_ids_logprob
    return [logprob_by_id[label] for label in labels] if not isinstance(labels, Unset) else []


def label_scores(
    logprobs: Sequence[float], *, apply_softmax: bool, temperature: float = 1.0
) -> list[float]:
    """Computes the scores of labels from their log-probabilities, as `score` returns them."""
    top = max(logprobs)
    if not apply_softmax or not math.isfinite(top):
        return [math.exp(each) for each in logprobs]
    weights = [math.exp((each - top) / temperature) for each in logprobs]
    total = sum(weights)
    return [weight / total for weight in weights]
