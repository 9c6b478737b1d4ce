"""Values that are not all there yet: reading the beginning of a JSON text as a value of a type."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, Union, get_args, get_origin

from typing_extensions import TypedDict

from sglang_lite.constraints.types import value_type
from sglang_lite.protocol import JsonSchema


def partial_reader(annotation: Any) -> Callable[[str], Any]:
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
        # A string that is still being written is shown, unless only whole ones are values (an enum, a date).
        for strings in ("trailing-strings", True):
            try:
                return adapter.validate_python(from_json(text, allow_partial=typing.cast(Any, strings)))
            except (ValueError, ValidationError):
                continue
        return None

    return read


@lru_cache(maxsize=256)
def _partial(annotation: Any) -> Any:
    """The type with every field optional."""
    from pydantic import BaseModel, create_model

    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        return _partial(arguments[0])
    if origin in (Union, types.UnionType):
        return Union[tuple(map(_partial, arguments))]  # noqa: UP007 # from a tuple
    if origin in (list, dict, tuple, set):
        return origin[tuple(a if a is ... else _partial(a) for a in arguments)]
    if origin is Literal or not isinstance(annotation, type):
        return annotation
    if issubclass(annotation, BaseModel):
        fields = {name: (_optional(f.annotation), None) for name, f in annotation.model_fields.items()}
        return create_model(f"Partial{annotation.__name__}", **typing.cast(Any, fields))
    hints = typing.get_type_hints(annotation) if dataclasses.is_dataclass(annotation) else {}
    if hints:
        fields = {name: (_optional(hint), None) for name, hint in hints.items()}
        return create_model(f"Partial{annotation.__name__}", **typing.cast(Any, fields))
    if typing.is_typeddict(annotation):
        hints = typing.get_type_hints(annotation)
        return TypedDict(annotation.__name__, {n: _partial(h) for n, h in hints.items()}, total=False)  # type: ignore[operator] # made at run time
    return annotation


def _optional(annotation: Any) -> Any:
    return _partial(annotation) | None
