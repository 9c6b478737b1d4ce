"""Executes operations on the values of a running program, within its limits."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

from sglang_lite.errors import short_repr
from sglang_lite.lang.code_mode.limits import MAX_BITS, Meter, ProgramFault, check_int
from sglang_lite.lang.code_mode.parse import MAX_POWER
from sglang_lite.lang.code_mode.values import KEY_TYPES, ObjectValue, are_equal, as_text, is_same
from sglang_lite.protocol.anything import UserValue

_NUMBERS = (int, float, bool)
_MAX_DIGITS: Final = 1000  # characters of a text that is converted to a number
_MAX_SHOWN: Final = 200  # characters of a Python error's message
_ARITHMETIC: Final[dict[type, Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_ORDER: Final[dict[type, Callable[[Any, Any], bool]]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_PYTHON_ERRORS = (ArithmeticError, LookupError, ValueError, TypeError)


def type_error(problem: str) -> ProgramFault:
    """Returns the error for values of wrong types."""
    return ProgramFault("TypeError", problem, "Check the types of the values.")


def kind_of(value: UserValue) -> str:
    return type(value.original if isinstance(value, ObjectValue) else value).__name__


def do_safely(work: Callable[[], UserValue]) -> UserValue:
    """Calls `work` and returns its result. Raises ProgramFault instead of Python's errors."""
    try:
        return work()
    except _PYTHON_ERRORS as error:
        raise python_fault(error) from error


def python_fault(error: Exception) -> ProgramFault:
    """Converts an error that Python raised to a ProgramFault."""
    name = type(error).__name__
    return ProgramFault(name, f"{name}: {error!s:.{_MAX_SHOWN}}.", "Check the values before.")


def compute(op: ast.operator, left: UserValue, right: UserValue, meter: Meter) -> UserValue:
    """Returns the result of an operation on two values."""
    if isinstance(left, _NUMBERS) and isinstance(right, _NUMBERS):
        _bound_number(op, left, right)
        result = do_safely(lambda: _ARITHMETIC[type(op)](left, right))
        return check_int(result) if isinstance(result, int) else result
    match op, left, right:
        case (ast.Add(), str(), str()) | (ast.Add(), list(), list()):
            meter.count_memory(len(left) + len(right))
            return left + right
        case (ast.Mult(), str() | list(), int()):
            return _repeat(left, right, meter)
        case (ast.Mult(), int(), str() | list()):
            return _repeat(right, left, meter)
    raise type_error(f"{kind_of(left)} and {kind_of(right)} can't be computed with.")


def _bound_number(op: ast.operator, left: UserValue, right: UserValue) -> None:
    if not (isinstance(left, int) and isinstance(right, int)):
        return
    if isinstance(op, ast.Mult) and left.bit_length() + right.bit_length() > MAX_BITS + 1:
        check_int(1 << (MAX_BITS + 1))
    if isinstance(op, ast.Pow):
        if not 0 <= right <= MAX_POWER:
            raise ProgramFault("limit", f"the exponent is not from 0 to {MAX_POWER}.", "Multiply.")
        if left.bit_length() * right > MAX_BITS + MAX_POWER:
            check_int(1 << (MAX_BITS + 1))


def _repeat(value: str | list[UserValue], count: int, meter: Meter) -> UserValue:
    if not value or count <= 0:  # Python can't multiply by any number
        return value[:0]
    meter.count_memory(len(value) * count)
    return value * count


def negate(op: ast.unaryop, value: UserValue) -> UserValue:
    if isinstance(op, ast.Not):
        return not is_true(value)
    if not isinstance(value, _NUMBERS):
        raise type_error(f"{kind_of(value)} has no sign.")
    return -value if isinstance(op, ast.USub) else +value


def is_true(value: UserValue) -> bool:
    """Returns whether a value counts as true. Objects of the caller's classes always do."""
    return True if isinstance(value, ObjectValue) else bool(value)


def compare(op: ast.cmpop, left: UserValue, right: UserValue, meter: Meter) -> bool:
    match op:
        case ast.Is():
            return left is right
        case ast.IsNot():
            return left is not right
        case ast.Eq():
            return are_equal(left, right, meter)
        case ast.NotEq():
            return not are_equal(left, right, meter)
        case ast.In():
            return _contains(right, left, meter)
        case ast.NotIn():
            return not _contains(right, left, meter)
    both_numbers = isinstance(left, _NUMBERS) and isinstance(right, _NUMBERS)
    if both_numbers or (isinstance(left, str) and isinstance(right, str)):
        meter.count_steps(0 if both_numbers else min(len(left), len(right)) // 1000)
        return _ORDER[type(op)](left, right)
    raise type_error(f"{kind_of(left)} and {kind_of(right)} have no order.")


def _contains(owner: UserValue, value: UserValue, meter: Meter) -> bool:
    match owner:
        case str() if isinstance(value, str):
            meter.count_steps(1 + len(owner) // 1000)
            return value in owner
        case list() | tuple():
            return any(is_same(value, each, meter) for each in owner)
        case dict():
            return check_key(value) in owner
    raise type_error(f"{kind_of(value)} can't be looked for in {kind_of(owner)}.")


def check_key(key: UserValue) -> UserValue:
    """Returns `key` itself. Raises ProgramFault if it can't be a key of a dict."""
    if type(key) not in KEY_TYPES:
        raise type_error(f"{kind_of(key)} can't be a key.")
    return key


def get_item(owner: UserValue, key: UserValue) -> UserValue:
    """Returns `owner[key]`."""
    if isinstance(owner, dict):
        return do_safely(lambda: owner[check_key(key)])
    if isinstance(owner, list | tuple | str) and isinstance(key, int):
        return do_safely(lambda: owner[key])
    # the text of a list may be far longer than the list
    shown = short_repr(key) if type(key) in KEY_TYPES else f"of the type {kind_of(key)}"
    raise type_error(f"{kind_of(owner)} has no item {shown}.")


def set_item(owner: UserValue, key: UserValue, value: UserValue, meter: Meter) -> None:
    """Executes `owner[key] = value`."""
    meter.count_memory(1)
    if isinstance(owner, dict):
        owner[check_key(key)] = value
    elif isinstance(owner, list) and isinstance(key, int):
        do_safely(lambda: operator.setitem(owner, key, value))
    else:
        raise type_error(f"items of {kind_of(owner)} can't be set.")


def slice_of(owner: UserValue, start: UserValue, end: UserValue, meter: Meter) -> UserValue:
    """Returns `owner[start:end]`."""
    if not isinstance(owner, list | str | tuple) or not all(
        each is None or isinstance(each, int) for each in (start, end)
    ):
        raise type_error(f"{kind_of(owner)} can't be sliced so.")
    found = owner[start:end]
    meter.count_memory(len(found))
    return found


def get_field(owner: UserValue, name: str) -> UserValue:
    """Returns the field of an object."""
    if isinstance(owner, ObjectValue) and owner.fields is not None and name in owner.fields:
        return owner.fields[name]
    known = () if not isinstance(owner, ObjectValue) else owner.fields or ()
    raise ProgramFault(
        "AttributeError",
        f"{kind_of(owner)} has no field {name!r}.",
        f"Its fields: {', '.join(known)}." if known else "Use the value itself.",
    )


def format_value(value: UserValue, spec: str, meter: Meter) -> str:
    """Returns the text of a value in an f-string. `spec` was already checked to be short."""
    if not spec:
        return as_text(value, meter)
    if not isinstance(value, (*_NUMBERS, str)):
        raise type_error(f"{kind_of(value)} has no format.")
    text: Any = do_safely(lambda: format(value, spec))
    meter.count_memory(len(text))
    return str(text)


def read_number(name: str, value: UserValue) -> UserValue:
    """Returns `int(value)` or `float(value)`."""
    if isinstance(value, str) and len(value) > _MAX_DIGITS:
        raise ProgramFault("limit", f"a number has more than {_MAX_DIGITS} digits.", "Cut it.")
    if not isinstance(value, (*_NUMBERS, str)):
        raise type_error(f"{name}() takes a number or its text, not {kind_of(value)}.")
    result = do_safely(lambda: int(value) if name == "int" else float(value))
    return check_int(result) if isinstance(result, int) else result


def check_ordered(name: str, values: Sequence[UserValue], meter: Meter) -> None:
    """Counts the characters that Python may compare to order values. Raises ProgramFault unless the
    values are all numbers or all texts.
    """
    if all(isinstance(each, _NUMBERS) for each in values):
        return
    texts = [each for each in values if isinstance(each, str)]
    if len(texts) < len(values):
        raise type_error(f"{name}() compares numbers, or texts.")
    meter.count_steps(sum(map(len, texts)) // 1000)
