"""Checks that records can be serialised, before they are sent."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from sglang_lite.errors import Location, WireError
from sglang_lite.protocol.record import Record
from sglang_lite.protocol.sampling import Unset
from sglang_lite.wire.limits import INTEGERS, Limits, depth_error, pointer_to
from sglang_lite.wire.scan import FLOAT

_FREE = frozenset({"meta", "value"})  # members of records that contain any plain data


class _RefusedError(Exception):
    """Refusal of a value that can't be sent. Each caller that this passes through adds its part of the path to the
    value, innermost first."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint
        self.path: list[str | int] = []

    def error(self, above: Iterable[str | int]) -> WireError:
        return WireError(self.problem, pointer=pointer_to((*above, *reversed(self.path))), hint=self.hint)


def check(record: Record, limits: Limits) -> bool:
    """Checks all values of a record.

    Returns:
        True if the record has a float that JSON lacks (infinite or NaN).
    """
    try:
        return _check_record(record, limits.depth - 1)  # the message's object takes one level
    except _RefusedError as refused:
        raise refused.error(["data"]) from None
    except RecursionError:
        raise depth_error(["data"], limits) from None


def is_plain(value: object, limits: Limits) -> bool:
    """True if a value is plain data, which may be part of `meta`."""
    try:
        _check(value, limits.depth // 2, plain=True)
    except (_RefusedError, RecursionError):
        return False
    return True


def _check_record(record: Record, depth: int) -> bool:
    special = False
    if not depth:
        raise _RefusedError("nested too deeply", "Nest less, or raise the limit.")
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if value is None or value is True or value is False:
            continue
        try:
            special = _check(value, depth - 1, plain=name in _FREE) or special
        except _RefusedError as refused:
            refused.path.append(name)
            raise
    return special


def _check(value: Any, depth: int, *, plain: bool) -> bool:
    kind = type(value)
    if kind is str:
        if not value.isascii():
            _check_text(value)
    elif kind is int:
        if value not in INTEGERS:
            raise _RefusedError("an integer of more than 64 bits", "Use a float or a text.")
    elif kind is float:
        if not math.isfinite(value):
            if not depth:
                raise _RefusedError("nested too deeply", "Nest less, or raise the limit.")
            return True
    elif value is None or kind is bool:
        pass
    elif kind is list or (kind is tuple and not plain):
        return _check_items(value, depth, plain=plain)
    elif kind is dict and plain:
        return _check_object(value, depth)
    elif not plain and isinstance(value, Record):
        return _check_record(value, depth)
    elif not plain and (kind is bytes or kind is Unset):
        pass
    elif not plain and kind is Location:
        _check_text(value.file)
        _check_text(value.function)
    else:
        raise _RefusedError(
            f"a {kind.__name__} can't be sent",
            "Use None, booleans, numbers, texts, lists, and dictionaries by text."
            if plain
            else "Give data instead: it exists only in the process that made it.",
        )
    return False


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _RefusedError(
            "half of a surrogate pair in a text", 'Use text.encode("utf-8", "replace").decode().'
        ) from None


def _check_items(items: Any, depth: int, *, plain: bool) -> bool:
    if not depth:
        raise _RefusedError("nested too deeply", "Nest less, or raise the limit.")
    special = False
    if set(map(type, items)) == {int} and min(items) in INTEGERS and max(items) in INTEGERS:  # fast path for token ids
        return False
    for i, item in enumerate(items):
        try:
            special = _check(item, depth - 1, plain=plain) or special
        except _RefusedError as refused:
            refused.path.append(i)
            raise
    return special


def _check_object(members: dict[Any, Any], depth: int) -> bool:
    if not depth:
        raise _RefusedError("nested too deeply", "Nest less, or raise the limit.")
    special = False
    for name, value in members.items():
        if type(name) is not str or name == FLOAT:
            raise _RefusedError(f"{name!r:.60} can't be the name of a member", f"Use texts other than {FLOAT!r}.")
        try:
            _check_text(name)
            special = _check(value, depth - 1, plain=True) or special
        except _RefusedError as refused:
            refused.path.append(name)
            raise
    return special
