"""Values of a running program: plain data, and objects of the caller's classes. A program sees at
most the fields of such an object.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import inspect
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sglang_lite.lang.code_mode.limits import MAX_DEPTH, Meter, ProgramFault, check_int
from sglang_lite.lang.code_mode.static_types import field_names
from sglang_lite.protocol.anything import UserValue

_AS_TEXT = (
    datetime.date,
    datetime.time,
    datetime.timedelta,
    decimal.Decimal,
    uuid.UUID,
    enum.Enum,
)
KEY_TYPES: Final = (str, int, bool, float, type(None))


@dataclass(frozen=True, slots=True, eq=False)
class ObjectValue:
    """Object that a function returned.

    Attributes:
        original: the object.
        fields: the object's fields, as values of the program; None if they are not known.
    """

    original: UserValue
    fields: Mapping[str, UserValue] | None


class ResultReader:
    """Converter of a function's results to values of a program. Copies lists and dicts.

    Args:
        meter: counts the items and characters.
        name: name of the function.
    """

    def __init__(self, meter: Meter, name: str) -> None:
        self._meter = meter
        self._name = name
        self._size = 0

    def read(self, value: UserValue, depth: int = 0) -> UserValue:
        """Converts a value. Raises ProgramFault if programs can't have such values."""
        if depth > MAX_DEPTH:
            raise self._error(f"has values nested more than {MAX_DEPTH} times.")
        self._count(1)
        if value is None or type(value) in (bool, float):
            return value
        if isinstance(value, enum.Enum):
            return ObjectValue(value, None)
        if isinstance(value, str):
            self._count(len(value))
            return str.__str__(value)
        if isinstance(value, int):
            return check_int(int(value))
        if isinstance(value, float):
            return float(value)
        names = field_names(type(value))
        if names is not None:
            fields = {
                name: self.read(getattr(value, name, None), depth + 1)
                for name in names
                if not name.startswith("_")
            }
            return ObjectValue(value, fields)
        return self._read_container(value, depth)

    def _read_container(self, value: UserValue, depth: int) -> UserValue:
        if isinstance(value, list | set | frozenset):
            return [self.read(each, depth + 1) for each in value]
        if isinstance(value, tuple):
            return tuple(self.read(each, depth + 1) for each in value)
        if isinstance(value, Mapping):
            keys = [self.read(each, depth + 1) for each in value]
            if any(type(each) not in KEY_TYPES for each in keys):
                raise self._error("has keys that are neither texts nor numbers.")
            return dict(zip(keys, (self.read(each, depth + 1) for each in value.values())))
        if inspect.isgenerator(value) or inspect.isasyncgen(value) or inspect.isawaitable(value):
            raise self._error(f"is a {type(value).__name__}, which is no value.")
        return ObjectValue(value, None)

    def _count(self, size: int) -> None:
        self._size += size
        most = self._meter.limits.max_result
        if self._size > most:
            raise self._error(f"has more than max_result={most:,} items and characters.", "limit")
        self._meter.count_memory(size)

    def _error(self, problem: str, kind: str = "tool") -> ProgramFault:
        return ProgramFault(
            kind,
            f"the result of {self._name}() {problem}",
            "Ask for less, or use another function.",
        )


def original_value(value: UserValue, meter: Meter, depth: int = 0) -> UserValue:
    """Converts a program's value to an argument for the caller's functions: replaces ObjectValues
    with the original objects, and copies lists and dicts. Raises ProgramFault if the value is too
    large.
    """
    if depth > MAX_DEPTH:
        raise ProgramFault(
            "limit", f"a value is nested more than {MAX_DEPTH} times.", "Nest less deeply."
        )
    meter.count_steps()
    if isinstance(value, ObjectValue):
        return value.original
    if isinstance(value, list | tuple):
        return type(value)([original_value(each, meter, depth + 1) for each in value])
    if isinstance(value, dict):
        return {key: original_value(each, meter, depth + 1) for key, each in value.items()}
    return value


def has_objects(value: UserValue) -> bool:
    """Returns True if a value contains objects of the caller's classes. The caller must know that
    the value's size is bounded.
    """
    if isinstance(value, dict):
        return any(map(has_objects, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_objects, value))
    return isinstance(value, ObjectValue)


def is_plain(value: UserValue) -> bool:
    """Returns True if a value would not change by being saved as JSON and loaded again. The caller
    must know that the value's size is bounded.
    """
    if isinstance(value, dict):
        return all(type(key) is str and is_plain(key) for key in value) and all(
            map(is_plain, value.values())
        )
    if isinstance(value, list):
        return all(map(is_plain, value))
    if isinstance(value, str):
        return value.isascii() or value.encode("utf-8", "replace").decode() == value
    if type(value) is int:
        return -(2**63) <= value < 2**64  # integers that files of runs can store
    return value is None or isinstance(value, bool | float)


def as_text(value: UserValue, meter: Meter) -> str:
    """Returns the text of a value, as `str` does. Raises ProgramFault if it has none."""
    if isinstance(value, str):
        return value
    text = _repr(value, meter, 0)
    meter.count_memory(len(text))
    return text


def _repr(value: UserValue, meter: Meter, depth: int) -> str:
    meter.count_steps()
    if depth > MAX_DEPTH:
        raise ProgramFault(
            "limit", f"a value is nested more than {MAX_DEPTH} times.", "Nest less deeply."
        )
    match value:
        case ObjectValue(original=original):
            if depth or not isinstance(original, _AS_TEXT):
                name = type(original).__name__
                raise ProgramFault(
                    "TypeError", f"{name} can't be written as text.", "Write its fields."
                )
            return str(original)
        case list():
            text = f"[{', '.join(_repr(each, meter, depth + 1) for each in value)}]"
        case tuple():
            inside = ", ".join(_repr(each, meter, depth + 1) for each in value)
            text = f"({inside},)" if len(value) == 1 else f"({inside})"
        case dict():
            pairs = (f"{key!r}: {_repr(each, meter, depth + 1)}" for key, each in value.items())
            text = f"{{{', '.join(pairs)}}}"
        case _:
            text = repr(value)
    meter.count_memory(len(text) if depth else 0)
    return text


def are_equal(left: UserValue, right: UserValue, meter: Meter, depth: int = 0) -> bool:
    """Returns whether two values are equal, as `==` does."""
    meter.count_steps()
    if depth > MAX_DEPTH:
        raise ProgramFault(
            "limit", f"a value is nested more than {MAX_DEPTH} times.", "Nest less deeply."
        )
    match left, right:
        case (ObjectValue(), _) | (_, ObjectValue()):
            return _are_equal_objects(left, right)
        case (list(), list()) | (tuple(), tuple()):
            return len(left) == len(right) and all(
                is_same(a, b, meter, depth + 1) for a, b in zip(left, right)
            )
        case dict(), dict():
            meter.count_steps(len(left) // 100)  # comparing the keys takes time, too
            return left.keys() == right.keys() and all(
                is_same(each, right[key], meter, depth + 1) for key, each in left.items()
            )
        case (list() | tuple() | dict(), _) | (_, list() | tuple() | dict()):
            return False
        case str(), str() if len(left) == len(right):
            meter.count_steps(len(left) // 1000)
    return bool(left == right)


def is_same(left: UserValue, right: UserValue, meter: Meter, depth: int = 0) -> bool:
    """Returns True if two items are identical or equal, which is how containers compare items."""
    if left is right:
        meter.count_steps()
        return True
    return are_equal(left, right, meter, depth)


def _are_equal_objects(left: UserValue, right: UserValue) -> bool:
    originals = [each.original if isinstance(each, ObjectValue) else each for each in (left, right)]
    try:
        return bool(originals[0] == originals[1])
    except Exception as error:  # a user's class may fail to compare
        raise ProgramFault(
            "TypeError", "the objects can't be compared.", "Compare their fields."
        ) from error
