"""Sampling parameters with the engine's defaults filled in and every value checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import regex

from sglang_lite.errors import short_repr
from sglang_lite.protocol import ParameterError, RecordName, SamplingParams
from sglang_lite.protocol.parameter import Exactness, Parameter, SamplingOrder
from sglang_lite.protocol.sampling import PARAMETERS, given_values
from sglang_lite.text.stop import compile_stop_pattern

MAX_STOP_CHARS = 512


@dataclass(frozen=True, slots=True)
class ResolvedParams:
    """SamplingParams in which every UNSET value is replaced by the engine's default."""

    max_tokens: int
    min_tokens: int
    n: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    stop_regex: Mapping[str, regex.Pattern[str]]  # by source of the pattern
    include_stop: bool
    ignore_eos: bool
    skip_special_tokens: bool
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    sampling_order: SamplingOrder | None
    logit_bias: tuple[tuple[int, float], ...]
    allowed_token_ids: tuple[int, ...]
    bad_words: tuple[str, ...]
    repeats: int | None
    thinking: int | tuple[str, ...] | None
    reasoning_format: tuple[str, ...]
    speculation: bool
    seed: int | None
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: tuple[int, ...]
    return_text_in_logprobs: bool
    return_prompt_token_ids: bool
    return_routed_experts: bool
    return_hidden_states: bool
    confidence: bool
    exact: Exactness
    heal: bool
    lora_path: tuple[str, ...]

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5 or self.top_k == 1

    @property
    def sequential(self) -> bool:
        """Whether top-p applies to the probability mass that top-k leaves. By default, as in
        SGLang, it does only if min-p is used.
        """
        return self.sampling_order == "sequential" or (
            self.sampling_order is None and self.min_p > 0
        )

    @property
    def scores_next_token(self) -> bool:
        """Whether the request generates no tokens but returns log-probabilities of the next one. A
        token is then drawn and dropped.
        """
        return (
            not self.max_tokens
            and self.return_logprob
            and bool(self.top_logprobs_num or self.token_ids_logprob)
        )

    @property
    def scores_tokens(self) -> bool:
        """Whether the log-probabilities of all generated tokens are reported. Each token then needs
        a draw.
        """
        return self.return_logprob or self.confidence

    @property
    def has_thought_limit(self) -> bool:
        """Whether the output's thoughts have a limit. They always do if `reasoning_format` is set,
        which leaves room for a constrained answer.
        """
        return self.thinking is not None or bool(self.reasoning_format)

    @property
    def recorded_fields(self) -> tuple[RecordName, ...]:
        """Names of the values, such as "hidden_states", that the result has for each token in
        addition to its id.
        """
        experts: tuple[RecordName, ...] = ("routed_experts",) if self.return_routed_experts else ()
        return (*experts, "hidden_states") if self.return_hidden_states else experts

    @property
    def penalised(self) -> bool:
        return bool(
            self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0
        )

    @property
    def plain(self) -> bool:
        """Whether logits are used unchanged: no penalties, biases, excluded tokens or minimum
        length.
        """
        excludes = self.allowed_token_ids or self.bad_words
        return not (self.penalised or self.logit_bias or self.min_tokens or excludes)


def resolve_params(params: SamplingParams, vocab_size: int) -> ResolvedParams:
    """Fills in defaults, and performs the checks that need the engine: its limits, and token ids
    against its vocabulary.

    Raises:
        ParameterError: a value is out of range; the error names the parameter.
    """
    try:
        return _cached(params, vocab_size)
    except TypeError:  # unhashable, because a value is a list
        return _check_and_resolve(params, vocab_size)


def _check_and_resolve(params: SamplingParams, vocab_size: int) -> ResolvedParams:
    values = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given_values(params).items()
    }
    for parameter in PARAMETERS:
        if parameter.name in values:
            _check_with_engine(parameter, values[parameter.name], vocab_size)
    for stop in values.get("stop", ()):
        if len(stop) > MAX_STOP_CHARS:
            raise ParameterError(
                "stop", f"a string of {len(stop):,} characters, the limit is {MAX_STOP_CHARS}."
            )
    if "stop_regex" in values:
        values["stop_regex"] = {
            pattern: compile_stop_pattern(pattern) for pattern in values["stop_regex"]
        }
    resolved = ResolvedParams(**{**_DEFAULTS, **values})
    if resolved.min_tokens > resolved.max_tokens:
        raise ParameterError(
            "min_tokens", f"{resolved.min_tokens} is more than max_tokens ({resolved.max_tokens})."
        )
    if resolved.exact:
        for name in _NOT_EXACT:
            if getattr(resolved, name) != _DEFAULTS[name]:
                raise ParameterError(
                    "exact", f"can't be combined with {name}.", hint="Leave one of the two out."
                )
        if resolved.confidence:
            raise ParameterError(
                "exact",
                "can't be combined with confidence.",
                hint="Leave it out: state.confidence(name) reads the exact probabilities.",
            )
        if resolved.exact == "weighted" and resolved.temperature != 1:
            raise ParameterError(
                "exact",
                f"temperature is {resolved.temperature:g}, but weights are those of draws at temperature 1.",
                hint="Use temperature=1.",
            )
        if resolved.temperature > 1:
            raise ParameterError(
                "exact",
                f"temperature is {resolved.temperature:g}: above 1, unlikely texts would count that are not computed.",
                hint="Use a temperature from 0 to 1.",
            )
    return resolved


_cached = lru_cache(maxsize=1024)(_check_and_resolve)
# Parameters that exact draws don't support: they change the model's distribution, end a text early,
# or report values of tokens that were not drawn.
_NOT_EXACT = (
    "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "min_tokens", "stop", "stop_token_ids", "stop_regex", "include_stop", "ignore_eos", "repeats",
    "thinking", "reasoning_format", "allowed_token_ids", "bad_words", "return_logprob", "return_routed_experts",
    "return_hidden_states",
)  # fmt: skip
_DEFAULTS: dict[str, Any] = {**{each.name: each.default for each in PARAMETERS}, "stop_regex": {}}


def _check_with_engine(parameter: Parameter, value: Any, vocab_size: int) -> None:
    parameter.check_engine(value)
    if parameter.kind in ("token ids", "biases"):
        for entry in value:
            token = entry[0] if parameter.kind == "biases" else entry
            if not 0 <= token < vocab_size:
                told = (
                    f"{short_repr(token)} is no token id of this model (0 to {vocab_size - 1:,})."
                )
                raise ParameterError(parameter.name, told)
