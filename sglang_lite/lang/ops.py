"""What a branch plays: nodes, and beside those that give something what its run keeps for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from sglang_lite.lang.futures import Cell, TextLog
from sglang_lite.lang.ir import SglGen, SglSelect
from sglang_lite.program import nodes
from sglang_lite.program.nodes import (
    GrammarBegin,
    GrammarEnd,
    ImagePart,
    ScopeBegin,
    ScopeEnd,
    Text,
    TurnBegin,
    TurnEnd,
)
from sglang_lite.protocol import Image, Span

if TYPE_CHECKING:
    from sglang_lite.constraints.byte_matcher import ByteMatcher
    from sglang_lite.lang.interpreter import StreamExecutor
    from sglang_lite.lang.push_down import Line


@dataclass(slots=True)
class GenOp:
    """
    Attributes:
        node: with the parameters of the run, and the constraint of its whole text, reasoning included.
        own: what was asked for.
    """

    node: nodes.Gen
    own: SglGen
    cell: Cell
    log: TextLog | None
    thoughts: Cell | None = None  # gets the reasoning, where it is split off
    thoughts_log: TextLog | None = None
    asked: tuple[Line, int] | None = None  # where its answer comes, and the place of its node there
    mark: int | None = None  # before that node, to go back to


@dataclass(slots=True)
class SelectOp:
    node: nodes.Select
    own: SglSelect
    cell: Cell
    log: TextLog | None
    asked: tuple[Line, int] | None = None  # as of a generation
    mark: int | None = None


@dataclass(slots=True)
class ScopeOp:
    node: ScopeBegin | ScopeEnd
    cell: Cell


@dataclass(slots=True)
class ForkOp:
    node: nodes.Fork
    children: list[StreamExecutor]


@dataclass(slots=True)
class JoinOp:
    """
    Attributes:
        added: gets what each of the children has added to its text.
    """

    node: nodes.Join
    children: list[StreamExecutor]
    added: list[Cell]


@dataclass(slots=True)
class MarkOp:
    """A place to come back to; `back` goes there."""

    mark: Mark
    back: bool


@dataclass(slots=True)
class ReadOp:
    """Asks for something about the branch as it is at this place in the queue. No node: it is the caller's."""

    cell: Cell
    what: Callable[[StreamExecutor], Any]


@dataclass(slots=True)
class HookOp:
    """Tells a backend that defines the hook; on its pool of threads, as the hook may block. No node, as ReadOp."""

    hook: str
    args: tuple[Any, ...]


Op: TypeAlias = (
    Text
    | ImagePart
    | TurnBegin
    | TurnEnd
    | GrammarBegin
    | GrammarEnd
    | GenOp
    | SelectOp
    | ScopeOp
    | ForkOp
    | JoinOp
    | MarkOp
    | ReadOp
    | HookOp
)


@dataclass(frozen=True, slots=True)
class Reasoned:
    """A generation of which the user sees only a part: `answer` is what messages and variables show of it."""

    spans: tuple[Span, ...]
    answer: str

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)


Piece: TypeAlias = str | Span | Image | Reasoned


class Mark:
    """What a checkpoint remembers: of the submitting side, and once played of the text."""

    __slots__ = ("ahead", "cells", "grammar", "lengths", "place", "role", "scopes", "turns", "walk")

    def __init__(self, branch: StreamExecutor) -> None:
        self.cells = dict(branch._cells)
        self.grammar, self.ahead = branch._grammar, branch._ahead and branch._ahead.copy()
        self.turns, self.role, self.scopes = list(branch._turns), branch._role, dict(branch._scopes)
        self.lengths: tuple[int, int, tuple[str, int] | None] | None = None
        self.walk: ByteMatcher | None = None
        self.place: int | None = None  # of its node, where that is handed over
