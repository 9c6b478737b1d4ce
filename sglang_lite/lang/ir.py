"""The nodes of a program. Immutable: a node says what to do; what came of it is elsewhere (futures.Cell)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_lite.lang.choices import ChoicesSamplingMethod
from sglang_lite.protocol import Constraint, ParameterError, SamplingParams

if TYPE_CHECKING:
    from sglang_lite.constraints.types import ValueType

# What `dtype=` stands for: bounded, and each is a value that Python reads. A number may be followed by one blank or
# line end, which ends it (NUMBER_STOPS) and is not part of the result: a model that would go on with text can say so,
# where otherwise only more digits were left.
REGEX_INT = r"[-+]?[0-9]{1,16}[ \n]?"
REGEX_FLOAT = r"[-+]?[0-9]{1,16}(?:\.[0-9]{1,16})?[ \n]?"
NUMBER_STOPS = (" ", "\n")
REGEX_BOOL = r"(True|False)"
REGEX_STR = r"\"(?:[^\"\\\x00-\x1f]|\\[\"\\/bfnrt]|\\u[0-9a-fA-F]{4}){0,1024}\""


class SglExpr:
    """Anything that can be added to a state. `+` with text or another expression makes a list."""

    __slots__ = ()

    def __add__(self, other: str | SglExpr) -> SglExprList:
        return SglExprList((*self._parts(), *as_expr(other)._parts()))

    def __radd__(self, other: str | SglExpr) -> SglExprList:
        return SglExprList((*as_expr(other)._parts(), *self._parts()))

    def _parts(self) -> tuple[SglExpr, ...]:
        return (self,)

    def walk(self) -> Iterator[SglExpr]:
        """The nodes in it, in order, without the lists."""
        yield self

    def print_graph_dfs(self) -> None:
        """Prints the nodes in it, one a line."""
        for i, node in enumerate(self.walk()):
            print(f"%{i} = {node!r}")


def as_expr(value: Any) -> SglExpr:
    if isinstance(value, str):
        return SglConstantText(value)
    if isinstance(value, SglExpr):
        return value
    raise ParameterError("+", f"a {type(value).__name__} can't be added to a program.", hint="Turn it into text first.")


class SglExprList(SglExpr):
    """Expressions, one after another."""

    __slots__ = ("expr_list",)

    def __init__(self, expr_list: Sequence[SglExpr]) -> None:
        self.expr_list = tuple(expr_list)

    def _parts(self) -> tuple[SglExpr, ...]:
        return self.expr_list

    def walk(self) -> Iterator[SglExpr]:
        for expr in self.expr_list:
            yield from expr.walk()

    def __repr__(self) -> str:
        return f"ExprList({list(self.expr_list)!r})"


@dataclass(frozen=True, slots=True)
class SglConstantText(SglExpr):
    """Text, as it is."""

    value: str

    def __repr__(self) -> str:
        return f"Constant({self.value!r})"


@dataclass(frozen=True, slots=True)
class SglRoleBegin(SglExpr):
    """The start of a turn."""

    role: str

    def __repr__(self) -> str:
        return f"RoleBegin({self.role})"


@dataclass(frozen=True, slots=True)
class SglRoleEnd(SglExpr):
    """The end of a turn; the open turn must be of this role."""

    role: str

    def __repr__(self) -> str:
        return f"RoleEnd({self.role})"


@dataclass(frozen=True, slots=True)
class SglVarScopeBegin(SglExpr):
    """From here on, text is collected into a variable."""

    name: str

    def __repr__(self) -> str:
        return f"VarScopeBegin({self.name!r})"


@dataclass(frozen=True, slots=True)
class SglVarScopeEnd(SglExpr):
    """The variable has its text."""

    name: str

    def __repr__(self) -> str:
        return f"VarScopeEnd({self.name!r})"


@dataclass(frozen=True, slots=True)
class SglGen(SglExpr):
    """A generation.

    Attributes:
        name: of the variable that gets the result; None for none.
        params: what `gen` was told; the rest comes from the run.
        constraint: what the output must be.
        value_type: reads the text into a typed value; None leaves it text.
        stop: strings that end the value of a number, beside those of `params`.
    """

    name: str | None
    params: SamplingParams = SamplingParams()
    constraint: Constraint | None = None
    value_type: ValueType | None = None
    stop: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Gen({self.name!r})"


@dataclass(frozen=True, slots=True)
class SglSelect(SglExpr):
    """A choice among texts."""

    name: str | None
    choices: tuple[str, ...]
    temperature: float
    choices_method: ChoicesSamplingMethod

    def __repr__(self) -> str:
        return f"Select({self.name!r}, choices={list(self.choices)!r})"


DTYPES: dict[Any, tuple[str, tuple[str, ...]]] = {
    int: (REGEX_INT, NUMBER_STOPS),
    float: (REGEX_FLOAT, NUMBER_STOPS),
    bool: (REGEX_BOOL, ()),
    str: (REGEX_STR, ()),
}
DTYPES.update({"int": DTYPES[int], "float": DTYPES[float], "bool": DTYPES[bool], "str": DTYPES[str]})
DTYPES["string"] = DTYPES[str]
