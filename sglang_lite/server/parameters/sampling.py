"""Sampling parameters of a request, from the names of its protocol."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from sglang_lite.protocol import ParameterError, SamplingParams
from sglang_lite.protocol.anything import Json
from sglang_lite.protocol.parameter import Parameter
from sglang_lite.protocol.sampling import PARAMETERS, read_params

_TABLE = {each.name: each for each in PARAMETERS}


class OpenAiSampling(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sampling parameters that all of OpenAI's protocols have, those of SGLang, `sampling_order` and `speculation`."""

    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    sampling_order: str | None = None
    speculation: bool | None = None


class CompletionSampling(OpenAiSampling, kw_only=True, omit_defaults=True):
    """Sampling parameters of OpenAI's completions, of chats and of texts."""

    n: int | None = None
    max_tokens: int | None = None
    logit_bias: dict[str, float] | None = None


_NAMES = {name: name for name in CompletionSampling.__struct_fields__} | {"no_stop_trim": "include_stop"}


def read(request: msgspec.Struct, names: Mapping[str, str] | None = None, **values: Json) -> SamplingParams:
    """Sampling parameters of a request.

    Args:
        names: this package's names of parameters by the protocol's, where they aren't those of a CompletionSampling.
        values: defaults by this package's names, for parameters that the request lacks.

    Raises:
        ParameterError: a value isn't supported; the error has the protocol's name of the parameter.
    """
    known = _NAMES if names is None else {**_NAMES, **names}
    table = {name: _TABLE[known[name]] for name in request.__struct_fields__ if name in known}
    written = {name: value for name in table if (value := getattr(request, name)) is not None}
    taken: dict[str, str] = {}
    for name in written:
        other = taken.setdefault(table[name].name, name)
        if other != name:
            raise ParameterError(name, f"and {other} are both given, but they are one parameter. Give one of them.")
    defaults = {name: value for name, value in values.items() if name not in taken}
    params = read_params({**defaults, **written}, {**{name: _TABLE[name] for name in defaults}, **table})
    for name in written:
        _check_engine(name, table[name], params)
    return params


def _check_engine(name: str, parameter: Parameter, params: SamplingParams) -> None:
    """Raises ParameterError if the engine would refuse the value, with the name that the request uses."""
    try:
        parameter.check_engine(getattr(params, parameter.name))
    except ParameterError as error:
        problem = error.message.removeprefix(f"{error.parameter}: ")
        raise ParameterError(name, problem, hint=error.hint) from None
