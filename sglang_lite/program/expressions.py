"""What can be added to a program: a node, or several one after another."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from sglang_lite.errors import Location, ParameterError


class Expression:
    """Anything that can be added to a state. `+` with text or another expression makes a list."""

    __slots__ = ()

    def __add__(self, other: str | Expression) -> Expressions:
        return Expressions((*self._parts(), *as_expression(other)._parts()))

    def __radd__(self, other: str | Expression) -> Expressions:
        return Expressions((*as_expression(other)._parts(), *self._parts()))

    def _parts(self) -> tuple[Expression, ...]:
        return (self,)

    def walk(self) -> Iterator[Expression]:
        """The parts of it, in order, without the lists."""
        yield self

    def print_graph_dfs(self) -> None:
        """Prints the parts of it, one a line."""
        for i, part in enumerate(self.walk()):
            print(f"%{i} = {part!r}")


class Expressions(Expression):
    """Expressions, one after another."""

    __slots__ = ("expr_list",)

    def __init__(self, expr_list: Sequence[Expression]) -> None:
        self.expr_list = tuple(expr_list)

    def _parts(self) -> tuple[Expression, ...]:
        return self.expr_list

    def walk(self) -> Iterator[Expression]:
        for part in self.expr_list:
            yield from as_expression(part).walk()

    def __repr__(self) -> str:
        return f"ExprList({list(self.expr_list)!r})"


def as_expression(value: Any) -> Expression:
    """Text as a node; an expression as it is. Raises ParameterError: it is neither."""
    if isinstance(value, str):
        from sglang_lite.program.nodes import Text

        return Text(value)
    if isinstance(value, Expression):
        return value
    raise not_addable("+", value)


def not_addable(operator: str, value: Any, where: Location | None = None) -> ParameterError:
    """The error for what is neither text nor an expression."""
    hint = "Turn it into text."
    if inspect.isawaitable(value):
        hint = "Await it first: s += await s.get(…)."
        if inspect.iscoroutine(value):
            value.close()  # nobody will await it, and this error says so
    elif hasattr(value, "bind_arguments"):
        hint = "Call it: s += program(…)."
    kind = "None" if value is None else f"a {type(value).__name__}"
    return ParameterError(operator, f"{kind} can't be added to a program.", hint=hint, where=where)
