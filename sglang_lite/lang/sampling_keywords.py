"""SamplingParams from the keywords of `gen` and `run`. What the user did not say stays UNSET."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from sglang_lite.protocol import ParameterError, SamplingParams
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.sampling import named, read_params

_OF_GEN = named("gen")


def gen_params(*values: UserValue) -> SamplingParams:
    """SamplingParams of `gen`'s values, in the table's order; None is unset. A program makes the same few again and
    again.

    Raises:
        ParameterError: a value that no backend could honour.
    """
    try:
        return _cached(*values)
    except TypeError:  # a list among them
        return read_params(dict(zip(_OF_GEN, values, strict=True)), _OF_GEN)


@lru_cache(maxsize=4096, typed=True)
def _cached(*values: Any) -> SamplingParams:
    return read_params(dict(zip(_OF_GEN, values, strict=True)), _OF_GEN)


def check_limits(timeout: float | None, retries: int | None) -> None:
    """Raises ParameterError: a time limit or a number of retries that is none. None says nothing."""
    if timeout is not None:
        real = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if not real or not 0 < timeout < math.inf:
            raise ParameterError("timeout", f"{timeout!r} is not a number of seconds above 0.")
    if retries is not None and (isinstance(retries, bool) or not isinstance(retries, int) or retries < 0):
        raise ParameterError("retries", f"{retries!r} is not a whole number of at least 0.")


def check_flags(**flags: UserValue) -> None:
    """Raises ParameterError: one of them is neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ParameterError(name, f"{value!r:.60} is not True or False.")
