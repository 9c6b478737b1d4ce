"""Operations that a branch plays: nodes, and with those that give something what its run keeps for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from sglang_lite.errors import Origin, SglError
from sglang_lite.lang.concurrency.variables import TextLog, Variable
from sglang_lite.lang.expressions import SglGen, SglSelect
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

if TYPE_CHECKING:
    from sglang_lite.constraints.byte_matcher import ByteMatcher
    from sglang_lite.lang.execution.equal_branches import EqualBranches
    from sglang_lite.lang.execution.player import Player
    from sglang_lite.lang.execution.push_down import PushedBranch
    from sglang_lite.lang.execution.transcript import Place
    from sglang_lite.lang.execution.turn_ahead import Turn
    from sglang_lite.protocol import Constraint, Generation


@dataclass(frozen=True, slots=True)
class Refused:
    """A failed attempt: its answers, where it had any, and what was wrong."""

    answers: tuple[Generation, ...]
    error: Exception


class AskedOp(msgspec.Struct, eq=False):  # which is made without Python
    """A node that a backend answers.

    Attributes:
        node: with the parameters of the run, and the constraint of its whole text, reasoning included.
        own: what was asked for.
    """

    node: nodes.Gen | nodes.Select
    own: SglGen | SglSelect
    variable: Variable
    log: TextLog | None
    asked: tuple[PushedBranch, int] | None = None  # where its answer comes, and the place of its node there
    mark: int | None = None  # before that node, to go back to
    began: float = 0.0  # when it began to wait; 0.0: it has not, or that was not looked at
    ended: float = 0.0  # when it had its answer, or failed
    refused: tuple[Refused, ...] = ()  # attempts before that one
    turn: tuple[Turn, int] | None = None  # that it is part of, and its place there; None: it is asked for as if alone
    path: str = ""  # of its branch in the tree of forks
    number: int = 0  # of the node there

    def refuse(self, error: Exception, answers: Sequence[Generation] = ()) -> None:
        """Keeps an attempt that has failed."""
        if isinstance(error, SglError) and error.origin is None and answers:
            error.origin = Origin.of(answers[0].meta)
        self.refused = (*self.refused, Refused(tuple(answers), error))


class GenOp(AskedOp, eq=False):
    node: nodes.Gen
    own: SglGen
    thoughts: Variable | None = None  # gets the reasoning, where it is split off
    thoughts_log: TextLog | None = None
    equal: EqualBranches | None = None  # a call that it may share; None: it has its own


class SelectOp(AskedOp, eq=False):
    node: nodes.Select
    own: SglSelect


@dataclass(slots=True)
class ScopeOp:
    node: ScopeBegin | ScopeEnd
    variable: Variable


@dataclass(slots=True)
class ForkOp:
    node: nodes.Fork
    children: list[Player]


@dataclass(slots=True)
class JoinOp:
    """
    Attributes:
        added: gets what each of the children has added to its text.
    """

    node: nodes.Join
    children: list[Player]
    added: list[Variable]


@dataclass(slots=True)
class MarkOp:
    """A place to come back to; `back` goes there."""

    mark: BranchMark
    back: bool


@dataclass(slots=True)
class ReadOp:
    """Asks for something about the branch as it is at this place in the queue. No node: it is the caller's."""

    variable: Variable
    what: Callable[[Player], Any]


@dataclass(slots=True)
class HookOp:
    """Tells a backend that defines the hook; on its pool of threads, as the hook may block. No node, as ReadOp."""

    hook: str
    args: tuple[Any, ...]


Op: TypeAlias = (
    Text | ImagePart | TurnBegin | TurnEnd | GrammarBegin | GrammarEnd | GenOp | SelectOp
    | ScopeOp | ForkOp | JoinOp | MarkOp | ReadOp | HookOp
)  # fmt: skip


@dataclass(slots=True, eq=False)
class BranchMark:
    """A place to come back to: where it is in the transcript, once it is played, and of its node, where that is handed
    over."""

    played: Place | None = None
    place: int | None = None


@dataclass(frozen=True, slots=True)
class BranchSnapshot:
    """Knowledge of the submitting side of a branch at a mark."""

    mark: BranchMark
    variables: dict[str, Variable]
    turns: list[str]
    role: tuple[str, str] | None
    scopes: dict[str, tuple[Variable, ...]]
    grammar: Constraint | None
    ahead: ByteMatcher | None
