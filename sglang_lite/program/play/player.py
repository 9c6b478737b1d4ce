"""Player of programs: decides which nodes of a program's branches are executed when.

It does no work by itself. Its inputs are calls that return immediately and leave effects, such as
a request for an answer, which a driver takes and performs in order. It has no thread, lock, future
or callback. The driver owns it, and uses it from one thread at a time.

Rules, in addition to those in program/nodes.py:
- A node is identified by the path of its branch and its place there: the number of nodes that the
  branch was given before it.
- A branch that fails stays failed. Its queued and later nodes are not played, nor are the branches
  that they would fork. Branches that were forked earlier play on. A rollback to a mark before the
  failed node revives the branch.
- A join claims the nodes that its branches have at its own place in the program, and those of the
  branches forked from them. It fails if a node whose text it appends fails. A join of a failed
  branch claims nodes, too.
- A branch waits at a judged node for the verdict, even if the answer has failed. The verdict may
  arrive before the branch gets there, or before the answer, which is then given up. Claims wait for
  the verdict, too.
- A rollback takes effect as soon as it is received. But nodes that a join above its branch has
  claimed are still played; in its own branch, they are played before the rollback. Branches that
  the rollback ends play such nodes, too, and then end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic

from sglang_lite.program.nodes import (
    Fork,
    Gen,
    GrammarBegin,
    GrammarEnd,
    Join,
    Mark,
    Path,
    Pause,
    Rollback,
    Select,
    is_judged,
)
from sglang_lite.program.play.branch import (
    Ask,
    Cancel,
    Effect,
    Ended,
    Failed,
    Forked,
    Idle,
    ProgramBranch,
    QueuedT,
    TextT,
    Totals,
)
from sglang_lite.protocol import ProgramError, RequestAbortedError, SglError


class ProgramPlayer(Generic[TextT, QueuedT]):
    """Player of one program.

    Args:
        text: text that the main branch continues.

    Attributes:
        main: the main branch.
        totals: numbers of queued nodes, and of branches that wait for an answer.
        ended: True once the program has ended; all inputs are ignored then.
        judges: False if no verdicts will come: answers to judged nodes add nothing then.
    """

    def __init__(self, text: TextT) -> None:
        self._branches = Branches[TextT, QueuedT](text)
        self.main = self._branches.main
        self.totals = self._branches.totals
        self.ended = False
        self.judges = True
        self._closed = False
        self._stray: SglError | None = None  # error for nodes of a branch that was never forked

    def pop_effects(self) -> list[Effect[TextT, QueuedT]]:
        """Returns the effects since the last call, in order, and clears them."""
        effects = self._branches.effects
        self._branches.effects = []
        return effects

    # --------------------------------------------------------------------------------------- inputs

    def add_branch_nodes(
        self, path: Path, entries: Sequence[QueuedT], refusal: SglError | None = None
    ) -> ProgramBranch[TextT, QueuedT] | None:
        """Adds nodes to a branch, whose fork must have been added before. Returns the branch, or
        None if the program has ended.

        Args:
            path: path of the branch.
            entries: the nodes.
            refusal: error with which the branch fails in place of these nodes, once it has played
                the earlier ones.
        """
        if self.ended:
            return None
        branch = self._branches.by_path.get(path)
        if branch is None:
            self._stray = ProgramError(
                "nodes were added to a branch that was not forked.",
                hint="Add the fork first. A path names it by its place among the branch's nodes.",
            )
            branch = self._branches.add_failed_branch(path, self._stray)
        if refusal is not None and branch.error is None and branch.refused is None:
            branch.refused = refusal
            self._branches.effects.append(Failed((*path, branch.count), None, refusal))
        first = branch.count
        branch.count += len(entries)
        self._queue_nodes(branch, first, entries, told=True)
        self._play_ready_branches()
        return branch

    def accept_answer(self, ask: Ask[TextT, QueuedT], pieces: Sequence[object] | None = ()) -> None:
        """Accepts the answer to a node. Does nothing if the ask was given up.

        Args:
            pieces: what the node adds to the text; None if the answer is judged.
        """
        if ask.is_current:
            ask.branch.set_ask(None)
            if pieces is None and self.judges:
                ask.branch.paused = ask.place
            else:
                self._branches.complete_node(ask.branch, ask.place, pieces or ())
            self._play_ready_branches()

    def judge(
        self, path: Path, place: int, pieces: Sequence[object], again: QueuedT | None = None
    ) -> None:
        """Accepts the caller's verdict on a judged node. Does nothing if the node was rolled back
        or its branch has failed.

        Args:
            pieces: what is appended to the text.
            again: question to ask in the node's place, after these pieces; None if the branch goes
                on.
        """
        if self.ended:
            return
        branch = self._branches.by_path.get(path)
        if branch is None or place >= branch.count:
            self._stray = ProgramError(
                "a verdict was given on a node that was not added.", hint="Add the node first."
            )
        elif branch.error is None and place >= branch.played:
            branch.verdicts.setdefault(place, deque()).append((pieces, again))
            if branch.judged_place == place:
                self._branches.give_up_ask(branch)
                self._apply_verdicts(branch, place)
                self._play_ready_branches()

    def accept_failure(self, ask: Ask[TextT, QueuedT], error: SglError) -> None:
        """Accepts the failure of a node. Does nothing if the ask was given up."""
        if ask.is_current:
            ask.branch.set_ask(None)
            name = getattr(ask.node, "name", None)
            if self.judges and is_judged(ask.node):
                ask.branch.paused = ask.place
                self._branches.effects.append(
                    Failed((*ask.branch.path, ask.place), name, error, ask.attempt)
                )
            else:
                self._branches.fail_branch_at(ask.branch, error, ask.place, name)
            self._play_ready_branches()

    def end_branch_quietly(self, path: Path) -> None:
        """Ends a branch at its next node that needs an answer, without reporting the end. Earlier
        nodes are still played, because the caller may already have played them itself. A rollback
        can revive the branch.
        """
        branch = self._branches.by_path.get(path)
        if branch is None or (branch.lost and branch.error is not None):
            return
        error = branch.refused or RequestAbortedError("the branch was dropped.")
        if branch.judged_place is not None and (back := branch.next_rollback()) is not None:
            # the caller has rejected an answer, but a rollback that removes it is already queued
            self._branches.skip_to_rollback(branch, back, error)
            self._play_ready_branches()
            return
        branch.refused = error
        branch.quiet = True
        asked = branch.ask is not None and isinstance(branch.ask.node, Gen | Select)
        if branch.error is None and branch.paused is None and not asked:
            waits = (
                (at, isinstance(entry.node, Gen | Select | Pause)) for at, entry in branch.queue
            )
            place = next(
                (at for at, answered in waits if answered and not branch.has_final_verdict(at)),
                None,
            )
            if place is not None:
                self._branches.end_removed_forks(
                    branch, branch.remove_queued_from(place), error, quiet=True
                )
            if branch.ask is not None or branch.queue:
                return
        self._branches.give_up_if_refused(branch)
        self._play_ready_branches()

    def close(self) -> None:
        """Announces that no more nodes will be added. The program ends when everything is played."""
        self._closed = True
        self._play_ready_branches()

    def fail_program(self, error: SglError) -> None:
        """Ends the program with an error."""
        if not self.ended:
            for branch in self._branches.by_path.values():
                self._branches.give_up_ask(branch)
            self._finish_program(error)

    # -------------------------------------------------------------------------------- what is added

    def _queue_nodes(
        self,
        branch: ProgramBranch[TextT, QueuedT],
        first: int,
        entries: Sequence[QueuedT],
        *,
        told: bool,
    ) -> None:
        """Queues the nodes of a branch. A rollback among them takes effect immediately.

        Args:
            first: place of the first node.
            told: whether to report the branch's error if it was never reported.
        """
        forked = []
        for place, entry in enumerate(entries, first):
            node = entry.node
            if isinstance(node, Rollback):
                if branch.has_mark(node.mark):
                    if not branch.lost:
                        self._branches.roll_back(branch, node.mark, place, entry)
                # else the branch has failed before the mark
                elif branch.error is None and branch.refused is None:
                    branch.push(place, entry)  # fails when it is played
                continue
            failure = branch.error or branch.refused
            if isinstance(node, Fork):
                made = self._branches.announce_fork(branch, place, entry.branches)
                forked += [
                    (child, nodes, failure, branch.quiet)
                    for child, nodes in zip(made, entry.branches)
                ]
            # also in a failed branch, so that the result doesn't depend on when it failed
            if isinstance(node, Join):
                branch.add_join(place, node)
            if failure is None:
                branch.push(place, entry)
            elif branch.untold and told:
                branch.untold = False
                self._branches.effects.append(Failed((*branch.path, place), None, failure))
        # queued after the joins that claim these nodes, since a rollback may be among the nodes
        for child, nodes, failure, quiet in forked:
            self._queue_nodes(child, 0, nodes, told=False)
            if failure is not None:
                self._branches.end_branch_and_forks(child, failure, quiet=quiet)
        self._branches.ready.append(branch)

    # -------------------------------------------------------------------------------------- playing

    def _play_ready_branches(self) -> None:
        """Plays nodes in all branches that can go on, and ends the program if it is closed and
        fully played.
        """
        while not self.ended:
            while self._branches.ready:
                self._play_branch(self._branches.ready.popleft())
            if not self._closed or self.totals.asked:
                return
            if any(branch.paused is not None for branch in self._branches.by_path.values()):
                return
            # No answer is missing: a branch that has begun and has a queue is at a join.
            joining = (
                branch
                for branch in self._branches.by_path.values()
                if branch.queue and branch.text is not None
            )
            waiting = next(joining, None)
            if waiting is None:
                self._finish_program(self.main.error or self._stray)
                return
            self._branches.fail_branch_at(
                waiting, ProgramError("a join waits for nodes that were never added.")
            )

    def _play_branch(self, branch: ProgramBranch[TextT, QueuedT]) -> None:
        """Plays nodes until one has to wait, or the queue is empty."""
        text = branch.text
        if text is None or branch.ask is not None or branch.paused is not None:
            return
        while branch.queue:
            place, entry = branch.queue[0]
            node = entry.node
            try:
                if isinstance(node, Join) and not branch.try_join(place, node):
                    return
                branch.pop()
                if isinstance(node, Gen | Select | GrammarBegin | GrammarEnd | Pause):
                    branch.attempt = 0
                    if isinstance(node, Pause) or (place in branch.verdicts and is_judged(node)):
                        self._apply_verdicts(branch, place)
                    else:
                        self._branches.emit_ask(branch, place, entry)
                    return
                if isinstance(node, Rollback):
                    self._branches.finish_rollback(branch, place)
                    continue
                if isinstance(node, Fork):
                    self._branches.begin_fork_branches(
                        text, branch.path, place, len(entry.branches)
                    )
                elif isinstance(node, Mark):
                    branch.marks[place] = text.mark()
                elif not isinstance(node, Join):
                    text.append(node)
            except SglError as error:
                self._branches.fail_branch_at(branch, error, place, getattr(node, "name", None))
                return
            self._branches.ready += branch.record_played_node(place)
        self._branches.give_up_if_refused(branch)
        self._branches.effects.append(Idle(branch))

    def _apply_verdicts(self, branch: ProgramBranch[TextT, QueuedT], place: int) -> None:
        """Applies the verdicts that have already arrived for the node at which a branch waits. The
        branch goes on if one of them is final, and keeps waiting otherwise.
        """
        assert branch.text is not None
        branch.paused, verdicts = place, branch.verdicts.pop(place, None)
        while verdicts:
            pieces, again = verdicts.popleft()
            if again is None:
                self._branches.complete_node(branch, place, pieces)
                return
            branch.text.append_pieces(pieces)
            branch.attempt += 1
            if not verdicts:  # else the answer already has a verdict
                self._branches.emit_ask(branch, place, again)

    def _finish_program(self, error: SglError | None) -> None:
        self.ended = True
        self._branches.end_all_branches(error)


class Branches(Generic[TextT, QueuedT]):
    """Branches of one program. Only the player uses them.

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
        self.main = ProgramBranch[TextT, QueuedT]((), self.totals, text)
        self.by_path: dict[Path, ProgramBranch[TextT, QueuedT]] = {(): self.main}
        self.ready: deque[ProgramBranch[TextT, QueuedT]] = deque()
        self.effects: list[Effect[TextT, QueuedT]] = []

    def add_failed_branch(self, path: Path, error: SglError) -> ProgramBranch[TextT, QueuedT]:
        """Adds a branch that was never forked, and marks it as failed with an error."""
        branch = self.by_path[path] = ProgramBranch(path, self.totals)
        self.end_branch_and_forks(branch, error)
        return branch

    def announce_fork(
        self,
        branch: ProgramBranch[TextT, QueuedT],
        place: int,
        branches: Sequence[Sequence[QueuedT]],
    ) -> list[ProgramBranch[TextT, QueuedT]]:
        """Creates the branches of a fork in advance. They begin when the fork is played."""
        made = [
            ProgramBranch[TextT, QueuedT]((*branch.path, place, i), self.totals)
            for i in range(len(branches))
        ]
        for child, nodes in zip(made, branches):
            child.count = len(nodes)
            self.by_path[child.path] = child
            # joins that have already claimed the fork also claim the nodes of its branches
            for claim in branch.claims:
                if place < claim.end:
                    child.claim_nodes(claim.joiner, None)
        branch.forks[place] = made
        return made

    def begin_fork_branches(self, text: TextT, path: Path, place: int, size: int) -> None:
        """Begins the branches of a fork."""
        for i in range(size):
            branch = self.by_path[(*path, place, i)]
            branch.text = text.fork()
            self.ready += branch.settle_claims()
            self.effects.append(Forked(branch))
            self.ready.append(branch)

    def emit_ask(self, branch: ProgramBranch[TextT, QueuedT], place: int, entry: QueuedT) -> None:
        branch.paused = None
        ask = Ask(branch, place, entry, branch.attempt)
        branch.set_ask(ask)
        self.effects.append(ask)

    def complete_node(
        self, branch: ProgramBranch[TextT, QueuedT], place: int, pieces: Sequence[object]
    ) -> None:
        """Appends what a node adds, and lets its branch go on."""
        branch.paused = None
        if pieces and branch.text is not None:
            branch.text.append_pieces(pieces)
        self.ready += branch.record_played_node(place)
        self.ready.appendleft(branch)  # in front, so that a driver continues this branch first

    def roll_back(
        self, branch: ProgramBranch[TextT, QueuedT], mark: int, at: int, entry: QueuedT
    ) -> None:
        """Removes the nodes after a mark, except claimed ones. Queues the rollback if the mark has
        not been played, or if a node after the mark is claimed. Otherwise goes back to the mark
        immediately.
        """
        end, gone = branch.undo_forks(mark, at)
        error = RequestAbortedError("a rollback removed the fork of this branch.")
        for child in gone:
            self.end_branch_and_forks(child, error, quiet=True, below=branch)
        waits = end > mark + 1 or mark not in branch.marks
        removed = branch.remove_queued_from(end) if waits else self.stop(branch)
        self.end_removed_forks(branch, removed, error, quiet=True)
        branch.rollbacks[at] = mark
        branch.refused = None
        branch.quiet = False
        if waits:
            branch.push(at, entry)
        else:
            branch.error = None
            self.finish_rollback(branch, at)

    def finish_rollback(self, branch: ProgramBranch[TextT, QueuedT], at: int) -> None:
        branch.play_rollback(at)
        self.ready += branch.record_played_node(at)

    def fail_branch_at(
        self,
        branch: ProgramBranch[TextT, QueuedT],
        error: SglError,
        place: int | None = None,
        name: str | None = None,
    ) -> None:
        """Reports the failure of the node at `place` (default: the next one). Then ends the branch
        or, if a queued rollback undoes the node, continues the branch at the rollback.
        """
        self.effects.append(
            Failed((*branch.path, branch.next_place if place is None else place), name, error)
        )
        back = branch.next_rollback()
        if back is None:
            self.give_up_branch(branch, error)
        else:
            self.skip_to_rollback(branch, back, error)

    def skip_to_rollback(
        self, branch: ProgramBranch[TextT, QueuedT], back: int, error: SglError
    ) -> None:
        """Drops everything in a branch that comes before a queued rollback, including the node
        being played. Fails the claims on the dropped nodes.
        """
        branch.paused = None
        self.give_up_ask(branch)
        self.end_removed_forks(branch, branch.drop_queued_before(back), error, quiet=True)
        self.ready += [*branch.fail_claims(error, back), branch]

    def end_branch_and_forks(
        self,
        branch: ProgramBranch[TextT, QueuedT],
        error: SglError,
        *,
        quiet: bool = False,
        below: ProgramBranch[TextT, QueuedT] | None = None,
    ) -> None:
        """Ends a branch and those forked from it for good.

        Args:
            quiet: whether the error is reported only if nodes are added later.
            below: branch whose rollback ends this one, or None. Nodes claimed by joins in branches
                above it are still played.
        """
        claimed = -1 if below is None else branch.count_nodes_claimed_above(below, branch.count)
        if branch.error is None and claimed >= 0:
            branch.refused = error
            branch.remove_queued_from(claimed)
        elif branch.error is None:
            if not (quiet or branch.lost):
                self.effects.append(Failed((*branch.path, branch.next_place), None, error))
            self.give_up_branch(branch, error, quiet=quiet)
        if not branch.lost:
            branch.lost = True
            branch.quiet = quiet
            branch.untold = quiet
            for child in branch.children:
                self.end_branch_and_forks(child, error, quiet=quiet, below=below)

    def end_removed_forks(
        self,
        branch: ProgramBranch[TextT, QueuedT],
        removed: Sequence[tuple[int, QueuedT]],
        error: SglError,
        *,
        quiet: bool,
    ) -> None:
        """Ends the branches of forks that have been removed from the queue. Removed forks will not
        be played.
        """
        for place, entry in removed:
            for i in range(len(entry.branches)):
                self.end_branch_and_forks(
                    self.by_path[(*branch.path, place, i)], error, quiet=quiet
                )

    def give_up_if_refused(self, branch: ProgramBranch[TextT, QueuedT]) -> None:
        if branch.refused is not None:
            self.give_up_branch(branch, branch.refused, quiet=branch.quiet)

    def give_up_branch(
        self, branch: ProgramBranch[TextT, QueuedT], error: SglError, *, quiet: bool = False
    ) -> None:
        """Ends a branch with an error. Also ends the branches of its forks that are still queued.
        `quiet` means the same as in `end_branch_and_forks`.
        """
        branch.error = error
        removed = self.stop(branch)
        self.ready += branch.fail_claims(error)
        self.end_removed_forks(branch, removed, error, quiet=quiet)

    def stop(self, branch: ProgramBranch[TextT, QueuedT]) -> list[tuple[int, QueuedT]]:
        """Discards the open question and the queue of a branch. Returns what was queued."""
        branch.refused = None
        branch.paused = None
        self.give_up_ask(branch)
        self.effects.append(Idle(branch))
        return branch.remove_queued_from(0)

    def give_up_ask(self, branch: ProgramBranch[TextT, QueuedT]) -> None:
        if branch.ask is not None:
            self.effects.append(Cancel(branch.ask))
            branch.set_ask(None)

    def end_all_branches(self, error: SglError | None) -> None:
        """Ends all branches, and reports the end of the program."""
        for branch in self.by_path.values():
            branch.discard_unplayed()
            self.effects.append(Idle(branch))
        self.effects.append(Ended(error))
        self.by_path = {}
        self.ready = deque()
