"""Expressions that a body makes and adds to nothing: `sgl.user(…)` on a line of its own."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator

from sglang_lite.lang import api
from sglang_lite.lang.function import SglFunction
from sglang_lite.lang.symbolic.graph_checks import Finding
from sglang_lite.protocol import Location

_MADE = (
    "assistant", "gen", "gen_int", "gen_string", "image", "select", "separate_reasoning", "system", "user", "video",
)  # fmt: skip


def dropped(program: SglFunction) -> Iterator[Finding]:
    """Yields a finding for each statement of the body that only makes an expression."""
    try:
        lines, first = inspect.getsourcelines(program.func)
        body = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError):  # no source: the function was made by `exec`, or is a lambda in a call
        return
    file = program.func.__code__.co_filename
    for statement in ast.walk(body):
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            name = ast.unparse(statement.value.func)
            if _named(name, program.func.__globals__) in [getattr(api, made) for made in _MADE]:
                where = Location.named(file, first + statement.lineno - 1, program.func.__qualname__)
                yield Finding("not-added", f"{name}(…) is added to nothing.", where, f"Write s += {name}(…).")


def _named(name: str, scope: dict[str, object]) -> object:
    """Object that a dotted name has in a module, or None."""
    first, *rest = name.split(".")
    found = scope.get(first)
    for part in rest:
        found = getattr(found, part, None)
    return found
