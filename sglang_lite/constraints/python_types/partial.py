"""Partial values: the beginning of a JSON text, read as an incomplete value of a Python type."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections import abc
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, ForwardRef, Literal, Union, get_args, get_origin

from typing_extensions import TypedDict

from sglang_lite.constraints.python_types.readable import ClassField, class_fields
from sglang_lite.constraints.python_types.value_type import value_type
from sglang_lite.protocol import JsonSchema
from sglang_lite.protocol.anything import UserValue


def partial_reader(annotation: object) -> Callable[[str], UserValue]:
    """Returns a function that reads the beginning of a text as a partial value of a type. The
    function returns None while no part of the value is known.

    Models and dataclasses become models with the same fields. Fields that have not arrived
    are None, also in named tuples. Lists, tuples and dicts contain the items that have
    arrived. Sets whose items are not yet hashable become lists. A bare scalar other than
    `str` has no partial values.
    """
    if annotation is str:
        return lambda text: text or None
    if not isinstance(value_type(annotation).constraint, JsonSchema):
        return lambda text: None
    from pydantic import TypeAdapter, ValidationError
    from pydantic_core import from_json

    adapter = TypeAdapter(_make_partial_type(annotation))

    def read(text: str) -> Any:
        text = _drop_unfinished_number(text)
        # An incomplete string is included, unless only complete strings are valid (an enum, a
        # date).
        for strings in ("trailing-strings", True):
            try:
                return adapter.validate_python(
                    from_json(text, allow_partial=typing.cast(Any, strings))
                )
            except (ValueError, ValidationError):
                continue
        return None

    return read


def _drop_unfinished_number(text: str) -> str:
    """Drops a number at the end of a text, because more digits may follow. Keeps digits inside a
    string.
    """
    inside_a_string = re.sub(r"\\.", "", text).count('"') % 2
    return text if inside_a_string else re.sub(r"(-|-?[0-9][-+.0-9eE]*)$", "", text)


@lru_cache(maxsize=256)
def _cached_partial(annotation: Any) -> Any:
    return _Partial().build(annotation)


def _make_partial_type(annotation: Any) -> Any:
    """Returns a type in which everything that may still be missing is optional or None."""
    try:
        return _cached_partial(annotation)
    except TypeError:  # unhashable metadata in Annotated
        return _cached_partial.__wrapped__(annotation)


class _Partial:
    """Builds the partial type for a type. A class that contains itself is referred to by name."""

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}  # names of the classes visited so far
        self._models: dict[str, Any] = {}  # partial models by name
        self._done: dict[Any, Any] = {}  # partial types of classes

    def build(self, annotation: Any) -> Any:
        found = self._partial_of(annotation)
        for model in self._models.values():
            model.model_rebuild(_types_namespace=self._models, force=True)
        return found

    def _partial_of(self, annotation: Any) -> Any:
        origin = get_origin(annotation)
        arguments = get_args(annotation)
        if origin is typing.Annotated:
            return self._partial_of(arguments[0])
        if isinstance(annotation, typing.NewType):
            return self._partial_of(annotation.__supertype__)
        if origin in (Union, types.UnionType):
            return Union[tuple(map(self._partial_of, arguments))]  # noqa: UP007 # members are in a tuple
        if origin is tuple and arguments and arguments[-1] is not ...:
            return self._build_tuple_type(arguments, tuple)
        if isinstance(origin, type) and arguments and issubclass(origin, abc.Iterable):
            return self._partial_container(origin, arguments)
        return (
            self._convert_class(annotation)
            if isinstance(annotation, type) and origin is None
            else annotation
        )

    def _partial_container(self, origin: Any, arguments: tuple[Any, ...]) -> Any:
        before = len(self._models)
        inner = tuple(a if a is ... else self._partial_of(a) for a in arguments)
        unhashable = issubclass(origin, abc.Set) and len(self._models) > before
        lazy = origin in (abc.Iterable, abc.Iterator, abc.Generator)
        return list[inner[0]] if unhashable or lazy else origin[inner]  # type: ignore[valid-type] # built at run time

    def _build_tuple_type(self, items: Sequence[Any], make: Callable[[Sequence[Any]], Any]) -> Any:
        """Returns the type of a tuple whose last items may be missing.

        Args:
            items: types of the items.
            make: constructor of the value from the items that have arrived.
        """
        from pydantic import WrapValidator

        def read_tuple(values: Any, handler: Callable[[Any], Any]) -> Any:
            if not isinstance(values, list):
                raise ValueError("not a list")
            return make(handler([*values, *[None] * (len(items) - len(values))])[: len(values)])

        kinds = [Union[self._partial_of(item), None] for item in items]  # noqa: UP007 # X | None fails for a ForwardRef
        return typing.Annotated[tuple[tuple(kinds)], WrapValidator(read_tuple)]  # type: ignore[misc] # built at run time

    def _convert_class(self, annotation: type) -> Any:
        from pydantic import BaseModel

        if annotation in self._done:
            return self._done[annotation]
        if annotation in self._names:  # the class contains itself
            return Any if typing.is_typeddict(annotation) else ForwardRef(self._names[annotation])
        model = issubclass(annotation, BaseModel)
        fields = class_fields(annotation)
        known = (
            model
            or fields is not None
            or dataclasses.is_dataclass(annotation)
            or typing.is_typeddict(annotation)
        )
        if not known:
            return (
                self._convert_named_tuple(annotation)
                if hasattr(annotation, "_fields")
                else annotation
            )
        name = f"Partial{annotation.__name__}"
        while name in self._names.values():
            name += "_"
        self._names[annotation] = name
        self._done[annotation] = partial_type = (
            self._convert_model(annotation, name)
            if model
            else self._convert_record(annotation, name, fields)
        )
        return partial_type

    def _convert_model(self, annotation: Any, name: str) -> Any:
        from pydantic import ConfigDict, Field, RootModel, create_model

        if issubclass(annotation, RootModel):
            root = self._partial_of(annotation.model_fields["root"].annotation)
            created: Any = create_model(name, __base__=RootModel[root])  # type: ignore[valid-type] # built at run time
        else:
            extra: Literal["allow", "ignore"] = (
                "allow" if annotation.model_config.get("extra") == "allow" else "ignore"
            )
            fields: dict[str, Any] = {
                each: (
                    Union[self._partial_of(f.annotation), None],  # noqa: UP007 # X | None fails for a ForwardRef
                    Field(None, validation_alias=f.validation_alias),
                )
                for each, f in annotation.model_fields.items()
            }
            config = ConfigDict(populate_by_name=True, extra=extra, arbitrary_types_allowed=True)
            created = create_model(name, __config__=config, **fields)
        self._models[name] = created
        return created

    def _convert_record(
        self, annotation: Any, name: str, class_fields: list[ClassField] | None
    ) -> Any:
        from pydantic import ConfigDict, Field, create_model

        if class_fields is not None:
            config = ConfigDict(arbitrary_types_allowed=True)
            parts: dict[str, Any] = {
                each.name: (
                    Union[self._partial_of(each.annotation), None],  # noqa: UP007 # X | None fails for a ForwardRef
                    Field(None, validation_alias=each.member),
                )
                for each in class_fields
                if each.name
            }
            self._models[name] = created = create_model(name, __config__=config, **parts)
            return created
        hints = typing.get_type_hints(annotation)
        if typing.is_typeddict(annotation):
            members = {each: self._partial_of(hint) for each, hint in hints.items()}
            return TypedDict(annotation.__name__, members, total=False)  # type: ignore[operator] # built at run time
        names = [each.name for each in dataclasses.fields(annotation) if each.init]
        fields: dict[str, Any] = {
            each: (Union[self._partial_of(hints[each]), None], None)  # noqa: UP007 # X | None fails for a ForwardRef
            for each in names
        }
        self._models[name] = created = create_model(name, **fields)
        return created

    def _convert_named_tuple(self, annotation: Any) -> Any:
        hints = typing.get_type_hints(annotation)
        kinds = [hints.get(name, Any) for name in annotation._fields]  # noqa: SLF001 # public API of NamedTuple
        missing = [None] * len(kinds)
        return self._build_tuple_type(
            kinds, lambda values: annotation(*values, *missing[len(values) :])
        )
