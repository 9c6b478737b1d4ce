"""Selections that take more than a single generation: from the alternatives for one token, or step
by step with logit biases.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_lite.lang.backend.base import collect_single_answer
from sglang_lite.lang.backend.capabilities import Demands
from sglang_lite.lang.backend.ladder.strategy import Strategy
from sglang_lite.lang.backend.remote.serving import add_strategy_to_meta, append_to_user_turn, serve
from sglang_lite.lang.backend.token_counts import TiktokenEncoding
from sglang_lite.lang.results import with_warnings
from sglang_lite.protocol import (
    Choices,
    ChoiceScore,
    Generation,
    ParameterError,
    Prompt,
    Selection,
    Span,
    TokenLogprob,
    ValueValidationError,
)
from sglang_lite.protocol.anything import Foreign
from sglang_lite.protocol.results import total_usage

if TYPE_CHECKING:
    from sglang_lite.lang.backend.remote.backend import RemoteBackend

MIN_LOGPROB = -1e4  # instead of the logarithm of 0
_BIAS = 100.0  # the largest bias that OpenAI accepts: no other token is drawn


def validate_tokenizer(tokenizer: Foreign) -> TiktokenEncoding | None:
    """Checks a tokenizer that a user has passed, and returns it. None is allowed. Raises
    ParameterError if the tokenizer lacks `encode` or `decode`.
    """
    has = all(callable(getattr(tokenizer, name, None)) for name in ("encode", "decode"))
    if tokenizer is not None and not has:
        problem = f"a {type(tokenizer).__name__} has no encode and decode."
        hint = "Give one that has them, such as tiktoken.encoding_for_model(…)."
        raise ParameterError("tokenizer", problem, hint=hint)
    found: TiktokenEncoding | None = tokenizer
    return found


async def select_by_strategy(
    backend: RemoteBackend, prompt: Prompt, demands: Demands, strategy: Strategy
) -> Selection:
    """Makes the model choose, using the strategy of the selection.

    Raises:
        ValueValidationError: the answer is none of the choices.
    """
    assert isinstance(demands.constraint, Choices)
    choices = demands.constraint.options
    if strategy.name == "token_logprobs":
        return await _select_by_first_token(backend, prompt, demands, strategy, choices)
    if strategy.name == "logit_bias_steps":
        return await _select_token_by_token(backend, prompt, demands, strategy, choices)
    picked = await collect_single_answer(
        serve(backend, prompt, demands.params, demands.constraint, strategy, stream=False)
    )
    return Selection((), picked.usage, picked.text, picked.meta)


# ------------------------------------------------------------------------- one token's alternatives


async def _select_by_first_token(
    backend: RemoteBackend,
    prompt: Prompt,
    demands: Demands,
    strategy: Strategy,
    choices: Sequence[str],
) -> Selection:
    """Requests a single token and its likeliest alternatives. Each of these tokens counts for the
    choice that begins with it.
    """
    shown = append_to_user_turn(
        prompt,
        f"Answer with exactly one of these texts, and with nothing else:\n{_as_json_list(choices)}",
    )
    count = strategy.alternatives
    params = msgspec.structs.replace(
        demands.params, max_tokens=1, return_logprob=True, top_logprobs_num=count
    )
    answer = await collect_single_answer(
        backend.call_api(shown, params, strategy, constrained=False, stream=False)
    )
    found = _choice_probabilities(answer.output_logprobs, choices)
    if not any(found):
        if strategy.fallback is None:
            told_first = answer.output_logprobs[0].text if answer.output_logprobs else answer.text
            raise _no_choice_error(choices, f"the answer begins with {told_first!r:.60}", answer)
        other = await select_by_strategy(backend, prompt, demands, strategy.fallback)
        meta = {**other.meta, "calls": other.meta["calls"] + 1}
        return msgspec.structs.replace(
            other, usage=total_usage([answer.usage, other.usage]), meta=meta
        )
    scores = tuple(
        ChoiceScore(choice, (index,), (math.log(each) if each else MIN_LOGPROB,))
        for index, (choice, each) in enumerate(zip(choices, found))
    )
    unseen = [choice for choice, each in zip(choices, found) if not each]
    warnings = (
        [f"not among the {count} likeliest beginnings: {_as_json_list(unseen)}"] if unseen else []
    )
    return Selection(
        scores,
        answer.usage,
        None,
        with_warnings(add_strategy_to_meta(answer.meta, strategy, 1), *warnings),
    )


def _choice_probabilities(logprobs: Sequence[TokenLogprob], choices: Sequence[str]) -> list[float]:
    """Returns for each choice the probability that the answer begins with it. No token may begin
    two of the choices (`first_characters_differ`).
    """
    found = [0.0] * len(choices)
    first = logprobs[0] if logprobs else None
    alternatives = (
        () if first is None else first.top or ((first.logprob, first.token_id, first.text),)
    )
    for logprob, _, text in alternatives:
        beginning = (text or "").lstrip()
        for index, choice in enumerate(choices):
            if beginning and logprob is not None and choice.lstrip().startswith(beginning):
                found[index] += math.exp(logprob)
    return found


# ---------------------------------------------------------------------------------- biases by steps


async def _select_token_by_token(
    backend: RemoteBackend,
    prompt: Prompt,
    demands: Demands,
    strategy: Strategy,
    choices: Sequence[str],
) -> Selection:
    """Builds a choice token by token. Where the remaining choices differ, one call generates the
    next token, with a bias toward their tokens. Where they agree, no call is needed.
    """
    tokenizer = backend.tokenizer
    assert tokenizer is not None  # a condition of this strategy
    remaining = {choice: tuple(tokenizer.encode(choice)) for choice in choices}
    calls = 0
    usages = []
    meta = dict[str, Any]()
    at = 0
    while len(remaining) > 1:
        tokens = sorted({ids[at] for ids in remaining.values()})
        picked_token = tokens[0]
        if len(tokens) > 1:
            beginning = tokenizer.decode(next(iter(remaining.values()))[:at])
            bias = tuple((token, _BIAS) for token in tokens)
            params = msgspec.structs.replace(demands.params, max_tokens=1, logit_bias=bias)
            spans = (*prompt.spans, Span(beginning, special=False)) if beginning else prompt.spans
            shown = msgspec.structs.replace(prompt, spans=spans, partial=prompt.partial + beginning)
            answer = await collect_single_answer(
                backend.call_api(shown, params, strategy, constrained=False, stream=False)
            )
            calls = calls + 1
            meta = dict(answer.meta)
            usages.append(answer.usage)
            texts = [token for token in tokens if tokenizer.decode((token,)) == answer.text]
            if len(texts) != 1:
                raise _no_choice_error(
                    choices, f"{answer.text!r:.60} followed {beginning!r:.60}", answer
                )
            (picked_token,) = texts
        remaining = {choice: ids for choice, ids in remaining.items() if ids[at] == picked_token}
        at += 1
    (picked,) = remaining
    return Selection((), total_usage(usages), picked, add_strategy_to_meta(meta, strategy, calls))


def _as_json_list(choices: Sequence[str]) -> str:
    return json.dumps(list(choices), ensure_ascii=False)


def _no_choice_error(choices: Sequence[str], why: str, answer: Generation) -> ValueValidationError:
    hint = "Ask for one of them in the prompt, or use another backend for this node."
    error = ValueValidationError(
        f"none of {_as_json_list(choices):.200} was chosen: {why}.", text=answer.text, hint=hint
    )
    error.usage = answer.usage
    return error
