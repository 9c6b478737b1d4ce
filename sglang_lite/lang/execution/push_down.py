"""Handing over of a run to a backend that plays whole programs.

The first generation or selection of a run opens its program; later nodes of its branches extend the program as they are
queued. Each branch still plays its operations itself, to set values, variables and streams, but it takes the answers
from the program instead of asking the backend node by node.

A program has one outbox, in order of submission over all branches. It is sent whenever a node needs an answer. So the
backend knows of a fork before it gets the branches' nodes, and of a join before it gets a rollback in what is joined.

A node is held if the caller's Python decides on its result (a check, further attempts, a method of choosing, another
backend): no later node of the branch is handed over until the branch has played the held node and knows its text.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from bisect import bisect
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from sglang_lite.lang.backend.base import Backend, ProgramAtBackend
from sglang_lite.lang.concurrency.loop import executor
from sglang_lite.lang.concurrency.variables import resolve
from sglang_lite.lang.execution.operations import (
    BranchMark,
    EventOp,
    ForkOp,
    GenOp,
    JoinOp,
    MarkOp,
    Op,
    ReadOp,
    ScopeOp,
    SelectOp,
)
from sglang_lite.lang.execution.transcript import Piece
from sglang_lite.program.nodes import Join, Mark, Node, Path, Rollback, Text
from sglang_lite.protocol import (
    Delta,
    Generation,
    Image,
    Played,
    ProgramError,
    ProgramEvent,
    RequestAbortedError,
    SamplingParams,
    Selection,
    SglError,
    Span,
    Unset,
)
from sglang_lite.protocol.anything import UserValue


def priority_keywords(priority: int) -> dict[str, int]:
    """Keyword arguments for a priority: empty if it is 0, so that backends without priorities need no parameter for
    it."""
    return {"priority": priority} if priority else {}


class PushedProgram:
    """Program of a run that is handed over to its backend.

    Args:
        stream: whether texts are read while they grow.
        priority: priority of the program at its engine.
        asks: whether all generations are asked for; False if a branch may have the answer of an earlier run, so that
            it decides on each.

    Attributes:
        lock: lock of all its branches; a branch's own lock is taken before it.
        closed: True if no more nodes are accepted; later nodes need a new program.
    """

    def __init__(self, backend: Backend, *, stream: bool, priority: int = 0, asks: bool = True) -> None:
        self.backend, self.stream, self.priority, self.asks = backend, stream, priority, asks
        self.lock = threading.RLock()
        self.closed = False
        self._open: ProgramAtBackend | None = None
        self._outbox: list[tuple[PushedBranch, Node]] = []  # nodes that are not sent yet
        self._unforked: list[tuple[PushedBranch, Node]] = []  # those of branches whose fork is not handed over yet
        self._branches: dict[Path, PushedBranch] = {}  # branches that have nodes in the program
        self._ended: SglError | None = None  # error with which the program ended

    @property
    def opened(self) -> bool:
        """True if the program was opened, even if it has ended since."""
        return self._open is not None or self._ended is not None

    def put(self, branch: PushedBranch, nodes: Sequence[Node]) -> None:
        """Appends nodes of a branch to the outbox."""
        box = self._unforked if branch.path is None else self._outbox
        box += [(branch, node) for node in nodes]

    def fork(self) -> bool:
        """Moves the nodes of branches that have been forked now to the outbox. Returns True if one needs an answer."""
        waiting, self._unforked, asks = self._unforked, [], False
        for branch, node in waiting:
            self.put(branch, (node,))
            asks = asks or (branch.asks and branch.path is not None)
        return asks

    def flush(self, branch: PushedBranch) -> None:
        """Sends the outbox to the backend, as a node of a branch needs an answer. The first call opens the program."""
        if self._ended is not None:
            self._forget_nodes()
            executor().post(branch.end, self._ended)
            return
        branch.asks = branch.path is None
        if branch.asks:
            return
        try:
            if self._open is None:
                self._open = self.backend.open_program(
                    self._take, stream=self.stream, **priority_keywords(self.priority)
                )
        except SglError as error:
            executor().post(branch.end, error)
        else:
            self._send(self._open)

    def _send(self, program: ProgramAtBackend) -> None:
        for branch, nodes in self._runs():
            path = branch.path
            assert path is not None
            self._branches[path] = branch
            error = branch.refusal
            if error is None:
                try:
                    program.extend(path, nodes)
                except SglError as refused:
                    branch.refused = error = refused
            if error is not None:
                executor().post(branch.end, error)

    def _runs(self) -> list[tuple[PushedBranch, list[Node]]]:
        """Empties the outbox into lists of nodes, each of one branch. The order of nodes of different branches is kept
        where it matters: joins and rollbacks stay behind everything before them, and branches behind their forks."""
        outbox, self._outbox = self._outbox, []
        runs: list[tuple[PushedBranch, list[Node]]] = []
        growing: dict[PushedBranch, list[Node]] = {}
        for branch, node in outbox:
            if isinstance(node, Join | Rollback):
                growing = dict(runs[-1:])
            nodes = growing.get(branch)
            if nodes is None:
                nodes = growing[branch] = []
                runs.append((branch, nodes))
            nodes.append(node)
        return runs

    def drop(self, branch: PushedBranch) -> None:
        """Cancels the queued and running nodes of a branch."""
        path = branch.path
        if self._open is not None and path is not None:
            self._send(self._open)  # the outbox may contain a mark for a later rollback
            self._open.drop(path)

    def close(self) -> None:
        """Announces that no more nodes will come."""
        with self.lock:
            self.closed = True
            self._forget_nodes()  # nothing waits for them
            if self._open is not None:
                self._open.close()

    def _forget_nodes(self) -> None:
        """Empties the outbox, which breaks reference cycles that the garbage collector would have to find."""
        self._outbox, self._unforked = [], []

    def _take(self, event: ProgramEvent) -> None:
        """Dispatches an event of the program to its branch. Runs on the executor loop."""
        if isinstance(event, Played):
            if (branch := self._branches.get(event.path[:-1])) is not None:
                branch.take(event.path[-1], event.event)
            return
        name = type(self.backend).__name__
        error = event if isinstance(event, SglError) else ProgramError(f"{name} ended the program before this node.")
        with self.lock:
            self._ended, self._open = error, None
            self._forget_nodes()
            # Breaks reference cycles, which the garbage collector would have to find.
            branches, self._branches = self._branches, {}
        for branch in branches.values():
            branch.end(error)


class PushedBranch:
    """Part of a branch that is handed over to the backend.

    Attributes:
        parent: branch from which it was forked, or None for the main branch.
        held: operation that the branch has to finish before more nodes are handed over, or None.
        forked_at: (index of the fork's node in the parent, index in the fork), or None if the fork is not handed over
            yet.
        count: number of its nodes that are handed over.
        asks: True if a node of it needs an answer, but its fork is not handed over yet.
        refused: error with which the backend has refused some of its nodes, or None.
    """

    def __init__(self, program: PushedProgram, parent: PushedBranch | None = None) -> None:
        self.program, self.parent = program, parent
        self.held: Op | None = None
        self.forked_at: tuple[int, int] | None = None
        self.count = 0
        self.asks = False
        self.refused: SglError | None = None
        self._path: Path | None = () if parent is None else None
        self._sent_pieces = 0  # number of pieces that the program has, counted when `held` was reached
        self._is_fresh = False  # True if no text was handed over to this program yet
        self._inboxes: dict[int, NodeEvents] = {}  # by index of the node; used on the executor loop
        self._ended: SglError | None = None  # error with which the program ended
        self._failed: tuple[int, SglError] | None = None  # index of the failed node, and its error
        self._rollbacks: list[int] = []  # indices of the rollbacks' nodes, ascending

    @property
    def path(self) -> Path | None:
        """Path of the branch in the program, or None if its fork is not handed over yet."""
        if self._path is None and self.parent is not None and self.forked_at is not None:
            before = self.parent.path
            self._path = None if before is None else (*before, *self.forked_at)
        return self._path

    @property
    def refusal(self) -> SglError | None:
        """Error with which the backend has refused nodes of this branch, or of one that it was forked from."""
        return self.refused or (None if self.parent is None else self.parent.refusal)

    # ------------------------------------------------------------------ the submitting side, under the branch's lock

    def add(self, op: Op) -> bool:
        """Hands over an operation, unless an operation before it is held. Returns False if the program is closed."""
        with self.program.lock:
            if self.program.closed:
                return False
            if self.held is None and self._add(op):
                self.program.flush(self)
            return True

    def fresh(self, at: Op | None, pieces: Sequence[Piece]) -> PushedBranch:
        """Copy of the branch in a new program, for what is added after the end of the body.

        Args:
            at: operation that the branch is playing, or None.
            pieces: text of the branch, used if `at` is None.
        """
        old = self.program
        pushed = PushedBranch(PushedProgram(old.backend, stream=old.stream, priority=old.priority, asks=old.asks))
        pushed.begin_fresh(at, pieces)
        return pushed

    def begin_fresh(self, at: Op | None, pieces: Sequence[Piece]) -> None:
        """Begins a new program with the branch's text so far: at once if no operation is being played, else when `at`
        is finished. Arguments as of `fresh`."""
        self.held, self._is_fresh = at, True
        if at is None:
            self._sync(pieces)

    def join(self, node: Join, children: Sequence[PushedBranch | None]) -> Join:
        """Returns the join node with the current number of nodes of each joined branch, or unchanged if this branch or
        one of them is held or not handed over."""
        with self.program.lock:
            own = [child for child in children if child is not None and child.parent is self and child.held is None]
            if self.held is not None or len(own) < len(children):
                return node
            return msgspec.structs.replace(node, ends=tuple(child.count for child in own))

    def resume_after(self, op: Op, pieces: Sequence[Piece], queue: Iterable[Op]) -> None:
        """Hands over what a held operation has done, and the queued operations behind it. Called when the branch has
        played the held operation."""
        with self.program.lock:
            if self.held is not op:
                return
            self.held = None
            back = isinstance(op, MarkOp) and not self._is_fresh
            if isinstance(op, MarkOp) and back:
                self._go_back(op.mark)
            else:
                self._sync(pieces)
            if self._add_all(queue) or (back and self.program.opened):
                self.program.flush(self)

    def roll_back(self, op: MarkOp, removed: Sequence[Op]) -> None:
        """Hands over a rollback. If it waits for claimed nodes, it is held when the branch comes to it; then the
        backend gets it when it is played.

        Args:
            removed: operations that it has removed.
        """
        with self.program.lock:
            if op.waits:
                if any(each is self.held for each in removed):
                    self.held = None
            elif op.mark.node_index is not None:  # else the mark stands behind the held operation
                self.held = None
                self._go_back(op.mark)
                if self.program.opened:
                    self.program.flush(self)

    def skip_to(self, op: MarkOp) -> None:
        """Notes that the branch continues at a rollback, which takes a failed operation back."""
        with self.program.lock:
            if op.waits:
                self.held = op

    def drop(self) -> None:
        """Cancels the queued and running nodes, as the branch has failed."""
        with self.program.lock:
            self.program.drop(self)

    def _put(self, *nodes: Node) -> int:
        """Appends nodes, and returns the index of the last one."""
        self.program.put(self, nodes)
        self.count += len(nodes)
        return self.count - 1

    def _go_back(self, mark: BranchMark) -> None:
        assert mark.node_index is not None
        self._rollbacks.append(self._put(Rollback(mark.node_index)))

    def _sync(self, pieces: Sequence[Piece]) -> None:
        """Appends the text that is not handed over yet."""
        for piece in pieces[self._sent_pieces :]:
            if isinstance(piece, str):
                self._put(Text(piece))
            elif not isinstance(piece, Image):
                for span in (piece,) if isinstance(piece, Span) else piece.spans:
                    self._put(Text(span.text, span.ids, span.special))
        self._sent_pieces, self._is_fresh = len(pieces), False

    def _add(self, op: Op) -> bool:
        """Appends the node of an operation. Returns True if the pending nodes have to be sent now, as an answer is
        needed."""
        match op:
            case GenOp():
                return self._gen(op)
            case SelectOp():
                return self._select(op)
            case ForkOp():
                return self._fork(op)
            case JoinOp():
                self._join(op)
            case MarkOp():
                if not op.back:
                    op.mark.node_index = self._put(Mark())
                elif op.waits:
                    self.held = op
            case ScopeOp():
                self._put(op.node)
            case ReadOp() | EventOp():
                pass
            case node:
                self._put(node)
        return False

    def _add_all(self, queue: Iterable[Op]) -> bool:
        asks = False
        for op in queue:
            if self.held is not None:
                break
            asks = self._add(op) or asks
        return asks

    def _gen(self, op: GenOp) -> bool:
        if op.node.held:
            self.held = op
            if not self.program.asks or op.has_own_prompt:
                return False
            op.mark = self._put(Mark())
        op.pushed_node = self, self._put(op.node)
        return True

    def _select(self, op: SelectOp) -> bool:
        if op.node.method is None:
            self.held = op
            return False
        if isinstance(op.node.seed, Unset):  # a fixed seed, as the branch and the backend both draw
            op.node = msgspec.structs.replace(op.node, seed=secrets.randbits(63))
        op.pushed_node = self, self._put(op.node)
        return True

    def _fork(self, op: ForkOp) -> bool:
        place = self._put(op.node)
        branches = [child.pushed for child in op.children if child.pushed is not None]
        for i, pushed in enumerate(branches):
            pushed.forked_at = place, i
        return self.program.fork()

    def _join(self, op: JoinOp) -> None:
        branches = [child.pushed for child in op.children if child.pushed is not None and child.pushed.parent is self]
        appends = op.node.mode == "concate_and_append"
        if appends and (not op.node.ends or len(branches) < len(op.children)):
            self.held = op
            return
        if branches and branches[0].forked_at is not None:
            op.node = msgspec.structs.replace(op.node, fork=branches[0].forked_at[0])
        self._put(op.node)

    # -------------------------------------------------------------- the playing side, on the executor loop

    def note_start(self, op: Op, pieces: Sequence[Piece]) -> None:
        """Notes how much text a held operation begins with. Called when the branch begins to play an operation."""
        if self.held is op and not self._is_fresh:
            self._sent_pieces = len(pieces)

    def gen(self, op: GenOp, params: SamplingParams, pieces: Sequence[Piece]) -> int:
        """Sends a held generation; if it was sent before, after a rollback to its mark. Returns the index of its
        node."""
        with self.program.lock:
            self._begin_attempt(op, pieces)
            place = self._put(msgspec.structs.replace(op.node, params=params, held=True))
            self.program.flush(self)
            return place

    def score(self, op: SelectOp, choices: Sequence[str], pieces: Sequence[Piece], *, unconditional: bool) -> int:
        """Sends a selection that is to be scored only. Returns the index of its node."""
        with self.program.lock:
            self._begin_attempt(op, pieces)
            node = msgspec.structs.replace(op.node, choices=tuple(choices), method=None, unconditional=unconditional)
            place = self._put(node)
            self.program.flush(self)
            return place

    def _begin_attempt(self, op: GenOp | SelectOp, pieces: Sequence[Piece]) -> None:
        if self.held is not op:  # and nothing of it may follow the rollback
            raise RequestAbortedError("a rollback removed this node.")
        if op.mark is not None:
            self._rollbacks.append(self._put(Rollback(op.mark)))
        self._sync(pieces)
        op.mark = self._put(Mark())

    def take(self, place: int, event: Delta | Generation | Selection | SglError) -> None:
        """Passes an event of a node to its inbox. An error also fails all nodes behind the node, up to a rollback."""
        if isinstance(event, SglError):
            self._failed = place, event
            for each, inbox in list(self._inboxes.items()):
                if each > place and self._is_lost(each):
                    inbox.put(event)
        self._inbox(place).put(event)

    def _is_lost(self, place: int) -> bool:
        """Returns True if an earlier node has failed and no rollback between the two has taken it back."""
        if self._failed is None or self._failed[0] >= place:
            return False
        back = bisect(self._rollbacks, self._failed[0])
        return back == len(self._rollbacks) or self._rollbacks[back] > place

    def end(self, error: SglError) -> None:
        """Ends the branch with an error: no more events will come."""
        self._ended = error
        for inbox in list(self._inboxes.values()):
            inbox.put(error)

    async def answers(self, place: int, last: int = 1) -> AsyncGenerator[Delta | Generation | Selection, None]:
        """Yields the events of a node, up to its `last`-th generation or selection. Raises the SglError with which the
        node failed."""
        inbox = self._inbox(place)
        try:
            while last:
                event = await inbox.get()
                if isinstance(event, SglError):
                    raise event
                last -= not isinstance(event, Delta)
                yield event
        finally:
            self._inboxes.pop(place, None)

    def answer(self, place: int) -> UserValue:
        """First event of a node, or None if none has come yet."""
        inbox = self._inbox(place)
        if not inbox.events:
            return None
        self._inboxes.pop(place, None)
        return inbox.events.popleft()

    def when_answered(self, place: int, then: Callable[[], object]) -> NodeEvents:
        """Calls `then` when the next event of a node comes; `answer` must have returned None. Returns an object whose
        `cancel` revokes the call."""
        inbox = self._inbox(place)
        inbox.then = then
        return inbox

    def _inbox(self, place: int) -> NodeEvents:
        found = self._inboxes.get(place)
        if found is None:
            found = self._inboxes[place] = NodeEvents()
            if self._failed is not None and self._is_lost(place):
                found.put(self._failed[1])
            elif self._ended is not None:
                found.put(self._ended)
        return found


class NodeEvents:
    """Queue of a node's events, with a single consumer. Used on the executor loop only.

    Attributes:
        events: events that have come and were not taken.
        then: called once when the next event comes.
    """

    __slots__ = ("events", "then")

    def __init__(self) -> None:
        self.events: deque[Any] = deque()
        self.then: Callable[[], object] | None = None

    def put(self, event: object) -> None:
        self.events.append(event)
        then, self.then = self.then, None
        if then is not None:
            then()

    async def get(self) -> UserValue:
        if not self.events:
            arrival = asyncio.get_running_loop().create_future()
            self.then = partial(resolve, arrival)
            await arrival
        return self.events.popleft()

    def cancel(self) -> None:
        """Revokes the callback."""
        self.then = None
