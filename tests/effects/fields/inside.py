"""Cases of fields inside fields: parts of messages, definitions of tools, formats, items, options.

A case sends a request's field twice: with the inner field, and without it or with another value.
What it shows has to be gone when the inner field is dropped after the body was parsed.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from sglang_lite.server.fields import Fields
from tests.effects.fields.case import OMIT, Ask, Door, Shows


@dataclass(frozen=True)
class Inside:
    """Case of a field inside a field.

    Attributes:
        record: record that has the inner field; None if it is the key of an object.
        name: inner field, as bodies spell it; a path from the request's field, as
            `json_schema.strict`, for a key.
        door: name of the request's record, of which `DOORS` has the route.
        outer: field of the request.
        given: value of the request's field with the inner one.
        without: value without it, or with another one.
        shows: whether answers show the effect.
        beside: other fields of the request.
        server: engine that answers (conftest.py).
        empty: what a handler reads while the inner field is hidden; its default unless it is given.
    """

    record: type[msgspec.Struct] | None
    name: str
    door: str
    outer: str
    given: Any
    without: Any
    shows: Shows
    beside: Mapping[str, Any] = field(default_factory=dict)
    server: str = "bytes"
    empty: Any = OMIT

    def __str__(self) -> str:
        return f"{self.door}.{self.outer}: {key_of(self.record) + '.' if self.record else ''}{self.name}"

    def seen(self, url: str, door: Door, *, given: bool) -> bool:
        """Whether answers show the effect, with the inner field or without."""
        own = {self.outer: self.given} if given else {}
        return self.shows(Ask(url, door, "", {**self.beside, self.outer: self.without}, own))

    @contextmanager
    def hidden(self) -> Iterator[list[object]]:
        """Drops the inner field after bodies were parsed. Yields the values that were dropped."""
        if self.record is None:
            with _without_key(self.outer, self.name.split(".")) as dropped:
                yield dropped
        else:
            with _without_field(self.record, self.name, self.empty) as dropped:
                yield dropped


def key_of(record: type[msgspec.Struct]) -> str:
    """Name of a record with that of its module."""
    return f"{record.__module__.rpartition('.')[2]}.{record.__name__}"


@contextmanager
def _without_field(record: type[msgspec.Struct], name: str, empty: Any) -> Iterator[list[object]]:
    """Sets a field of all records of a type to its default, or to `empty`, in whatever is parsed."""
    (found,) = (each for each in msgspec.structs.fields(record) if each.encode_name == name)
    default = found.default if empty is OMIT else empty
    assert default is not msgspec.NODEFAULT, (
        f"{name} has no default: say what is read while it is hidden"
    )
    dropped: list[object] = []
    convert: Any = msgspec.convert

    def convert_without(*arguments: Any, **options: Any) -> Any:
        parsed = convert(*arguments, **options)
        for each in _inside(parsed):
            if type(each) is record:
                dropped.append(getattr(each, found.name))
                msgspec.structs.force_setattr(each, found.name, default)
        return parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(msgspec, "convert", convert_without)
        yield dropped


@contextmanager
def _without_key(outer: str, path: list[str]) -> Iterator[list[object]]:
    """Drops a key of the objects of a request's field after it was parsed."""
    dropped: list[object] = []
    read: Any = Fields.parse_record

    def read_without(self: Fields[Any], *arguments: Any, **options: Any) -> Any:
        body = read(self, *arguments, **options)
        _drop(getattr(body, outer, None), path, dropped)
        return body

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fields, "parse_record", read_without)
        yield dropped


def _drop(found: Any, path: list[str], dropped: list[object]) -> None:
    if isinstance(found, list):
        for each in found:
            _drop(each, path, dropped)
        return
    first, *others = path
    if isinstance(found, msgspec.Struct):
        inner = getattr(found, first, None)
    else:
        inner = found.get(first) if isinstance(found, dict) else None
    if others:
        _drop(inner, others, dropped)
    elif isinstance(found, dict) and first in found:
        dropped.append(found.pop(first))


def _inside(parsed: Any) -> Iterator[Any]:
    """Yields all records in what was parsed."""
    if isinstance(parsed, msgspec.Struct):
        yield parsed
        for name in parsed.__struct_fields__:
            yield from _inside(getattr(parsed, name))
    elif isinstance(parsed, list | tuple):
        for each in parsed:
            yield from _inside(each)
    elif isinstance(parsed, dict):
        for each in parsed.values():
            yield from _inside(each)


def records_inside(*kinds: Any) -> set[type[msgspec.Struct]]:
    """Records that values of types may have in them."""
    found: set[type[msgspec.Struct]] = set()
    left = list(kinds)
    while left:
        kind = left.pop()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in found:
            found.add(kind)
            left += typing.get_type_hints(kind).values()
        left += typing.get_args(kind)
    return found
