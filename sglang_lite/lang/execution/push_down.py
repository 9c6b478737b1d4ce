"""Sends a run to a backend that executes whole programs.

The first generation or selection of a run opens its program; later nodes of its branches extend the
program as they are queued. Each branch still executes its operations in this process, to set
values, variables and streams, but it takes the answers from the program instead of asking the
backend node by node.

A program has one outbox, in order of submission over all branches. It is sent whenever a node needs
an answer. So the backend learns of a fork before it gets the branches' nodes, and of a join before
it gets a rollback in a joined branch.

A node is judged if the caller's Python decides what takes its place (a check, further attempts, a
method of choosing, another backend). The backend's branch waits there for the verdict, which is
sent once this process has executed the node.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from sglang_lite.lang.backend.base import ProgramAtBackend
from sglang_lite.lang.concurrency.loop import executor
from sglang_lite.lang.concurrency.variables import resolve_future
from sglang_lite.lang.execution.operations import (
    BranchMark,
    EventOp,
    ForkOp,
    GenOp,
    JoinOp,
    MarkOp,
    Op,
    ReadOp,
    ReplaceOp,
    ScopeOp,
    SelectOp,
)
from sglang_lite.lang.execution.transcript import Piece, pieces_to_nodes, pieces_to_spans
from sglang_lite.program.nodes import (
    Gen,
    Join,
    Mark,
    Node,
    Path,
    Pause,
    Rollback,
    Select,
    Text,
    Verdict,
)
from sglang_lite.protocol import (
    Delta,
    Generation,
    Location,
    ParameterError,
    Played,
    ProgramError,
    ProgramEvent,
    RequestAbortedError,
    Selection,
    SglError,
)
from sglang_lite.protocol.anything import UserValue

if TYPE_CHECKING:
    from sglang_lite.lang.execution.run import Run

# index of a node in its branch, and number of the attempt at it
Attempt: TypeAlias = tuple[int, int]


class BranchEvents:
    """Events of a branch's nodes, such as pieces of answers, until the branch's player takes them.
    They arrive on a thread of the backend.

    Attributes:
        judged: indices of all nodes so far whose answers the caller judges.
        rollbacks: indices of the rollbacks' nodes.
    """

    __slots__ = (
        "_abandoned",
        "_ended",
        "_failed",
        "_lock",
        "_untaken",
        "_waiting",
        "judged",
        "rollbacks",
    )

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.judged = set[int]()
        self.rollbacks: list[int] = []
        self._untaken: dict[Attempt, deque[Any]] = {}  # events that arrived and were not taken yet
        # what to call when the next event comes
        self._waiting: dict[Attempt, Callable[[], object]] = {}
        self._abandoned = set[Attempt]()  # their events are dropped
        self._failed: list[tuple[int, SglError]] = []  # indices of failed nodes, and their errors
        self._ended: SglError | None = None  # error with which the program ended

    def add_node_event(
        self, attempt: Attempt, event: Delta | Generation | Selection | SglError
    ) -> None:
        """Records an event of a node. An error also fails the nodes after it, up to the next
        rollback, unless the caller judges the node's answers.
        """
        place, _ = attempt
        with self._lock:
            if isinstance(event, SglError) and place not in self.judged:
                self._failed.append((place, event))
            if attempt not in self._abandoned:
                self._untaken.setdefault(attempt, deque()).append(event)
        self._notify_waiters()

    def end_with_error(self, error: SglError) -> None:
        """Ends the branch with an error. No more events will come."""
        self._ended = error
        self._notify_waiters()

    def _notify_waiters(self) -> None:
        with self._lock:
            calls = [
                self._waiting.pop(each)
                for each in [*self._waiting]
                if self._peek_event(each) is not None
            ]
        for call in calls:
            call()

    def _peek_event(self, attempt: Attempt) -> Any:
        """Returns the next event of a node without removing it, or None if there is none yet. If an
        earlier node or the program has failed, the error counts as the next event after those that
        have arrived.
        """
        if untaken := self._untaken.get(attempt):
            return untaken[0]
        place, _ = attempt
        for failed, error in self._failed:
            if failed < place and not any(failed < back < place for back in self.rollbacks):
                return error
        return self._ended

    async def iterate_events(
        self, attempt: Attempt, last: int = 1
    ) -> AsyncGenerator[Delta | Generation | Selection, None]:
        """Yields the events of a node, up to its `last`-th generation or selection. Raises the
        SglError with which the node failed. If the iteration ends early, all remaining events of
        the node are dropped.
        """
        try:
            while last:
                arrival = asyncio.get_running_loop().create_future()
                if not self.has_event_or_notify(
                    attempt, partial(executor().post, resolve_future, arrival)
                ):
                    await arrival
                event = self.pop_event(attempt)
                last -= not isinstance(event, Delta)
                yield event
        finally:
            if last:
                self._drop_attempt_events(attempt)

    def _drop_attempt_events(self, attempt: Attempt) -> None:
        """Drops the events of a node, including those still to come."""
        with self._lock:
            self._abandoned.add(attempt)
            self._untaken.pop(attempt, None)
            self._waiting.pop(attempt, None)

    def has_event_or_notify(self, attempt: Attempt, then: Callable[[], object]) -> bool:
        """Returns True if an event of a node has arrived. If not, `then` is called once, when the
        next event arrives.
        """
        with self._lock:
            if self._peek_event(attempt) is not None:
                return True
            self._waiting[attempt] = then
        return False

    def pop_event(self, attempt: Attempt) -> UserValue:
        """Takes the next event of a node, which must have arrived. Raises the SglError with which
        the node failed.
        """
        with self._lock:
            untaken = self._untaken.get(attempt)
            event = untaken.popleft() if untaken else self._peek_event(attempt)
            if not untaken:
                self._untaken.pop(attempt, None)
        if isinstance(event, SglError):
            raise event
        return event


_Given: TypeAlias = tuple[int, Verdict]  # index of a node, and the verdict on it


@dataclass(slots=True)
class _Judged:
    """Operation for which the backend waits until this process sends a verdict, such as a
    generation with a check.

    Attributes:
        place: index of the operation's node in the branch.
        known: number of pieces of the branch's text that the program has; None until the operation
            is played.
    """

    op: Op
    place: int
    known: int | None = None


def priority_keywords(priority: int) -> dict[str, int]:
    """Returns keyword arguments for a priority. They are empty for priority 0, so backends without
    priorities need no such parameter.
    """
    return {"priority": priority} if priority else {}


class PushedProgram:
    """Program that a run has pushed down to its backend.

    Attributes:
        lock: lock of all its branches; a branch acquires its own lock first.
        closed: True if no more nodes are accepted; later nodes need a new program.
        count: number of nodes so far, over all branches.
        outbox: nodes of branches and verdicts on them that are not sent yet, in order of
            submission.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.lock = threading.RLock()
        self.closed = False
        self.count = 0
        self._open: ProgramAtBackend | None = None
        self.outbox: list[tuple[PushedBranch, Node | _Given]] = []
        self._branches: dict[Path, PushedBranch] = {}  # branches that have nodes in the program
        self._ended: SglError | None = None  # error with which the program ended
        self._winding_down: asyncio.TimerHandle | None = None  # used on the executor loop

    @property
    def opened(self) -> bool:
        """True if the program was opened, even if it has ended since."""
        return self._open is not None or self._ended is not None

    def flush_outbox(self, branch: PushedBranch) -> None:
        """Sends the outbox to the backend because a node of `branch` needs an answer. The first
        call opens the program.
        """
        if self._ended is not None:
            self.outbox = []
            executor().post(branch.events.end_with_error, self._ended)
            return
        try:
            if self._open is None:
                settings = self.run.settings
                self._open = self.run.backend.open_program(
                    self._dispatch_event,
                    stream=settings.stream,
                    **priority_keywords(settings.priority),
                )
                if self.run.winds_down_at is not None:
                    self._schedule_wind_down(self._open, self.run.winds_down_at)
        except SglError as error:
            executor().post(branch.events.end_with_error, error)
        else:
            self._send_outbox(self._open)

    def _schedule_wind_down(self, program: ProgramAtBackend, at: float) -> None:
        """Makes an open program wind down at a given time (`time.monotonic()`)."""
        if time.monotonic() >= at:
            program.wind_down()
        else:
            executor().post(self._start_wind_down_timer, at)

    def _start_wind_down_timer(self, at: float) -> None:
        """Starts the timer that winds the program down. Runs on the executor loop."""
        if self._ended is None:
            loop = asyncio.get_running_loop()
            self._winding_down = loop.call_later(at - time.monotonic(), self._wind_down)

    def _wind_down(self) -> None:
        with self.lock:
            if self._open is not None:
                self._open.wind_down()

    def _cancel_wind_down_timer(self) -> None:
        """Cancels the timer, which would keep an ended program alive. Runs on the executor loop."""
        if self._winding_down is not None:
            self._winding_down.cancel()
            self._winding_down = None

    def _send_outbox(self, program: ProgramAtBackend) -> None:
        for branch, items in self._group_outbox():
            self._branches[branch.path] = branch
            error = branch.refusal
            if error is None:
                try:
                    if isinstance(items, tuple):
                        program.judge(branch.path, *items)
                    else:
                        program.extend(branch.path, items)
                except SglError as refused:
                    branch.refused = error = refused
            if error is not None:
                executor().post(branch.events.end_with_error, error)

    def _group_outbox(self) -> list[tuple[PushedBranch, list[Node] | _Given]]:
        """Empties the outbox and returns its content as verdicts and lists of nodes, each for one
        branch. Joins and rollbacks stay after everything submitted before them, and the nodes of a
        branch stay after its fork.
        """
        outbox = self.outbox
        self.outbox = []
        runs: list[tuple[PushedBranch, list[Node] | _Given]] = []
        growing: dict[PushedBranch, list[Node]] = {}
        for branch, item in outbox:
            if isinstance(item, tuple):
                runs.append((branch, item))
                continue
            if isinstance(item, Join | Rollback):
                growing = {last: nodes for last, nodes in runs[-1:] if isinstance(nodes, list)}
            nodes = growing.get(branch)
            if nodes is None:
                nodes = growing[branch] = []
                runs.append((branch, nodes))
            nodes.append(item)
        return runs

    def drop_branch(self, branch: PushedBranch) -> None:
        """Asks the backend to end a branch: at the node that is being answered, or else at the next
        one that needs an answer.
        """
        if self._open is not None:
            self._send_outbox(self._open)  # the outbox may contain a mark for a later rollback
            self._open.drop_branch(branch.path)

    def expect_pause(self, branch: PushedBranch, seconds: float) -> None:
        """Tells the backend how long nothing will be added to a branch."""
        with self.lock:
            if self._open is not None and not self.closed:
                self._send_outbox(self._open)
                self._open.expect_pause(branch.path, seconds)

    def close(self, count: int | None = None) -> bool:
        """Announces that no more nodes will come. If `count` is given and the program has more
        nodes than that, leaves it open and returns False.
        """
        with self.lock:
            if count is not None and self.count > count:
                return False
            self.closed = True
            self.outbox = []  # nothing waits for it
            if self._open is not None:
                self._open.close()
        return True

    def _dispatch_event(self, event: ProgramEvent) -> None:
        """Dispatches an event of the program to its branch. If the program has ended, ends all of
        its branches.
        """
        if isinstance(event, Played):
            if (branch := self._branches.get(event.path[:-1])) is not None:
                branch.events.add_node_event((event.path[-1], event.attempt), event.event)
            return
        name = type(self.run.backend).__name__
        error = (
            event
            if isinstance(event, SglError)
            else ProgramError(f"{name} ended the program before this node.")
        )
        with self.lock:
            self._ended = error
            self._open = None
            # Breaks reference cycles, which the garbage collector would have to find.
            self.outbox = []
            branches = self._branches
            self._branches = {}
        if self.run.winds_down_at is not None:
            executor().post(self._cancel_wind_down_timer)
        for branch in branches.values():
            # perhaps inside a call to the program, whose caller holds locks
            if isinstance(event, SglError):
                executor().post(branch.events.end_with_error, error)
            else:
                branch.events.end_with_error(error)


class PushedBranch:
    """The pushed-down part of a branch.

    Args:
        path: path of the branch in the program.
        parent: branch from which it was forked, or None for the main branch.

    Attributes:
        count: number of its nodes that are pushed down.
        refused: error with which the backend rejected some of its nodes, or None.
        judged: operations that wait for a verdict, by id.
        events: events of its nodes.
    """

    def __init__(
        self, program: PushedProgram, path: Path = (), parent: PushedBranch | None = None
    ) -> None:
        self.program = program
        self.path = path
        self.parent = parent
        self.count = 0
        self.refused: SglError | None = None
        self.judged: dict[int, _Judged] = {}
        self.events = BranchEvents()

    @property
    def refusal(self) -> SglError | None:
        """Error with which the backend rejected nodes of this branch or of a branch from which it
        was forked.
        """
        return self.refused or (None if self.parent is None else self.parent.refusal)

    # ------------------------------------------------- the submitting side, under the branch's lock

    def push_op(self, op: Op, pieces: Sequence[Piece]) -> PushedBranch:
        """Pushes an operation down and returns the branch that received it: this branch, or, if
        the program is closed or the operation replaces the text, a branch of a new program, which
        begins with the text.
        """
        if type(op) is ReplaceOp:
            return self._start_new_program(op.text.pieces)
        with self.program.lock:
            if not self.program.closed:
                if type(op) is Text:  # like most operations
                    self._append_node(op)
                elif self._put_op(op):
                    self.program.flush_outbox(self)
                return self
        return self._start_new_program(pieces).push_op(op, ())

    def _start_new_program(self, pieces: Sequence[Piece]) -> PushedBranch:
        """Creates the same branch in a new program. The program begins with a mark and with the
        branch's text so far.
        """
        run = self.program.run
        pushed = PushedBranch(PushedProgram(run))
        if run.body_open:
            run.later_programs.append(pushed.program)
        pushed.push_op(MarkOp(BranchMark(), back=False), ())
        for node in pieces_to_nodes(pieces):
            pushed.push_op(node, ())
        return pushed

    def forget_ops(self, ops: Sequence[Op | None]) -> None:
        """Forgets operations that a rollback removed. No verdict on them will be sent."""
        for op in ops:
            self.judged.pop(id(op), None)

    def cancel_ops(self, ops: Sequence[Op | None], *, taken_back: bool) -> None:
        """Cancels operations because the first of them has failed, or the branch as a whole.

        Args:
            taken_back: whether a later rollback undoes them. The branch is then dropped at the
                backend only if the first operation waits for a verdict.
        """
        with self.program.lock:
            waits = any(id(op) in self.judged for op in ops[:1])
            self.forget_ops(ops)
            if waits or not taken_back:
                self.program.drop_branch(self)

    def _append_node(self, node: Node) -> int:
        """Appends a node and returns its index."""
        self.program.outbox.append((self, node))
        self.program.count += 1
        self.count += 1
        return self.count - 1

    def _put_judged_node(self, op: Op, node: Node) -> _Judged:
        self.events.judged.add(self.count)
        judged = self.judged[id(op)] = _Judged(op, self._append_node(node))
        return judged

    def _put_op(self, op: Op) -> bool:
        """Appends the node of an operation. Returns True if the outbox has to be sent now, because
        the node needs an answer or rolls back an open program.
        """
        match op:
            case GenOp() | SelectOp():
                return self._put_answer_op(op)
            case ForkOp():
                place = self._append_node(op.node)
                for i, child in enumerate(op.children):
                    child.pushed = PushedBranch(self.program, (*self.path, place, i), self)
            case JoinOp():
                if not self._put_join(op) and op.node.mode == "concate_and_append":
                    self._put_judged_node(op, Pause())
            case MarkOp() if op.back:
                branch, place = op.mark.pushed or (None, 0)
                self.events.rollbacks.append(
                    self._append_node(Rollback(place if branch is self else 0))
                )
                # the mark is in an earlier program; the verdict carries the text before it
                if branch is not self:
                    self._put_judged_node(op, Pause()).known = 0
                return self.program.opened
            case MarkOp():
                op.mark.pushed = self, self._append_node(Mark())
            case ScopeOp():
                self._append_node(op.node)
            case ReadOp() | EventOp() | ReplaceOp():  # the last is handled in `push_op`
                pass
            case node:
                self._append_node(node)
        return False

    def _put_answer_op(self, op: GenOp | SelectOp) -> bool:
        """Appends a node that needs an answer, and returns True. If the answer must not be
        requested yet, appends a pause in its place and returns False.
        """
        asks = True
        if op.node.judged:  # choices that an open grammar allows are known when it is played
            asks = isinstance(op, GenOp) and not op.has_own_prompt and self.program.run.kept is None
            place = self._put_judged_node(op, op.node if asks else Pause()).place
        else:
            place = self._append_node(op.node)
        op.pushed_node = self, place
        return asks

    def put_late_join(self, op: JoinOp) -> None:
        """Appends a join to a branch that has failed. The join is still needed, because it claims
        the nodes of the joined branches.
        """
        with self.program.lock:
            if not self.program.closed:
                self._put_join(op)

    def _put_join(self, op: JoinOp) -> bool:
        """Appends the node of a join, which covers the nodes that the joined branches have so far.
        Returns False if the program does not contain the fork of these branches.
        """
        branches = [
            child.pushed
            for child in op.children
            if child.pushed is not None and child.pushed.parent is self
        ]
        if len(branches) < len(op.children):
            return False
        ends = tuple([branch.count for branch in branches])
        self._append_node(msgspec.structs.replace(op.node, fork=branches[0].path[-2], ends=ends))
        return True

    # ------------------------------------------------------- the playing side, on the executor loop

    def record_pieces_at_start(self, op: Op, pieces: Sequence[Piece]) -> None:
        """Records how many pieces of text the branch has when it begins to execute an operation
        that needs a verdict.
        """
        judged = self.judged.get(id(op))
        if judged is not None and judged.known is None:
            judged.known = len(pieces)

    def request_another_answer(
        self, op: GenOp | SelectOp, node: Gen | Select, pieces: Sequence[Piece]
    ) -> None:
        """Requests another answer for an operation that needs a verdict. The answer is generated
        after the text that the operation has added so far.
        """
        with self.program.lock:
            if id(op) not in self.judged:  # nothing of it may follow the rollback
                raise RequestAbortedError("a rollback removed this node.")
            op.attempt += 1
            self._put_verdict(op, pieces, node)
            self.program.flush_outbox(self)

    def send_final_verdict(self, op: Op, pieces: Sequence[Piece]) -> None:
        """Sends the final verdict on an operation that the branch has executed, if the operation
        needs one.
        """
        if id(op) in self.judged:
            with self.program.lock:
                self._put_verdict(op, pieces)
                del self.judged[id(op)]
                if self.program.opened:
                    self.program.flush_outbox(self)

    def _put_verdict(
        self, op: Op, pieces: Sequence[Piece], again: Gen | Select | None = None
    ) -> None:
        judged = self.judged[id(op)]
        verdict = Verdict(tuple(pieces_to_spans(pieces[judged.known :])), again)
        self.program.outbox.append((self, (judged.place, verdict)))
        judged.known = len(pieces)


def expect_pause(branch: PushedBranch | None, seconds: float, where: Location | None) -> None:
    """Tells a backend that executes whole programs how long nothing will be added to a branch.

    Raises:
        ParameterError: `seconds` is not a non-negative finite number.
    """
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, int | float)
        or not 0 <= seconds < math.inf
    ):
        raise ParameterError(
            "expect_pause", f"{seconds!r:.60} is no number of seconds.", where=where
        )
    if branch is not None:
        branch.program.expect_pause(branch, seconds)
