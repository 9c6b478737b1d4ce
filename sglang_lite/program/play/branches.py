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

    def go_back(self, branch: Branch[TextT, QueuedT], at: int) -> None:
        for child in branch.go_back(at):
            self.lose(child, RequestAbortedError("a rollback removed the fork of this branch."), quiet=True)
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
            self.give_up_ask(branch)
            self.ready += [*branch.fail_claims(error, back), branch]

    def lose(self, branch: Branch[TextT, QueuedT], error: SglError, *, quiet: bool = False) -> None:
        """Ends a branch and those forked from it for good.

        Args:
            quiet: whether the error is told only if nodes are added later.
        """
        if branch.lost:
            return
        branch.lost, branch.quiet = True, quiet
        if branch.error is None:
            if not quiet:
                self.effects.append(Failed((*branch.path, branch.next_place), None, error))
            self.give_up(branch, error, quiet=quiet)
        branch.untold = quiet
        for child in branch.children:
            self.lose(child, error, quiet=quiet)

    def end_refused(self, branch: Branch[TextT, QueuedT]) -> None:
        if branch.refused is not None:
            self.give_up(branch, branch.refused, quiet=branch.quiet)

    def give_up(self, branch: Branch[TextT, QueuedT], error: SglError, *, quiet: bool = False) -> None:
        """Ends a branch with an error, and the branches of forks that will not be played (`quiet`: as in `_lose`)."""
        branch.error = error
        ended = [child for child in branch.children if child.text is None] + branch.skip_rollbacks(0)
        self.stop(branch)
        self.ready += branch.fail_claims(error)
        for child in ended:
            self.lose(child, error, quiet=quiet)

    def stop(self, branch: Branch[TextT, QueuedT]) -> None:
        """Discards what is asked and queued."""
        branch.refused, branch.joining, branch.paused = None, False, None
        self.give_up_ask(branch)
        branch.cut(0)
        self.effects.append(Idle(branch))

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
