"""Sampling parameters of a generation."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final


class Unset(enum.Enum):
    """The type of UNSET: "the caller said nothing", which is not the same as any default."""

    UNSET = "UNSET"

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset.UNSET


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a generation is sampled and when it ends. UNSET means "the backend's documented default".

    Attributes:
        max_tokens: most tokens to generate, ≥ 0 (local default 128).
        min_tokens: no end-of-sequence and no stop before this many tokens (0).
        n: how many independent samples, ≥ 1 (1).
        stop: strings that end the generation; matched on text and not part of the result.
        stop_token_ids: token ids that end it.
        stop_regex: patterns of Python's `re` that end it, like `stop`: as soon as the text contains a match.
        include_stop: keep what was matched, be it text or a token's, in the text (False).
        ignore_eos: go on after an end-of-sequence token (False).
        skip_special_tokens: leave special tokens out of the text (True).
        temperature: 0 is greedy (1.0).
        top_p: in (0, 1] (1.0).
        top_k: -1 or 0 for all (-1).
        min_p: drop tokens under min_p x the largest probability, in [0, 1] (0.0).
        frequency_penalty: in [-2, 2], per occurrence in the output (0.0).
        presence_penalty: in [-2, 2], once for tokens in the output (0.0).
        repetition_penalty: in (0, 2], for tokens in prompt or output (1.0).
        logit_bias: (token id, what is added to its logit) pairs.
        seed: draws depend on (seed, position) alone. UNSET: a fresh seed per request.
        return_logprob: report log-probabilities of generated tokens (False).
        logprob_start_len: also report those of prompt tokens from this position on (-1: none).
        top_logprobs_num: with `return_logprob`, the k most likely tokens at each position (0).
        token_ids_logprob: with `return_logprob`, the log-probabilities of these ids at each position.
        return_text_in_logprobs: add each token's text (False).
    """

    max_tokens: int | Unset = UNSET
    min_tokens: int | Unset = UNSET
    n: int | Unset = UNSET
    stop: tuple[str, ...] | Unset = UNSET
    stop_token_ids: tuple[int, ...] | Unset = UNSET
    stop_regex: tuple[str, ...] | Unset = UNSET
    include_stop: bool | Unset = UNSET
    ignore_eos: bool | Unset = UNSET
    skip_special_tokens: bool | Unset = UNSET
    temperature: float | Unset = UNSET
    top_p: float | Unset = UNSET
    top_k: int | Unset = UNSET
    min_p: float | Unset = UNSET
    frequency_penalty: float | Unset = UNSET
    presence_penalty: float | Unset = UNSET
    repetition_penalty: float | Unset = UNSET
    logit_bias: tuple[tuple[int, float], ...] | Unset = UNSET
    seed: int | Unset = UNSET
    return_logprob: bool | Unset = UNSET
    logprob_start_len: int | Unset = UNSET
    top_logprobs_num: int | Unset = UNSET
    token_ids_logprob: tuple[int, ...] | Unset = UNSET
    return_text_in_logprobs: bool | Unset = UNSET
