"""Checks of arguments that are no sampling parameters."""

from __future__ import annotations

import math

from sglang_lite.protocol import Location, ParameterError
from sglang_lite.protocol.anything import UserValue


def check_whole(name: str, value: UserValue, least: int | None = None, where: Location | None = None) -> None:
    """Raises ParameterError: a value is no whole number, or less than the least."""
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        limit = "" if least is None else f" of at least {least}"
        raise ParameterError(name, f"{value!r:.60} is not a whole number{limit}.", where=where)


def check_positive(name: str, value: UserValue, unit: str = "") -> None:
    """Raises ParameterError: a value is no number above 0, of a unit that is said with "of", or has no end."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ParameterError(name, f"{value!r:.60} is not a number {unit and f'of {unit} '}above 0.")


def check_limits(timeout: float | None, retries: int | None) -> None:
    """Raises ParameterError: a time limit or a number of retries that is none. None says nothing."""
    if timeout is not None:
        check_positive("timeout", timeout, "seconds")
    if retries is not None:
        check_whole("retries", retries, 0)


def check_flags(**flags: UserValue) -> None:
    """Raises ParameterError: one of them is neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ParameterError(name, f"{value!r:.60} is not True or False.")
