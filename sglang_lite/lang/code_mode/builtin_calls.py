"""Executes the builtin functions and methods that a program may use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from sglang_lite.lang.code_mode.builtin_types import METHODS
from sglang_lite.lang.code_mode.limits import Meter, ProgramFault, check_int
from sglang_lite.lang.code_mode.operations import (
    check_key,
    check_ordered,
    do_safely,
    kind_of,
    read_number,
    type_error,
)
from sglang_lite.lang.code_mode.values import as_text
from sglang_lite.protocol.anything import UserValue

_ITERABLE: Final = (list, tuple, str, dict, range, enumerate, zip)


def iterate(value: UserValue, meter: Meter) -> Iterator[UserValue]:
    """Yields the items of a value, and counts each one as a step."""
    if type(value) not in _ITERABLE:
        raise type_error(f"{kind_of(value)} has no items.")
    items: Iterator[Any] = iter(value)
    while True:
        try:
            item = next(items)
        except StopIteration:
            return
        except RuntimeError as error:  # the dict has changed
            raise ProgramFault(
                "RuntimeError", f"{error}.", "Loop over a list of its keys: list(…)."
            ) from error
        meter.count_steps()
        yield item


def call_builtin(name: str, arguments: Sequence[UserValue], meter: Meter) -> UserValue:
    """Calls a builtin function. The type check has already checked the number of arguments."""
    first = arguments[0]
    match name:
        case "len":
            if not isinstance(first, (str, list, tuple, dict)):
                raise type_error(f"{kind_of(first)} has no length.")
            return len(first)
        case "range":
            return _make_range(arguments)
        case "enumerate":
            start = arguments[1] if len(arguments) == 2 else 0
            if not isinstance(start, int):
                raise type_error("the second argument of enumerate() is a whole number.")
            return enumerate(iterate(first, meter), start)
        case "zip":
            return zip(iterate(first, meter), iterate(arguments[1], meter))
        case "abs" | "round":
            return _round(name, arguments)
        case "str":
            return as_text(first, meter)
        case "int" | "float":
            return read_number(name, first)
        case "min" | "max" if len(arguments) > 1:
            return _find_extreme(name, arguments, meter)
    items = list(iterate(first, meter))
    if name in ("min", "max"):
        return _find_extreme(name, items, meter)
    if name == "sum":
        return _add_up(items)
    meter.count_memory(len(items))
    if name == "sorted":
        check_ordered(name, items, meter)
        return sorted(items)
    return items


def _make_range(arguments: Sequence[UserValue]) -> range:
    if not all(isinstance(each, int) for each in arguments):
        raise type_error("range() takes whole numbers.")
    found = do_safely(lambda: range(*arguments))
    assert isinstance(found, range)
    return found


def _round(name: str, arguments: Sequence[UserValue]) -> UserValue:
    first, *digits = arguments
    if not isinstance(first, int | float) or not all(isinstance(each, int) for each in digits):
        raise type_error(f"{name}() takes a number, not {kind_of(first)}.")
    if name == "abs":
        return abs(first)
    if any(abs(each) > 1000 for each in digits):
        raise ProgramFault("limit", "round() has more than 1000 digits.", "Give fewer.")
    result = do_safely(lambda: round(first, *digits))
    return check_int(result) if isinstance(result, int) else result


def _find_extreme(name: str, items: Sequence[UserValue], meter: Meter) -> UserValue:
    check_ordered(name, items, meter)
    return do_safely(lambda: min(items) if name == "min" else max(items))


def order_items(
    name: str,
    items: Sequence[UserValue],
    keys: Sequence[Any],  # numbers or texts, which is checked here
    meter: Meter,
    *,
    reverse: bool,
) -> UserValue:
    """Sorts items by their keys, or returns the item with the smallest or the largest key."""
    check_ordered(name, keys, meter)
    places = range(len(items))
    if name == "sorted":
        return [items[i] for i in sorted(places, key=keys.__getitem__, reverse=reverse)]
    choose = min if name == "min" else max
    return items[do_safely(lambda: choose(places, key=keys.__getitem__))]


def _add_up(items: Sequence[UserValue]) -> UserValue:
    if not all(isinstance(each, int | float) for each in items):
        raise type_error("sum() takes numbers.")
    result = do_safely(lambda: sum(items))  # in Python's own order and precision
    return check_int(result) if isinstance(result, int) else result


def call_method(
    owner: UserValue, name: str, arguments: Sequence[UserValue], meter: Meter
) -> UserValue:
    """Calls a method of a text, a list or a dict."""
    kind = type(owner).__name__
    least, most = METHODS.get(kind, {}).get(name, (0, -1))
    if not least <= len(arguments) <= most:
        raise ProgramFault(
            "AttributeError", f"{kind_of(owner)} has no such method {name}().", "Use what it has."
        )
    match owner:
        case list():
            meter.count_memory(1)
            return owner.append(arguments[0])
        case dict():
            if name == "get":
                return owner.get(check_key(arguments[0]), *arguments[1:])
            # lists, since Python compares and prints views without a limit
            meter.count_memory(len(owner))
            views: dict[str, Iterable[Any]] = {
                "keys": owner.keys(),
                "values": owner.values(),
                "items": owner.items(),
            }
            return list(views[name])
    return _call_text_method(owner, name, arguments, meter)


def _call_text_method(
    owner: str, name: str, arguments: Sequence[UserValue], meter: Meter
) -> UserValue:
    if name == "join":
        return _join(owner, list(iterate(arguments[0], meter)), meter)
    if not all(isinstance(each, str) for each in arguments):
        raise type_error(f"{name}() takes texts.")
    meter.count_steps(1 + len(owner) // 1000)
    match name:
        case "lower":
            result: Any = owner.lower()
        case "upper":
            result = owner.upper()
        case "strip":
            result = owner.strip()
        case "startswith":
            return owner.startswith(arguments[0])
        case "endswith":
            return owner.endswith(arguments[0])
        case "split":
            result = do_safely(lambda: owner.split(*arguments))
        case _:
            old, new = arguments
            meter.count_memory((owner.count(old)) * len(new))
            result = owner.replace(old, new)
    meter.count_memory(len(owner))
    return result


def _join(owner: str, items: Sequence[UserValue], meter: Meter) -> str:
    if not all(isinstance(each, str) for each in items):
        raise type_error("join() takes a list of texts.")
    meter.count_memory(sum(map(len, items)) + len(owner) * len(items))
    return owner.join(items)
