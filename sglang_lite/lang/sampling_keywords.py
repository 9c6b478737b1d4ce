"""SamplingParams from the keywords of `gen` and `run`. What the user did not say stays UNSET."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from sglang_lite.protocol import SamplingParams
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
