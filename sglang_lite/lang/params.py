"""From the keywords of `gen` and `run` to SamplingParams. What the user did not say stays UNSET."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sglang_lite.protocol import ParameterError, SamplingParams

_TEXTS = ("stop", "stop_regex")
_IDS = ("stop_token_ids", "token_ids_logprob")


def sampling_params(given: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams of the entries that are not None. One string stands for a list of one.

    Raises:
        ParameterError: a value of the wrong type. (Ranges are the backend's to check: they differ.)
    """
    values = {name: value for name, value in given.items() if value is not None}
    for name in _TEXTS:
        if name in values:
            values[name] = _strings(name, values[name])
    for name in _IDS:
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
