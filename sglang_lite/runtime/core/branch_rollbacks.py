"""Marks of a program's branch, and rollbacks to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_lite.protocol import RequestAbortedError
from sglang_lite.runtime.core.branch_forks import BranchForks, Claims
from sglang_lite.runtime.core.branch_queue import BranchQueue, QueuedNode
from sglang_lite.runtime.core.branch_text import BranchText, TextMark

if TYPE_CHECKING:
    from sglang_lite.runtime.core.program_branch import Branch


class BranchRollbacks:
    """Marks and rollbacks of one branch. A rollback removes the queued nodes behind its mark as soon as it is received,
    but those that a join has claimed; they are played before the branch goes back.

    Args:
        queue: queue of the branch.
        forks: forks of the branch.
        claims: claims on the branch.
    """

    def __init__(self, queue: BranchQueue, forks: BranchForks, claims: Claims) -> None:
        self._queue, self._forks, self._claims = queue, forks, claims
        self._marks: dict[int, TextMark] = {}  # played marks, by place
        # Rollbacks that are not played yet, by place: the mark, and the branches of forks behind it.
        self._waiting: dict[int, tuple[int, list[Branch]]] = {}

    def set_mark(self, place: int, text: BranchText) -> None:
        self._marks[place] = text.mark()

    def has_mark(self, mark: int) -> bool:
        """Returns True if a mark is played or queued."""
        return mark in self._marks or self._queue.has(mark)

    def receive(self, mark: int, at: int, entry: QueuedNode) -> bool:
        """Removes what is queued behind a mark. Returns True if the branch can go back at once; if not, the rollback is
        queued behind the nodes that are played before.

        Args:
            at, entry: place and entry of the rollback.
        """
        kept = self._claims.last_end(mark + 1, at)
        end = max(kept, mark + 1)
        gone = self._forks.go_back(mark, kept)
        for each in [each for each in self._waiting if each >= end]:  # these are removed, too
            gone += self._waiting.pop(each)[1]
        self._waiting[at] = mark, gone
        self._queue.predicted_tail = None
        if not kept and not self._queue.has(mark):
            return True
        self._queue.cut(end)
        self._queue.add(at, entry)
        return False

    def go_back(self, at: int, text: BranchText) -> None:
        """Plays the rollback at a place."""
        mark, gone = self._waiting.pop(at)
        self._marks = {place: each for place, each in self._marks.items() if place <= mark}
        text.go_back(self._marks[mark])
        for branch in gone:
            branch.lose(RequestAbortedError("a rollback removed the fork of this branch."), quiet=True)

    def skip_failed(self) -> int | None:
        """Place of the first queued rollback that takes back what is being played, or None; the branch skips what is
        queued before it."""
        place = min((at for at, (mark, _) in self._waiting.items() if mark in self._marks), default=None)
        if place is not None:
            self._queue.skip_to(place)
            for each in [each for each in self._waiting if each < place]:
                self._waiting[place][1].extend(self._waiting.pop(each)[1])
        return place

    def cut_answers(self) -> bool:
        """Removes the first queued node that needs an answer, and all behind it. Returns True if nodes are left."""
        place = self._queue.next_answer
        if place is not None:
            self._queue.cut(place)
            for each in [each for each in self._waiting if each >= place]:
                for branch in self._waiting.pop(each)[1]:
                    branch.lose(RequestAbortedError("the branch was dropped."), quiet=True)
        return bool(self._queue)

    def clear(self) -> list[Branch]:
        """Forgets the queued rollbacks. Returns the branches of forks that they would have removed."""
        waiting, self._waiting = self._waiting, {}
        return [branch for _, gone in waiting.values() for branch in gone]
