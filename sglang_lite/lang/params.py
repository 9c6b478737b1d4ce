"""From the keywords of `gen` and `run` to SamplingParams. What the user did not say stays UNSET."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from sglang_lite.lang.ir import SglExpr
from sglang_lite.protocol import ParameterError, SamplingParams

# The order in which `gen` passes them.
_NAMES = (
    "max_tokens", "min_tokens", "n", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p",
    "frequency_penalty", "presence_penalty", "ignore_eos", "return_logprob", "logprob_start_len", "top_logprobs_num",
    "return_text_in_logprobs", "seed", "include_stop", "repetition_penalty", "logit_bias",
)  # fmt: skip
_FLAGS = frozenset({"ignore_eos", "return_logprob", "return_text_in_logprobs", "include_stop"})
_FLOATS = frozenset({"temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"})


def gen_params(*values: Any) -> SamplingParams:
    """SamplingParams of `gen`'s values, in their order; None is unset. A program makes the same few again and again."""
    try:
        return _cached(*values)
    except TypeError:  # a list among them
        return sampling_params(dict(zip(_NAMES, values)))


@lru_cache(maxsize=4096, typed=True)
def _cached(*values: Any) -> SamplingParams:
    return sampling_params(dict(zip(_NAMES, values)))


def sampling_params(given: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams of the entries that are not None. One string stands for a list of one.

    Raises:
        ParameterError: a value of the wrong type. (Ranges are the backend's to check: they differ.)
    """
    values = {name: _checked(name, value) for name, value in given.items() if value is not None}
    return SamplingParams(**values)


def check_limits(timeout: Any, retries: Any) -> None:
    """Raises ParameterError: a time limit or a number of retries that is none. None says nothing."""
    if timeout is not None:
        real = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if not real or not 0 < timeout < math.inf:
            raise ParameterError("timeout", f"{timeout!r} is not a number of seconds above 0.")
    if retries is not None and (isinstance(retries, bool) or not isinstance(retries, int) or retries < 0):
        raise ParameterError("retries", f"{retries!r} is not a whole number of at least 0.")


def check_flags(**flags: Any) -> None:
    """Raises ParameterError: one of them is neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ParameterError(name, f"{value!r:.60} is not True or False.")


def _checked(name: str, value: Any) -> Any:
    if name in ("stop", "stop_regex"):
        return _strings(name, value)
    if isinstance(value, SglExpr):
        return value  # in a trace, for what will be known when the program runs
    if name in ("stop_token_ids", "token_ids_logprob"):
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise ParameterError(name, f"{value!r} is not a list of token ids.")
        return tuple(_number(name, i, int) for i in value)
    if name == "logit_bias":
        if not isinstance(value, Mapping):
            raise ParameterError(name, f"{value!r} is not a mapping from token ids to numbers.")
        return tuple(sorted((_token_id(k), _number(name, v, float)) for k, v in value.items()))
    if name in _FLAGS:
        if not isinstance(value, bool):
            raise ParameterError(name, f"{value!r} is not True or False.")
        return value
    return _number(name, value, float if name in _FLOATS else int)


def _token_id(key: Any) -> Any:
    """A key of `logit_bias`; OpenAI's users write ids as strings."""
    return int(key) if isinstance(key, str) and key.isdecimal() else _number("logit_bias", key, int)


def _number(name: str, value: Any, kind: type) -> Any:
    allowed = numbers.Real if kind is float else numbers.Integral
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise ParameterError(name, f"{value!r} is not a {'number' if kind is float else 'whole number'}.")
    return kind(value)


def _strings(name: str, value: str | Iterable[str]) -> tuple[str, ...]:
    if not isinstance(value, Iterable):
        raise ParameterError(name, f"{value!r} is not a string or a list of strings.")
    texts = (value,) if isinstance(value, str) else tuple(value)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ParameterError(name, f"{text!r} is not a non-empty string.")
    return texts
