"""Sampling parameters with the engine's defaults filled in and every value checked."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from sglang_lite.protocol import ParameterError, SamplingParams, Unset

MAX_STOPS = 64
MAX_STOP_CHARS = 512
MAX_SAMPLES = 256
MAX_TOP_LOGPROBS = 256
MAX_BIASES = 4096


@dataclass(frozen=True, slots=True)
class ResolvedParams:
    """See SamplingParams; here nothing is UNSET."""

    max_tokens: int = 128
    min_tokens: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] = ()
    return_text_in_logprobs: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5 or self.top_k == 1

    @property
    def penalised(self) -> bool:
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0)

    @property
    def plain(self) -> bool:
        """Neither penalties nor biases nor a ban on ending: logits are used as they are."""
        return not (self.penalised or self.logit_bias or self.min_tokens)


def resolve_params(params: SamplingParams, vocab_size: int) -> ResolvedParams:
    """Fills in defaults.

    Raises:
        ParameterError: a value out of range, by the parameter's name.
    """
    given: dict[str, Any] = {
        field.name: value for field in fields(params) if not isinstance(value := getattr(params, field.name), Unset)
    }
    if given.pop("stop_regex", ()):
        raise ParameterError("stop_regex", "is not supported by this engine.", hint="Use regex= or stop=.")
    for name, (kind, low, high) in _RANGES.items():
        if name in given:
            given[name] = _number(name, given[name], kind, low, high)
    if "top_p" in given and given["top_p"] == 0:
        raise ParameterError("top_p", "0 leaves no token.", hint="Use temperature=0 for greedy decoding.")
    if given.get("repetition_penalty") == 0:
        raise ParameterError("repetition_penalty", "0 is outside (0, 2].")
    if "stop" in given:
        given["stop"] = _stops(given["stop"])
    for name in ("stop_token_ids", "token_ids_logprob"):
        if name in given:
            given[name] = tuple(_token_id(name, i, vocab_size) for i in given[name])
    if "logit_bias" in given:
        given["logit_bias"] = _biases(given["logit_bias"], vocab_size)
    resolved = ResolvedParams(**given)
    if resolved.min_tokens > resolved.max_tokens:
        raise ParameterError("min_tokens", f"{resolved.min_tokens} is more than max_tokens ({resolved.max_tokens}).")
    return resolved


_RANGES: dict[str, tuple[type, float, float]] = {
    "max_tokens": (int, 0, 2**31 - 1),
    "min_tokens": (int, 0, 2**31 - 1),
    "n": (int, 1, MAX_SAMPLES),
    "temperature": (float, 0.0, 100.0),
    "top_p": (float, 0.0, 1.0),
    "top_k": (int, -1, 2**31 - 1),
    "min_p": (float, 0.0, 1.0),
    "frequency_penalty": (float, -2.0, 2.0),
    "presence_penalty": (float, -2.0, 2.0),
    "repetition_penalty": (float, 0.0, 2.0),
    "seed": (int, -(2**63), 2**64 - 1),
    "logprob_start_len": (int, -1, 2**31 - 1),
    "top_logprobs_num": (int, 0, MAX_TOP_LOGPROBS),
}


def _number(name: str, value: Any, kind: type, low: float, high: float) -> Any:
    accepted = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, accepted):
        raise ParameterError(name, f"{value!r} is not {'a whole number' if kind is int else 'a number'}.")
    if not math.isfinite(value) or not low <= value <= high:
        raise ParameterError(name, f"{value!r} is outside [{low:g}, {high:g}].")
    return kind(value)


def _stops(stops: tuple[str, ...]) -> tuple[str, ...]:
    if len(stops) > MAX_STOPS:
        raise ParameterError("stop", f"{len(stops):,} strings, the limit is {MAX_STOPS}.")
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise ParameterError("stop", f"{stop!r} is not a non-empty string.")
        if len(stop) > MAX_STOP_CHARS:
            raise ParameterError("stop", f"a string of {len(stop):,} characters, the limit is {MAX_STOP_CHARS}.")
    return tuple(stops)


def _token_id(name: str, value: Any, vocab_size: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise ParameterError(name, f"{value!r} is no token id of this model (0 to {vocab_size - 1:,}).")
    return value


def _biases(biases: tuple[tuple[int, float], ...], vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(biases) > MAX_BIASES:
        raise ParameterError("logit_bias", f"{len(biases):,} entries, the limit is {MAX_BIASES:,}.")
    return tuple(
        (_token_id("logit_bias", token, vocab_size), _number("logit_bias", bias, float, -1e4, 1e4))
        for token, bias in biases
    )
