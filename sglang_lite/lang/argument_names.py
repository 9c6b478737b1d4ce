"""Errors for misspelled argument and attribute names, with suggestions."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import TYPE_CHECKING, NoReturn, ParamSpec, TypeVar

from sglang_lite.errors import short_repr
from sglang_lite.lang.tracebacks import user_location
from sglang_lite.protocol import ParameterError

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Argument names used by SGLang's engine, OpenAI's and Anthropic's APIs, guidance, LMQL, outlines and
# transformers, mapped to the names that this package uses.
_ELSEWHERE = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "max_length": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_sequences": "stop",
    "stop_at": "stop",
    "stop_strings": "stop",
    "save_stop_text": "include_stop",
    "no_stop_trim": "include_stop",
    "include_stop_str_in_output": "include_stop",
    "eos_token_id": "stop_token_ids",
    "sampling_seed": "seed",
    "random_seed": "seed",
    "num_return_sequences": "n",
    "response_format": "json_schema",
    "schema": "json_schema",
    "output_type": "type",
    "response_model": "type",
    "pattern": "regex",
    "grammar": "constraint",
    "ebnf": "constraint=sgl.Grammar(…)",
    "lark": "constraint=sgl.Grammar(…)",
    "options": "choices",
    "logprobs": "return_logprob",
    "top_logprobs": "top_logprobs_num",
    "functions": "tools",
    "variable": "name",
    "key": "name",
    "content": "expr",
    "text": "expr",
    "count": "size",
    "workers": "num_threads",
    "max_workers": "num_threads",
    "concurrency": "num_threads",
    "batch_size": "num_threads",
    "show_progress": "progress_bar",
    "max_turns": "max_steps",
    "max_iterations": "max_steps",
    "max_rounds": "max_steps",
    "model": "model_name",
    "api_base": "base_url",
    "url": "base_url",
    "endpoint": "base_url",
    "rpm": "requests_per_minute",
    "tpm": "tokens_per_minute",
    "responses": "answers",
}


_LISTED = 16  # maximum number of names listed in a message


def explains_wrong_arguments(func: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorates a function to suggest the right arguments. A call with wrong ones raises a
    ParameterError with suggestions instead of a TypeError.
    """
    signature = inspect.signature(func)
    owner, _, name = func.__qualname__.rpartition(".")
    called = owner.rpartition(".")[2] if name == "__init__" else name

    @functools.wraps(func)
    def call_and_explain(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return func(*args, **kwargs)
        except TypeError:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                wrong = str(error)
            else:
                raise
        raise _wrong_call_error(called, signature, args, kwargs, wrong)

    return call_and_explain


def explains_wrong_fields(record: type[_T]) -> type[_T]:
    """Decorates a dataclass to suggest the right fields. Its constructor then reports wrong
    arguments like a function with `explains_wrong_arguments`.
    """
    record.__init__ = explains_wrong_arguments(record.__init__)  # type: ignore[method-assign] # the class has no subclasses
    return record


def _wrong_call_error(
    called: str,
    signature: inspect.Signature,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    wrong: str,
) -> ParameterError:
    """Returns the error for a call whose arguments do not fit a signature.

    Args:
        called: name of the function, for the message.
        wrong: message of the TypeError.
    """
    parameters = [
        each
        for each in signature.parameters.values()
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    by_position = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    names = [each.name for each in parameters if each.name != "self"]
    order = (
        f"Its parameters, in order: {', '.join(name for name in by_position if name != 'self')}."
    )
    where = user_location()
    open_ended = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
    for name in () if open_ended else kwargs:
        if name not in names:
            return unknown_argument_error(called, name, names)
    for name, value in zip(by_position, args):
        if name in kwargs:
            return ParameterError(
                name,
                f"{called} got two values for it: {short_repr(value)} and {short_repr(kwargs[name])}.",
                hint=order,
                where=where,
            )
    for each in parameters[len(args) :]:
        if each.default is each.empty and each.name not in kwargs:
            alias = next((name for name in kwargs if _ELSEWHERE.get(name) == each.name), None)
            hint = order if alias is None else f"{alias}= is called {each.name}= here."
            return ParameterError(each.name, f"{called} needs it.", hint=hint, where=where)
    return ParameterError(called, f"{wrong}.", hint=order, where=where)


def unknown_argument_error(called: str, unknown: str, known: Collection[str]) -> ParameterError:
    """Returns the error for a call with an argument that the function does not have.

    Args:
        called: name of the function, for the message.
        unknown: name of the argument.
        known: names of the function's parameters.
    """
    return ParameterError(
        unknown,
        f"{called} has no such argument.",
        hint=suggest_or_list_arguments(unknown, known),
        where=user_location(),
    )


def suggest_argument(unknown: str, known: Collection[str]) -> str:
    """Returns a hint with the known name that is most similar to an unknown argument name. Returns
    an empty string if none is similar.
    """
    here, _, value = _ELSEWHERE.get(unknown, "").partition("=")
    if here in known:
        return f"Use {here}={value} here."
    near = difflib.get_close_matches(unknown, known, n=1, cutoff=0.62)
    near = near or [name for name in known if len(unknown) > 2 and unknown in name][:1]
    return f"Did you mean {near[0]}=?" if near else ""


def suggest_or_list_arguments(unknown: str, known: Collection[str]) -> str:
    """Returns a hint with the known name that is most similar to an unknown argument name. If none
    is similar, the hint lists all known names.
    """
    listed = sorted(known) if isinstance(known, Set) else [*known]
    return suggest_argument(unknown, known) or (
        f"Its parameters: {', '.join(listed[:_LISTED])}{', …' if len(known) > _LISTED else '.'}"
    )


def unknown_attribute_error(state: object, name: str) -> AttributeError:
    """Returns the error for an attribute that a state does not have. The message explains how to
    read variables. For a function such as `gen` or `select`, it explains how to call the function.
    """
    if name == "probs":
        return AttributeError("s.probs(name) is now s.selection(name).probs.", name=name, obj=state)
    if name in ("gen", "gen_int", "gen_string", "select", "image", "video", "audio"):
        return AttributeError(
            f"a state has no {name}. Write s += sgl.{name}(…).", name=name, obj=state
        )
    if name in ("append", "extend", "add", "write"):
        return AttributeError(
            f"a state has no {name}. Text and generations are added by s += …", name=name, obj=state
        )
    known = _known_variables(state)
    read = [f"s[{each!r}]" for each in (known if known and name not in known else [name])]
    problem = f"{type(state).__name__!r} object has no attribute {name!r}. "
    cure = (
        f"A variable is read as {read[0]}."
        if len(read) == 1
        else f"Variables are read as {', '.join(read)}."
    )
    return AttributeError(problem + cure, name=name, obj=state)


def _known_variables(state: object) -> Sequence[str]:
    """Returns the names of a state's first few variables. Returns an empty list for any other
    object.
    """
    try:
        return list(object.__getattribute__(state, "branch").names.variables)[:_LISTED]
    except AttributeError:
        return []


class AttributeHints:
    """Base class of states: reading a missing attribute raises the error built by
    `unknown_attribute_error`.
    """

    __slots__ = ()

    if not TYPE_CHECKING:  # a type checker would accept any attribute

        def __getattr__(self, name: str) -> NoReturn:
            raise unknown_attribute_error(self, name)
