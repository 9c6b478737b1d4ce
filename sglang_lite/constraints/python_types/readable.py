"""Makes annotations readable by pydantic. Models replace attrs classes and msgspec Structs. Before
Python 3.12, TypedDicts of `typing_extensions` replace other TypedDicts, because pydantic requires
them.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ForwardRef, Literal, NotRequired, Union, get_args, get_origin

import msgspec
from typing_extensions import TypedDict

from sglang_lite.protocol import ConstraintError


@dataclass(frozen=True, slots=True)
class ClassField:
    """Field of an attrs class, a msgspec Struct or a dataclass.

    Attributes:
        name: keyword of the constructor.
        member: name in JSON.
        annotation: type of the value.
        default: arguments of pydantic's Field that give the default, if there is one.
    """

    name: str
    member: str
    annotation: Any
    default: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ClassReader:
    """Reads the values of an attrs class or Struct.

    Attributes:
        cls: the class.
        names: keywords of its constructor by the names of the model's fields.
        checks: description of the checks that the constructor makes beyond the types of fields, or
            "" if it makes none.
    """

    cls: type
    names: dict[str, str]
    checks: str

    def build_value(self, model: Any) -> Any:  # instance of the class's pydantic stand-in
        """Builds an instance of the class from the fields set on its pydantic stand-in."""
        try:
            return self.cls(
                **{
                    self.names[each]: getattr(model, each)
                    for each in self.names.keys() & model.model_fields_set
                }
            )
        except TypeError as error:  # pydantic would not turn a TypeError into a validation error
            raise ValueError(str(error)) from error


def class_fields(cls: object) -> list[ClassField] | None:
    """Returns the JSON fields of a class that pydantic can't read: an attrs class, a msgspec
    Struct, or a dataclass with a field of such a class. Before Python 3.12, a dataclass with a
    field of a TypedDict also counts. Returns None for any other annotation.

    Raises:
        ConstraintError: a Struct is written as an array, or a name in an annotation is not
            known.
    """
    if not isinstance(cls, type) or not (
        _is_attrs_or_struct(cls) or (_is_dataclass(cls) and _contains_unreadable_class(cls, set()))
    ):
        return None
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise ConstraintError(f"type: {cls.__name__} has no JSON schema: {error}.") from error
    if issubclass(cls, msgspec.Struct):
        return list(_struct_fields(cls, hints))
    return list(
        _attrs_fields(cls, hints)
        if hasattr(cls, "__attrs_attrs__")
        else _dataclass_fields(cls, hints)
    )


def _is_attrs_or_struct(cls: type) -> bool:
    """Returns True for an attrs class or a Struct."""
    return hasattr(cls, "__attrs_attrs__") or issubclass(cls, msgspec.Struct)


def _is_dataclass(cls: type) -> bool:
    """Returns True for a dataclass of the standard library. Pydantic's own dataclasses are
    excluded, because they have more than fields.
    """
    return dataclasses.is_dataclass(cls) and not hasattr(cls, "__pydantic_config__")


def _contains_unreadable_class(annotation: Any, seen: set[type]) -> bool:
    """Returns True if an annotation contains a class that pydantic does not read.

    Args:
        seen: dataclasses already visited, since one may contain itself.
    """
    if typing.is_typeddict(annotation):
        return sys.version_info < (3, 12)
    if isinstance(annotation, type) and _is_attrs_or_struct(annotation):
        return True
    if not isinstance(annotation, type) or not _is_dataclass(annotation) or annotation in seen:
        return any(_contains_unreadable_class(each, seen) for each in get_args(annotation))
    seen.add(annotation)
    try:
        hints = typing.get_type_hints(annotation, include_extras=True)
    except NameError:  # pydantic may know the name
        return False
    return any(_contains_unreadable_class(hint, seen) for hint in hints.values())


def _struct_fields(cls: type[msgspec.Struct], hints: dict[str, Any]) -> Iterator[ClassField]:
    config = cls.__struct_config__
    if config.array_like:
        raise ConstraintError(
            f"type: {cls.__name__} is written as an array.", hint="Leave array_like out."
        )
    if config.tag is not None:
        yield ClassField("", str(config.tag_field), Literal[config.tag], {})
    for each in msgspec.structs.fields(cls):
        yield ClassField(
            each.name,
            each.encode_name,
            hints[each.name],
            {} if each.required else _default_for_field(each.default),
        )


def _attrs_fields(cls: Any, hints: dict[str, Any]) -> Iterator[ClassField]:
    import attrs

    for each in attrs.fields(cls):
        if each.init:
            default = {} if each.default is attrs.NOTHING else _default_for_field(each.default)
            yield ClassField(each.alias, each.alias, hints.get(each.name, Any), default)


def _dataclass_fields(cls: Any, hints: dict[str, Any]) -> Iterator[ClassField]:
    for each in dataclasses.fields(cls):
        if each.init:
            required = (
                each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
            )
            default = None if each.default is dataclasses.MISSING else each.default
            yield ClassField(
                each.name,
                each.name,
                hints[each.name],
                {} if required else _default_for_field(default),
            )


def _default_for_field(default: Any) -> dict[str, Any]:
    """Returns arguments of pydantic's Field for a field with a default. A scalar default is passed
    on, so that schemas show it. The class itself sets the default.
    """
    return (
        {"default": default}
        if isinstance(default, str | int | float | None)
        else {"default_factory": type(None)}
    )


def make_readable(annotation: Any) -> Any:  # any annotation
    """Converts an annotation to one whose values pydantic reads."""
    return _Readable().convert(annotation)


class _Readable:
    """Converts an annotation. A class that contains itself is referred to by name."""

    def __init__(self) -> None:
        # annotations that replace classes, or their names while they are being built
        self._kinds: dict[type, Any] = {}
        self._models: list[Any] = []
        self._namespace: dict[str, Any] = {}

    def convert(self, annotation: Any) -> Any:
        found = self._convert_part(annotation)
        for model in self._models:
            model.model_rebuild(_types_namespace=self._namespace, force=True)
        return found

    def _convert_part(self, annotation: Any) -> Any:
        origin = get_origin(annotation)
        arguments = get_args(annotation)
        if typing.is_typeddict(annotation) and sys.version_info < (3, 12):
            hints = typing.get_type_hints(annotation, include_extras=True)
            fields = {
                name: self._convert_part(hint)
                if name in annotation.__required_keys__
                else NotRequired[self._convert_part(hint)]
                for name, hint in hints.items()
            }
            make: Any = TypedDict  # type checkers expect names that are written out
            made = make(annotation.__name__, fields)
            made.__doc__ = annotation.__doc__
            return made
        if origin is Annotated:
            base = self._convert_part(arguments[0])
            metadata = [_convert_metadata(each) for each in arguments[1:]]
            return Annotated[(base, *metadata)]
        if origin in (Union, types.UnionType):
            kinds = [
                self._convert_part(each) for each in arguments if each is not msgspec.UnsetType
            ]
            return Union[tuple(kinds)]  # noqa: UP007 # members are in a tuple
        if isinstance(origin, type):
            converted = tuple(map(self._convert_part, arguments))
            return annotation if converted == arguments else origin[converted]  # type: ignore[index] # a generic class
        fields_of_class = class_fields(annotation)
        return (
            annotation
            if fields_of_class is None
            else self._convert_foreign_class(annotation, fields_of_class)
        )

    def _convert_foreign_class(self, cls: type, fields: list[ClassField]) -> Any:
        from pydantic import AfterValidator, Field, create_model

        if cls not in self._kinds:
            name = f"{cls.__name__}_{len(self._kinds)}"
            self._kinds[cls] = ForwardRef(name)
            made: dict[str, Any] = {}
            for i, each in enumerate(fields):
                title = each.member.replace("_", " ").title()
                field = Field(validation_alias=each.member, title=title, **each.default)
                made[f"field{i}"] = (self._convert_part(each.annotation), field)
            model = create_model(cls.__name__, __doc__=cls.__doc__, **made)
            reader = ClassReader(
                cls,
                {f"field{i}": each.name for i, each in enumerate(fields) if each.name},
                _name_constructor_checks(cls),
            )
            self._models.append(model)
            self._kinds[cls] = self._namespace[name] = Annotated[
                model, AfterValidator(reader.build_value)
            ]
        return self._kinds[cls]


def _name_constructor_checks(cls: Any) -> str:
    """Describes the checks that the constructor of a class makes beyond the types of fields, such
    as "__post_init__". Returns "" if it makes none.
    """
    if not hasattr(cls, "__attrs_attrs__"):
        return "__post_init__" if hasattr(cls, "__post_init__") else ""
    hooks = [name for name in ("__attrs_pre_init__", "__attrs_post_init__") if hasattr(cls, name)]
    own = any(each.validator or each.converter for each in cls.__attrs_attrs__)
    return ", ".join([*(["validators and converters"] if own else []), *hooks])


def _convert_metadata(each: Any) -> Any:
    """Converts one item of an annotation's metadata to a form that pydantic reads."""
    if not isinstance(each, msgspec.Meta):
        return each
    from pydantic import Field

    if each.tz is not None:
        hint = "Use pydantic's AwareDatetime or NaiveDatetime."
        raise ConstraintError("type: the tz of msgspec's Meta is not supported.", hint=hint)
    names = (
        "ge",
        "gt",
        "le",
        "lt",
        "multiple_of",
        "pattern",
        "min_length",
        "max_length",
        "title",
        "description",
    )
    return Field(**{name: value for name in names if (value := getattr(each, name)) is not None})
