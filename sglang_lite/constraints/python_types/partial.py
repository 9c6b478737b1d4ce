"""Partial values: the beginning of a JSON text read as a value of a type."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, Union, get_args, get_origin

from typing_extensions import TypedDict

from sglang_lite.constraints.python_types.value_type import value_type
from sglang_lite.protocol import JsonSchema


def partial_reader(annotation: object) -> Callable[[str], Any]:
    """A function from the beginning of a text to what it says of the value so far; None where that is nothing yet.

    Models and dataclasses become models of the same fields, None where one has not come; lists and dicts have what has
    come. A scalar by itself has no beginnings: only `str` is read before it is whole.
    """
    if annotation is str:
        return lambda text: text or None
    if not isinstance(value_type(annotation).constraint, JsonSchema):
        return lambda text: None
    from pydantic import TypeAdapter, ValidationError
    from pydantic_core import from_json

    adapter = TypeAdapter(_partial(annotation))

    def read(text: str) -> Any:
        text = _without_open_number(text)
        # A string that is still being written is shown, unless only whole ones are values (an enum, a date).
        for strings in ("trailing-strings", True):
            try:
                return adapter.validate_python(from_json(text, allow_partial=typing.cast(Any, strings)))
            except (ValueError, ValidationError):
                continue
        return None

    return read


def _without_open_number(text: str) -> str:
    """Drop the digits at the end, which may be the first of a longer number (unless they are part of a string)."""
    inside_a_string = re.sub(r"\\.", "", text).count('"') % 2
    return text if inside_a_string else re.sub(r"(-|-?[0-9][-+.0-9eE]*)$", "", text)


@lru_cache(maxsize=256)
def _partial(annotation: Any, inside: frozenset[type] = frozenset()) -> Any:
    """The type with every field optional. A type inside itself is read as plain JSON."""
    from pydantic import BaseModel, Field, create_model

    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        return _partial(arguments[0], inside)
    if origin in (Union, types.UnionType):
        return Union[tuple(_partial(a, inside) for a in arguments)]  # noqa: UP007 # from a tuple
    if origin in (list, dict, tuple, set):
        return origin[tuple(a if a is ... else _partial(a, inside) for a in arguments)]
    if origin is Literal or not isinstance(annotation, type):
        return annotation
    if annotation in inside:
        return Any
    inside |= {annotation}
    fields: dict[str, Any] = {}
    if issubclass(annotation, BaseModel):
        for name, f in annotation.model_fields.items():
            annotated: Any = f.annotation
            fields[name] = _partial(annotated, inside) | None, Field(None, validation_alias=f.validation_alias)
        return create_model(f"Partial{annotation.__name__}", **fields)
    if dataclasses.is_dataclass(annotation):
        for name, hint in typing.get_type_hints(annotation).items():
            fields[name] = _partial(hint, inside) | None, None
        return create_model(f"Partial{annotation.__name__}", **fields)
    if typing.is_typeddict(annotation):
        hints = typing.get_type_hints(annotation)
        return TypedDict(annotation.__name__, {n: _partial(h, inside) for n, h in hints.items()}, total=False)  # type: ignore[operator] # made at run time
    return annotation
