"""The interface between the server and what it speaks, and how a request is held against an SDK's types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

from sglang_lite.protocol.anything import Foreign, Json
from sglang_lite.testing.answers import Fail, ServedAnswer, Wanted


class Api(Protocol):
    """An API of a provider. Its functions are pure: a request's body and answers in, models of the SDK out."""

    def read(self, body: Mapping[str, Json]) -> Wanted:
        """Reads a request."""
        ...

    def refusal(self, body: Mapping[str, Json], *, compatible: bool) -> Fail | None:
        """The error that the provider would answer with; None: it takes the request."""
        ...

    def whole(self, told: Sequence[ServedAnswer], wanted: Wanted, number: int) -> Json:
        """An answer in one piece.

        Args:
            told: a sample each.
            number: of the request, for the ids.
        """
        ...

    def events(self, told: Sequence[ServedAnswer], wanted: Wanted, body: Mapping[str, Json], number: int) -> list[Json]:
        """The same as a stream."""
        ...

    def error(self, fail: Fail, number: int) -> Json:
        """An error as a body."""
        ...

    def error_event(self, fail: Fail, number: int) -> Json:
        """An error in a stream."""
        ...


@cache
def adapter(kind: Foreign) -> Foreign:
    """pydantic's adapter of an SDK's type of requests, which takes no member that it does not have."""
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(kind | None, config=ConfigDict(extra="forbid"))  # a union, so that the config goes inside


def problem(kind: Foreign, body: object) -> tuple[str, str] | None:
    """The place and kind of what is wrong with a body by an SDK's type; None: nothing is."""
    from pydantic import ValidationError

    try:
        found = _later(adapter(kind).validate_python(body))
    except ValidationError as error:
        found = (), error
    if found is None:
        return None
    path, wrong = found
    first = max(wrong.errors(), key=lambda each: len(each["loc"]))  # of a union's, the one that came furthest
    names = _names(body)
    place = [str(part) for part in (*path, *first["loc"]) if isinstance(part, int) or part in names]
    return ".".join(place) or str(first["loc"][-1]), first["msg"]


def _later(value: Any, path: tuple[Any, ...] = ()) -> tuple[tuple[Any, ...], Any] | None:
    """The place and error of what pydantic looks at only when it is asked for: items of an `Iterable`."""
    from pydantic import ValidationError

    if not isinstance(value, Mapping | list | tuple | Iterator):
        return None
    try:
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            if (found := _later(each, (*path, key))) is not None:
                return found
    except ValidationError as error:
        return path, error
    return None


def _names(body: object) -> set[str]:
    """All names in a body."""
    if isinstance(body, Mapping):
        return {*map(str, body), *(name for value in body.values() for name in _names(value))}
    if isinstance(body, list):
        return {name for each in body for name in _names(each)}
    return set()


def texts(value: object) -> list[str]:
    """All texts of a conversation's items, in order: what rules are looked for in."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for name in _SAID if name in value for text in texts(value[name])]
    return [text for each in value for text in texts(each)] if isinstance(value, list) else []


_SAID = ("system", "instructions", "messages", "content", "text", "prompt", "input", "output")
