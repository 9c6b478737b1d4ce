"""Record of how far a branch has been waited for.

Whether an answer has come when a program is cancelled depends on the backend. Whether somebody has waited for it is the
program's own doing. So cancelling keeps what was waited for, and takes away all else, even if it has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from sglang_lite.lang.concurrency.variables import Variable
from sglang_lite.lang.execution.operations import AnswerOp, BranchMark, GenOp, JoinOp, MarkOp, Op, ScopeOp
from sglang_lite.protocol import SglError


class Waits:
    """Record of how far a branch has been waited for, and of its cancellation.

    The nodes that wait for a backend, or for the text of other branches, are numbered from 1 in the order in which they
    were added. Whoever waits for one has waited for all before it, and for the branch's parent up to the fork.

    Args:
        parent: waits of the branch that it was forked from; None for the main branch.

    Attributes:
        last: number of the last such node of the branch's text; 0 if it has none.
        known: greatest number of a node that was waited for; 0 if none was.
        failure_known: True if a reader has received the branch's failure.
        forked_at: number of the last node of the parent before the fork.
        joins: numbers of joins that nobody has waited for, and the places that each of them waits for.
        parent: waits of the branch that it was forked from, or None.
        cancelled: cancellation of the branch, or None.
        refuses: True if the branch has failed by its cancellation, or fails by it once what it keeps was played.
    """

    __slots__ = (
        "_claims", "_count", "cancelled", "failure_known", "forked_at", "joins", "known", "last", "parent", "refuses",
    )  # fmt: skip

    def __init__(self, parent: Waits | None = None) -> None:
        self.parent = parent
        self.forked_at: int = 0 if parent is None else parent.last
        self.last: int = 0
        self.known: int = 0
        self._count = 0  # of all nodes, with those that a rollback has removed
        self.failure_known = False
        self.cancelled: Cancellation | None = None
        self.refuses = False
        self._claims: dict[int, int] | None = None  # number up to which joins take the branch, by their depth
        self.joins: list[tuple[int, Sequence[Place]]] = []

    def number(self, op: Op) -> None:
        """Numbers an operation that is added, if it waits for something, and notes where its variables are."""
        if isinstance(op, AnswerOp):
            variable = op.variable
            variable.awaited = place = self.add()
            if variable.log is not None:
                variable.log.awaited = place
            if isinstance(op, GenOp) and op.thoughts is not None:
                op.thoughts.awaited = place
        elif isinstance(op, JoinOp) and op.added:
            self.add([each.awaited for each in op.added if isinstance(each.awaited, Place)])
        elif isinstance(op, ScopeOp):
            op.variable.awaited = self.here()
        elif isinstance(op, MarkOp) and not op.back:
            op.mark.waits = self.last

    def add(self, joined: Sequence[Place] = ()) -> Place:
        """Numbers a node that is added.

        Args:
            joined: places in other branches that the node waits for.
        """
        self._count = self.last = self._count + 1
        if joined:
            self.joins.append((self.last, joined))
        return Place(self, self.last)

    def here(self) -> Place:
        """Place behind everything that was added."""
        return Place(self, self.last)

    def go_back(self, mark: BranchMark) -> bool:
        """Notes that a rollback has removed the nodes behind a mark. Undoes a cancellation behind the mark, if
        everything before the mark was waited for. Returns False if the branch stays cancelled with that."""
        self.last = mark.waits
        self.failure_known = False
        cancelled = self.cancelled
        if cancelled is not None and not mark.cancelled:
            if cancelled.final or cancelled.kept < mark.waits:
                return False
            self.cancelled = None
        self.refuses = False
        return True

    def claim(self, depth: int) -> None:
        """Notes that a join in a branch of this depth takes what was added so far."""
        self._claims = {**(self._claims or {}), depth: self.last}

    def note(self, number: int) -> None:
        """Notes that somebody has waited for a node."""
        waits: Waits | None = self
        while waits is not None:
            before = waits.known
            if before >= number > 0:
                return
            waits.known = max(before, number)
            reached = [places for at, places in waits.joins if at <= number]
            if reached:
                waits.joins = [each for each in waits.joins if each[0] > number]
            for places in reached:
                for place in places:
                    place.note()
            number = waits.forked_at
            waits = waits.parent

    def kept(self, depth: int) -> int:
        """Number up to which a cancellation of a branch of this depth keeps the nodes of this branch; -1 if it does not
        even keep what the branch began with."""
        claims = self._claims or {}
        claimed = max((number for joining, number in claims.items() if joining < depth), default=-1)
        return max(claimed, self.known if self._begins_known() else -1)

    def take_away(self, variables: Sequence[Variable], kept: int, error: SglError) -> None:
        """Takes those of the branch's variables away that a cancellation does not keep.

        Args:
            kept: number of the last node that stays.
            error: error of the cancellation.
        """
        for variable in variables:
            if self._takes(variable, kept):
                variable.take_away(error)

    def _takes(self, variable: Variable, kept: int) -> bool:
        """Returns True if a variable is behind the last node that stays, or was gathered from one that was taken
        away."""
        awaited = variable.awaited
        if isinstance(awaited, Place):
            return awaited.waits is self and awaited.number > kept
        return isinstance(awaited, Gathered) and any(each.taken_away for each in awaited.variables)

    def _begins_known(self) -> bool:
        """Returns True if somebody has waited for everything before the branch's fork."""
        waits = self
        while not waits.known and waits.parent is not None:
            if waits.parent.known < waits.forked_at:
                return False
            if waits.forked_at:
                return True
            waits = waits.parent
        return True


class Place(msgspec.Struct, eq=False):  # a msgspec.Struct: its constructor runs no Python code
    """Place in a branch: behind the node of a number."""

    waits: Waits
    number: int

    def note(self, *, failed: bool = False) -> None:
        """Notes that somebody has waited for what stands before this place, or has received the branch's failure."""
        if failed:
            self.waits.failure_known = True
        else:
            self.waits.note(self.number)


class Gathered(NamedTuple):
    """Variables whose values a join has gathered.

    Attributes:
        variables: variables of the branches.
    """

    variables: Sequence[Variable]

    def note(self, *, failed: bool = False) -> None:
        """Notes that somebody has waited for all of them, or has received the error of one of them."""
        for each in self.variables:
            if each.awaited is not None:
                each.awaited.note(failed=each.error() is not None)


class Everything(NamedTuple):
    """Places of branches that are waited for together."""

    places: Sequence[Place]

    def note(self, *, failed: bool = False) -> None:
        """Notes that somebody has waited for all of them."""
        for place in self.places:
            place.note()


class Cancellation(NamedTuple):
    """Cancellation of a branch.

    Attributes:
        error: error of everything that it took away, and of what is added afterwards.
        kept: number of the last node that it has left to the branch; -1 if not even what the branch began with.
        final: True if no rollback undoes it.
    """

    error: SglError
    kept: int
    final: bool
