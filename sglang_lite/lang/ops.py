"""The operations that a branch plays: a node with what the submitting side has made of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from sglang_lite.lang.futures import Cell, TextLog
from sglang_lite.lang.ir import SglGen, SglSelect
from sglang_lite.protocol import Constraint, Image, Location, SamplingParams, Span, Unset

if TYPE_CHECKING:
    from sglang_lite.constraints.byte_matcher import Walk
    from sglang_lite.lang.interpreter import StreamExecutor
    from sglang_lite.lang.push_down import Line


@dataclass(slots=True)
class GenOp:
    node: SglGen
    params: SamplingParams
    constraint: Constraint | None  # of its whole text, reasoning included
    cell: Cell
    log: TextLog | None
    thoughts: Cell | None = None  # gets the reasoning, where it is split off
    thoughts_log: TextLog | None = None
    asked: tuple[Line, int] | None = None  # where its answer comes, and the place of its node there
    mark: int | None = None  # before that node, to go back to


@dataclass(slots=True)
class SelectOp:
    node: SglSelect
    cell: Cell
    log: TextLog | None
    seed: int | Unset
    asked: tuple[Line, int] | None = None  # as of a generation
    mark: int | None = None


@dataclass(slots=True)
class ImageOp:
    """An image, and what stands for it in the text of a chat template."""

    image: Image
    token: str
    where: Location | None


@dataclass(slots=True)
class TurnOp:
    """A turn begins, or (role None) the open one ends."""

    role: str | None


@dataclass(slots=True)
class ScopeOp:
    """Text is collected from here on, or up to here."""

    cell: Cell
    begins: bool


@dataclass(slots=True)
class GrammarOp:
    """All text is a walk through a grammar from here on, or (None) was one up to here."""

    walk: Walk | None
    where: Location | None


@dataclass(slots=True)
class TextOp:
    """Text inside a grammar, which has to allow it."""

    text: str
    where: Location | None


@dataclass(slots=True)
class ForkOp:
    children: list[StreamExecutor]


@dataclass(slots=True)
class JoinOp:
    """Appends what the children have added to the parent's text.

    Attributes:
        added: gets that of each.
        ends: how many nodes each had handed over; None: not all of them are.
    """

    children: list[StreamExecutor]
    added: list[Cell]
    ends: tuple[int, ...] | None
    where: Location | None


@dataclass(slots=True)
class ReadOp:
    """Asks for something about the branch as it is at this place in the queue."""

    cell: Cell
    what: Callable[[StreamExecutor], Any]


@dataclass(slots=True)
class MarkOp:
    """A place to come back to; `back` goes there."""

    mark: Mark
    back: bool


@dataclass(slots=True)
class HookOp:
    """Tells a backend that defines the hook; on its pool of threads, as the hook may block."""

    hook: str
    args: tuple[Any, ...]


Op: TypeAlias = (
    str  # text of the program
    | Span  # text of a chat template inside a turn
    | GenOp
    | SelectOp
    | ImageOp
    | TurnOp
    | ScopeOp
    | GrammarOp
    | TextOp
    | ForkOp
    | JoinOp
    | ReadOp
    | MarkOp
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
        self.walk: Walk | None = None
        self.place: int | None = None  # of its node, where that is handed over
