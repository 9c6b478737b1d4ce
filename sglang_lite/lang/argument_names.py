"""Names that a function or a state does not have: the error says which one was meant."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NoReturn, ParamSpec, TypeVar

from sglang_lite.lang.tracebacks import user_location
from sglang_lite.protocol import ParameterError

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Names of SGLang's engine, of OpenAI's and Anthropic's APIs, of guidance, LMQL, outlines and transformers.
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
    "show_progress": "progress_bar",
    "max_turns": "max_steps",
    "max_iterations": "max_steps",
    "max_rounds": "max_steps",
}


_LISTED = 16  # names


def tells_names(func: Callable[_P, _T]) -> Callable[_P, _T]:
    """Makes an unknown keyword of a function a ParameterError that says what it is called here."""
    known = [name for name in inspect.signature(func).parameters if name != "self"]

    @functools.wraps(func)
    def told(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return func(*args, **kwargs)
        except TypeError:
            unknown = next((name for name in kwargs if name not in known), None)
            if unknown is None:
                raise
        raise no_such_argument(func.__name__, unknown, known)

    return told


def no_such_argument(called: str, unknown: str, known: Collection[str]) -> ParameterError:
    """The error of a call that was given an argument of another name."""
    return ParameterError(
        unknown, f"{called} has no such argument.", hint=name_meant(unknown, known), where=user_location()
    )


def name_meant(unknown: str, known: Collection[str]) -> str:
    """A hint at the name here of what was written."""
    here = _ELSEWHERE.get(unknown)
    if here in known:
        return f"It is {here}= here."
    near = difflib.get_close_matches(unknown, known, n=1)
    if near:
        return f"Did you mean {near[0]}=?"
    return f"There are {', '.join([*known][:_LISTED])}{', …' if len(known) > _LISTED else '.'}"


class TellsFunctions:
    """A state, of which some expect `gen` and the like to be methods."""

    if not TYPE_CHECKING:  # which would take any name for an attribute

        def __getattr__(self, name: str) -> NoReturn:
            if name in ("gen", "gen_int", "gen_string", "select", "image", "video"):
                raise AttributeError(f"a state has no {name}. Write s += sgl.{name}(…).", name=name, obj=self)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
