"""Handing a run to a backend that plays whole programs.

The first generation or selection of a run opens its program; all that its branches queue from then on extends it, as it
is queued. Each branch still plays its operations itself, for values, variables and streams: what a backend would have
been asked for comes from the program.

What the caller's Python decides on (a check, further attempts, a method of choosing, another backend) is held: nothing
behind it is handed over until the branch is through with it and knows the text.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from sglang_lite.lang.backend.base_backend import priority_keywords
from sglang_lite.lang.concurrency.loop import executor
from sglang_lite.lang.concurrency.variables import resolve
from sglang_lite.lang.execution.operations import ForkOp, GenOp, HookOp, JoinOp, MarkOp, Op, ReadOp, ScopeOp, SelectOp
from sglang_lite.lang.execution.transcript import Piece
from sglang_lite.program.nodes import Join, Mark, Node, Path, Rollback, Text
from sglang_lite.protocol import (
    Delta,
    Generation,
    Image,
    Played,
    ProgramError,
    ProgramEvent,
    SamplingParams,
    Selection,
    SglError,
    Span,
    Unset,
)
from sglang_lite.protocol.anything import UserValue

if TYPE_CHECKING:
    from sglang_lite.lang.backend.base_backend import BaseBackend


class ProgramAtBackend(Protocol):
    """A program that is open at a backend. Any thread may call it; none of the calls waits."""

    def extend(self, path: Path, nodes: Sequence[Node]) -> None:
        """Adds nodes to a branch. Raises SglError: they can't be taken."""
        ...

    def drop(self, path: Path) -> None:
        """Ends what is queued or under way in a branch; a rollback continues from before."""
        ...

    def close(self) -> None:
        """Says that nothing more will come."""
        ...


class PushedProgram:
    """The program of a run, at its backend.

    Args:
        stream: somebody reads texts while they grow.
        priority: of the program.

    Attributes:
        lock: of all its branches; a branch's own lock is taken before.
        closed: what comes nevertheless needs a program of its own.
    """

    def __init__(self, backend: BaseBackend, *, stream: bool, priority: int = 0) -> None:
        self.backend, self.stream, self.priority = backend, stream, priority
        self.lock = threading.RLock()
        self.closed = False
        self._open: ProgramAtBackend | None = None
        self._branches: dict[Path, PushedBranch] = {}  # those that the program has
        self._over: SglError | None = None  # it has ended

    @property
    def opened(self) -> bool:
        """True if the program was opened, though it may have ended."""
        return self._open is not None or self._over is not None

    def flush(self, branch: PushedBranch) -> None:
        """Hands over what a branch and those before it have, and opens the program with it."""
        if self._over is not None:
            executor().post(branch.end, self._over)
            return
        try:
            if self._open is None:
                self._open = self.backend.open_program(
                    self._take, stream=self.stream, **priority_keywords(self.priority)
                )
            self._send(branch, self._open)
            late, branch.late = branch.late, []
            for each in late:
                self._send_waiting(each, self._open)
        except SglError as error:
            executor().post(branch.end, error)

    def _send(self, branch: PushedBranch, program: ProgramAtBackend) -> None:
        if branch.parent is not None:
            self._send(branch.parent, program)
        joined, branch.joined = branch.joined, []
        for each in joined:
            self._send(each, program)
        path = branch.path
        if path is None:
            branch.waiting = True
        elif branch.nodes:
            self._branches[path] = branch
            nodes, branch.nodes = branch.nodes, []
            program.extend(path, nodes)

    def _send_waiting(self, branch: PushedBranch, program: ProgramAtBackend) -> None:
        if branch.waiting:
            branch.waiting = False
            self._send(branch, program)
        for each in branch.forks:
            self._send_waiting(each, program)

    def drop(self, branch: PushedBranch) -> None:
        """Ends what is queued or under way of a branch."""
        path = branch.path
        if self._open is not None and path is not None:
            with contextlib.suppress(SglError):
                self._send(branch, self._open)  # a mark among it may be gone back to
            self._open.drop(path)

    def close(self) -> None:
        """Says that nothing more will come."""
        with self.lock:
            self.closed = True
            if self._open is not None:
                self._open.close()

    def _take(self, event: ProgramEvent) -> None:
        """Takes an event of the program. On the executor loop."""
        if isinstance(event, Played):
            if (branch := self._branches.get(event.path[:-1])) is not None:
                branch.take(event.path[-1], event.event)
            return
        error = event if isinstance(event, SglError) else ProgramError("the program has ended.")
        with self.lock:
            self._over, self._open = error, None
            branches, self._branches = self._branches, {}  # no cycle is left that the garbage collector had to find
        for branch in branches.values():
            branch.end(error)


class PushedBranch:
    """A branch, as far as it is handed over.

    Attributes:
        parent: the branch it was forked from.
        nodes: that are yet to be sent: they wait for the next generation or selection.
        joined: branches that have to be sent before.
        forks: branches that were forked from it, as far as that is handed over.
        late: those of them that may wait for it.
        waiting: its nodes are asked for, but its own fork is not handed over yet.
        held: the operation that the branch has to get through before more is handed over.
        forked_at: the place of its fork in the parent, and which of that fork it is; None: not handed over yet.
        count: of its nodes, those that are sent too.
    """

    def __init__(self, program: PushedProgram, parent: PushedBranch | None = None) -> None:
        self.program, self.parent = program, parent
        self.nodes: list[Node] = []
        self.joined: list[PushedBranch] = []
        self.forks: list[PushedBranch] = []
        self.late: list[PushedBranch] = []
        self.waiting = False
        self.held: Op | None = None
        self.forked_at: tuple[int, int] | None = None
        self.count = 0
        self._known = 0  # pieces of text that are handed over, of those that the branch had when it came to `held`
        self._behind = False  # not even those are
        self._inboxes: dict[int, NodeEvents] = {}  # by the places of nodes; on the executor loop
        self._ended: SglError | None = None  # its program
        self._failed: tuple[int, SglError] | None = None  # where, and with what
        self._back = -1  # the place of the last rollback

    @property
    def path(self) -> Path | None:
        """Path of the branch in the program; None: its fork is not handed over yet."""
        if self.parent is None:
            return ()
        before = self.parent.path
        return None if before is None or self.forked_at is None else (*before, *self.forked_at)

    # ------------------------------------------------------------------ the submitting side, under the branch's lock

    def add(self, op: Op) -> bool:
        """Hands an operation over, unless something before it is held. False: the program is closed."""
        with self.program.lock:
            if self.program.closed:
                return False
            if self.held is None and self._add(op):
                self.program.flush(self)
            return True

    def fresh(self, at: Op | None, pieces: Sequence[Piece]) -> PushedBranch:
        """Copy of the branch, handed over in a program of its own.

        Args:
            at: what the branch is at.
            pieces: its text, where that is nothing.
        """
        pushed = PushedBranch(
            PushedProgram(self.program.backend, stream=self.program.stream, priority=self.program.priority)
        )
        pushed.begin_behind(at, pieces)
        return pushed

    def begin_behind(self, at: Op | None, pieces: Sequence[Piece]) -> None:
        """Begins with text that is not handed over yet; as `fresh`."""
        self.held, self._behind = at, True
        if at is None:
            self._sync(pieces)

    def join(self, node: Join, children: Sequence[PushedBranch | None]) -> Join:
        """The node, with how many nodes each of the branches has; without, if not all of them are handed over."""
        with self.program.lock:
            own = [child for child in children if child is not None and child.parent is self and child.held is None]
            if len(own) < len(children):
                return node
            return msgspec.structs.replace(node, ends=tuple(child.count for child in own))

    def go_on(self, op: Op, pieces: Sequence[Piece], queue: Iterable[Op]) -> None:
        """Hands over what an operation that was held has brought, as the branch is through with it, and the queue."""
        with self.program.lock:
            if self.held is not op:
                return
            self.held = None
            self._sync(pieces)
            if self._add_all(queue):
                self.program.flush(self)

    def roll_back(self, mark: int | None) -> None:
        """Goes back to a mark. One that was not handed over (None) stands behind what is held."""
        if mark is None:
            return
        with self.program.lock:
            self.held = None
            self._back = self._put(Rollback(mark))
            if self.program.opened:
                self.program.flush(self)

    def drop(self) -> None:
        """Ends what is queued or under way, as the branch has failed."""
        with self.program.lock:
            self.program.drop(self)

    def waits(self) -> bool:
        """Tells whether the branch, or one that was forked from it, is waiting."""
        return self.waiting or any(pushed.waits() for pushed in self.forks)

    def _put(self, *nodes: Node) -> int:
        """Appends nodes. Returns the place of the last one."""
        self.nodes += nodes
        self.count += len(nodes)
        return self.count - 1

    def _sync(self, pieces: Sequence[Piece]) -> None:
        """Hands over the text that is not known yet."""
        for piece in pieces[self._known :]:
            if isinstance(piece, str):
                self._put(Text(piece))
            elif not isinstance(piece, Image):
                for span in (piece,) if isinstance(piece, Span) else piece.spans:
                    self._put(Text(span.text, span.ids, span.special))
        self._known, self._behind = len(pieces), False

    def _add(self, op: Op) -> bool:
        """Takes the node of an operation. Says whether it asks for something."""
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
                    op.mark.place = self._put(Mark())
            case ScopeOp():
                self._put(op.node)
            case ReadOp() | HookOp():
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
        options = op.own.options
        if op.node.held:
            self.held = op
            if self.program.backend.remembers or (options is not None and options.backend is not None):
                return False
            op.mark = self._put(Mark())
        op.asked = self, self._put(op.node)
        return True

    def _select(self, op: SelectOp) -> bool:
        if op.node.method is None:
            self.held = op
            return False
        if isinstance(op.node.seed, Unset):  # as both sides draw
            op.node = msgspec.structs.replace(op.node, seed=secrets.randbits(63))
        op.asked = self, self._put(op.node)
        return True

    def _fork(self, op: ForkOp) -> bool:
        place = self._put(op.node)
        branches = [child.pushed for child in op.children if child.pushed is not None]
        for i, pushed in enumerate(branches):
            pushed.forked_at = place, i
        self.forks += branches
        self.late += [pushed for pushed in branches if pushed.waits()]
        return bool(self.late)

    def _join(self, op: JoinOp) -> None:
        appends = op.node.mode == "concate_and_append"
        if appends and not op.node.ends:
            self.held = op
            return
        branches = [child.pushed for child in op.children if child.pushed is not None and child.pushed.parent is self]
        if branches and branches[0].forked_at is not None:
            op.node = msgspec.structs.replace(op.node, fork=branches[0].forked_at[0])
        self._put(op.node)
        if appends:
            self.joined += branches

    # -------------------------------------------------------------- the playing side, on the executor loop

    def reach(self, op: Op, pieces: Sequence[Piece]) -> None:
        """Notes that the branch begins to play an operation."""
        if self.held is op and not self._behind:
            self._known = len(pieces)

    def gen(self, op: GenOp, params: SamplingParams, pieces: Sequence[Piece]) -> int:
        """Asks for a generation that is held, once more if it was asked for. Returns its place."""
        with self.program.lock:
            op.mark = self._again(op.mark, pieces)
            place = self._put(msgspec.structs.replace(op.node, params=params, held=True))
            self.program.flush(self)
            return place

    def score(self, op: SelectOp, choices: Sequence[str], pieces: Sequence[Piece], *, unconditional: bool) -> int:
        """Asks for the scores of choices. Returns the node's place."""
        with self.program.lock:
            op.mark = self._again(op.mark, pieces)
            held = msgspec.structs.replace(op.node, choices=tuple(choices), method=None, unconditional=unconditional)
            place = self._put(held)
            self.program.flush(self)
            return place

    def _again(self, mark: int | None, pieces: Sequence[Piece]) -> int:
        if mark is not None:
            self._back = self._put(Rollback(mark))
        self._sync(pieces)
        return self._put(Mark())

    def take(self, place: int, event: Delta | Generation | Selection | SglError) -> None:
        """Takes an event of a node. An error is that of all nodes behind it, too, up to a rollback."""
        if isinstance(event, SglError):
            self._failed = place, event
            for each, inbox in list(self._inboxes.items()):
                if each > place and self._lost(each):
                    inbox.put(event)
        self._inbox(place).put(event)

    def _lost(self, place: int) -> bool:
        """Tells whether a node before has failed."""
        return self._failed is not None and self._failed[0] < place and not self._failed[0] < self._back < place

    def end(self, error: SglError) -> None:
        """Ends the branch: nothing more will come."""
        self._ended = error
        for inbox in list(self._inboxes.values()):
            inbox.put(error)

    async def answers(self, place: int, last: int = 1) -> AsyncGenerator[Delta | Generation | Selection, None]:
        """Events of a node, up to its `last`-th generation or selection. Raises SglError: what it failed with."""
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
        """The first event of a node, None as long as there is none."""
        inbox = self._inbox(place)
        if not inbox.events:
            return None
        self._inboxes.pop(place, None)
        return inbox.events.popleft()

    def when_answered(self, place: int, then: Callable[[], object]) -> NodeEvents:
        """Calls `then` once `answer` has something, which it has not now. Returns what cancels that."""
        inbox = self._inbox(place)
        inbox.then = then
        return inbox

    def _inbox(self, place: int) -> NodeEvents:
        found = self._inboxes.get(place)
        if found is None:
            found = self._inboxes[place] = NodeEvents()
            if self._failed is not None and self._lost(place):
                found.put(self._failed[1])
            elif self._ended is not None:
                found.put(self._ended)
        return found


class NodeEvents:
    """Events of a node, for whoever plays it: one at a time. On the executor loop.

    Attributes:
        events: that have come.
        then: is called with the next one.
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
            come = asyncio.get_running_loop().create_future()
            self.then = partial(resolve, come)
            await come
        return self.events.popleft()

    def cancel(self) -> None:
        """Forgets what was to be called."""
        self.then = None
