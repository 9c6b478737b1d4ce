"""From the keywords of `gen` and `run` to SamplingParams. What the user did not say stays UNSET."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from sglang_lite.protocol import ParameterError, SamplingParams

# The order in which `gen` passes them.
_NAMES = (
    "max_tokens", "min_tokens", "n", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p",
    "frequency_penalty", "presence_penalty", "ignore_eos", "return_logprob", "logprob_start_len", "top_logprobs_num",
    "return_text_in_logprobs", "seed", "include_stop", "repetition_penalty", "logit_bias",
)  # fmt: skip


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
    values = {name: value for name, value in given.items() if value is not None}
    for name in ("stop", "stop_regex"):
        if name in values:
            values[name] = _strings(name, values[name])
    for name in ("stop_token_ids", "token_ids_logprob"):
        if name in values:
            values[name] = tuple(values[name])
    if "logit_bias" in values:
        values["logit_bias"] = tuple(sorted((int(k), float(v)) for k, v in dict(values["logit_bias"]).items()))
    return SamplingParams(**values)


def _strings(name: str, value: str | Iterable[str]) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ParameterError(name, f"{text!r} is not a non-empty string.")
    return texts
