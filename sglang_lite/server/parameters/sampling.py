"""Reads a request's sampling parameters, which have the names of the request's protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_lite.protocol import ParameterError, SamplingParams
from sglang_lite.protocol.anything import Json
from sglang_lite.protocol.parameter import Kind, Parameter, Place
from sglang_lite.protocol.sampling import PARAMETERS, parameters_for, read_params

_MAX_BIAS = 100
_TABLE = {each.name: each for each in PARAMETERS}


_TYPES: dict[Kind, Any] = {
    "int": int,
    "float": float,
    "bool": bool,
    "strings": str | list[str],
    "token ids": list[int],
    "biases": dict[str, float],
    "order": str,
    "budget": int | str,
    "exactness": bool | str,
}
# SGLang's names that OpenAI's routes use, by this package's names of the same parameters
_OWN_NAMES = {"include_stop": "no_stop_trim"}


def _fields(place: Place) -> list[tuple[str, Any, None]]:
    """Returns a request's fields for the sampling parameters of a `Place`, such as "completions".
    Each is optional, and given as (name, type, default).
    """
    return [
        (_OWN_NAMES.get(each.name, each.name), _TYPES[each.kind] | None, None)
        for each in parameters_for(place).values()
    ]


if TYPE_CHECKING:  # with the fields that code names

    class OpenAiSampling(msgspec.Struct, kw_only=True, omit_defaults=True):
        temperature: float | None = None
        top_p: float | None = None

    class CompletionSampling(OpenAiSampling, kw_only=True, omit_defaults=True):
        n: int | None = None
        max_tokens: int | None = None
else:
    OpenAiSampling = msgspec.defstruct(
        "OpenAiSampling",
        _fields("openai"),
        module=__name__,
        kw_only=True,
        omit_defaults=True,
        namespace={"__doc__": "Sampling parameters that all of OpenAI's protocols have."},
    )
    CompletionSampling = msgspec.defstruct(
        "CompletionSampling",
        _fields("completions"),
        bases=(OpenAiSampling,),
        module=__name__,
        kw_only=True,
        omit_defaults=True,
        namespace={
            "__doc__": "Sampling parameters of OpenAI's completions, of chats and of texts."
        },
    )


# Names of vLLM and llama.cpp for parameters that have another one here.
_OTHER_NAMES = {"include_stop_str_in_output": "include_stop", "n_predict": "max_tokens"}
_NAMES = (
    {name: name for name in CompletionSampling.__struct_fields__}
    | {own: ours for ours, own in _OWN_NAMES.items()}
    | _OTHER_NAMES
)


def read_sampling_params(
    request: msgspec.Struct, names: Mapping[str, str] | None = None, **values: Json
) -> SamplingParams:
    """Reads the sampling parameters of a request.

    Args:
        names: maps the protocol's field names to ours, for fields that are not named as in
            CompletionSampling.
        values: defaults, under our names, for parameters that the request omits.

    Raises:
        ParameterError: a value isn't supported. The error uses the protocol's parameter name.
    """
    known = _NAMES if names is None else {**_NAMES, **names}
    table = {name: _TABLE[known[name]] for name in request.__struct_fields__ if name in known}
    written = {name: value for name in table if (value := getattr(request, name)) is not None}
    taken: dict[str, str] = {}
    for name in written:
        other = taken.setdefault(table[name].name, name)
        if other != name:
            raise ParameterError(
                name, f"and {other} are both given, but they are one parameter. Give one of them."
            )
    defaults = {name: value for name, value in values.items() if name not in taken}
    params = read_params(
        {**defaults, **written}, {**{name: _TABLE[name] for name in defaults}, **table}
    )
    for name in written:
        _check_engine_accepts(name, table[name], params)
    _check_biases(getattr(request, "logit_bias", None) or {})
    return params


def _check_biases(biases: Mapping[str, float]) -> None:
    """Raises ParameterError if a bias is outside the range of OpenAI's protocols."""
    for token, bias in biases.items():
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise ParameterError(
                f"logit_bias.{token[:20]}",
                f"{bias:g} is not between -{_MAX_BIAS} and {_MAX_BIAS}.",
                hint=f"-{_MAX_BIAS} forbids a token, {_MAX_BIAS} chooses it.",
            )


def _check_engine_accepts(name: str, parameter: Parameter, params: SamplingParams) -> None:
    """Raises ParameterError, with the name that the request uses, if the engine would refuse the
    value.
    """
    try:
        parameter.check_engine(getattr(params, parameter.name))
    except ParameterError as error:
        problem = error.message.removeprefix(f"{error.parameter}: ")
        raise ParameterError(name, problem, hint=error.hint) from None
