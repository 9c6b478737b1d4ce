"""Interface between the test server and its providers' APIs, and checks of requests against an
SDK's types.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

from sglang_lite.protocol.anything import Foreign, Json
from sglang_lite.testing.answers import Fail, RenderedAnswer, RequestSummary


class ScriptedApi(Protocol):
    """API of a provider. Its methods are pure functions from a request's body and scripted answers
    to objects of the SDK.
    """

    def summarize_request(self, body: Mapping[str, Json]) -> RequestSummary:
        """Summarizes a request's body."""
        ...

    def refusal(self, body: Mapping[str, Json], *, compatible: bool) -> Fail | None:
        """Returns the error with which the provider would answer, or None if it accepts the
        request.
        """
        ...

    def response(
        self, answers: Sequence[RenderedAnswer], request: RequestSummary, number: int
    ) -> Json:
        """Builds an answer in one piece.

        Args:
            answers: samples of the answer.
            number: number of the request, for ids.
        """
        ...

    def events(
        self,
        answers: Sequence[RenderedAnswer],
        request: RequestSummary,
        body: Mapping[str, Json],
        number: int,
    ) -> list[Json]:
        """Builds an answer as a list of stream events."""
        ...

    def error_body(self, fail: Fail, number: int) -> Json:
        """Builds an error as the body of a response."""
        ...

    def error_event(self, fail: Fail, number: int) -> Json:
        """Builds an error as an event of a stream."""
        ...


@cache
def strict_type_adapter(kind: Foreign) -> Foreign:
    """Returns pydantic's adapter for an SDK's request type, which rejects unknown members."""
    from pydantic import ConfigDict, TypeAdapter

    # a union, so that the config applies inside
    return TypeAdapter(kind | None, config=ConfigDict(extra="forbid"))


def find_type_error(kind: Foreign, body: object) -> tuple[str, str] | None:
    """Returns the path and message of a body's first error according to an SDK's type, or None if
    the body is valid.
    """
    from pydantic import ValidationError

    try:
        invalid = _find_lazy_error(strict_type_adapter(kind).validate_python(body))
    except ValidationError as error:
        invalid = (), error
    if invalid is None:
        return None
    path, validation_error = invalid
    # the deepest error of a union
    first = max(validation_error.errors(), key=lambda each: len(each["loc"]))
    names = _member_names(body)
    parameter = [
        str(part) for part in (*path, *first["loc"]) if isinstance(part, int) or part in names
    ]
    return ".".join(parameter) or str(first["loc"][-1]), first["msg"]


def _find_lazy_error(value: Any, path: tuple[Any, ...] = ()) -> tuple[tuple[Any, ...], Any] | None:
    """Finds the first error in values that pydantic validates lazily (items of an `Iterable`), and
    returns its path and the error, or None.
    """
    from pydantic import ValidationError

    if not isinstance(value, Mapping | list | tuple | Iterator):
        return None
    try:
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            if (found := _find_lazy_error(each, (*path, key))) is not None:
                return found
    except ValidationError as error:
        return path, error
    return None


def _member_names(body: object) -> set[str]:
    """Returns all member names in a body."""
    if isinstance(body, Mapping):
        return {
            *map(str, body),
            *(name for value in body.values() for name in _member_names(value)),
        }
    if isinstance(body, list):
        return {name for each in body for name in _member_names(each)}
    return set()


def collect_texts(value: object) -> list[str]:
    """Returns all texts of a conversation's items, in order. Scripted answers are matched against
    these texts.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [
            text for name in _TEXT_FIELDS if name in value for text in collect_texts(value[name])
        ]
    return (
        [text for each in value for text in collect_texts(each)] if isinstance(value, list) else []
    )


_TEXT_FIELDS = (
    "system",
    "instructions",
    "messages",
    "content",
    "text",
    "prompt",
    "input",
    "output",
)
