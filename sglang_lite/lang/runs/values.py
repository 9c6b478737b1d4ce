"""Conversion of variables' values to JSON and back: plain data, and values of the types that `gen(type=…)` supports."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import enum
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import msgspec

from sglang_lite.protocol import ProgramError
from sglang_lite.protocol.anything import UserValue


def to_json_data(value: UserValue, what: str) -> UserValue:
    """Value as JSON data. Values of types beyond JSON's are wrapped with the name of their type.

    Args:
        what: description of the value for the error.

    Raises:
        ProgramError: the value can't be saved.
    """
    try:
        return _json_data(value, what)
    except RecursionError as error:
        problem = f"{what} contains itself, or is too deep to be saved."
        raise ProgramError(problem, hint="Keep names of what it refers to.") from error


def _json_data(value: UserValue, what: str) -> UserValue:
    if isinstance(value, int) and not -(2**63) <= value < 2**64:  # JSON data has no integers beyond 64 bits
        return {"$type": "builtins:int", "$value": str(value)}
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, list):
        return [_json_data(item, what) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: _json_data(item, what) for key, item in value.items()}
    kind: Any = type(value)
    data: Any = None
    if kind in (tuple, set, frozenset):
        data = [_json_data(item, what) for item in value]
    elif kind is dict:
        data = [[_json_data(key, what), _json_data(item, what)] for key, item in value.items()]
    elif inspect.isfunction(value):  # the function of a ToolCall
        kind, data = value, value.__name__
    elif isinstance(value, enum.Enum):
        data = value.name
    elif isinstance(value, datetime.date | datetime.time):
        data = value.isoformat()
    elif hasattr(value, "model_dump"):
        data = value.model_dump(mode="json")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        data = {f.name: _json_data(getattr(value, f.name), what) for f in dataclasses.fields(value)}
    elif isinstance(value, msgspec.Struct):
        data = {name: _json_data(getattr(value, name), what) for name in value.__struct_fields__}
    name = f"{kind.__module__}:{kind.__qualname__}"
    with contextlib.suppress(ImportError, AttributeError):
        if data is not None and import_by_name(name) is kind:
            return {"$type": name, "$value": data}
    raise ProgramError(
        f"{what} is a {kind.__name__}, which can't be saved to a file.",
        hint="Define its class at the top of a module, or return plain data.",
    )


def import_by_name(name: str) -> UserValue:
    """Class or function with the name `module:qualified.name`. Imports the module."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def from_json_data(value: UserValue, find: Callable[[str], UserValue]) -> UserValue:
    """Value from the result of `to_json_data`.

    Args:
        find: returns the class or function of a name. Raises if the name is unknown, or its class must not be
            instantiated.

    Raises:
        ValueError: a type is not one of a saved value.
    """
    if isinstance(value, list):
        return [from_json_data(item, find) for item in value]
    if not isinstance(value, dict):
        return value
    if "$type" not in value:
        return {key: from_json_data(item, find) for key, item in value.items()}
    kind, data = find(value["$type"]), value["$value"]
    if inspect.isfunction(kind):
        return kind
    if kind is int:
        return int(data)
    if kind in (tuple, set, frozenset):
        return kind(from_json_data(item, find) for item in data)
    if kind is dict:
        return {from_json_data(key, find): from_json_data(item, find) for key, item in data}
    if issubclass(kind, enum.Enum):
        return kind[data]
    if issubclass(kind, datetime.date | datetime.time):
        return kind.fromisoformat(data)
    if hasattr(kind, "model_validate"):
        return kind.model_validate(data)
    if hasattr(kind, "__dataclass_fields__") or issubclass(kind, msgspec.Struct):
        return kind(**from_json_data(data, find))
    raise ValueError(f"{value['$type']} is not the type of a saved value")
