"""Forks of a branch, and the joins that append their texts to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_lite.program.nodes import Join, Path
from sglang_lite.protocol import ProgramError, SglError, Span
from sglang_lite.runtime.core.branch_queue import QueuedNode
from sglang_lite.runtime.core.branch_text import BranchText

if TYPE_CHECKING:
    from sglang_lite.runtime.core.program_branch import Branch, ProgramOfBranches


@dataclass(eq=False, slots=True)
class Claim:
    """Claim of a join on the text that the first nodes of a branch add. A rollback in that branch waits for it.

    Attributes:
        end: number of these nodes.
        text: text that they have added, or None until they are played.
        error: error because of which they will not be played, or None.
    """

    end: int
    text: Sequence[Span] | None = None
    error: SglError | None = None


class Claims:
    """Claims on a branch that its playing has not reached yet."""

    def __init__(self) -> None:
        self._open: list[Claim] = []

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, claim: Claim) -> None:
        self._open.append(claim)

    def settle(self, text: BranchText, played: int) -> None:
        """Gives the claims on the first `played` nodes their text."""
        for claim in self._open:
            if claim.end <= played:
                claim.text = tuple(text.added_before(claim.end))
        self._open = [claim for claim in self._open if claim.text is None]

    def fail(self, error: SglError, before: int | None = None) -> None:
        """Fails the claims on at most `before` nodes (None: all)."""
        for claim in self._open:
            if before is None or claim.end <= before:
                claim.error = error
        self._open = [claim for claim in self._open if claim.error is None]

    def last_end(self, after: int, before: int) -> int:
        """Largest end of a claim with `after` < end <= `before`, or 0."""
        return max((claim.end for claim in self._open if after < claim.end <= before), default=0)


class BranchForks:
    """Forks and joins of one branch, in the order in which they were received.

    Args:
        player: program of the branch.
        path: path of the branch.
    """

    def __init__(self, player: ProgramOfBranches, path: Path) -> None:
        self._player, self._path = player, path
        self._branches: dict[int, list[Branch]] = {}  # branches of each fork, by its place
        self._joins: list[int] = []  # places of joins that append
        # Joined branches and the claims on them, by the join's place; None if it doesn't match the forks.
        self._claims: dict[int, list[tuple[Branch, Claim]] | None] = {}

    @property
    def branches(self) -> list[Branch]:
        """Branches of all forks."""
        return [branch for found in self._branches.values() for branch in found]

    def receive(self, place: int, branches: Sequence[Sequence[QueuedNode]]) -> list[Branch]:
        """Makes the branches of a fork known, each with the nodes that the fork has for it."""
        found = [self._player.branch((*self._path, place, i)) for i in range(len(branches))]
        for branch, entries in zip(found, branches):
            branch.announce(entries)
        self._branches[place] = found
        return found

    def claim(self, place: int, node: Join) -> None:
        """Claims the texts that a join will append: those that its branches have at the join's own place."""
        if node.mode == "gather_variable":
            return
        last = max(self._joins, default=-1)
        places = [at for at in self._branches if (at > last if node.fork is None else at == node.fork)]
        children = [branch for at in places for branch in self._branches[at]]
        ends: Sequence[int | None] = node.ends or [None] * len(children)
        matches = len(children) == len(ends)
        self._claims[place] = [(child, child.claim(end)) for child, end in zip(children, ends)] if matches else None
        self._joins.append(place)

    def begin(self, text: BranchText, place: int, size: int) -> None:
        """Starts the branches of a fork."""
        tail = text.tail()
        for i in range(size):
            branch = self._player.branch((*self._path, place, i))
            branch.begin(text.fork(), tail)
            branch.hold()
            branch.resume()

    def join(self, text: BranchText, place: int, node: Join, waiter: Branch) -> bool:
        """Appends the texts of joined branches. Returns False if a branch has not been played far enough; then it
        resumes `waiter` later.

        Raises:
            SglError: a joined branch has failed, or the join doesn't match the forks.
        """
        if node.mode == "gather_variable":
            return True
        claims = self._claims[place]
        if claims is None:
            raise ProgramError("a join names a fork that this branch does not have.")
        for branch, claim in claims:
            if claim.error is not None:
                raise claim.error
            if claim.text is None:
                branch.wake_when_played(waiter)
                return False
        for _, claim in claims:
            text.write(claim.text or ())
        del self._claims[place]
        return True

    def go_back(self, mark: int, kept: int) -> list[Branch]:
        """Forgets the forks and joins after a mark. Returns the branches of these forks.

        Args:
            kept: number of first nodes that will be played before the branch goes back.
        """
        gone = [branch for at, found in self._branches.items() if at > mark for branch in found]
        self._branches = {at: found for at, found in self._branches.items() if at <= mark}
        self._joins = [at for at in self._joins if at <= mark]
        self._claims = {at: claims for at, claims in self._claims.items() if at <= mark or at < kept}
        return gone
