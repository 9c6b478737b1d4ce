"""Finds statements in a program's body that create a generation or a turn without adding it to a
state.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import NamedTuple

from sglang_lite.lang.tracebacks import warn_at
from sglang_lite.protocol import Location
from sglang_lite.protocol.anything import UserValue

# Functions of this package that create parts.
_MADE = {
    "assistant", "audio", "gen", "gen_int", "gen_string", "image", "select", "separate_reasoning", "system", "user",
    "video",
}  # fmt: skip
# Code of checked bodies, by its id, since equal code may come from another file.
_checked: weakref.WeakValueDictionary[int, CodeType] = weakref.WeakValueDictionary()


class DroppedPart(NamedTuple):
    """Statement that creates a generation or a turn without adding it to a state.

    Attributes:
        name: the function called, as written in the source: `sgl.user`.
        where: location of the statement.
    """

    name: str
    where: Location

    @property
    def problem(self) -> str:
        return f"{self.name}(…) is added to nothing."

    @property
    def cure(self) -> str:
        return f"Write s += {self.name}(…)."


def find_unadded_expressions(body: Callable[..., UserValue]) -> Iterator[DroppedPart]:
    """Yields the statements of a body that create a generation or a turn without adding it. Yields
    nothing if the body's source is unavailable or can't be parsed, as for a lambda inside a call or
    code run by `exec`.
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
            if _creates_expression(_resolve_dotted_name(name, body.__globals__)):
                yield DroppedPart(
                    name, Location(file, first + statement.lineno - 1, body.__qualname__)
                )


def warn_of_unadded_expressions(body: Callable[..., UserValue]) -> None:
    """Warns about each generation or turn that a body creates without adding it. Each warning names
    the line and is given only the first time the body is run.
    """
    code = getattr(body, "__code__", None)
    if code is None or _checked.get(id(code)) is code:
        return
    _checked[id(code)] = code
    for part in find_unadded_expressions(body):
        warn_at(part.where, f"{part.problem} {part.cure}")


def _creates_expression(found: object) -> bool:
    module = getattr(found, "__module__", None) or ""
    return module.startswith("sglang_lite.lang.") and getattr(found, "__name__", "") in _MADE


def _resolve_dotted_name(name: str, scope: dict[str, object]) -> object:
    """Returns the object that a dotted name refers to in a module, or None if a part of the name
    doesn't exist.
    """
    first, *rest = name.split(".")
    found = scope.get(first)
    for part in rest:
        found = getattr(found, part, None)
    return found
