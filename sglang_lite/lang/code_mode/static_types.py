"""Types of expressions in a model's program, read from annotations and from JSON schemas."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from typing_extensions import is_typeddict

from sglang_lite.protocol.anything import Json, UserValue

TypeKind: TypeAlias = Literal[
    "any",
    "never",
    "none",
    "bool",
    "int",
    "float",
    "str",
    "literal",
    "list",
    "dict",
    "tuple",
    "iterable",
    "object",
    "record",
    "value",
    "union",
]
_MAX_DEPTH: Final = 8  # levels of nested types; a type nested more deeply becomes "any"

# Limits of a type that a program builds by putting values into lists and dicts:
_MAX_LEVELS: Final = 20
_MAX_PARTS: Final = 500


@dataclass(frozen=True, slots=True)
class StaticType:
    """Type of an expression.

    Attributes:
        kind: a "literal" is one of several constants. A "dict" has keys of one type and values of
            one type; an "object" is a dict with known keys. A "record" is an object of a class with
            known fields, a "value" an object of any other class. An "iterable" can only be iterated
            over.
        items: types of the items of a list, tuple, iterable, of the keys and values of a dict, or
            of the alternatives of a union.
        fields: types of the values of an object, or of the fields of a record.
        required: keys that an object must have.
        name: name of the class of a record or value.
        values: constants of a literal.
        has_more: whether an object may have other keys, too.
    """

    kind: TypeKind
    items: tuple[StaticType, ...] = ()
    fields: tuple[tuple[str, StaticType], ...] = ()
    required: frozenset[str] = frozenset()
    name: str = ""
    values: tuple[UserValue, ...] = ()
    has_more: bool = False

    def options(self) -> tuple[StaticType, ...]:
        """Returns the alternatives of a union, or the type itself."""
        return self.items if self.kind == "union" else (self,)

    def __str__(self) -> str:
        inside = ", ".join(map(str, self.items))
        match self.kind:
            case "union":
                return " | ".join(map(str, self.items))
            case "literal":
                return " | ".join(map(repr, self.values))
            case "list" | "dict" | "tuple":
                return f"{self.kind}[{inside}]" if inside else self.kind
            case "iterable":
                return f"items of type {inside}"
            case "object":
                members = ", ".join(f"{name!r}: {kind}" for name, kind in self.fields)
                return f"{{{members}}}"
            case "record" | "value":
                return self.name
            case "none":
                return "None"
        return self.kind


ANY: Final = StaticType("any")
NEVER: Final = StaticType("never")
NONE: Final = StaticType("none")
BOOL: Final = StaticType("bool")
INT: Final = StaticType("int")
FLOAT: Final = StaticType("float")
STR: Final = StaticType("str")
_BY_CLASS: Final = {type(None): NONE, None: NONE, bool: BOOL, int: INT, float: FLOAT, str: STR}
_BY_SCHEMA: Final = {"null": NONE, "boolean": BOOL, "integer": INT, "number": FLOAT, "string": STR}
_LISTS = (list, set, frozenset, collections.abc.Sequence, collections.abc.Iterable)
_DICTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


def list_of(item: StaticType) -> StaticType:
    return StaticType("list", (item,))


def dict_of(key: StaticType, value: StaticType) -> StaticType:
    return StaticType("dict", (key, value))


def iterable_of(item: StaticType) -> StaticType:
    return StaticType("iterable", (item,))


def join_types(found: Iterable[StaticType]) -> StaticType:
    """Returns the smallest type that has all values of some types."""
    different = {id(each): each for each in found}
    if len(different) == 1:
        return next(iter(different.values()))
    every = (option for each in different.values() for option in each.options())
    options = list(dict.fromkeys(option for option in every if option.kind != "never"))
    if ANY in options:
        return ANY
    plain = {each for each in options if each.kind in ("none", "bool", "int", "float", "str")}
    options = [
        each
        for each in options
        if each.kind != "literal" or not {_BY_CLASS.get(type(v)) for v in each.values} <= plain
    ]
    if not options:
        return NEVER
    if len(options) == 1:
        return options[0]
    if all(each.kind == "literal" for each in options):
        values = dict.fromkeys((type(v), v) for each in options for v in each.values)
        return StaticType("literal", values=tuple(value for _, value in values))
    kinds = {each.kind for each in options}
    if kinds == {"list"}:
        return list_of(join_types(each.items[0] for each in options))
    if kinds <= {"dict", "object"}:
        keys, values_of = zip(*map(items_of_dict, options))
        return dict_of(join_types(keys), join_types(values_of))
    return StaticType("union", tuple(options))


def items_of_dict(found: StaticType) -> tuple[StaticType, StaticType]:
    """Returns the types of the keys and values of a dict or an object."""
    if found.kind == "object":
        more = (ANY,) if found.has_more else ()
        return STR, join_types((*(each for _, each in found.fields), *more))
    return found.items[0], found.items[1]


def widen(found: StaticType) -> StaticType:
    """Returns a type in which literals are replaced by the types of their values."""
    if found.kind == "literal":
        return join_types(_BY_CLASS.get(type(value), ANY) for value in found.values)
    if found.kind == "union":
        return join_types(map(widen, found.items))
    return found


def without_none(found: StaticType) -> StaticType:
    """Returns a type without None among its alternatives."""
    if found.kind == "union":
        return join_types(each for each in found.items if each.kind != "none")
    return found


def limit_size(found: StaticType) -> StaticType:
    """Returns a type that a program builds, or a less precise type if it is too large to check."""
    if (not found.items and not found.fields) or _count_parts(found, 0) <= _MAX_PARTS:
        return found
    return iterable_of(ANY) if found.kind == "iterable" else ANY


def _count_parts(found: StaticType, depth: int) -> int:
    """Counts the types inside a type. Returns more than the limit if the nesting is too deep."""
    if found.kind == "record":  # the size of a function's result type is limited elsewhere
        return 1
    if depth > _MAX_LEVELS:
        return _MAX_PARTS + 1
    count = 1
    for each in (*found.items, *(kind for _, kind in found.fields)):
        count += _count_parts(each, depth + 1)
        if count > _MAX_PARTS:
            break
    return count


def may_be_none(found: StaticType) -> bool:
    return any(each.kind == "none" for each in found.options())


def fits(source: StaticType, target: StaticType) -> bool:
    """Returns True if values of the type `source` are accepted where `target` is expected. Lengths
    and classes are known only of values, so they are checked when a call is made.
    """
    if "any" in (source.kind, target.kind) or source.kind == "never":
        return True
    if source.kind == "union":
        return all(fits(each, target) for each in source.items)
    if target.kind == "union":
        return any(fits(source, each) for each in target.items)
    if target.kind == "literal":
        if source.kind == "literal":
            wanted = {(type(value), value) for value in target.values}
            return all((type(value), value) in wanted for value in source.values)
        return any(fits(source, _BY_CLASS.get(type(value), ANY)) for value in target.values)
    if source.kind == "literal":
        return fits(widen(source), target)
    if source.kind in ("record", "value"):
        return target.kind in ("object", "record", "value", "str", "dict", "list", "tuple")
    if target.kind == "value":
        return source.kind in ("str", "int", "float")
    if target.kind == "float":
        return source.kind in ("int", "float")
    return _fits_container(source, target)


def _fits_container(source: StaticType, target: StaticType) -> bool:
    if target.kind in ("list", "tuple"):
        if source.kind not in ("list", "tuple"):
            return False
        return all(fits(own, want) for own in source.items for want in target.items)
    if target.kind == "dict" and source.kind == "object":
        return all(fits(each, target.items[1]) for _, each in source.fields)
    if target.kind == "dict":
        return source.kind == "dict" and all(map(fits, source.items, target.items))
    if target.kind in ("object", "record"):
        if source.kind == "dict":
            return True
        own = dict(source.fields)
        wanted = dict(target.fields)
        return (
            source.kind == "object"
            and (source.has_more or target.required <= own.keys())
            and (target.has_more or own.keys() <= wanted.keys())
            and all(fits(each, wanted.get(name, ANY)) for name, each in own.items())
        )
    return source.kind == target.kind


# ------------------------------------------------------------------------------------- annotations


def type_of_result(function: Callable[..., UserValue]) -> StaticType:
    """Returns the type of a function's results; "any" if the function has no annotation."""
    try:
        found = inspect.get_annotations(function, eval_str=True).get("return", Any)
    except (NameError, TypeError, AttributeError, SyntaxError):
        return ANY
    return type_of_annotation(found)


def type_of_annotation(annotation: Any, depth: int = 0) -> StaticType:  # a type of any kind
    """Returns the type of the values that an annotation allows."""
    if (isinstance(annotation, type) and annotation in _BY_CLASS) or annotation is None:
        return _BY_CLASS[annotation]
    if depth > _MAX_DEPTH:
        return ANY
    origin = get_origin(annotation)
    inner = [type_of_annotation(each, depth + 1) for each in _type_arguments(annotation)]
    if origin in (Union, types.UnionType):
        return join_types(inner)
    if origin is Literal:
        return StaticType("literal", values=get_args(annotation))
    if hasattr(annotation, "__metadata__"):  # Annotated
        return inner[0]
    kind = origin or annotation
    if kind in _LISTS:
        return list_of(inner[0] if inner else ANY)
    if kind in _DICTS:
        return dict_of(*inner) if len(inner) == 2 else dict_of(STR, ANY)
    if kind is tuple:
        variadic = get_args(annotation)[-1:] == (Ellipsis,)
        return list_of(inner[0]) if variadic else StaticType("tuple", tuple(inner))
    if not isinstance(annotation, type):
        return ANY
    return _type_of_class(annotation, depth)


def _type_arguments(annotation: Any) -> Iterable[Any]:
    if get_origin(annotation) is Literal:
        return ()
    return [
        each
        for each in get_args(annotation)[: 1 if hasattr(annotation, "__metadata__") else None]
        if each is not Ellipsis
    ]


def _type_of_class(kind: type, depth: int) -> StaticType:
    names = field_names(kind)
    if is_typeddict(kind):
        names = tuple(kind.__annotations__)
    if names is None:
        return ANY if kind is object else StaticType("value", name=kind.__name__)
    try:
        hints = get_type_hints(kind)
    except (NameError, TypeError):
        hints = {}
    fields = tuple((name, type_of_annotation(hints.get(name, Any), depth + 1)) for name in names)
    if is_typeddict(kind):
        required: frozenset[str] = getattr(kind, "__required_keys__", frozenset())
        return StaticType("object", fields=fields, required=required, name=kind.__name__)
    return StaticType("record", fields=fields, name=kind.__name__)


def field_names(kind: type) -> tuple[str, ...] | None:
    """Returns the names of the fields of a class whose objects are records: a dataclass, a NamedTuple,
    or a class of pydantic, msgspec or attrs. Returns None for other classes.
    """
    if issubclass(kind, enum.Enum):
        return None
    if dataclasses.is_dataclass(kind):
        return tuple(each.name for each in dataclasses.fields(kind))
    for attribute in ("__pydantic_fields__", "__struct_fields__", "_fields"):
        found = getattr(kind, attribute, None)
        if isinstance(found, Mapping | tuple):
            return tuple(map(str, found))
    attrs = getattr(kind, "__attrs_attrs__", None)
    return None if attrs is None else tuple(each.name for each in attrs)


# ----------------------------------------------------------------------------------------- schemas


def type_of_schema(
    schema: Json,
    shared: Mapping[str, UserValue],
    depth: int = 0,
    known: dict[str, StaticType] | None = None,
) -> StaticType:
    """Returns the type of the values that are valid under a JSON schema.

    Args:
        shared: a schema with the definitions (`$defs`) that it refers to.
        known: types of the definitions read so far. Newly read ones are added, so that each is read
            only once. Where a definition contains itself, its type is "any".
    """
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or "allOf" in schema:
        return ANY
    inner = partial(type_of_schema, shared=shared, depth=depth + 1, known=known)
    if "$ref" in schema:
        reference = str(schema["$ref"])
        if known is None:
            return inner(resolve_reference(reference, shared))
        if reference not in known:
            known[reference] = ANY
            known[reference] = limit_size(inner(resolve_reference(reference, shared)))
        return known[reference]
    if "enum" in schema or "const" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        plain = all(isinstance(each, str | int | float | bool | None) for each in values)
        return StaticType("literal", values=tuple(values)) if plain else ANY
    for name in ("anyOf", "oneOf"):
        if name in schema:
            return join_types(map(inner, schema[name]))
    kind = schema.get("type")
    if isinstance(kind, list):
        return join_types(inner({**schema, "type": each}) for each in kind)
    if kind == "array":
        return list_of(ANY if "prefixItems" in schema else inner(schema.get("items")))
    if kind == "object":
        return _type_of_object(schema, inner)
    return _BY_SCHEMA.get(str(kind), ANY)


def _type_of_object(
    schema: Mapping[str, UserValue], inner: Callable[[Json], StaticType]
) -> StaticType:
    """Returns the type of an object. `inner` returns the types of its members."""
    members = schema.get("properties", {})
    more = schema.get("additionalProperties")
    if "patternProperties" in schema:
        more = None
    if not members:
        return dict_of(ANY, inner(more))
    fields = tuple((name, inner(each)) for name, each in members.items())
    required = frozenset(schema.get("required", ()))
    return StaticType("object", fields=fields, required=required, has_more=more is not False)


def resolve_reference(reference: str, shared: Mapping[str, UserValue]) -> Json:
    """Returns the schema that a reference within a document points to, or None if there is none."""
    found: Any = shared
    for name in reference.removeprefix("#/").split("/"):
        if not isinstance(found, Mapping) or name not in found:
            return None
        found = found[name]
    return found
