"""Checks, before records are sent, that they can be serialised."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from sglang_lite.errors import Location, WireError
from sglang_lite.protocol.parameter import Unset
from sglang_lite.protocol.record import Record
from sglang_lite.wire.limits import INTEGERS, Limits, depth_error, pointer_to
from sglang_lite.wire.scan import FLOAT

_FREE = frozenset({"meta", "value"})  # members of records that contain any plain data


class _RefusedError(Exception):
    """Raised for a value that can't be sent. As the error propagates, each caller adds its part of
    the path to the value, innermost first.
    """

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint
        self.path: list[str | int] = []


def check_record(record: Record, limits: Limits) -> bool:
    """Checks all values of a record.

    Returns:
        True if the record has a float that JSON lacks (infinite or NaN).
    """
    try:
        # the message object itself takes one level
        return _check_value(record, limits.depth - 1, plain=False)
    except _RefusedError as refused:
        pointer = pointer_to(("data", *reversed(refused.path)))
        raise WireError(refused.problem, pointer=pointer, hint=refused.hint) from None
    except RecursionError:
        raise depth_error(["data"], limits) from None


def is_plain(value: object, limits: Limits) -> bool:
    """Returns True if a value is plain data, which may be part of `meta`."""
    try:
        _check_value(value, limits.depth // 2, plain=True)
    except (_RefusedError, RecursionError):
        return False
    return True


def _check_value(value: Any, depth: int, *, plain: bool) -> bool:
    kind = type(value)
    if value is None or kind is bool:
        return False
    if kind is str:
        if not value.isascii():
            _check_text(value)
        return False
    if kind is int:
        if value not in INTEGERS:
            raise _RefusedError("an integer of more than 64 bits", "Use a float or a text.")
        return False
    if kind is float and math.isfinite(value):
        return False
    parts: Iterable[tuple[str | int, Any]] = ()
    if kind is list or (kind is tuple and not plain):
        if (
            set(map(type, value)) != {int}
            or min(value) not in INTEGERS
            or max(value) not in INTEGERS
        ):
            # a list of integers, such as token ids, needs no further checks
            parts = enumerate(value)
    elif kind is dict and plain:
        parts = _checked_members(value)
    elif not plain and isinstance(value, Record):
        parts = zip(value.__struct_fields__, msgspec.structs.astuple(value))
    elif not plain and (kind is bytes or kind is Unset):
        return False
    elif not plain and kind is Location:
        _check_text(value.file)
        _check_text(value.function)
        return False
    elif kind is not float:
        raise _RefusedError(
            f"a {kind.__name__} can't be sent",
            "Use None, booleans, numbers, texts, lists, and dictionaries by text."
            if plain
            else "Give data instead: it exists only in the process that made it.",
        )
    if not depth:
        raise _RefusedError("nested too deeply", "Nest less, or raise the limit.")
    special = kind is float
    for name, part in parts:
        if part is None or part is True or part is False:
            continue
        try:
            special = _check_value(part, depth - 1, plain=plain or name in _FREE) or special
        except _RefusedError as refused:
            refused.path.append(name)
            raise
    return special


def _checked_members(value: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    for name, each in value.items():
        if type(name) is not str or name == FLOAT:
            raise _RefusedError(
                f"{name!r:.60} can't be the name of a member", f"Use texts other than {FLOAT!r}."
            )
        _check_text(name)
        yield name, each


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _RefusedError(
            "half of a surrogate pair in a text", 'Use text.encode("utf-8", "replace").decode().'
        ) from None
