"""Checks of arguments other than sampling parameters."""

from __future__ import annotations

import inspect
import math

from sglang_lite.protocol import Location, ParameterError
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.parameter import check_known


def check_whole_number(
    name: str,
    value: UserValue,
    least: int | None = None,
    where: Location | None = None,
    hint: str = "",
) -> None:
    """Raises ParameterError if a value is not a whole number or is less than `least`. Raises
    TraceError if it is a symbol of a trace.
    """
    check_known(name, value)
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or (least is not None and value < least)
    ):
        limit = "" if least is None else f" of at least {least}"
        raise ParameterError(
            name, f"{value!r:.60} is not a whole number{limit}.", where=where, hint=hint
        )


def check_positive(name: str, value: UserValue, unit: str = "") -> None:
    """Raises ParameterError if a value is not a finite number above 0. `unit`, such as "seconds",
    is part of the message.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ParameterError(
            name, f"{value!r:.60} is not a number {unit and f'of {unit} '}above 0."
        )


def check_limits(timeout: float | None, retries: int | None) -> None:
    """Raises ParameterError if a time limit is not a positive number of seconds, or a number of
    retries is not a whole number of at least 0. None is allowed for both.
    """
    if timeout is not None:
        check_positive("timeout", timeout, "seconds")
    if retries is not None:
        check_whole_number("retries", retries, 0)


def check_wind_down(wind_down: UserValue, timeout: float | None) -> None:
    """Raises ParameterError if `wind_down` is not a positive number of seconds, or the run has no
    timeout.
    """
    check_positive("wind_down", wind_down, "seconds")
    if timeout is None:
        raise ParameterError(
            "wind_down",
            "it has no effect without a timeout, from which on it counts.",
            hint="Give both: run(timeout=30, wind_down=2).",
        )


def check_booleans(**flags: UserValue) -> None:
    """Raises ParameterError if one of the arguments is neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ParameterError(name, f"{value!r:.60} is not True or False.")


def refuse_position_ids_offset(offset: UserValue, where: Location | None) -> None:
    """Raises ParameterError if `position_ids_offset` is given. SGLang's `fork` and `copy` accept
    this argument but ignore it.
    """
    if offset is not None:
        raise ParameterError(
            "position_ids_offset", "has no effect.", hint="Leave it out.", where=where
        )


def check_takes_one_argument(check: UserValue) -> None:
    """Raises ParameterError if `check` is not a function that can be called with one value."""
    if not callable(check):
        raise ParameterError("check", f"{check!r} is not a function.")
    try:
        signature = inspect.signature(check)
    except ValueError:  # some functions written in C have no signature
        return
    try:
        signature.bind(None)
    except TypeError:
        name = getattr(check, "__name__", "check")
        problem = f"{name}{signature} can't be called with the value alone."
        raise ParameterError(
            "check", problem, hint="It gets one argument: check=lambda value: …."
        ) from None


_POLICIES = ("raise", "warn", "keep")


def check_truncation_policy(value: object) -> None:
    """Raises ParameterError if a value of the argument `shortened` is not one of the known
    policies.
    """
    if value not in _POLICIES:
        raise ParameterError(
            "shortened", f"{value!r:.60} is not one of {', '.join(map(repr, _POLICIES))}."
        )
