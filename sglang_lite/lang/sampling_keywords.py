"""Sampling parameters as keyword arguments: signatures that list them, and their conversion to
SamplingParams.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Final, ParamSpec, TypeVar

from sglang_lite.lang.argument_names import explains_wrong_arguments
from sglang_lite.protocol import ParameterError, SamplingParams
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.parameter import Place
from sglang_lite.protocol.sampling import NO_PARAMS, parameters_for, read_params

_P = ParamSpec("_P")
_T = TypeVar("_T")
_OF_GEN = parameters_for("gen")
_TYPES: Final = {
    "int": "int | None",
    "float": "float | None",
    "bool": "bool | None",
    "strings": "str | Sequence[str] | None",
    "token ids": "Sequence[int] | None",
    "biases": "Mapping[int, float] | None",
    "order": "SamplingOrder | None",
    "budget": "int | str | None",
    "exactness": "Exactness | None",
}


def with_sampling_signature(
    place: Place, in_order: Sequence[str] = (), *, sglang: bool = False
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Returns a decorator for functions that take sampling parameters through `**`. The decorated
    function's signature lists the parameters that are allowed in `place`, such as "gen".

    Args:
        in_order: names of all parameters that can be given by position, if there are more than two.
            The function then receives the others by name, its `*others` is only for type checkers,
            and wrong arguments raise an error that explains them.
        sglang: whether the signature has SGLang's names and defaults.
    """
    shown = {
        name: Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            annotation=_TYPES[each.kind],
            default=each.default
            if sglang and each.default != () and "request" not in each.places
            else None,
        )
        for name, each in parameters_for(place, sglang=sglang).items()
    }

    def with_signature(func: Callable[_P, _T]) -> Callable[_P, _T]:
        own = {
            name: each
            for name, each in inspect.signature(func).parameters.items()
            if name not in shown
        }
        parameters = {**shown, **own}
        for name in in_order:
            parameters[name] = parameters.pop(name).replace(kind=Parameter.POSITIONAL_OR_KEYWORD)
        for name in ("others", "sampling"):
            parameters.pop(name, None)
        signature = Signature(sorted(parameters.values(), key=lambda each: each.kind))
        func.__signature__ = signature  # type: ignore[attr-defined] # read by `inspect.signature`
        if not in_order:
            return func
        call: Callable[..., _T] = func
        # names still free for keywords, by the number of positional arguments
        free = [parameters.keys() - {*in_order[:count]} for count in range(3)]

        @explains_wrong_arguments
        @functools.wraps(func)
        def call_with_bound(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            return call(**signature.bind(*args, **kwargs).arguments)

        @functools.wraps(func)
        def call_by_name(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            if len(args) <= 2 and kwargs.keys() <= free[len(args)]:
                return func(*args, **kwargs)
            return call_with_bound(*args, **kwargs)

        return call_by_name

    return with_signature


def gen_params(max_tokens: UserValue, others: Mapping[str, UserValue]) -> SamplingParams:
    """Returns the SamplingParams for the keywords of `gen`. None means unset. Results are cached,
    since a program uses few different ones.

    Raises:
        ParameterError: a value can't be honoured by any backend.
    """
    if max_tokens is None and not others:
        return NO_PARAMS
    # gen(prompt, "name"), as in other libraries
    if isinstance(max_tokens, str) and not max_tokens.isdigit():
        hint = 'A prompt is added before a generation, whose name comes first: s += prompt + gen("name").'
        raise ParameterError("max_tokens", f"{max_tokens!r:.60} is not a whole number.", hint=hint)
    try:
        return _cached_gen_params(max_tokens=max_tokens, **others)
    except TypeError:  # an unhashable value, such as a list
        return _cached_gen_params.__wrapped__(max_tokens=max_tokens, **others)


@functools.lru_cache(maxsize=4096, typed=True)
def _cached_gen_params(**values: UserValue) -> SamplingParams:
    return read_params(values, _OF_GEN)
