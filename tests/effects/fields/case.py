"""Cases of fields, and the doors through which they are sent."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx2
import msgspec
import pytest

from sglang_lite.server.fields import Fields

OMIT: Any = object()  # a field of a door's request that a case leaves out
UNUSED = "x-unused-fields"


@dataclass(frozen=True)
class Answer:
    """Answer of a server.

    Attributes:
        status: HTTP status.
        headers: its headers.
        text: its body.
    """

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def body(self) -> Any:
        """The body, which is JSON."""
        return json.loads(self.text)

    @property
    def events(self) -> list[Any]:
        """Events of a stream, or its lines."""
        lines = [line.removeprefix("data: ") for line in self.text.splitlines()]
        return [json.loads(line) for line in lines if line.startswith("{")]

    def get(self, path: str) -> Any:
        """What is at a place of the body, such as `choices.0.text`; None if there is nothing. `#`
        counts a list.
        """
        found: Any = self.body
        for step in path.split("."):
            if step == "#":
                found = len(found) if found is not None else None
            elif isinstance(found, list):
                found = found[int(step)] if int(step) < len(found) else None
            else:
                found = found.get(step) if isinstance(found, dict) else None
        return found


@dataclass(frozen=True)
class Door:
    """Route with a body.

    Attributes:
        path: its path.
        base: fields of a request that works.
        text: place of the answer's text.
        tokens: place of the number of its tokens.
        inside: field in which a case's field and those beside it are; "" for the body itself.
    """

    path: str
    base: Mapping[str, Any]
    text: str = ""
    tokens: str = ""
    inside: str = ""


@dataclass(frozen=True)
class Ask:
    """Sends requests of a case.

    Attributes:
        url: address of the server.
        door: route.
        name: the case's field.
        beside: other fields of all its requests.
        own: its field and value, if it is given.
    """

    url: str
    door: Door
    name: str
    beside: Mapping[str, Any]
    own: Mapping[str, Any]

    def __call__(self, **more: Any) -> Answer:
        """Answer with the case's field, and others."""
        base, given = dict(self.door.base), {**self.beside, self.name: OMIT, **self.own, **more}
        if self.door.inside:
            given = {
                self.door.inside: _without_omitted({**base.get(self.door.inside, {}), **given})
            }
        return self.send(self.door.path, _without_omitted({**base, **given}))

    def without(self, **more: Any) -> Answer:
        """Answer without the case's field."""
        return replace(self, own={})(**more)

    def text(self, *, given: bool = True, **more: Any) -> str:
        """Text of the answer, with the case's field or without."""
        return str(self._at(self.door.text, given=given, **more))

    def tokens(self) -> int:
        """Number of the answer's tokens."""
        return int(self._at(self.door.tokens))

    def _at(self, path: str, *, given: bool = True, **more: Any) -> Any:
        found = self(**more) if given else self.without(**more)
        assert found.status == 200, found.text
        return found.get(path)

    def send(self, path: str, body: object, method: str = "POST") -> Answer:
        """Answer to any request."""
        found = httpx2.request(method, self.url + path, json=body, timeout=60)
        return Answer(found.status_code, found.headers, found.text)


def _without_omitted(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not OMIT}


Shows = Callable[[Ask], bool]


@dataclass(frozen=True)
class Case:
    """Case of a field.

    Attributes:
        value: a value of the field; a function of the address of the server makes one.
        shows: whether answers show the field's effect.
        beside: other fields of the request.
        server: engine that answers (conftest.py).
        empty: what a handler reads while the field is hidden; the field's default unless it is
            given.
    """

    value: Any
    shows: Shows
    beside: Mapping[str, Any] = field(default_factory=dict)
    server: str = "bytes"
    empty: Any = OMIT

    def seen(self, url: str, door: Door, name: str, *, given: bool) -> bool:
        """Whether answers show the effect, with the field or without."""
        value = self.value(url) if callable(self.value) else self.value
        return self.shows(Ask(url, door, name, self.beside, {name: value} if given else {}))


@contextmanager
def hide_body_field(
    record: type[msgspec.Struct], name: str, empty: Any = OMIT
) -> Iterator[list[object]]:
    """Drops a field after bodies were parsed: whatever handles the record reads its default.

    Args:
        record: record of the body.
        name: field, as bodies spell it.
        empty: what is read in its place; OMIT for the default.

    Yields:
        the values that were hidden.
    """
    (found,) = (each for each in msgspec.structs.fields(record) if each.encode_name == name)
    default = found.default if empty is OMIT else empty
    if default is msgspec.NODEFAULT:
        default = found.default_factory()
    hidden: list[object] = []
    read: Any = Fields.parse_record

    def read_without(self: Fields[Any], *arguments: Any, **options: Any) -> Any:
        body = read(self, *arguments, **options)
        if type(body) is record:
            hidden.append(getattr(body, found.name))
            msgspec.structs.force_setattr(body, found.name, default)
        return body

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fields, "parse_record", read_without)
        yield hidden


# ------------------------------------------------------------------------------- what shows effects


def at(path: str, expected: Any) -> Shows:
    """Shows that something is at a place of the answer's body."""
    return lambda ask: (found := ask()).status == 200 and found.get(path) == expected


def has(path: str) -> Shows:
    """Shows that there is something at a place of the answer's body."""
    return lambda ask: (found := ask()).status == 200 and found.get(path) not in (None, [], {}, "")


def differs(*paths: str) -> Shows:
    """Shows that a place of the body differs from what it is without the field."""

    def shows(ask: Ask) -> bool:
        given, without = ask(), ask.without()
        assert (given.status, without.status) == (200, 200), given.text + without.text
        return any(given.get(path) != without.get(path) for path in paths)

    return shows


def refused(status: int = 400, word: str = "") -> Shows:
    """Shows that the request is refused."""
    return lambda ask: (found := ask()).status == status and word in found.text


def streams(kind: str = "text/event-stream") -> Shows:
    """Shows that the answer is a stream."""
    return lambda ask: ask().headers["content-type"].startswith(kind)


def reported(name: str) -> Shows:
    """Shows that a field is reported as one without effect."""
    return lambda ask: name in ask().headers.get(UNUSED, "").split(", ")


def uses_its_own_cache(path: str) -> Shows:
    """Shows that a prompt that is cached is computed again."""

    def shows(ask: Ask) -> bool:
        ask.without()
        assert ask.without().get(path) > 0
        return ask().get(path) == 0

    return shows
