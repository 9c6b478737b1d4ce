"""State of one branch while its program runs: the queue of nodes, and what the rules in player.py
need to know. Also defines the effects that the player requests from its driver.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeAlias, TypeVar

from sglang_lite.program.nodes import (
    Content,
    Gen,
    GrammarBegin,
    GrammarEnd,
    Join,
    Node,
    Path,
    Select,
    is_judged,
)
from sglang_lite.protocol import ProgramError, SglError

PieceT = TypeVar("PieceT")
# the driver's own kind of text, with its own kind of pieces
TextT = TypeVar("TextT", bound="BranchText[Any]")
QueuedT = TypeVar("QueuedT", bound="QueuedNode")


@dataclass(frozen=True, slots=True)
class ExpectedTokens:
    """Numbers of tokens that nodes are expected to add.

    Attributes:
        text: tokens of text that is not generated.
        generated: maximum number of generated tokens.
        path: tokens that must be computed one after another, along the longest branch.
    """

    text: int = 0
    generated: int = 0
    path: int = 0

    def __add__(self, other: ExpectedTokens) -> ExpectedTokens:
        return ExpectedTokens(
            self.text + other.text, self.generated + other.generated, self.path + other.path
        )

    def __sub__(self, other: ExpectedTokens) -> ExpectedTokens:
        return ExpectedTokens(
            self.text - other.text, self.generated - other.generated, self.path - other.path
        )


NOTHING_EXPECTED = ExpectedTokens()


@dataclass(eq=False, slots=True)
class QueuedNode:
    """A node that is yet to be played. A driver extends this class with the data that it needs to
    play nodes.

    Attributes:
        node: the node.
        branches: nodes of each branch of a fork.
        expected: tokens that it is expected to add.
    """

    node: Node
    branches: Sequence[Sequence[Self]] = ()
    expected: ExpectedTokens = NOTHING_EXPECTED


class BranchText(ABC, Generic[PieceT]):
    """Text of a branch, in the form that a driver needs: tokens, or messages.

    Attributes:
        added: pieces that the branch has added since its start.
    """

    __slots__ = ("added",)
    added: list[PieceT]

    @abstractmethod
    def append(self, node: Content) -> None:
        """Appends the content of a node. Raises SglError if that is impossible."""

    @abstractmethod
    def append_pieces(self, pieces: Sequence[PieceT]) -> None:
        """Appends pieces: an answer, or what a joined branch has added."""

    @abstractmethod
    def fork(self) -> Self:
        """Returns the text of a new branch that continues from here."""

    @abstractmethod
    def mark(self) -> object:
        """Returns a mark of this place, for `restore_position`."""

    @abstractmethod
    def restore_position(self, mark: Any) -> None:  # what the driver's `mark` returns
        """Goes back to a mark, which can be used again later."""


@dataclass(eq=False, slots=True)
class Claim(Generic[TextT, QueuedT]):
    """Claim of a join on the first nodes of a branch. Claimed nodes are played even if a rollback
    comes later. In a joined branch, the claim also collects what its nodes add. In branches forked
    from a joined branch, it only makes sure that the nodes are played.

    Attributes:
        joiner: branch that contains the join.
        end: number of claimed nodes.
        pieces: what the nodes have added, or None until they are played.
        error: error that prevents them from being played, or None.
    """

    joiner: ProgramBranch[TextT, QueuedT]
    end: int
    pieces: Sequence[object] | None = None
    error: SglError | None = None


@dataclass(eq=False, slots=True)
class Ask(Generic[TextT, QueuedT]):
    """Effect: a node needs an answer. The branch waits for the answer.

    Attributes:
        branch: branch of the node.
        place: index of the node in its branch.
        entry: the node, as it was queued.
        attempt: number of earlier verdicts on this node that requested another attempt.
    """

    branch: ProgramBranch[TextT, QueuedT]
    place: int
    entry: QueuedT
    attempt: int = 0

    @property
    def node(self) -> Gen | Select | GrammarBegin | GrammarEnd:
        node = self.entry.node
        assert isinstance(node, Gen | Select | GrammarBegin | GrammarEnd)
        return node

    @property
    def is_current(self) -> bool:
        """True until the node is answered or given up."""
        return self.branch.ask is self


@dataclass(slots=True)
class Totals:
    """Totals over all branches of a program: queued nodes, and branches that wait for an answer."""

    queued: int = 0
    asked: int = 0


class ProgramBranch(Generic[TextT, QueuedT]):
    """Branch of a program. Only the player changes it.

    Args:
        path: path of the branch; () for the main branch.
        totals: numbers of its program.
        text: text of the branch; None until its fork is played.

    Attributes:
        queue: places and nodes that are yet to be played, in order.
        expected: tokens that the queue is expected to add.
        count: number of nodes that the branch was ever given.
        played: number of nodes played, failed or skipped.
        ask: request for the answer that the branch waits for, or None.
        paused: place at which it waits for a verdict of the caller, or None.
        verdicts: verdicts on nodes that the branch has not reached, by place, in order: the pieces
            to add, and the node to ask again or None.
        attempt: number of verdicts on its current node that requested another attempt.
        error: error that it has failed with, or was dropped with; a rollback resets it.
        refused: error that it fails with once its queue is empty, or None.
        lost: True if it has ended for good, or will once its queue is empty: its fork was rolled
            back, or will never be played.
        quiet: True if its error is not reported when it occurs.
        untold: True if its error was not reported yet, and will be when nodes are added.
        forks: branches of its forks, by place.
        joins: places of its joins that append.
        joined: its claims on other branches, by the join's place; None if the join doesn't match
            the forks.
        claims: open claims of joins on this branch.
        marks: places of the text to go back to, by the place of the mark.
        rollbacks: marks of the rollbacks that are not played yet, by place.
        lengths: number of added pieces after each played node, by place.
    """

    __slots__ = (
        "_totals", "ask", "attempt", "claims", "count", "error", "expected", "forks", "joined", "joins", "lengths",
        "lost", "marks", "path", "paused", "played", "queue", "quiet", "refused", "rollbacks", "text",
        "untold", "verdicts",
    )  # fmt: skip

    def __init__(self, path: Path, totals: Totals, text: TextT | None = None) -> None:
        self.path = path
        self._totals = totals
        self.text = text
        self.queue: deque[tuple[int, QueuedT]] = deque()
        self.expected = NOTHING_EXPECTED
        self.count = self.played = 0
        self.ask: Ask[TextT, QueuedT] | None = None
        self.paused: int | None = None
        self.attempt = 0
        self.verdicts: dict[int, deque[tuple[Sequence[object], QueuedT | None]]] = {}
        self.lost = self.quiet = self.untold = False
        self.error: SglError | None = None
        self.refused: SglError | None = None
        self.forks: dict[int, list[ProgramBranch[TextT, QueuedT]]] = {}
        self.joins: list[int] = []
        self.joined: dict[int, list[Claim[TextT, QueuedT]] | None] = {}
        self.claims: list[Claim[TextT, QueuedT]] = []
        self.marks: dict[int, object] = {}
        self.rollbacks: dict[int, int] = {}
        self.lengths: dict[int, int] = {}

    @property
    def next_place(self) -> int:
        """Place of the next node; if the queue is empty, the place that the next added node will
        have.
        """
        return self.queue[0][0] if self.queue else self.count

    @property
    def will_return(self) -> bool:
        """True if the branch has nodes to play, or waits for an answer or a verdict. Its text is
        then still needed.
        """
        return self.ask is not None or bool(self.queue) or self.paused is not None

    @property
    def children(self) -> Iterator[ProgramBranch[TextT, QueuedT]]:
        """Branches of all forks in this branch."""
        for branches in self.forks.values():
            yield from branches

    # ---------------------------------------------------------------------------------------- queue

    def push(self, place: int, entry: QueuedT) -> None:
        self.queue.append((place, entry))
        self.expected += entry.expected
        self._totals.queued += 1

    def pop(self, *, last: bool = False) -> tuple[int, QueuedT]:
        place, entry = self.queue.pop() if last else self.queue.popleft()
        self.expected -= entry.expected
        self._totals.queued -= 1
        return place, entry

    def drop_queued_before(self, end: int) -> list[tuple[int, QueuedT]]:
        """Removes and returns the queued nodes before a place."""
        self.rollbacks = {at: mark for at, mark in self.rollbacks.items() if at >= end}
        removed = []
        while self.queue and self.queue[0][0] < end:
            removed.append(self.pop())
        return removed

    def remove_queued_from(self, start: int) -> list[tuple[int, QueuedT]]:
        """Removes the queued nodes from a place on, together with the verdicts on them. Returns the
        removed nodes.
        """
        if self.verdicts:
            self.verdicts = {place: each for place, each in self.verdicts.items() if place < start}
        self.rollbacks = {at: mark for at, mark in self.rollbacks.items() if at < start}
        removed = []
        while self.queue and self.queue[-1][0] >= start:
            removed.append(self.pop(last=True))
        return removed

    def set_ask(self, ask: Ask[TextT, QueuedT] | None) -> None:
        self._totals.asked += (ask is not None) - (self.ask is not None)
        self.ask = ask

    @property
    def judged_place(self) -> int | None:
        """Place of the judged node that the branch has reached, whether or not its answer has
        arrived. None if the branch is not at a judged node.
        """
        return self.ask.place if self.ask is not None and is_judged(self.ask.node) else self.paused

    def has_final_verdict(self, place: int) -> bool:
        """Returns True if the final verdict on a node has already arrived, before the branch has
        reached the node.
        """
        return any(again is None for _, again in self.verdicts.get(place, ()))

    def record_played_node(self, place: int) -> list[ProgramBranch[TextT, QueuedT]]:
        """Records that the node at a place was played. Returns the branches whose joins may now be
        able to proceed.
        """
        assert self.text is not None
        self.played = place + 1
        self.lengths[place] = len(self.text.added)
        return self.settle_claims() if self.claims else []

    def discard_unplayed(self) -> None:
        """Discards all nodes that have not been played. Also breaks reference cycles, so that no
        garbage collection is needed.
        """
        self.paused = None
        self.queue.clear()
        self.claims.clear()
        self.joined.clear()

    # ---------------------------------------------------------------------------------------- joins

    def add_join(self, place: int, node: Join) -> None:
        """Claims the first nodes of each branch that a join names: as many as the join specifies,
        or all nodes so far.
        """
        last = max(self.joins, default=-1)
        places = [at for at in self.forks if (at > last if node.fork is None else at == node.fork)]
        children = [child for at in places for child in self.forks[at]]
        ends: Sequence[int | None] = node.ends or [None] * len(children)
        matches = len(children) == len(ends)
        claims = (
            [child.claim_nodes(self, end) for child, end in zip(children, ends)]
            if matches
            else None
        )
        if node.mode == "concate_and_append":
            self.joined[place] = claims
            self.joins.append(place)

    def claim_nodes(
        self, joiner: ProgramBranch[TextT, QueuedT], end: int | None
    ) -> Claim[TextT, QueuedT]:
        """Claims the first `end` nodes (None: all nodes so far) for a join in the branch `joiner`.
        If a claimed node is a fork, also claims all nodes of the fork's branches.
        """
        claim = Claim(joiner, self.count if end is None else end)
        for place, branches in self.forks.items():
            if place < claim.end:
                for child in branches:
                    child.claim_nodes(joiner, None)
        self.claims.append(claim)
        self.settle_claims()
        if self.error is not None:
            self.fail_claims(self.error)
        return claim

    def try_join(self, place: int, node: Join) -> bool:
        """Appends what joined branches have added. Appends nothing and returns False if a branch
        has not yet played all nodes that the join claims.

        Raises:
            SglError: a joined branch has failed, or the join doesn't match the forks.
        """
        if node.mode == "gather_variable":
            return True
        claims = self.joined[place]
        if claims is None:
            raise ProgramError("a join names a fork that this branch does not have.")
        for claim in claims:
            if claim.error is not None:
                raise claim.error
            if claim.pieces is None:
                return False
        assert self.text is not None
        for claim in claims:
            self.text.append_pieces(claim.pieces or ())
        del self.joined[place]
        return True

    def settle_claims(self) -> list[ProgramBranch[TextT, QueuedT]]:
        """Completes each claim whose nodes have all been played: stores in the claim what the nodes
        added. Returns the branches that made these claims.
        """
        if self.text is None:
            return []
        settled = [claim for claim in self.claims if claim.end <= self.played]
        for claim in settled:
            places = [place for place in self.lengths if place < claim.end]
            claim.pieces = tuple(self.text.added[: self.lengths[max(places)]]) if places else ()
        self.claims = [claim for claim in self.claims if claim.pieces is None]
        return [claim.joiner for claim in settled]

    def fail_claims(
        self, error: SglError, before: int | None = None
    ) -> list[ProgramBranch[TextT, QueuedT]]:
        """Fails the claims on this branch. With `before`, fails only claims whose nodes all come
        before that place. Returns the branches that made the failed claims.
        """
        failed = [claim for claim in self.claims if before is None or claim.end <= before]
        for claim in failed:
            claim.error = error
        self.claims = [claim for claim in self.claims if claim.error is None]
        return [claim.joiner for claim in failed]

    # ------------------------------------------------------------------------------------ rollbacks

    def has_mark(self, mark: int) -> bool:
        """Returns True if a mark is played or queued, and no queued rollback removes it."""
        known = mark in self.marks or any(place == mark for place, _ in self.queue)
        return known and not any(to < mark < at for at, to in self.rollbacks.items())

    def count_nodes_claimed_above(self, below: ProgramBranch[TextT, QueuedT], at: int) -> int:
        """Returns how many of this branch's first nodes survive a rollback in the branch `below`.
        Nodes survive if joins in branches above `below` have claimed them. Returns -1 if no such
        join has claimed the branch, and 0 if one claimed it before it had nodes.

        Args:
            at: number of nodes when the rollback is added.
        """
        above = (claim.end for claim in self.claims if len(claim.joiner.path) < len(below.path))
        return max((end for end in above if end <= at), default=-1)

    def undo_forks(self, mark: int, at: int) -> tuple[int, list[ProgramBranch[TextT, QueuedT]]]:
        """Discards the forks and joins that a rollback removes.

        Args:
            mark: place of the mark that the rollback returns to.
            at: place of the rollback.

        Returns:
            Place from which to remove queued nodes, and the branches of the discarded forks. Nodes
            before that place are claimed, or do not come after the mark.
        """
        claimed = self.count_nodes_claimed_above(self, at)
        gone = [
            child for place, branches in self.forks.items() if place > mark for child in branches
        ]
        self.forks = {place: branches for place, branches in self.forks.items() if place <= mark}
        self.joins = [place for place in self.joins if place <= mark]
        self.joined = {
            place: claims
            for place, claims in self.joined.items()
            if place <= mark or place < claimed
        }
        return max(claimed, mark + 1), gone

    def next_rollback(self) -> int | None:
        """Returns the place of the first queued rollback that will undo the node being played, or
        None if there is none.
        """
        return min((at for at, mark in self.rollbacks.items() if mark in self.marks), default=None)

    def play_rollback(self, at: int) -> None:
        """Plays the rollback at a place. Raises ProgramError if the branch does not have its mark."""
        mark = self.rollbacks.pop(at, None)
        if mark is None:
            raise ProgramError("a rollback names a mark that its branch does not have.")
        assert self.text is not None
        self.text.restore_position(self.marks[mark])
        self.marks = {place: each for place, each in self.marks.items() if place <= mark}
        self.lengths = {place: length for place, length in self.lengths.items() if place <= mark}


@dataclass(frozen=True, eq=False, slots=True)
class Cancel(Generic[TextT, QueuedT]):
    """Effect: an answer is no longer needed."""

    ask: Ask[TextT, QueuedT]


@dataclass(frozen=True, eq=False, slots=True)
class Failed:
    """Effect: a node failed, or will not be played.

    Attributes:
        path: path of the node: that of its branch, and its place.
        name: name of its variable, or None.
        error: why.
        attempt: see Ask.
    """

    path: Path
    name: str | None
    error: SglError
    attempt: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Forked(Generic[TextT, QueuedT]):
    """Effect: a branch begins, because its fork was played."""

    branch: ProgramBranch[TextT, QueuedT]


@dataclass(frozen=True, eq=False, slots=True)
class Idle(Generic[TextT, QueuedT]):
    """Effect: a branch has nothing to play."""

    branch: ProgramBranch[TextT, QueuedT]


@dataclass(frozen=True, eq=False, slots=True)
class Ended:
    """Effect: the program has ended, with an error or None. It is the last effect."""

    error: SglError | None


Effect: TypeAlias = (
    Ask[TextT, QueuedT]
    | Cancel[TextT, QueuedT]
    | Failed
    | Forked[TextT, QueuedT]
    | Idle[TextT, QueuedT]
    | Ended
)
