"""SamplingParams from the keywords of `gen`. Parameters that the user does not give stay UNSET."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from sglang_lite.protocol import SamplingParams
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.sampling import named, read_params

_OF_GEN = named("gen")


def gen_params(*values: UserValue) -> SamplingParams:
    """SamplingParams with the values of `gen`'s parameters. Cached, as a program uses few different ones.

    Args:
        *values: values in the order of the parameter table; None for unset.

    Raises:
        ParameterError: a value can't be honoured by any backend.
    """
    try:
        return _cached(*values)
    except TypeError:  # a value is a list, which can't be hashed
        return read_params(dict(zip(_OF_GEN, values, strict=True)), _OF_GEN)


@lru_cache(maxsize=4096, typed=True)
def _cached(*values: Any) -> SamplingParams:
    return read_params(dict(zip(_OF_GEN, values, strict=True)), _OF_GEN)
