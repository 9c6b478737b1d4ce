"""Python types as constraints: the texts that spell values of a type, and functions that read them
back.

A scalar is written bare (`42`, `positive`, `2024-05-01`), every other value as JSON.
Pydantic reads texts back, so a value is always valid for its type; any other text is an
error.
"""

from __future__ import annotations

import datetime
import enum
import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from typing_extensions import is_typeddict

from sglang_lite.constraints.json_schema.formats import DATE
from sglang_lite.constraints.json_schema.wellformed import refuse_duplicate_names
from sglang_lite.constraints.number_text import PATTERNS, TERMINATORS
from sglang_lite.constraints.python_types.patterns import MAX_INT, TIME, ZONE
from sglang_lite.constraints.python_types.readable import make_readable
from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import (
    Choices,
    Constraint,
    ConstraintError,
    Number,
    Regex,
    ValueValidationError,
)


@dataclass(frozen=True, slots=True)
class ValueType:
    """A Python type with its constraint and reader.

    Attributes:
        annotation: the type; None for text that only has to look like a number.
        constraint: constraint on the text; None for `str`, which allows any text.
        parse: function from a text to the value; raises ValueValidationError.
        checked: requirements that only `parse` checks, as (JSON Pointer into the constraint's
            schema, reason).
    """

    annotation: Any
    constraint: Constraint | None
    parse: Callable[[str], Any]
    checked: tuple[tuple[str, str], ...] = ()


def value_type(annotation: object) -> ValueType:
    """Returns the constraint and reader of the values of a type.

    Args:
        annotation: a pydantic model, dataclass, attrs class, msgspec Struct, TypedDict, Literal,
            Enum, int, float, bool, str, date, datetime, time, list[…], dict[str, …], … | None, or
            Annotated with constraints.

    Raises:
        ConstraintError: the type has no JSON schema.
    """
    unreadable = isinstance(annotation, str) and not (
        annotation.strip() and annotation.isprintable()
    )
    if unreadable or isinstance(annotation, Mapping | bool):
        hint = "Give a schema as json_schema=…, or a type: a pydantic model, int, list[str] …"
        raise ConstraintError(f"type: {annotation!r:.60} is no type.", hint=hint)
    today = datetime.date.today()
    try:
        return _value_type(annotation, today)
    except TypeError:  # unhashable metadata in Annotated
        return _value_type.__wrapped__(annotation, today)


@lru_cache(maxsize=512)
def _value_type(annotation: Any, today: datetime.date) -> ValueType:
    """Returns the constraint and reader of the values of a type. `today` is part of the cache key
    because some types are compared with the current day.
    """
    if annotation is str:
        return ValueType(annotation, None, lambda text: text)
    if annotation in (int, float):
        return ValueType(
            annotation,
            Number("integer" if annotation is int else "float"),
            _number_reader(annotation),
        )
    if annotation is bool:
        return ValueType(
            annotation, Choices(("true", "false")), _make_value_reader(annotation, json.loads)
        )
    iso = {
        datetime.date: DATE,
        datetime.time: f"{TIME}{ZONE}?",
        datetime.datetime: f"{DATE}T{TIME}{ZONE}?",
    }
    if isinstance(annotation, type) and annotation in iso:
        return ValueType(annotation, Regex(iso[annotation]), _make_value_reader(annotation, str))
    members = _members_by_text(annotation)
    if members is not None:
        return ValueType(annotation, Choices(tuple(members)), partial(_find_member, members))
    # pydantic takes a while to load
    from sglang_lite.constraints.python_types.pydantic_schema import schema_of

    found = schema_of(_make_type_adapter(annotation), str(annotation))
    schema = found.schema
    if schema.get("type") == "integer":
        if "exclusiveMinimum" not in schema:
            schema.setdefault("minimum", -MAX_INT)
        if "exclusiveMaximum" not in schema:
            schema.setdefault("maximum", MAX_INT)
    constraint = msgspec.structs.replace(json_schema(schema), sets=found.sets)
    return ValueType(
        annotation, constraint, _make_value_reader(annotation, _load), checked=found.not_expressed
    )


def has_type(value: object, annotation: Any) -> bool:  # a type of any kind
    """Returns True if a value already is of a type, without conversion."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if isinstance(annotation, type) and not is_typeddict(annotation):
        return isinstance(value, annotation)
    try:
        adapter = _make_type_adapter(annotation)
    except ConstraintError:  # contains a class whose values have no text
        adapter = TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
    try:
        adapter.validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def number_text_type(number: Number) -> ValueType:
    """Returns a ValueType whose values are texts of numbers that Python can convert, without
    thousands separators.
    """
    return ValueType(None, number, _strip_number_text)


def _strip_number_text(text: str) -> str:
    return text.rstrip(TERMINATORS).replace(",", "")


def _number_reader(annotation: type) -> Callable[[str], Any]:
    read = _make_value_reader(annotation, str)

    def number(text: str) -> Any:
        if re.fullmatch(PATTERNS["float"], text.rstrip(TERMINATORS)) is None:
            raise ValueValidationError(f"{text!r} is no number.", text=text)
        return read(_strip_number_text(text))

    return number


def _members_by_text(annotation: Any) -> dict[str, Any] | None:
    """Returns the values of a Literal or Enum by their texts, or None for other types."""
    if get_origin(annotation) is Literal:
        members = get_args(annotation)
    elif isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        members = tuple(annotation)
    else:
        return None
    values: dict[str, Any] = {}
    for member in members:
        text = _enum_member_text(member)
        if text in values:
            raise ConstraintError(
                f"type: {values[text]!r} and {member!r} are both written {text!r}."
            )
        values[text] = member
    if not values:
        raise ConstraintError(f"type: {annotation!r} has no members.")
    return values


def _enum_member_text(member: Any) -> str:
    value = member.value if isinstance(member, enum.Enum) else member
    try:
        return value if isinstance(value, str) else json.dumps(value)
    except TypeError as error:
        raise ConstraintError(f"type: {member!r} can't be written: {error}.") from error


def _find_member(members: dict[str, Any], text: str) -> Any:
    if text not in members:
        raise ValueValidationError(
            f"{text!r} is none of {', '.join(map(repr, members))}.", text=text
        )
    return members[text]


def _make_type_adapter(annotation: Any) -> Any:
    from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter
    from pydantic_core import SchemaError

    if inspect.isroutine(annotation):
        raise ConstraintError(f"type: {annotation!r} is a function, not a type.")
    if _is_record_instance(annotation):
        name = type(annotation).__name__
        raise ConstraintError(
            f"type: {annotation!r:.60} is a value, not a type.",
            hint=f"Give the class: type={name}.",
        )
    if isinstance(annotation, list | tuple | set):
        inside = ", ".join(getattr(each, "__name__", repr(each)) for each in annotation)
        hint = f"Write {type(annotation).__name__}[{inside or 'str'}]."
        raise ConstraintError(f"type: {annotation!r} is a value, not a type.", hint=hint)
    try:
        return TypeAdapter(make_readable(annotation))
    except (PydanticSchemaGenerationError, PydanticUserError, SchemaError, NameError) as error:
        raise ConstraintError(
            f"type: values of {annotation!r} can't be generated: {_first_sentence(error)}.",
            hint=_suggest_readable_type(annotation),
        ) from error
    except ImportError as error:  # pydantic's optional dependencies, such as email-validator
        raise ConstraintError(f"type: {annotation!r} needs a package: {error}.") from error


def _is_record_instance(value: object) -> bool:
    """Returns True for an instance of a dataclass, a pydantic model, an attrs class or a Struct."""
    marks = ("__dataclass_fields__", "__pydantic_fields__", "__attrs_attrs__", "__struct_fields__")
    return not isinstance(value, type) and any(hasattr(type(value), mark) for mark in marks)


def _first_sentence(error: Exception) -> str:
    return re.split(r"\. |\.?\n", str(error))[0]


def _suggest_readable_type(annotation: Any) -> str:
    """Suggests what to write instead of a type that pydantic can't read."""
    if not isinstance(annotation, type):
        return ""
    if inspect.get_annotations(annotation):
        return f"Make {annotation.__name__} a dataclass: @dataclasses.dataclass in front of it."
    return "Give a dataclass, a pydantic model, a TypedDict, or a type of their fields."


_load = partial(json.loads, object_pairs_hook=refuse_duplicate_names)


def _make_value_reader(annotation: Any, load: Callable[[str], Any]) -> Callable[[str], Any]:
    from pydantic import ValidationError

    adapter = _make_type_adapter(annotation)

    def read(text: str) -> Any:
        try:
            value = load(text)
        except (ValueError, RecursionError) as error:
            raise ValueValidationError(f"the text is not JSON: {error}", text=text) from error
        try:
            return adapter.validate_python(value) if load is str else adapter.validate_json(text)
        except ValidationError as error:
            raise ValueValidationError(str(error), text=text, value=value) from error

    return read
