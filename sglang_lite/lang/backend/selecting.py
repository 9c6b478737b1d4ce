"""Selections that are not served as one generation: by the alternatives of one token, or by logit biases, step by
step."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from sglang_lite.lang.backend.base_backend import only_answer
from sglang_lite.lang.backend.rung import Demands, Rung
from sglang_lite.lang.backend.serving import rung_metadata, serve, with_words
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
    from sglang_lite.lang.backend.remote import RemoteBackend

MIN_LOGPROB = -1e4  # instead of the logarithm of 0
_BIAS = 100.0  # the largest bias that OpenAI accepts: no other token is drawn


class Tokenizer(Protocol):
    """Tokenizer of a model, with the interface of `tiktoken.encoding_for_model(…)`."""

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of a text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids."""


def checked_tokenizer(given: Foreign) -> Tokenizer | None:
    """Returns a user's tokenizer, or None. Raises ParameterError if it has no `encode` or no `decode`."""
    has = all(callable(getattr(given, name, None)) for name in ("encode", "decode"))
    if given is not None and not has:
        told = f"a {type(given).__name__} has no encode and decode."
        raise ParameterError("tokenizer", told, hint="Give one that has them, such as tiktoken.encoding_for_model(…).")
    found: Tokenizer | None = given
    return found


async def select_by_rung(
    backend: RemoteBackend, prompt: Prompt, asked: Demands, rung: Rung, tokenizer: Tokenizer | None
) -> Selection:
    """Makes the model choose, by the rung of the selection.

    Args:
        tokenizer: tokenizer of the model; the rung "logit_bias_steps" needs it.

    Raises:
        ValueValidationError: the answer is none of the choices.
    """
    assert isinstance(asked.constraint, Choices)
    choices = asked.constraint.options
    if rung.name == "token_logprobs":
        return await _by_first_token(backend, prompt, asked, rung, choices)
    if rung.name == "logit_bias_steps":
        assert tokenizer is not None  # a condition of this rung
        return await _by_steps(backend, prompt, asked, rung, choices, tokenizer)
    picked = await only_answer(serve(backend, prompt, asked.params, asked.constraint, rung, stream=False))
    return Selection((), picked.usage, picked.text, picked.meta)


# -------------------------------------------------------------------------------------------- one token's alternatives


async def _by_first_token(
    backend: RemoteBackend, prompt: Prompt, asked: Demands, rung: Rung, choices: Sequence[str]
) -> Selection:
    """Requests one token with its likeliest alternatives, each of which counts for the choice that it begins."""
    shown = with_words(prompt, f"Answer with exactly one of these texts, and with nothing else:\n{_listed(choices)}")
    params = msgspec.structs.replace(asked.params, max_tokens=1, return_logprob=True, top_logprobs_num=rung.field)
    said = await only_answer(backend.call(shown, params, rung, constrained=False, stream=False))
    found = _scores(said.output_logprobs, choices)
    if not any(found):
        if rung.fallback is None:
            told_first = said.output_logprobs[0].text if said.output_logprobs else said.text
            raise _none_of(choices, f"the answer begins with {told_first!r:.60}", said)
        other = await select_by_rung(backend, prompt, asked, rung.fallback, None)
        meta = {**other.meta, "calls": other.meta["calls"] + 1}
        return msgspec.structs.replace(other, usage=total_usage([said.usage, other.usage]), meta=meta)
    scores = tuple(
        ChoiceScore(choice, (place,), (math.log(each) if each else MIN_LOGPROB,))
        for place, (choice, each) in enumerate(zip(choices, found))
    )
    unseen = [choice for choice, each in zip(choices, found) if not each]
    warnings = [f"not among the {rung.field} likeliest beginnings: {_listed(unseen)}"] if unseen else []
    meta = {**said.meta, **rung_metadata(rung, 1)}
    return Selection(scores, said.usage, None, meta | ({"warnings": warnings} if warnings else {}))


def _scores(said: Sequence[TokenLogprob], choices: Sequence[str]) -> list[float]:
    """Probability that an answer begins with each choice. No token begins two of them (`differ_at_once`)."""
    found = [0.0] * len(choices)
    alternatives = said[0].top or ((said[0].logprob, said[0].token_id, said[0].text),) if said else ()
    for logprob, _, text in alternatives:
        begun = (text or "").lstrip()
        for place, choice in enumerate(choices):
            if begun and logprob is not None and choice.lstrip().startswith(begun):
                found[place] += math.exp(logprob)
    return found


# ----------------------------------------------------------------------------------------------------- biases by steps


async def _by_steps(
    backend: RemoteBackend, prompt: Prompt, asked: Demands, rung: Rung, choices: Sequence[str], tokenizer: Tokenizer
) -> Selection:
    """Follows the choices token by token. If the remaining choices differ at a position, one call generates the token
    there, with a bias for the choices' tokens; if they agree, no call is made."""
    left = {choice: tuple(tokenizer.encode(choice)) for choice in choices}
    calls, usages, meta = 0, [], dict[str, Any]()
    at = 0
    while len(left) > 1:
        tokens = sorted({ids[at] for ids in left.values()})
        taken = tokens[0]
        if len(tokens) > 1:
            begun = tokenizer.decode(next(iter(left.values()))[:at])
            bias = tuple((token, _BIAS) for token in tokens)
            params = msgspec.structs.replace(asked.params, max_tokens=1, logit_bias=bias)
            shown = _continued(prompt, begun)
            said = await only_answer(backend.call(shown, params, rung, constrained=False, stream=False))
            calls, meta = calls + 1, dict(said.meta)
            usages.append(said.usage)
            texts = [token for token in tokens if tokenizer.decode((token,)) == said.text]
            if len(texts) != 1:
                raise _none_of(choices, f"{said.text!r:.60} followed {begun!r:.60}", said)
            (taken,) = texts
        left = {choice: ids for choice, ids in left.items() if ids[at] == taken}
        at += 1
    (picked,) = left
    return Selection((), total_usage(usages), picked, {**meta, **rung_metadata(rung, calls)})


def _continued(prompt: Prompt, text: str) -> Prompt:
    spans = (*prompt.spans, Span(text, special=False)) if text else prompt.spans
    return msgspec.structs.replace(prompt, spans=spans, partial=prompt.partial + text)


def _listed(choices: Sequence[str]) -> str:
    return json.dumps(list(choices), ensure_ascii=False)


def _none_of(choices: Sequence[str], why: str, said: Generation) -> ValueValidationError:
    hint = "Ask for one of them in the prompt, or use another backend for this node."
    error = ValueValidationError(f"none of {_listed(choices):.200} was chosen: {why}.", text=said.text, hint=hint)
    error.usage = said.usage
    return error
