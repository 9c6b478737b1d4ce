"""The nodes of a program, as plain data: the one form that it has.

The language makes them, an interpreter queues them, a backend that plays whole programs is handed them, tracing records
them. A program is a tree of branches, each a sequence of nodes that only grows. A branch is named by its path: () is
the main one, (2, 0) the first branch of the fork that is node 2 of it.

What is the caller's own Python (a check, a reader of values, a method of choosing, another backend) is in no node: such
a node is `held`. What came of it is told and not appended; the branch stops there, without a slot, until the caller's
verdict comes as further nodes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from types import NoneType
from typing import Final, Literal, NoReturn, TypeAlias, get_args

from sglang_lite.errors import Location, ParameterError, shown
from sglang_lite.protocol import UNSET, Constraint, SamplingParams, Unset
from sglang_lite.protocol.prompt import Image
from sglang_lite.protocol.record import Record, Variant
from sglang_lite.protocol.sampling import Deferred

Path: TypeAlias = tuple[int, ...]
Method: TypeAlias = Literal[
    "token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"
]  # as in choosing.METHODS
JoinMode: TypeAlias = Literal["gather_variable", "concate_and_append"]
Reader: TypeAlias = Literal["int", "float", "bool"]
Sign: TypeAlias = Literal["true", "readable", "==", "<", "<=", ">", ">=", "in", "contains"]
Scalar: TypeAlias = str | int | float | bool | None


class Expression:
    """Base of what can be added to a state. `+` with text or another expression makes a list."""

    __slots__ = ()

    def __add__(self, other: str | Expression) -> Expressions:
        return Expressions((*_summands(self), *_summands(as_expression(other))))

    def __radd__(self, other: str | Expression) -> Expressions:
        return Expressions((*_summands(as_expression(other)), *_summands(self)))

    def __format__(self, spec: str) -> str:
        """Raises ParameterError: written into a string it would be its name there, and never be played."""
        raise ParameterError(
            "+", f"{self!r:.60} can't be written into a string.",
            hint="Add it: s += \"…\" + sgl.gen(…). Read its value as s[name].",
        )  # fmt: skip

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

    def walk(self) -> Iterator[Expression]:
        for part in self.expr_list:
            yield from as_expression(part).walk()

    def __repr__(self) -> str:
        return f"ExprList({list(self.expr_list)!r})"

    def __enter__(self) -> NoReturn:
        """Raises ParameterError: only a state's turns can be open."""
        role = next((part.role for part in self.walk() if isinstance(part, TurnBegin)), "user")
        hint = f"Write with s.{role}():, or s += sgl.{role}(…)."
        raise ParameterError("with", "a turn outside a program can't be opened.", hint=hint)

    def __exit__(self, *_: object) -> None: ...


def _summands(expression: Expression) -> tuple[Expression, ...]:
    return expression.expr_list if isinstance(expression, Expressions) else (expression,)


def as_expression(value: object) -> Expression:
    """Text as a node; an expression as it is. Raises ParameterError: it is neither."""
    if isinstance(value, str):
        check_awaited("+", value)
        return Text(value)
    if isinstance(value, Expression):
        return value
    raise not_addable("+", value)


_UNAWAITED = re.compile(
    r"<coroutine object (?:\w*ProgramState|SglFunction|BaseProgram)\.(?:get|arun|arun_batch) at 0x\w+>"
)


def check_awaited(operator: str, text: str, where: Location | None = None) -> None:
    """Raises ParameterError: a text was made with a coroutine of this package, where its result was meant."""
    if "<coroutine object " in text and (found := _UNAWAITED.search(text)):
        raise ParameterError(
            operator, f"the text has {found[0]!r}, a coroutine that was not awaited.",
            hint='Await it: text = await s.get("a"), or add a program itself: s += program(…).', where=where,
        )  # fmt: skip


def not_addable(operator: str, value: object, where: Location | None = None) -> ParameterError:
    """The error for what is neither text nor an expression."""
    hint = "Turn it into a string: str(…)."
    if inspect.isawaitable(value):
        name = getattr(value, "__name__", "…")
        hint = f"Await it first: s += await {'s.get' if name == 'get' else name}(…)."
        if name == "arun":
            hint = "Add the program itself: s += program(…)."
        if inspect.iscoroutine(value):
            value.close()  # nobody will await it, and this error says so
    elif isinstance(value, list | tuple):
        hint = "Add the parts with +: s += sgl.user(…) + sgl.assistant(…)."
    elif isinstance(value, dict):
        hint = "Add a message with its role: s += sgl.user(content)."
    elif hasattr(value, "bind_arguments"):
        hint = "Call it: s += program(…)."
    kind = "None" if value is None else f"a {type(value).__name__}"
    return ParameterError(operator, f"{kind} can't be added to a program.", hint=hint, where=where)


_NAMES: Final = (str, NoneType)
_CONSTRAINTS: Final = get_args(Constraint)
_CONSTRAINTS_OR_NONE: Final = (NoneType, *_CONSTRAINTS)


def _wrong(node: BaseNode, name: str, wanted: str) -> ParameterError:
    """The error of a node that has something of another type."""
    told = f"a {type(node).__name__} needs {wanted} here, not {shown(getattr(node, name))}."
    return ParameterError(name, told, where=node.where)


class BaseNode(Variant, Expression, frozen=True, kw_only=True, eq=False):
    """Base of all nodes. Two that say the same are equal, wherever they stand.

    Attributes:
        where: the user's line that made it.
    """

    where: Location | None = None

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, BaseNode) and _said(other) == _said(self)

    def __hash__(self) -> int:
        return hash((type(self), _said(self)))

    def __repr__(self) -> str:
        names, defaults = self.__struct_fields__, self.__struct_defaults__
        always = len(names) - len(defaults)
        said = [f"{value!r:.60}" for value in _said(self)[:always]]
        for name, value, default in zip(names[always:], _said(self)[always:], defaults):
            if value != default:
                said.append(f"{name}={value!r:.60}")
        return f"{type(self).__name__}({', '.join(said)})"


def _said(node: BaseNode) -> tuple[object, ...]:
    return tuple([getattr(node, name) for name in node.__struct_fields__ if name != "where"])


class Text(BaseNode, frozen=True, eq=False):
    """Text, as it is.

    Attributes:
        ids: its tokens, where a model wrote it.
        special: as in Span.
    """

    text: str
    ids: tuple[int, ...] | None = None
    special: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise _wrong(self, "text", "a string")


class Fill(BaseNode, frozen=True, eq=False):
    """Text that is not known when the program is written: of an argument, of an earlier node, or of a hold.

    Attributes:
        argument: its name; a program that is played has none left (see program/compiled.py).
        node: path of a generation or selection in any branch: the branch waits here until that has its value, a text
            (or a list, of several samples).
        hold: number of a value that the caller's Python makes of what has come; no engine plays a program that has one.
        steps: items to take of the value, one after another.
        special: as in Span.
        read: how the value is read of the node's text; None: it is the text.
    """

    argument: str | None = None
    node: Path | None = None
    steps: tuple[int | str, ...] = ()
    special: bool = True
    read: Reader | None = None
    hold: int | None = None

    def __post_init__(self) -> None:
        if sum(source is not None for source in (self.argument, self.node, self.hold)) != 1:
            raise ParameterError("Fill", "give exactly one of `argument`, `node` and `hold`.", where=self.where)


class ImagePart(BaseNode, frozen=True, eq=False):
    """An image.

    Attributes:
        text: what stands for it in the text of a chat template.
    """

    image: Image
    text: str = ""


class TurnBegin(BaseNode, frozen=True, eq=False):
    """The start of a turn. The text that a template has there is a node of its own, before it."""

    role: str

    def __post_init__(self) -> None:
        if not isinstance(self.role, str):
            raise _wrong(self, "role", "a string")


class TurnEnd(BaseNode, frozen=True, eq=False):
    """The end of a turn; the open turn must be of this role. The template's text comes after it."""

    role: str

    def __post_init__(self) -> None:
        if not isinstance(self.role, str):
            raise _wrong(self, "role", "a string")


class ScopeBegin(BaseNode, frozen=True, eq=False):
    """The start of a scope: text from here on is collected into a variable, too."""

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise _wrong(self, "name", "a string")


class ScopeEnd(BaseNode, frozen=True, eq=False):
    """The end of a scope: its variable has its text."""

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise _wrong(self, "name", "a string")


class Gen(BaseNode, frozen=True, eq=False):
    """A generation. Its first sample goes into the text.

    Attributes:
        name: of the variable.
        held: nothing goes into the text.
    """

    name: str | None
    params: SamplingParams = SamplingParams()
    constraint: Constraint | None = None
    held: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, _NAMES):
            raise _wrong(self, "name", "a string or None")
        if not isinstance(self.params, SamplingParams):
            raise _wrong(self, "params", "SamplingParams")
        if not isinstance(self.constraint, _CONSTRAINTS_OR_NONE):
            raise _wrong(self, "constraint", "a constraint or None")


class Select(BaseNode, frozen=True, eq=False):
    """A choice among texts, which goes into the text.

    Attributes:
        method: how it is chosen; None: the caller will say (the node is held).
        temperature: above 0, a draw from the softmax of the method's scores.
        seed: of that draw; UNSET for a fresh one.
        unconditional: score the choices without the prompt, too.
        special: of the choices, as in Span.
    """

    name: str | None
    choices: tuple[str, ...]
    method: Method | None = "token_length_normalized"
    temperature: float = 0.0
    seed: int | Unset = UNSET
    unconditional: bool = False
    special: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, _NAMES):
            raise _wrong(self, "name", "a string or None")
        if isinstance(self.choices, Deferred):
            return
        if not isinstance(self.choices, tuple) or not all(isinstance(choice, str) for choice in self.choices):
            raise _wrong(self, "choices", "a tuple of strings")


class GrammarBegin(BaseNode, frozen=True, eq=False):
    """The start of a grammar: all text from here on, `text` before it, is in the language of a constraint. Choices that
    it does not allow are left out of a selection; a fork's branches need not complete it, and text between which
    nothing is generated or selected is not checked: its author has."""

    constraint: Constraint
    text: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.constraint, _CONSTRAINTS):
            raise _wrong(self, "constraint", "a constraint")
        if not isinstance(self.text, str):
            raise _wrong(self, "text", "a string")


class GrammarEnd(BaseNode, frozen=True, eq=False):
    """The end of a grammar: the text in it is complete."""


class Fork(BaseNode, frozen=True, eq=False):
    """Branches that continue from here, beside what follows, each with the nodes that are known of it."""

    branches: tuple[tuple[Node, ...], ...]

    def __post_init__(self) -> None:
        for branch in self.branches if isinstance(self.branches, tuple) else (None,):
            if not isinstance(branch, tuple) or (branch and not all(isinstance(node, BaseNode) for node in branch)):
                raise _wrong(self, "branches", "a tuple of tuples of nodes")

    def __repr__(self) -> str:
        return super().__repr__() if any(self.branches) else f"Fork({len(self.branches)})"


class Join(BaseNode, frozen=True, eq=False):
    """The end of branches.

    Attributes:
        fork: the place of the fork among this branch's nodes; None: every fork since the last join.
        ends: of each branch, how many of its nodes are waited for; (): all there are.
        mode: "concate_and_append": waits for the branches and appends the texts that they added. "gather_variable":
            appends nothing and waits for nothing; each variable of theirs is a list from here on, an item a branch.
    """

    fork: int | None = None
    ends: tuple[int, ...] = ()
    mode: JoinMode = "concate_and_append"


class Mark(BaseNode, frozen=True, eq=False):
    """A place to come back to."""


class Rollback(BaseNode, frozen=True, eq=False):
    """Ends what is queued or under way after a mark, and goes back to it. Takes effect as soon as it comes.

    Attributes:
        mark: the mark's place among this branch's nodes.
    """

    mark: int


Node: TypeAlias = (
    Text | Fill | ImagePart | TurnBegin | TurnEnd | ScopeBegin | ScopeEnd | Gen | Select
    | GrammarBegin | GrammarEnd | Fork | Join | Mark | Rollback
)  # fmt: skip


class Condition(Record, frozen=True):
    """A question about the value of a node.

    Attributes:
        left: the value; of an argument only in a compiled program.
        sign: of the comparison; "true" asks whether it is not empty, or not 0, "readable" whether it can be read.
        right: what it is compared with, is in, or contains.
    """

    left: Fill
    sign: Sign = "true"
    right: Scalar | tuple[Scalar, ...] | Fill = None


class Decision(Record, frozen=True):
    """A decision on what comes next of a program.

    Attributes:
        parts: places among the program's parts: of the one that comes if the condition holds and of the one that comes
            if not; without a condition, of the one that comes.
        condition: None: there is none.
        after: paths of nodes that have to be played before.
    """

    parts: tuple[int, ...]
    condition: Condition | None = None
    after: tuple[Path, ...] = ()


class Added(Record, frozen=True):
    """Further nodes of a branch.

    Attributes:
        first: the place of the first of them in the branch.
    """

    path: Path
    first: int
    nodes: tuple[Node, ...]


class Part(Record, frozen=True):
    """A part of a program that comes by a decision, and the decision on what comes after it, if any."""

    added: tuple[Added, ...] = ()
    decision: Decision | None = None


class Program(Record, frozen=True):
    """A whole program.

    Attributes:
        nodes: of its main branch, those of its forks in them.
        decision: on what comes after them; None: nothing does.
        parts: that may come. Decisions in a part are on later ones, so that every program ends.
    """

    nodes: tuple[Node, ...]
    decision: Decision | None = None
    parts: tuple[Part, ...] = ()
