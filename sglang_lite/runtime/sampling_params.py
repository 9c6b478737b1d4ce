"""Sampling parameters with the engine's defaults filled in and every value checked."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import regex

from sglang_lite.protocol import ParameterError, SamplingParams, Unset

if TYPE_CHECKING:
    import torch

# A caller's own change of the logits: the ids so far and float32 logits [V] to logits [V].
LogitProcessor: TypeAlias = Callable[[list[int], "torch.Tensor"], "torch.Tensor"]

MAX_STOPS = 64
MAX_STOP_CHARS = 512
MAX_PATTERNS = 32
MAX_PATTERN_BYTES = 256
MAX_REPEATS = 100_000
MAX_IDS = 1024
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
    stop_regex: Mapping[str, regex.Pattern[str]] = field(default_factory=dict)  # by source
    include_stop: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
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
        f.name: value for f in fields(params) if not isinstance(value := getattr(params, f.name), Unset)
    }
    for name in _FLAGS & given.keys():
        if not isinstance(given[name], bool):
            raise ParameterError(name, f"{shown(given[name])} is neither True nor False.")
    for name, (kind, low, high) in _RANGES.items():
        if name in given:
            given[name] = _number(name, given[name], kind, low, high)
    if "top_p" in given and given["top_p"] == 0:
        raise ParameterError("top_p", "0 leaves no token.", hint="Use temperature=0 for greedy decoding.")
    if given.get("repetition_penalty") == 0:
        raise ParameterError("repetition_penalty", "0 is outside (0, 2].")
    for name, (most, check) in _LISTS.items():
        if name in given:
            given[name] = tuple(check(name, item, vocab_size) for item in _items(name, given[name], most))
    if "stop_regex" in given:
        given["stop_regex"] = {pattern: _compiled(pattern) for pattern in given["stop_regex"]}
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


def shown(value: object) -> str:
    """A value for an error message: short, however large it is."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python prints no whole number of more than 4,300 digits
        return "a huge number"


def _number(name: str, value: Any, kind: type, low: float, high: float) -> Any:
    accepted = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, accepted):
        raise ParameterError(name, f"{shown(value)} is not {'a whole number' if kind is int else 'a number'}.")
    if not low <= value <= high:  # NaN is not, either
        raise ParameterError(name, f"{shown(value)} is outside [{low:g}, {high:g}].")
    return kind(value)


def _items(name: str, values: Any, most: int) -> tuple[Any, ...]:
    if not isinstance(values, tuple | list):
        raise ParameterError(name, f"{shown(values)} is not a tuple.")
    if len(values) > most:
        raise ParameterError(name, f"{len(values):,} entries, the limit is {most:,}.")
    return tuple(values)


def _stop(name: str, stop: Any, _: int) -> str:
    if not isinstance(stop, str) or not stop:
        raise ParameterError(name, f"{shown(stop)} is not a non-empty string.")
    if not stop.isascii() and any("\ud800" <= char <= "\udfff" for char in stop):
        raise ParameterError(name, f"{shown(stop)} has unpaired surrogates, which no text has.")
    if len(stop) > MAX_STOP_CHARS:
        raise ParameterError(name, f"a string of {len(stop):,} characters, the limit is {MAX_STOP_CHARS}.")
    return stop


def _token_id(name: str, value: Any, vocab_size: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise ParameterError(name, f"{shown(value)} is no token id of this model (0 to {vocab_size - 1:,}).")
    return value


def _bias(name: str, entry: Any, vocab_size: int) -> tuple[int, float]:
    if not isinstance(entry, tuple | list) or len(entry) != 2:
        raise ParameterError(name, f"{shown(entry)} is not a pair of a token id and a number.")
    return _token_id(name, entry[0], vocab_size), _number(name, entry[1], float, -1e4, 1e4)


def _pattern(name: str, pattern: Any, _: int) -> str:
    if not isinstance(pattern, str) or not pattern:
        raise ParameterError(name, f"{shown(pattern)} is not a non-empty string.")
    if (size := len(pattern.encode("utf-8", "surrogatepass"))) > MAX_PATTERN_BYTES:
        raise ParameterError(name, f"a pattern of {size:,} bytes, the limit is {MAX_PATTERN_BYTES}.")
    return pattern


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> regex.Pattern[str]:
    """A pattern of Python's `re`, compiled by the `regex` package for its partial matches. What that takes for more
    than `re` does (fuzzy matches in braces, further flags) keeps `re`'s meaning or is refused by `re`."""
    counts = (max(map(int, re.findall(r"\d+", braces))) for braces in re.findall(r"\{\d*,?\d+,?\}", pattern))
    if (repeats := math.prod(count or 1 for count in counts)) > MAX_REPEATS:  # written out, they take memory
        raise ParameterError("stop_regex", f"{pattern!r} repeats {repeats:,} times, the limit is {MAX_REPEATS:,}.")
    try:
        re.compile(pattern)
        return regex.compile(_BRACE.sub(lambda m: m[0] if len(m[0]) > 1 else r"\{", pattern))
    except (re.error, regex.error, OverflowError, RecursionError, Warning) as error:
        raise ParameterError("stop_regex", f"{pattern!r} is no regular expression: {error}.") from None


# An escape, or a brace that opens no repeat.
_BRACE = re.compile(r"(?s)\\N\{[^}]*\}|\\.|\{(?!\d*,?\d*\}|,?\})")

_FLAGS = {"include_stop", "ignore_eos", "skip_special_tokens", "return_logprob", "return_text_in_logprobs"}
_LISTS: dict[str, tuple[int, Callable[[str, Any, int], Any]]] = {
    "stop": (MAX_STOPS, _stop),
    "stop_regex": (MAX_PATTERNS, _pattern),
    "stop_token_ids": (MAX_IDS, _token_id),
    "token_ids_logprob": (MAX_IDS, _token_id),
    "logit_bias": (MAX_BIASES, _bias),
}
