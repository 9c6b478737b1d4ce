"""Coroutines that can't be mistaken for their results. Comparing such a coroutine or testing it for
truth, instead of awaiting it, raises an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import NoReturn, ParamSpec, TypeVar

from sglang_lite.lang.tracebacks import user_location
from sglang_lite.protocol import ProgramError
from sglang_lite.protocol.anything import Foreign

_P = ParamSpec("_P")
_T = TypeVar("_T")


def must_await(
    method: Callable[_P, Coroutine[Foreign, Foreign, _T]],
) -> Callable[_P, Coroutine[Foreign, Foreign, _T]]:
    """Decorates a coroutine method so that comparing its result or testing it for truth, instead of
    awaiting it, raises ProgramError.
    """

    @functools.wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> Coroutine[Foreign, Foreign, _T]:
        return Unawaited(method(*args, **kwargs))

    return call


class Unawaited(Coroutine[Foreign, Foreign, _T]):
    """Coroutine that raises ProgramError if it is compared or tested for truth."""

    def __init__(self, coroutine: Coroutine[Foreign, Foreign, _T], name: str = "") -> None:
        self._coroutine = coroutine
        self.__name__: str = name or getattr(coroutine, "__name__", "…")

    def __await__(self) -> Generator[Foreign, Foreign, _T]:
        return self._coroutine.__await__()

    def send(self, value: object, /) -> Foreign:
        return self._coroutine.send(value)

    def throw(
        self, kind: Foreign, value: Foreign = None, trace: TracebackType | None = None, /
    ) -> Foreign:
        return (
            self._coroutine.throw(kind)
            if value is None
            else self._coroutine.throw(kind, value, trace)
        )

    def close(self) -> None:
        self._coroutine.close()

    def _raise_unawaited(self, *_: object) -> NoReturn:
        self.close()  # suppresses Python's warning about a coroutine that was never awaited
        raise ProgramError(
            "this is a coroutine, not yet its value.",
            hint=f"Await it: await s.{self.__name__}(…).",
            where=user_location(),
        )

    def __bool__(self) -> bool:
        self._raise_unawaited()

    def __eq__(self, other: object) -> bool:
        self._raise_unawaited()

    __ne__ = __eq__
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return repr(self._coroutine)
