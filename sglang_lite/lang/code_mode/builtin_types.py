"""Builtin functions and methods that a program may use, and the types of their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sglang_lite.lang.code_mode.static_types import (
    ANY,
    BOOL,
    FLOAT,
    INT,
    NEVER,
    NONE,
    STR,
    StaticType,
    items_of_dict,
    iterable_of,
    join_types,
    list_of,
    widen,
)

# Minimum and maximum number of arguments of each function.
BUILTINS: Final = {
    "len": (1, 1),
    "range": (1, 3),
    "enumerate": (1, 2),
    "zip": (2, 2),
    "sum": (1, 1),
    "min": (1, 3),
    "max": (1, 3),
    "sorted": (1, 1),
    "abs": (1, 1),
    "round": (1, 2),
    "str": (1, 1),
    "int": (1, 1),
    "float": (1, 1),
    "list": (1, 1),
}
# Functions that take `key=`: a function of one argument, or a lambda.
ORDERS: Final = ("min", "max", "sorted")
# Functions whose result can only be iterated over.
ITERATORS: Final = ("range", "enumerate", "zip")
# Minimum and maximum number of arguments of each method, by the kind of the object.
METHODS: Final = {
    "str": {
        "lower": (0, 0),
        "upper": (0, 0),
        "strip": (0, 0),
        "split": (0, 1),
        "join": (1, 1),
        "startswith": (1, 1),
        "endswith": (1, 1),
        "replace": (2, 2),
    },
    "list": {"append": (1, 1)},
    "dict": {"get": (1, 2), "keys": (0, 0), "values": (0, 0), "items": (0, 0)},
}
# Methods whose result can only be iterated over.
VIEWS: Final = ("keys", "values", "items")
METHOD_NAMES: Final = frozenset(name for names in METHODS.values() for name in names)
_NUMBERS: Final = frozenset(["bool", "int", "float"])


def item_type(found: StaticType) -> StaticType | None:
    """Returns the type of the items of a value that is iterated over, or None if values of the type
    can't be iterated over.
    """
    items = []
    for each in map(widen, found.options()):
        match each.kind:
            case "any":
                items.append(ANY)
            case "list" | "tuple" | "iterable":
                items += each.items or [NEVER if each.kind == "tuple" else ANY]
            case "dict":
                items.append(each.items[0])
            case "object" | "str":
                items.append(STR)
            case _:
                return None
    return join_types(items)


def is_number(found: StaticType) -> bool:
    return all(each.kind in (*_NUMBERS, "any") for each in widen(found).options())


def is_text(found: StaticType) -> bool:
    return all(each.kind in ("str", "any") for each in widen(found).options())


def can_be_text(found: StaticType) -> bool:
    """Returns True if values of a type may be written into a text. Records may not: a program
    writes their fields instead.
    """
    return all(each.kind not in ("record", "iterable") for each in found.options())


def result_of_builtin(name: str, arguments: Sequence[StaticType]) -> StaticType | str:
    """Returns the result type of a call of a builtin function, or a text that says what is wrong
    with the call.
    """
    first = widen(arguments[0])
    kinds = {each.kind for each in first.options()}
    match name:
        case "len":
            sized = kinds <= {"str", "list", "dict", "object", "tuple", "any"}
            return INT if sized else f"{first} has no length."
        case "range":
            whole = all(_is_whole(each) for each in arguments)
            return iterable_of(INT) if whole else "range() takes whole numbers."
        case "abs" | "round":
            return _result_of_rounding(name, arguments)
        case "str":
            return (
                STR
                if can_be_text(first)
                else f"{first} can't be written as text. Write its fields."
            )
        case "int" | "float":
            read = kinds <= {*_NUMBERS, "str", "any"}
            own = INT if name == "int" else FLOAT
            return own if read else f"{name}() takes a number or its text, not {first}."
        case "min" | "max" if len(arguments) > 1:
            return check_order(name, join_types(map(widen, arguments)))
    return _result_of_iterating(name, arguments)


def _is_whole(found: StaticType) -> bool:
    return all(each.kind in ("int", "bool", "any") for each in widen(found).options())


def _result_of_rounding(name: str, arguments: Sequence[StaticType]) -> StaticType | str:
    first = widen(arguments[0])
    if not is_number(first) or not all(map(_is_whole, arguments[1:])):
        return (
            f"{name}() takes a number, not {first}."
            if not is_number(first)
            else (f"the second argument of {name}() is a whole number.")
        )
    if name == "abs" or len(arguments) == 2:
        return join_types(INT if each.kind == "bool" else each for each in first.options())
    return INT


def _result_of_iterating(name: str, arguments: Sequence[StaticType]) -> StaticType | str:
    items = [item_type(each) for each in arguments[: 2 if name == "zip" else 1]]
    for each, item in zip(arguments, items):
        if item is None:
            return f"{name}() takes a list, not {each}."
    item, *others = [each for each in items if each is not None]
    match name:
        case "enumerate":
            if not all(map(_is_whole, arguments[1:])):
                return "the second argument of enumerate() is a whole number."
            return iterable_of(StaticType("tuple", (INT, item)))
        case "zip":
            return iterable_of(StaticType("tuple", (item, *others)))
        case "list":
            return list_of(item)
        case "sorted":
            ordered = check_order(name, widen(item))
            return ordered if isinstance(ordered, str) else list_of(ordered)
        case "sum":
            numbers = join_types(
                INT if each.kind == "bool" else each for each in (INT, *widen(item).options())
            )
            return numbers if is_number(item) else f"sum() takes numbers, not {item}."
    return check_order(name, widen(item))


def check_order(name: str, item: StaticType) -> StaticType | str:
    """Returns the type `item` if its values can be ordered, else a text that says why not."""
    if is_number(item) or is_text(item):
        return item
    return f"{name}() compares numbers, or texts, not {item}."


def result_of_method(
    owner: StaticType, name: str, arguments: Sequence[StaticType]
) -> StaticType | str:
    """Returns the result type of a method call, or a text that says what is wrong with the call.
    The caller has checked the number of arguments for each kind of object with such a method.
    """
    found = widen(owner)
    if found.kind == "any":
        if name in VIEWS:
            return iterable_of(ANY)
        return NONE if name == "append" else ANY
    kind = "dict" if found.kind == "object" else found.kind
    if name not in METHODS.get(kind, {}):
        return f"{found} has no method {name}()."
    if kind == "str":
        return _result_of_text_method(name, arguments)
    if kind == "list":
        return NONE
    key, value = items_of_dict(found)
    match name:
        case "keys":
            return iterable_of(key)
        case "values":
            return iterable_of(value)
        case "items":
            return iterable_of(StaticType("tuple", (key, value)))
    return join_types([value, arguments[1] if len(arguments) == 2 else NONE])


def _result_of_text_method(name: str, arguments: Sequence[StaticType]) -> StaticType | str:
    if name == "join":
        item = item_type(arguments[0])
        if item is None or not is_text(item):
            return (
                f"join() takes a list of texts, not {arguments[0]}. Make texts of them with str()."
            )
        return STR
    for each in arguments:
        if not is_text(each):
            return f"{name}() takes texts, not {each}."
    if name == "split":
        return list_of(STR)
    return BOOL if name in ("startswith", "endswith") else STR
