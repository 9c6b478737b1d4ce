"""Finds statements of a program's body that make a generation or a turn and add it to nothing."""

from __future__ import annotations

import ast
import inspect
import textwrap
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from sglang_lite.protocol import Location
from sglang_lite.protocol.anything import UserValue

# Functions of this package that make what is added.
_MADE = {
    "assistant", "audio", "gen", "gen_int", "gen_string", "image", "select", "separate_reasoning", "system", "user",
    "video",
}  # fmt: skip
# Code of bodies by its id: code of other files may be equal to it.
_checked: weakref.WeakValueDictionary[int, CodeType] = weakref.WeakValueDictionary()
_seen: dict[Any, Any] = {}  # warnings that were shown, as Python's filters keep them


class DroppedPart(NamedTuple):
    """Statement that makes a part of a text, and adds it to nothing.

    Attributes:
        name: what the statement calls, as it is written there: `sgl.user`.
        where: its place.
    """

    name: str
    where: Location

    @property
    def problem(self) -> str:
        return f"{self.name}(…) is added to nothing."

    @property
    def cure(self) -> str:
        return f"Write s += {self.name}(…)."


def dropped_parts(body: Callable[..., UserValue]) -> Iterator[DroppedPart]:
    """Yields the statements of a body that only make a part. There are none if the body has no
    source: one that `exec` has made, or a lambda in a call.
    """
    if not isinstance(body, FunctionType):
        return
    try:
        lines, first = inspect.getsourcelines(body)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError):
        return
    file = body.__code__.co_filename
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            name = ast.unparse(statement.value.func)
            if _makes_a_part(_named(name, body.__globals__)):
                yield DroppedPart(
                    name, Location(file, first + statement.lineno - 1, body.__qualname__)
                )


def warn_of_dropped_parts(body: Callable[..., UserValue]) -> None:
    """Warns about the dropped parts of a body, at their lines, when the body is run for the first
    time.
    """
    code = getattr(body, "__code__", None)
    if code is None or _checked.get(id(code)) is code:
        return
    _checked[id(code)] = code
    for part in dropped_parts(body):
        message = f"{part.problem} {part.cure}"
        warnings.warn_explicit(
            message, UserWarning, part.where.file, part.where.line, registry=_seen
        )


def _makes_a_part(found: object) -> bool:
    module = getattr(found, "__module__", None) or ""
    return module.startswith("sglang_lite.lang.") and getattr(found, "__name__", "") in _MADE


def _named(name: str, scope: dict[str, object]) -> object:
    """Object that a dotted name has in a module, or None."""
    first, *rest = name.split(".")
    found = scope.get(first)
    for part in rest:
        found = getattr(found, part, None)
    return found
