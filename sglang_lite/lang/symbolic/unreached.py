"""Statements of a body that add to the program, but that no traced way reaches."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from sglang_lite.protocol import Location
from sglang_lite.protocol.anything import UserValue

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_TURNS = ("system", "user", "assistant")
_ENDS = (ast.Return, ast.Raise, ast.Break, ast.Continue)


def unreached(
    body: Callable[..., UserValue], reached: Iterable[Location | None], asked: Iterable[Location]
) -> list[Location]:
    """Locations of statements that no way has reached, behind a condition that was explored or behind the end of their
    block. (Other statements may be reached with other arguments or globals.)

    Args:
        reached: locations of what all ways through the body have added, or at which they ended with an error.
        asked: locations of all questions.
    """
    try:
        lines, first = inspect.getsourcelines(body)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return []
    function = tree.body[0] if tree.body else None
    if not isinstance(function, _Function) or not function.args.args:
        return []
    code = inspect.unwrap(body).__code__
    here = {
        location.line - first + 1 for location in reached if location is not None and location.file == code.co_filename
    }
    question_lines = {each.line - first + 1 for each in asked if each.file == code.co_filename}
    return [
        Location.named(code.co_filename, statement.lineno + first - 1, code.co_qualname)
        for statement in _dead(function.body, function.args.args[0].arg, question_lines, doubtful=False)
        if here.isdisjoint(_lines(statement))
    ]


def _lines(node: ast.stmt | ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _dead(block: Sequence[ast.stmt], state: str, question_lines: set[int], *, doubtful: bool) -> Iterator[ast.stmt]:
    """Yields the statements that add to the state and that may be unreachable."""
    for statement in block:
        if doubtful and _adds(statement, state):
            yield statement
        inside = doubtful
        if isinstance(statement, ast.If | ast.While):
            inside = doubtful or not question_lines.isdisjoint(_lines(statement.test))
        for name in ("body", "orelse", "finalbody"):
            inner = getattr(statement, name, ())
            if not isinstance(statement, _Function | ast.ClassDef):
                yield from _dead(inner, state, question_lines, doubtful=inside)
        doubtful = doubtful or isinstance(statement, _ENDS)


def _adds(statement: ast.stmt, state: str) -> bool:
    match statement:
        case ast.AugAssign(target=ast.Name(id=name), op=ast.Add()):
            return name == state
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr))):
            return name == state and attr in _TURNS
    return False
