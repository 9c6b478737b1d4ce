"""Forks of a branch, and the joins that append their texts to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang_lite.program.nodes import Join, Path
from sglang_lite.protocol import ProgramError
from sglang_lite.runtime.core.branch_queue import QueuedNode
from sglang_lite.runtime.core.branch_text import BranchText

if TYPE_CHECKING:
    from sglang_lite.runtime.core.program_branch import Branch, ProgramOfBranches


class BranchForks:
    """Forks of one branch.

    Args:
        player: program of the branch.
        path: path of the branch.
    """

    def __init__(self, player: ProgramOfBranches, path: Path) -> None:
        self._player, self._path = player, path
        self._open: list[tuple[int, int]] = []  # (place, number of branches) of each fork since the last join

    def begin(self, text: BranchText, place: int, branches: Sequence[Sequence[QueuedNode]]) -> None:
        """Starts the branches of a fork, each with the nodes that the fork has for it."""
        self._open.append((place, len(branches)))
        tail = text.tail()
        for i, entries in enumerate(branches):
            child = self._player.branch((*self._path, place, i))
            self._player.count_dequeued(-len(entries))  # they are queued by `begin`
            child.begin(text.fork(), tail, entries)
            child.hold()
            child.resume()

    def join(self, text: BranchText, node: Join, waiter: Branch) -> bool:
        """Appends the texts of joined branches. Returns False if a branch has not been played far enough; then it
        resumes `waiter` later.

        Raises:
            SglError: a joined branch has failed, or the join doesn't match the forks.
        """
        if node.mode == "gather_variable":
            return True
        forks = self._open if node.fork is None else [each for each in self._open if each[0] == node.fork]
        children = [self._player.branch((*self._path, place, i)) for place, size in forks for i in range(size)]
        ends: Sequence[int | None] = node.ends or [None] * len(children)
        if len(children) != len(ends):
            raise ProgramError("a join names a fork that this branch does not have.")
        for child, end in zip(children, ends):
            if not child.is_played(end):
                if child.error is not None:
                    raise child.error
                child.wake_when_played(waiter)
                return False
        for child, end in zip(children, ends):
            text.write(child.added(end))
        self._open = [each for each in self._open if each not in forks]
        return True

    def go_back(self, mark: int) -> None:
        """Forgets the forks after a mark."""
        self._open = [each for each in self._open if each[0] < mark]
