"""The branches of a program that is being played: how they begin, fail and end, and what follows for others."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic

from sglang_lite.program.nodes import Path
from sglang_lite.program.play.branch import Ask, Branch, QueuedT, TextT, Totals
from sglang_lite.program.play.effects import Cancel, Effect, Ended, Failed, Forked, Idle
from sglang_lite.protocol import RequestAbortedError, SglError


class Branches(Generic[TextT, QueuedT]):
    """Branches of one program. The player alone uses them.

    Args:
        text: text that the main branch continues.

    Attributes:
        main: the main branch.
        by_path: all branches.
        totals: numbers over all branches.
        ready: branches that may be able to play.
        effects: effects that the driver has not taken yet.
    """

    def __init__(self, text: TextT) -> None:
        self.totals = Totals()
        self.main = Branch[TextT, QueuedT]((), self.totals, text)
        self.by_path: dict[Path, Branch[TextT, QueuedT]] = {(): self.main}
        self.ready: deque[Branch[TextT, QueuedT]] = deque()
        self.effects: list[Effect[TextT, QueuedT]] = []

    def add_lost(self, path: Path, error: SglError) -> Branch[TextT, QueuedT]:
        """Adds a branch that was not forked, and has failed with an error."""
        branch = self.by_path[path] = Branch(path, self.totals)
        self.lose(branch, error)
        return branch

    def announce(
        self, branch: Branch[TextT, QueuedT], place: int, branches: Sequence[Sequence[QueuedT]]
    ) -> list[Branch[TextT, QueuedT]]:
        """Makes the branches of a fork, which begin when the fork is played."""
        made = [Branch[TextT, QueuedT]((*branch.path, place, i), self.totals) for i in range(len(branches))]
        for child, nodes in zip(made, branches):
            child.count = len(nodes)
            self.by_path[child.path] = child
            for claim in branch.claims:  # of joins that came first, as the nodes of a branch came with its fork
                if place < claim.end:
                    child.claim(claim.joiner, None)
        branch.forks[place] = made
        return made

    def begin(self, text: TextT, path: Path, place: int, size: int) -> None:
        """Begins the branches of a fork."""
        for i in range(size):
            branch = self.by_path[(*path, place, i)]
            branch.text = text.fork()
            self.ready += branch.settle_claims()
            self.effects.append(Forked(branch))
            self.ready.append(branch)

    def ask(self, branch: Branch[TextT, QueuedT], place: int, entry: QueuedT) -> None:
        branch.paused = None
        ask = Ask(branch, place, entry, branch.attempt)
        branch.set_ask(ask)
        self.effects.append(ask)

    def settle(self, branch: Branch[TextT, QueuedT], place: int, pieces: Sequence[object]) -> None:
        """Appends what a node adds, and lets its branch go on."""
        branch.paused = None
        if pieces and branch.text is not None:
            branch.text.write(pieces)
        self.ready += branch.mark_played(place)
        self.ready.appendleft(branch)  # first, so that a driver can continue where it is

    def roll_back(self, branch: Branch[TextT, QueuedT], mark: int, at: int, entry: QueuedT) -> None:
        """Removes what is under way behind a mark but not claimed, and goes back at once if nothing before is left."""
        end, gone = branch.take_back(mark, at)
        error = RequestAbortedError("a rollback removed the fork of this branch.")
        for child in gone:
            self.lose(child, error, quiet=True, below=branch)
        waits = end > mark + 1 or mark not in branch.marks
        removed = branch.cut(end) if waits else self.stop(branch)
        self.lose_forks(branch, removed, error, quiet=True)
        branch.rollbacks[at], branch.refused, branch.quiet = mark, None, False
        if waits:
            branch.push(at, entry)
        else:
            branch.error = None
            self.go_back(branch, at)

    def go_back(self, branch: Branch[TextT, QueuedT], at: int) -> None:
        branch.go_back(at)
        self.ready += branch.mark_played(at)

    def fail(
        self, branch: Branch[TextT, QueuedT], error: SglError, place: int | None = None, name: str | None = None
    ) -> None:
        """Ends a branch with an error of the node at `place`, by default of the next one, unless a queued rollback
        takes the node back."""
        self.effects.append(Failed((*branch.path, branch.next_place if place is None else place), name, error))
        back = branch.next_rollback()
        if back is None:
            self.give_up(branch, error)
        else:
            self.skip(branch, back, error)

    def skip(self, branch: Branch[TextT, QueuedT], back: int, error: SglError) -> None:
        """Goes on with a queued rollback that takes back what a branch plays, which is not claimed any more."""
        branch.paused = None
        self.give_up_ask(branch)
        self.lose_forks(branch, branch.skip(back), error, quiet=True)
        self.ready += [*branch.fail_claims(error, back), branch]

    def lose(
        self,
        branch: Branch[TextT, QueuedT],
        error: SglError,
        *,
        quiet: bool = False,
        below: Branch[TextT, QueuedT] | None = None,
    ) -> None:
        """Ends a branch and those forked from it for good.

        Args:
            quiet: whether the error is told only if nodes are added later.
            below: branch that has rolled back: what joins above it have claimed is still played.
        """
        claimed = 0 if below is None else branch.claimed(below, branch.count)
        if branch.error is None and claimed > 0:
            branch.refused = error
            branch.cut(claimed)
        elif branch.error is None:
            if not (quiet or branch.lost):
                self.effects.append(Failed((*branch.path, branch.next_place), None, error))
            self.give_up(branch, error, quiet=quiet)
        if not branch.lost:
            branch.lost, branch.quiet, branch.untold = True, quiet, quiet
            for child in branch.children:
                self.lose(child, error, quiet=quiet, below=below)

    def lose_forks(
        self, branch: Branch[TextT, QueuedT], removed: Sequence[tuple[int, QueuedT]], error: SglError, *, quiet: bool
    ) -> None:
        """Ends the branches of forks that are not played, as they are among the nodes that were removed."""
        for place, entry in removed:
            for i in range(len(entry.branches)):
                self.lose(self.by_path[(*branch.path, place, i)], error, quiet=quiet)

    def end_refused(self, branch: Branch[TextT, QueuedT]) -> None:
        if branch.refused is not None:
            self.give_up(branch, branch.refused, quiet=branch.quiet)

    def give_up(self, branch: Branch[TextT, QueuedT], error: SglError, *, quiet: bool = False) -> None:
        """Ends a branch with an error, and the branches of forks that will not be played (`quiet`: as of `lose`)."""
        branch.error = error
        removed = self.stop(branch)
        self.ready += branch.fail_claims(error)
        self.lose_forks(branch, removed, error, quiet=quiet)

    def stop(self, branch: Branch[TextT, QueuedT]) -> list[tuple[int, QueuedT]]:
        """Discards what is asked and queued. Returns what was queued."""
        branch.refused, branch.joining, branch.paused = None, False, None
        self.give_up_ask(branch)
        self.effects.append(Idle(branch))
        return branch.cut(0)

    def give_up_ask(self, branch: Branch[TextT, QueuedT]) -> None:
        if branch.ask is not None:
            self.effects.append(Cancel(branch.ask))
            branch.set_ask(None)

    def end(self, error: SglError | None) -> None:
        """Ends all branches, and tells of the end of the program."""
        for branch in self.by_path.values():
            branch.end()
            self.effects.append(Idle(branch))
        self.effects.append(Ended(error))
        self.by_path, self.ready = {}, deque()
