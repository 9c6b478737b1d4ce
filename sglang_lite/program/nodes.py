"""Nodes of a program, as plain data.

The language creates nodes, an interpreter queues them, a backend that plays whole programs receives
them, and tracing records them. A program is a tree of branches. Each branch is a sequence of nodes
that can only be appended to, and is identified by its path: () is the main branch, and (2, 0) is
the first branch of the fork that is node 2 of the main branch.

No node contains Python code of the caller (a check, a reader of values, a method of choosing,
another backend). A node that needs such code is judged: its answer is reported but not appended,
and its branch waits, without a slot, for the caller's verdict. The verdict is the text to append in
its place, or another question.

Nodes are added in the order in which the program wrote them, across all branches: a fork before
the nodes of its branches, and a join before a rollback in a branch that it joins.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Coroutine, Iterator, Sequence
from types import NoneType
from typing import Final, Literal, NoReturn, TypeAlias, get_args

from sglang_lite.errors import Location, ParameterError, short_repr, with_article
from sglang_lite.protocol import UNSET, Constraint, SamplingParams, Span, Unset
from sglang_lite.protocol.parameter import Deferred
from sglang_lite.protocol.prompt import Media
from sglang_lite.protocol.record import Record, Variant

Path: TypeAlias = tuple[int, ...]
Method: TypeAlias = Literal[
    "token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"
]  # as in choosing.METHODS
JoinMode: TypeAlias = Literal["gather_variable", "concate_and_append"]


class Expression:
    """Base class of everything that can be added to a state. `+` with text or another expression
    makes an `Expressions`.
    """

    __slots__ = ()

    def __add__(self, other: str | Expression) -> Expressions:
        return Expressions((self, other))

    def __radd__(self, other: str | Expression) -> Expressions:
        return Expressions((other, self))

    def __format__(self, spec: str) -> str:
        """Raises ParameterError. An expression inside an f-string would become plain text and would
        never be played.
        """
        raise ParameterError(
            "+",
            f"{self!r:.60} can't be written into a string.",
            hint='Add it: s += "…" + sgl.gen(…). Read its value as s[name]. To look at it, print(repr(…)).',
        )

    def __str__(self) -> str:
        """Raises ParameterError, like `__format__`; `repr` shows an expression."""
        return self.__format__("")

    def walk(self) -> Iterator[Expression]:
        """Yields the elementary expressions in order, with lists flattened."""
        yield self

    def print_graph_dfs(self) -> None:
        """Prints the elementary expressions, one per line."""
        for i, part in enumerate(self.walk()):
            print(f"%{i} = {part!r}")


class Expressions(Expression):
    """Sequence of expressions.

    Attributes:
        expr_list: elementary expressions, in order. Nested sequences are flattened, and texts are
            Text nodes.
    """

    __slots__ = ("expr_list",)

    expr_list: tuple[Expression, ...]

    def __init__(self, expr_list: Sequence[str | Expression]) -> None:
        parts: list[Expression] = []
        for part in expr_list:
            if isinstance(part, Expressions):
                parts += part.expr_list
            else:
                parts.append(part if isinstance(part, Expression) else as_expression(part))
        self.expr_list = tuple(parts)

    def walk(self) -> Iterator[Expression]:
        return iter(self.expr_list)

    def __repr__(self) -> str:
        return f"ExprList({list(self.expr_list)!r})"

    def __enter__(self) -> NoReturn:
        """Raises ParameterError: only the turns of a state can be opened with `with`."""
        role = next((part.role for part in self.walk() if isinstance(part, TurnBegin)), "user")
        hint = f"Write with s.{role}():, or s += sgl.{role}(…)."
        raise ParameterError("with", "a turn outside a program can't be opened.", hint=hint)

    def __exit__(self, *_: object) -> None: ...


def as_expression(value: object) -> Expression:
    """Converts a string to a Text node, and returns expressions unchanged. Raises ParameterError
    for other values.
    """
    if isinstance(value, str):
        if "<coroutine object " in value:
            check_awaited("+", value)
        return Text(value)
    if isinstance(value, Expression):
        return value
    raise not_addable("+", value)


_UNAWAITED = re.compile(
    r"<coroutine object (?:\w*ProgramState|SglFunction|BaseProgram)\.(?:get|arun|arun_batch) at 0x\w+>"
)


def check_awaited(operator: str, text: str, where: Location | None = None) -> None:
    """Raises ParameterError if a text contains the repr of one of this package's coroutines, which
    the caller forgot to await.
    """
    if found := _UNAWAITED.search(text):
        raise ParameterError(
            operator,
            f"the text has {found[0]!r}, a coroutine that was not awaited.",
            hint='Await it: text = await s.get("a"), or add a program itself: s += program(…).',
            where=where,
        )


def not_addable(operator: str, value: object, where: Location | None = None) -> ParameterError:
    """Creates the error for a value that is neither text nor an expression, with a hint that
    depends on its type.
    """
    hint = "Turn it into a string: str(…)."
    if inspect.isawaitable(value):
        name = getattr(value, "__name__", "…")
        hint = f"Await it first: s += await {'s.get' if name == 'get' else name}(…)."
        if name == "arun":
            hint = "Add the program itself: s += program(…)."
        if isinstance(value, Coroutine):
            value.close()  # suppresses Python's warning about a coroutine that was never awaited
    elif isinstance(value, list | tuple):
        hint = "Add the parts with +: s += sgl.user(…) + sgl.assistant(…)."
    elif isinstance(value, dict):
        hint = "Add a message with its role: s += sgl.user(content)."
    elif hasattr(value, "bind_arguments"):
        hint = "Call it: s += program(…)."
    elif inspect.isfunction(value):
        hint = f"Call it: s += {value.__name__}(…)."
    elif isinstance(value, bytes | bytearray):
        hint = "Decode it: s += data.decode()."
    elif inspect.isgenerator(value):
        hint = "Add the parts in a loop: for part in parts: s += part."
    elif value is None:
        hint = "A call that returns nothing, such as print(…), adds nothing: write it on a line of its own."
    name = "coroutine" if isinstance(value, Coroutine) else type(value).__name__
    kind = "None" if value is None else with_article(name)
    return ParameterError(operator, f"{kind} can't be added to a program.", hint=hint, where=where)


_NAMES: Final = (str, NoneType)
_SECONDS = (int, float, NoneType)
_CONSTRAINTS: Final = get_args(Constraint)
_CONSTRAINTS_OR_NONE: Final = (NoneType, *_CONSTRAINTS)


def _wrong_type_error(node: BaseNode, name: str, expected: str) -> ParameterError:
    """Creates the error for a node whose field `name` has the wrong type."""
    problem = (
        f"a {type(node).__name__} needs {expected} here, not {short_repr(getattr(node, name))}."
    )
    return ParameterError(name, problem, where=node.where)


class BaseNode(Variant, Expression, frozen=True, kw_only=True, eq=False):
    """Base class of all nodes. Two nodes are equal if they have the same type and all fields but
    `where` are equal.

    Attributes:
        where: line of the user's code that made the node, or None if unknown.
    """

    where: Location | None = None

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is type(self)
            and isinstance(other, BaseNode)
            and _field_values(other) == _field_values(self)
        )

    def __hash__(self) -> int:
        return hash((type(self), _field_values(self)))

    def __repr__(self) -> str:
        names = self.__struct_fields__
        defaults = self.__struct_defaults__
        always = len(names) - len(defaults)
        values = [f"{value!r:.60}" for value in _field_values(self)[:always]]
        for name, value, default in zip(names[always:], _field_values(self)[always:], defaults):
            if value != default:
                values.append(f"{name}={value!r:.60}")
        return f"{type(self).__name__}({', '.join(values)})"


def _field_values(node: BaseNode) -> tuple[object, ...]:
    return tuple([getattr(node, name) for name in node.__struct_fields__ if name != "where"])


class Text(BaseNode, frozen=True, eq=False):
    """Literal text.

    Attributes:
        text: the text.
        ids: token ids, if a model wrote the text.
        special: True if special tokens that are spelled out in the text are tokenised as such;
            False if they are plain characters (see Span).
    """

    text: str
    ids: tuple[int, ...] | None = None
    special: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise _wrong_type_error(self, "text", "a string")


class ImagePart(BaseNode, frozen=True, eq=False):
    """Image, video or sound in the text.

    Attributes:
        image: the image.
        text: placeholder of the image in the text of a chat template.
    """

    image: Media
    text: str = ""


class _Turn(BaseNode, frozen=True, eq=False):
    role: str

    def __post_init__(self) -> None:
        if not isinstance(self.role, str):
            raise _wrong_type_error(self, "role", "a string")


class TurnBegin(_Turn, frozen=True, eq=False):
    """Start of a turn. The text that the chat template puts before a turn is a separate node, which
    comes before this one.
    """


class TurnEnd(_Turn, frozen=True, eq=False):
    """End of a turn. The open turn must have this role. The text that the chat template puts after
    a turn is a separate node, which comes after this one.
    """


class _Scope(BaseNode, frozen=True, eq=False):
    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise _wrong_type_error(self, "name", "a string")


class ScopeBegin(_Scope, frozen=True, eq=False):
    """Start of a scope: the text up to its end is also collected into a variable."""


class ScopeEnd(_Scope, frozen=True, eq=False):
    """End of a scope: the text since the scope's start is assigned to its variable."""


class Gen(BaseNode, frozen=True, eq=False):
    """Generation. Its first sample is appended to the text.

    Attributes:
        name: name of the variable, or None.
        params: sampling parameters.
        constraint: constraint on the generated text, or None.
        judged: True if the caller decides on the answer. Nothing is appended, and the branch waits
            for the verdict.
        stream: True if deltas are sent even if its program is not streamed.
        timeout: seconds that the caller waits for the answer, from when the node is played, or None
            for no limit. Before the time is up, an engine cuts short JSON that closing brackets can
            complete.
    """

    name: str | None
    params: SamplingParams = SamplingParams()
    constraint: Constraint | None = None
    judged: bool = False
    stream: bool = False
    timeout: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, _NAMES):
            raise _wrong_type_error(self, "name", "a string or None")
        if not isinstance(self.timeout, _SECONDS):
            raise _wrong_type_error(self, "timeout", "a number of seconds or None")
        if not isinstance(self.params, SamplingParams):
            raise _wrong_type_error(self, "params", "SamplingParams")
        if not isinstance(self.constraint, _CONSTRAINTS_OR_NONE):
            raise _wrong_type_error(self, "constraint", "a constraint or None")


class Select(BaseNode, frozen=True, eq=False):
    """Choice among texts. The chosen text is appended.

    Attributes:
        name: name of the variable, or None.
        choices: texts to choose from.
        method: name of the method of choosing. None if the caller chooses, in which case the answer
            is judged, like that of a judged Gen.
        temperature: if above 0, the choice is drawn from the softmax of the method's scores.
        seed: seed of that draw, or UNSET for a random one.
        unconditional: True if the choices are also scored without the prompt.
        special: whether special tokens spelled out in the choices are tokenised as such (see Text).
        lora_path: name of the adapter that scores the choices, () for none, or UNSET, as in
            SamplingParams.
    """

    name: str | None
    choices: tuple[str, ...]
    method: Method | None = "token_length_normalized"
    temperature: float = 0.0
    seed: int | Unset = UNSET
    unconditional: bool = False
    special: bool = True
    lora_path: tuple[str, ...] | Unset = UNSET

    def __post_init__(self) -> None:
        if not isinstance(self.name, _NAMES):
            raise _wrong_type_error(self, "name", "a string or None")
        if isinstance(self.lora_path, tuple) and len(self.lora_path) > 1:
            problem = f"{len(self.lora_path)} entries: a selection has one adapter at most."
            raise ParameterError("lora_path", problem, where=self.where)
        if isinstance(self.choices, Deferred):
            return
        if not isinstance(self.choices, tuple) or not all(
            isinstance(choice, str) for choice in self.choices
        ):
            raise _wrong_type_error(self, "choices", "a tuple of strings")

    @property
    def judged(self) -> bool:
        """True if the caller makes the choice."""
        return self.method is None


class Pause(BaseNode, frozen=True, eq=False):
    """Place where the branch waits for the caller's verdict. The verdict is a text to append, or a
    question to ask.
    """


class GrammarBegin(BaseNode, frozen=True, eq=False):
    """Start of a grammar: `text`, followed by all text up to the grammar's end, must match
    `constraint`. A selection inside the grammar skips choices that the grammar does not allow. A
    fork's branches need not complete the grammar. A grammar without a generation or selection is
    not checked here, because all its text comes from the program.

    Attributes:
        constraint: constraint on the text.
        text: beginning of the grammar's text, if the grammar was opened before this node; it is not
            appended.
    """

    constraint: Constraint
    text: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.constraint, _CONSTRAINTS):
            raise _wrong_type_error(self, "constraint", "a constraint")
        if not isinstance(self.text, str):
            raise _wrong_type_error(self, "text", "a string")


class GrammarEnd(BaseNode, frozen=True, eq=False):
    """End of a grammar. The text since the grammar's start must now match its constraint."""


class Fork(BaseNode, frozen=True, eq=False):
    """Branches that continue from here, in parallel with the following nodes of this branch.

    Attributes:
        branches: for each branch, its nodes that are known so far.
    """

    branches: tuple[tuple[Node, ...], ...]

    def __post_init__(self) -> None:
        for branch in self.branches if isinstance(self.branches, tuple) else (None,):
            if not isinstance(branch, tuple) or (
                branch and not all(isinstance(node, BaseNode) for node in branch)
            ):
                raise _wrong_type_error(self, "branches", "a tuple of tuples of nodes")

    def __repr__(self) -> str:
        return super().__repr__() if any(self.branches) else f"Fork({len(self.branches)})"


class Join(BaseNode, frozen=True, eq=False):
    """Joins the branches of one fork, or of several forks.

    Attributes:
        fork: index of the fork among this branch's nodes, or None for all forks since the last
            join.
        ends: for each branch, the number of its first nodes that the join claims: it waits for them
            and appends their text, even if a rollback comes later. () for all nodes that each
            branch has when the join is added.
        mode: "concate_and_append" waits for the branches and appends the texts that they have
            added. "gather_variable" neither appends nor waits; from here on, each variable of the
            branches is a list with one item per branch. Both claim the nodes that the branches
            have: a later rollback in a branch does not undo them.
    """

    fork: int | None = None
    ends: tuple[int, ...] = ()
    mode: JoinMode = "concate_and_append"


class Mark(BaseNode, frozen=True, eq=False):
    """Place in a branch to which a rollback can return."""


class Rollback(BaseNode, frozen=True, eq=False):
    """Cancels the queued and running nodes after a mark, and returns to the mark. Takes effect as
    soon as it is received. Nodes that joins in the branches above have claimed are still played.
    Also ends the branches of all forks after the mark, once these branches have played their own
    claimed nodes.

    Attributes:
        mark: index of the mark among this branch's nodes.
    """

    mark: int


# nodes that make up the text of a branch
Content: TypeAlias = Text | ImagePart | TurnBegin | TurnEnd | ScopeBegin | ScopeEnd
Node: TypeAlias = (
    Content | Gen | Select | Pause | GrammarBegin | GrammarEnd | Fork | Join | Mark | Rollback
)


def is_judged(node: Node) -> bool:
    """Returns True if a node needs the caller's verdict before its branch can go on."""
    return isinstance(node, Pause) or (isinstance(node, Gen | Select) and node.judged)


class Verdict(Record, frozen=True):
    """Caller's verdict on the answer to a judged node, or at a pause. To reject an answer for good,
    the caller drops the branch.

    Attributes:
        text: text to append.
        again: question to ask in the node's place, after that text; None if the branch goes on.
    """

    text: tuple[Span, ...] = ()
    again: Gen | Select | None = None


class Program(Record, frozen=True):
    """A complete program, as a backend receives it.

    Attributes:
        nodes: nodes of the main branch, including those of its forks.
    """

    nodes: tuple[Node, ...]
