"""Records how far a branch has been waited for.

Whether an answer has arrived when a program is cancelled depends on the backend. Whether someone
has waited for it depends only on the program. So a cancellation keeps what was waited for and
discards everything else, even if it has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from sglang_lite.lang.concurrency.variables import Variable
from sglang_lite.lang.execution.operations import (
    AnswerOp,
    BranchMark,
    GenOp,
    JoinOp,
    MarkOp,
    Op,
    ScopeOp,
    SelectOp,
)
from sglang_lite.protocol import SglError

# Operations that wait for something, or that record how far the branch has come.
NUMBERED = frozenset({GenOp, SelectOp, JoinOp, ScopeOp, MarkOp})


class Waits(msgspec.Struct, eq=False):  # a msgspec.Struct: its constructor runs no Python code
    """Record of how far callers have waited for a branch, and of its cancellation.

    The nodes that wait for a backend, or for the text of other branches, are numbered from 1 in the
    order in which they were added. Waiting for one means having waited for all before it, and for
    the branch's parent up to the fork.

    Attributes:
        parent: waits of the branch that it was forked from; None for the main branch.
        forked_at: number of the last node of the parent before the fork.
        last: number of the last such node of the branch's text; 0 if it has none.
        count: number of all such nodes, including those that a rollback has removed.
        known: greatest number of a node that was waited for; 0 if none was.
        failure_known: True if a reader has received the branch's failure.
        joins: numbers of joins that nobody has waited for, and the places that each of them waits
            for.
        claims: number of the last node that joins have taken, by the depth of the joining branch;
            None if none has.
        cancelled: cancellation of the branch, or None.
        refuses: True if the cancellation has failed the branch, or will once the nodes that it
            keeps have been played.
    """

    parent: Waits | None = None
    forked_at: int = 0
    last: int = 0
    count: int = 0
    known: int = 0
    failure_known: bool = False
    joins: Sequence[tuple[int, Sequence[Place]]] = ()
    claims: dict[int, int] | None = None
    cancelled: Cancellation | None = None
    refuses: bool = False

    def number_op(self, op: Op) -> None:
        """Numbers an added operation if it has to wait. Sets `awaited` of its variables, through
        which a wait for them is recorded.
        """
        if isinstance(op, AnswerOp):
            self.count = self.last = self.count + 1
            variable = op.variable
            variable.awaited = place = Place(self, self.last)
            if variable.log is not None:
                variable.log.awaited = place
            if isinstance(op, GenOp) and op.thoughts is not None:
                op.thoughts.awaited = place
        elif isinstance(op, JoinOp) and op.added:
            self.count = self.last = op.number = self.count + 1
            places = [each.awaited for each in op.added if isinstance(each.awaited, Place)]
            self.joins = (*self.joins, (self.last, places))
        elif isinstance(op, ScopeOp):
            op.variable.awaited = Place(self, self.last)
        elif isinstance(op, MarkOp) and not op.back:
            op.mark.waits = self.last

    def roll_back_waits(self, mark: BranchMark) -> bool:
        """Records that a rollback removed the nodes after a mark. A cancellation made after the
        mark is undone if everything before the mark was waited for. Returns False if the branch
        stays cancelled.
        """
        self.last = mark.waits
        self.failure_known = False
        cancelled = self.cancelled
        if cancelled is not None and not mark.cancelled:
            if cancelled.final or cancelled.kept < mark.waits:
                return False
            self.cancelled = None
        self.refuses = False
        return True

    def note(self, number: int) -> None:
        """Records that a caller has waited for a node, which implies everything before it."""
        waits: Waits | None = self
        while waits is not None:
            before = waits.known
            if before >= number > 0:
                return
            waits.known = max(before, number)
            joins = waits.joins
            if joins:
                waits.joins = [each for each in joins if each[0] > number]
            for at, places in joins:
                if at <= number:
                    for place in places:
                        place.note()
            number = waits.forked_at
            waits = waits.parent

    def last_kept_node(self, depth: int) -> int:
        """Returns the number of this branch's last node that is kept if the branch at `depth` is
        cancelled. Returns -1 if nothing is kept, not even the text that this branch began with.
        """
        claims = (self.claims or {}).items()
        claimed = max((number for joining, number in claims if joining < depth), default=-1)
        return max(claimed, self.known if self._was_fork_point_awaited() else -1)

    def withdraw_variables(self, variables: Sequence[Variable], kept: int, error: SglError) -> None:
        """Replaces the values of variables with an error, except those that a cancellation keeps.

        Args:
            kept: number of the last node that stays.
            error: error of the cancellation.
        """
        for variable in variables:
            if self._is_discarded(variable, kept):
                variable.replace_with_error(error)

    def _is_discarded(self, variable: Variable, kept: int) -> bool:
        """Returns True if a variable comes after the last node that is kept, or if a join gathered
        it from a discarded variable.
        """
        awaited = variable.awaited
        if isinstance(awaited, Place):
            return awaited.waits is self and awaited.number > kept
        return isinstance(awaited, Gathered) and any(each.taken_away for each in awaited.variables)

    def _was_fork_point_awaited(self) -> bool:
        """Returns True if a caller has waited for everything before the branch's fork."""
        waits = self
        while not waits.known and waits.parent is not None:
            if waits.parent.known < waits.forked_at:
                return False
            if waits.forked_at:
                return True
            waits = waits.parent
        return True


class Place(msgspec.Struct, eq=False):  # a msgspec.Struct: its constructor runs no Python code
    """Position in a branch, directly after the node with the given number."""

    waits: Waits
    number: int

    def note(self, *, failed: bool = False) -> None:
        """Records that a caller has waited for everything before this place, or has received the
        branch's failure.
        """
        if failed:
            self.waits.failure_known = True
        elif self.number > self.waits.known or not self.number:
            self.waits.note(self.number)


class Gathered(NamedTuple):
    """Variables that a join has gathered into one. Waiting for the gathered variable counts as
    waiting for each of them.

    Attributes:
        variables: variables of the branches.
    """

    variables: Sequence[Variable]

    def note(self, *, failed: bool = False) -> None:
        """Records that a caller has waited for all of these variables, or has received the error of
        one of them.
        """
        for each in self.variables:
            if each.awaited is not None:
                each.awaited.note(failed=failed and each.error_or_none() is not None)


class Everything(NamedTuple):
    """Positions in several branches. All of them count as waited for when a caller waits for
    everything so far.
    """

    places: Sequence[Place]

    def note(self, *, failed: bool = False) -> None:
        """Records that a caller has waited for all of these places."""
        for place in self.places:
            place.note()


class Cancellation(NamedTuple):
    """Cancellation of a branch.

    Attributes:
        error: error of everything that the cancellation discarded, and of later additions.
        kept: number of the last node that stays in the branch; -1 if nothing stays, not even the
            text that the branch began with.
        final: True if rollbacks can't undo it.
    """

    error: SglError
    kept: int
    final: bool
