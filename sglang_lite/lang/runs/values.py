"""Converts the values of variables to JSON and back. Supports plain data, and the types that
`gen(type=…)` supports.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import datetime
import decimal
import enum
import fractions
import importlib
import inspect
import ipaddress
import pathlib
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from sglang_lite.protocol import ProgramError
from sglang_lite.protocol.anything import UserValue

_SPELLED = (
    decimal.Decimal,
    uuid.UUID,
    fractions.Fraction,
    complex,
    pathlib.PurePath,
    ipaddress.IPv4Address,
    ipaddress.IPv6Address,
    ipaddress.IPv4Network,
    ipaddress.IPv6Network,
    ipaddress.IPv4Interface,
    ipaddress.IPv6Interface,
)  # their constructors read what str writes
# Classes whose values a file may contain without listing the class anywhere.
PLAIN_TYPES: tuple[Any, ...] = (
    int, tuple, set, frozenset, dict, bytes, datetime.date, datetime.datetime, datetime.time, datetime.timedelta,
    *_SPELLED, type(pathlib.Path()), type(pathlib.PurePath()),
)  # fmt: skip


def to_json_data(value: UserValue, what: str) -> UserValue:
    """Converts a value to JSON data. Values of types that JSON lacks are wrapped with the name of
    their type.

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
    except UnicodeEncodeError as error:
        problem = f"{what} has half of a surrogate pair, which can't be saved to a file."
        raise ProgramError(problem, hint='Use text.encode("utf-8", "replace").decode().') from error


def _json_data(value: UserValue, what: str) -> UserValue:
    # JSON data has no integers beyond 64 bits
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return {"$type": "builtins:int", "$value": str(value)}
    if value is None or (
        isinstance(value, bool | int | float | str) and not isinstance(value, enum.Enum)
    ):
        if isinstance(value, str) and not value.isascii():
            value.encode()
        return value
    if isinstance(value, list):
        return [_json_data(item, what) for item in value]
    if isinstance(value, dict) and all(
        isinstance(key, str) and not key.startswith("$") for key in value
    ):
        return {key: _json_data(item, what) for key, item in value.items()}
    kind: Any = value if inspect.isfunction(value) else type(value)  # the function of a ToolCall
    data = _json_payload(value, kind, what)
    name = f"{kind.__module__}:{kind.__qualname__}"
    with contextlib.suppress(ImportError, AttributeError):
        if data is not None and import_by_name(name) is kind:
            return {"$type": name, "$value": data}
    raise ProgramError(
        f"{what} is a {kind.__name__}, which can't be saved to a file.",
        hint="Define its class at the top of a module, or return plain data.",
    )


def _json_payload(value: Any, kind: Any, what: str) -> UserValue:
    """Returns JSON data from which `_restore_value` can restore a value of the type `kind`, or None
    if the value can't be saved.
    """
    if inspect.isfunction(value):
        return value.__name__
    if kind in (tuple, set, frozenset) or (isinstance(value, tuple) and hasattr(kind, "_fields")):
        return [_json_data(item, what) for item in value]
    if kind is dict:
        return [[_json_data(key, what), _json_data(item, what)] for key, item in value.items()]
    if isinstance(value, enum.Enum):
        return value.name if value.name in kind.__members__ else value.value
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return [value.days, value.seconds, value.microseconds]
    if kind is bytes:
        return base64.b64encode(value).decode()
    if isinstance(value, _SPELLED):
        return str(value)
    if hasattr(value, "model_dump"):
        return _dump_model(value)
    if not isinstance(value, type) and (names := _field_names(kind)) is not None:
        return {name: _json_data(getattr(value, name), what) for name in names}
    return None


def _field_names(kind: Any) -> list[str] | None:
    """Returns the names of the fields of a dataclass, an attrs class or a Struct, or None for
    another class.
    """
    if hasattr(kind, "__attrs_attrs__"):
        return [each.name for each in kind.__attrs_attrs__]
    if dataclasses.is_dataclass(kind):
        return [each.name for each in dataclasses.fields(kind)]
    return list(kind.__struct_fields__) if issubclass(kind, msgspec.Struct) else None


def _dump_model(model: Any) -> UserValue:
    """Converts a pydantic model to JSON data. Returns None if validating this data with the model's
    class does not produce an equal model.
    """
    for by_alias in (False, True):
        data = model.model_dump(mode="json", by_alias=by_alias)
        with contextlib.suppress(ValueError):  # base class of pydantic's errors
            if type(model).model_validate(data) == model:
                return data
    return None


def import_by_name(name: str) -> UserValue:
    """Imports the class or function with the name `module:qualified.name`."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def from_json_data(value: UserValue, find: Callable[[str], UserValue]) -> UserValue:
    """Restores a value from the result of `to_json_data`.

    Args:
        find: returns the class or function of a name. Raises if the name is unknown, or its class
            must not be instantiated.

    Raises:
        ValueError: saved values can't have the type that is named in the data.
    """
    if isinstance(value, list):
        return [from_json_data(item, find) for item in value]
    if not isinstance(value, dict):
        return value
    if "$type" not in value:
        return {key: from_json_data(item, find) for key, item in value.items()}
    return _restore_value(find(value["$type"]), value["$value"], value["$type"], find)


def _restore_value(kind: Any, data: Any, name: str, find: Callable[[str], UserValue]) -> UserValue:
    """Restores a value of the type `kind` from the result of `_json_payload`. `name` is the type's
    name, for errors.
    """
    if inspect.isfunction(kind):
        return kind
    if kind is int:
        return int(data)
    if kind in (tuple, set, frozenset):
        return kind(from_json_data(item, find) for item in data)
    if kind is dict:
        return {from_json_data(key, find): from_json_data(item, find) for key, item in data}
    if hasattr(kind, "_fields") and issubclass(kind, tuple):
        return kind(*[from_json_data(item, find) for item in data])
    if issubclass(kind, enum.Enum):
        return kind[data] if isinstance(data, str) and data in kind.__members__ else kind(data)
    if issubclass(kind, datetime.date | datetime.time):
        return kind.fromisoformat(data)
    if issubclass(kind, datetime.timedelta):
        return kind(*data)
    if kind is bytes:
        return base64.b64decode(data, validate=True)
    if issubclass(kind, _SPELLED):
        return kind(data)
    if hasattr(kind, "model_validate"):
        return kind.model_validate(data)
    if _field_names(kind) is not None:
        return _restore_object(kind, from_json_data(data, find))
    raise ValueError(f"{name} is not the type of a saved value")


def _restore_object(kind: Any, fields: dict[str, Any]) -> UserValue:
    """Returns an object with these fields. Calls the constructor only if it takes exactly these
    fields. Otherwise sets the fields directly.
    """
    if inspect.signature(kind).parameters.keys() == set(_field_names(kind) or ()):
        return kind(**fields)
    if missing := set(_field_names(kind) or ()) - fields.keys():
        raise ValueError(
            f"{kind.__qualname__} has the fields {sorted(missing)}, which were not saved"
        )
    made = kind.__new__(kind)
    for name, field in fields.items():
        object.__setattr__(made, name, field)
    return made
