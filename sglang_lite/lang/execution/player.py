"""Playing of a branch: its operations in order, one after another, on whichever thread can play the current one.

Text and turns are played at once, on the thread that submits them; operations that wait for a backend are played on the
executor loop (concurrency/loop.py), or on the backend's thread pool if its hooks block. The thread that plays a branch
owns it: one thread at any time, with handover under the branch's lock.

A branch that fails stays failed: all queued and later operations fail with the same error, and none of them waits.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.concurrency.loop import executor
from sglang_lite.lang.concurrency.pool import in_pool
from sglang_lite.lang.concurrency.variables import TextLog, Variable, located
from sglang_lite.lang.execution import generation, selection
from sglang_lite.lang.execution.first_token import FirstTokenGate
from sglang_lite.lang.execution.immediate import IMMEDIATE
from sglang_lite.lang.execution.names import Names
from sglang_lite.lang.execution.operations import (
    AnswerOp,
    BranchMark,
    ForkOp,
    GenOp,
    HookOp,
    JoinOp,
    MarkOp,
    Op,
    ReadOp,
    ScopeOp,
    SelectOp,
)
from sglang_lite.lang.execution.push_down import NodeEvents, PushedBranch
from sglang_lite.lang.execution.reading import unknown
from sglang_lite.lang.execution.run import Run, current_run
from sglang_lite.lang.execution.transcript import Transcript
from sglang_lite.program.nodes import Text
from sglang_lite.protocol import Location, ProgramError, RequestAbortedError, SglError
from sglang_lite.protocol.anything import UserValue

logger = logging.getLogger("sglang_lite")

_NOTHING = Text("")  # current operation of a forked branch until its parent has played the fork
# Shared by branches that have never queued anything: a deque of their own would take much memory.
_NO_QUEUE: deque[Op] = deque()


class Player:
    """Plays one branch.

    Args:
        run: run that the branch belongs to.
        pushed: handed-over side of the branch, for a backend that plays whole programs; None if the backend is asked
            node by node.
        forked: whether the branch begins only when its parent has played the fork.

    Attributes:
        names: names of the branch's variables, shared with the submitting side.
        transcript: text of the branch; owned by the thread that plays it.
        log: text log of the branch, or None if the run is not streamed.
        children: branches forked from it.
        gate: gate before its first generation, or None if it waits for no other branch.
        played: finished, failed and rolled-back operations, in order; owned by the thread that plays the branch.
        scope_starts: index of the first piece of each open scope, by the id of its variable.
    """

    __slots__ = (
        "__weakref__", "_current", "_failure", "_failure_reported", "_lock", "_queue", "_sid", "_stopped", "_waiting",
        "backend", "children", "gate", "log", "names", "played", "pushed", "run", "scope_starts", "transcript",
    )  # fmt: skip

    def __init__(self, run: Run, pushed: PushedBranch | None = None, *, forked: bool = False) -> None:
        self.run, self.backend, self.pushed = run, run.backend, pushed
        self.names = Names()
        self.log = TextLog() if run.settings.stream else None
        self.transcript = Transcript(self.log)
        self.children: list[Player] = []
        self.gate: FirstTokenGate | None = None
        self.played: list[Op] = []
        self._sid = ""
        self._lock = threading.Lock()
        self._queue = _NO_QUEUE
        # Current operation; the thread that plays it owns the branch until it is replaced.
        self._current: Op | None = _NOTHING if forked else None
        self._failure: SglError | None = None
        self._failure_reported = False
        self._stopped = False  # from outside the body, for good
        self._waiting: asyncio.Task[None] | NodeEvents | None = None
        self.scope_starts: dict[int, int] = {}

    # ------------------------------------------------------------------------------------------ any thread

    def put(self, op: Op) -> None:
        """Queues an operation, or plays it at once if no thread is playing the branch and it need not wait."""
        with self._lock:
            failure = self._failure
            if failure is None:
                if self.pushed is not None and type(op) not in (ReadOp, HookOp):
                    self._push(op)
                if self._current is not None:
                    if self._queue is _NO_QUEUE:
                        self._queue = deque()
                    self._queue.append(op)
                    return
                if type(op) is Text and self.transcript.matcher is None:  # an open grammar could refuse the text
                    self.transcript.append_text(op)
                    self.played.append(op)
                    return
                self._current = op
        if failure is not None:
            _fail_op(op, failure)
        elif (waits := self._advance(op)) is not None:
            self._dispatch(waits)

    def _push(self, op: Op) -> None:
        """Hands an operation over to the backend's program, or to a new one if that is closed. Needs the lock."""
        assert self.pushed is not None
        if not self.pushed.add(op):
            self.pushed = self.pushed.fresh(self._current, self.transcript.pieces)
            self.pushed.add(op)

    def continue_on(self, backend: BaseBackend) -> None:
        """Makes another backend play everything added from now on, in a new program. Requires `at_rest`."""
        self.backend, self.pushed = backend, self.run.pushed()
        if self.pushed is not None:
            self.pushed.program.close()

    def read(self, what: Callable[[Player], UserValue], where: Location | None = None) -> Variable:
        """Variable that is set to `what(player)` when everything queued so far has been played."""
        variable = Variable(where, self.run.made)
        self.put(ReadOp(variable, what))
        return variable

    def tree(self) -> list[Player]:
        """Branch itself and the branches forked from it, parents first."""
        found = [self]
        for player in found:  # the list grows meanwhile
            found += player.children
        return found

    @property
    def failure(self) -> SglError | None:
        """Error with which the branch has failed, or None."""
        return self._failure

    @property
    def at_rest(self) -> bool:
        """True if nothing is being played or queued."""
        return self._current is None

    @property
    def stopped(self) -> bool:
        """True if the branch was stopped for good, from outside the body."""
        return self._stopped

    @property
    def waits(self) -> bool:
        """True if an operation that is being played or queued has to wait."""
        with self._lock:
            ops = [*self._queue] if self._current is None else [self._current, *self._queue]
        return any(map(_has_to_wait, ops))

    def mark_failure_reported(self) -> None:
        """Notes that the branch's failure is reported to the user, so that it need not be logged."""
        self._failure_reported = True

    def declare_no_more(self) -> None:
        """Notes that the body has ended: undeclared names will never be declared, and the text is complete."""
        self.names.close(partial(unknown, self))
        if self.log is not None:
            self.put(ReadOp(Variable(), lambda player: player.log.close() if player.log else None))

    def go_back(self, mark: BranchMark, where: Location | None) -> None:
        """Goes back to a mark; a branch that has failed since works again.

        Raises:
            ProgramError: the run is streamed.
            SglError: the branch was stopped from outside or its deadline has passed; the error is its failure.
        """
        if self.log is not None:
            raise ProgramError(
                "text that was already streamed can't be rolled back.", hint="Run without stream=True.", where=where
            )
        deadline = self.run.deadline
        over = self._stopped or (deadline is not None and time.monotonic() >= deadline)
        if over and self._failure is not None:  # else a body that retries until it succeeds would never end
            raise located(self._failure, where)
        given_up = RequestAbortedError("a rollback removed this node.")
        with self._lock:
            lost = self._failure is not None and mark.position is None  # the branch failed before the mark
            running, removed = self._remove_behind(mark)
            if self.pushed is not None and not lost:
                self.pushed.roll_back(mark.node_index)
        for op in removed:
            _fail_op(op, given_up)
        self.put(MarkOp(mark, back=True))
        if running is not None:
            executor().post(self._end_rolled_back, running, given_up)

    def _remove_behind(self, mark: BranchMark) -> tuple[Op | None, list[Op]]:
        """Removes operations behind a mark from the queue, except for hooks. Returns the one being played behind it, or
        None, and the removed ones. Needs the lock."""
        queued = list(self._queue)
        if mark.position is not None:
            self._failure = None
            before, after, running = list[Op](), queued, None if self._current is _NOTHING else self._current
        else:  # nothing behind the mark has been played either
            at = next((i for i, op in enumerate(queued) if isinstance(op, MarkOp) and op.mark is mark), len(queued))
            before, after, running = queued[: at + 1], queued[at + 1 :], None
        self._queue = deque([*before, *(op for op in after if isinstance(op, HookOp))])
        return running, [op for op in after if not isinstance(op, HookOp)]

    def _end_rolled_back(self, op: Op, error: SglError) -> None:
        """Ends an operation that a rollback waits for, unless a thread plays it. Runs on the executor loop."""
        if self._waiting is not None and (waiting := self._fail(error, op)) is not None:
            waiting.cancel()

    def stop(self, error: SglError, *, reported: bool = True) -> None:
        """Fails the branch and the branches forked from it, and cancels the work of their backends. If the stop comes
        from outside an open body, the body can add nothing more.

        Args:
            reported: whether the holder of the branch already knows of the error, so that it need not be logged.
        """
        self._failure_reported = self._failure_reported or reported
        self._stopped = self._stopped or (self.run.body_open and current_run.get() is not self.run)
        with self._lock:
            # Only the hook for the end of the program is left.
            ending = isinstance(self._current, HookOp) and self._current.hook == "end_program"
            busy = (self._current is not None and not ending) or (self.log is not None and not self.log.closed)
        waiting = self._fail(error) if busy or self._stopped else None
        if waiting is not None:
            executor().post(waiting.cancel)
        for child in self.children:
            child.stop(error)

    # -------------------------------------------------------------------------------- the playing side

    def begin(self) -> None:
        """Begins to play a forked branch, as its parent has played the fork."""
        self._play_on(_NOTHING)

    def fail(self, error: SglError) -> None:
        """Fails the branch, as its parent has failed before the fork."""
        self._fail(error)

    def _play_on(self, op: Op) -> None:
        """Plays `op`, the current operation, and those behind it; dispatches the first that has to wait."""
        if (waits := self._advance(op)) is not None:
            self._dispatch(waits)

    def _dispatch(self, op: Op) -> None:
        _begin(op)
        if generation.is_only_answered(op, self):
            executor().post(self._await, op)
        elif self.backend.blocking and not generation.needs_loop(self, op):
            self.backend.pool.submit(partial(self.run.context.copy().run, self._play_blocking, op))
        else:
            executor().post(self._start, op)

    def _advance(self, op: Op) -> Op | None:
        """Plays `op`, the current operation, and the queue up to the first one that has to wait, which it returns.
        Returns None if the caller no longer owns the branch: nothing is left to play, or it was stopped."""
        while True:
            try:
                if type(op) is Text:
                    self.transcript.append_text(op)
                elif not IMMEDIATE[type(op)](self, op):
                    return op
                if type(op) is not ReadOp:
                    self.played.append(op)
            except BaseException as error:  # whatever was raised, the branch has failed and its readers must know
                self._fail(error, op)
                if not isinstance(error, Exception):
                    raise
                return None
            with self._lock:  # `_next`, inlined: this is the hottest loop of the language
                if self._current is not op:
                    return None
                if self.pushed is not None and self.pushed.held is op:
                    self.pushed.resume_after(op, self.transcript.pieces, self._queue)
                if not self._queue:
                    self._current = None
                    return None
                op = self._current = self._queue.popleft()

    def _next(self, op: Op) -> Op | None:
        """Takes the operation behind `op`, which the caller has played. Returns None as `_advance` does."""
        with self._lock:
            if self._current is not op:
                return None
            if self.pushed is not None and self.pushed.held is op:
                self.pushed.resume_after(op, self.transcript.pieces, self._queue)
            self._current = self._queue.popleft() if self._queue else None
            return self._current

    def _play_after(self, op: Op) -> Op | None:
        """`_advance`, beginning with the operation behind `op`."""
        if not isinstance(op, HookOp):
            self.played.append(op)
        following = self._next(op)
        return None if following is None else self._advance(following)

    def _start(self, op: Op) -> None:
        with self._lock:
            if self._current is op:
                loop = asyncio.get_running_loop()
                self._waiting = loop.create_task(self._play(op), context=self.run.context.copy())

    def _await(self, waits: GenOp) -> None:
        """Plays from a generation on that only lacks its answer, without a costly task. Runs on the executor loop."""
        token = current_run.set(self.run)
        op: Op | None = waits
        try:
            while op is not None and self._current is op:
                self._waiting = None
                if not generation.is_only_answered(op, self):
                    self._dispatch(op)
                    break
                if not generation.take_answer(self, op):
                    self._wait_for_answer(op)
                    break
                op = self._play_after(op)
        except BaseException as error:  # as in _advance
            self._fail(error, op)
        finally:
            current_run.reset(token)

    def _wait_for_answer(self, op: GenOp) -> None:
        assert op.pushed_node is not None
        pushed, place = op.pushed_node
        with self._lock:
            if self._current is op:
                self._waiting = pushed.when_answered(place, partial(self._await, op))

    async def _play(self, op: Op) -> None:
        """Plays the branch from an operation that has to wait, as a task of the executor loop."""
        current_run.set(self.run)
        task = self._waiting
        while True:
            try:
                if isinstance(op, JoinOp):
                    added = [piece for variable in op.added for piece in await variable.get()]
                    if self._current is op:
                        self.transcript.append_joined(added)
                elif isinstance(op, HookOp):
                    await in_pool(self.backend.pool, partial(_call_hook, self.backend, op))
                elif isinstance(op, GenOp):
                    await generation.agenerate(self, op)
                else:
                    assert isinstance(op, SelectOp)
                    await selection.aselect(self, op)
                following = self._play_after(op)
            except asyncio.CancelledError:
                self._fail(RequestAbortedError("the program was cancelled."), op)
                return
            except BaseException as error:  # as in _advance; no SystemExit of a backend may end this thread
                self._fail(error, op)
                return
            if following is None:
                break
            op = following
            _begin(op)
        if self._waiting is task:
            self._waiting = None

    def _play_blocking(self, op: Op) -> None:
        """Plays the branch from an operation that has to wait, on a thread of the backend's pool."""
        current_run.set(self.run)
        while self._current is op:
            try:
                if isinstance(op, HookOp):
                    _call_hook(self.backend, op)
                elif isinstance(op, GenOp):
                    generation.generate(self, op)
                else:
                    assert isinstance(op, SelectOp)
                    selection.select(self, op)
                following = self._play_after(op)
            except BaseException as error:  # as in _play
                self._fail(error, op)
                return
            if following is None:
                return
            if generation.needs_loop(self, following):
                self._dispatch(following)
                return
            op = following
            _begin(op)

    def _fail(self, error: BaseException, op: Op | None = None) -> asyncio.Task[None] | NodeEvents | None:
        """Fails the branch and all its queued operations, or continues with a queued rollback that takes the failed
        operation back. Returns the task or inbox that was waiting for the current operation.

        Args:
            op: operation that has failed; ignored if it is no longer the current one, as the branch was stopped
                meanwhile. None if the branch fails as a whole.
        """
        with self._lock:
            at, self._current = self._current, None
            if op is not None and at is not op:
                self._current = at
                return None
            failure = self._failure or located(error, _where(op))
            if failure.origin is not None and failure.origin.node is None and isinstance(op, AnswerOp):
                failure.origin = replace(failure.origin, node=op.node.name)
            back = next(filter(_goes_back, self._queue), None) if op is not None else None
            pending = list[Op]()
            while self._queue and self._queue[0] is not back:
                pending.append(self._queue.popleft())
            if back is not None:  # the failed operation is already taken back, by a rollback that is queued
                self._current = self._queue.popleft()
            else:
                if self.pushed is not None:
                    self.pushed.drop()
                self._failure = failure
            waiting, self._waiting = self._waiting, None
        if at is not None and not isinstance(at, HookOp):  # a hook has been called already
            pending.insert(0, at)
            if isinstance(at, AnswerOp):
                at.ended = time.perf_counter()
            if not isinstance(at, ReadOp):
                self.played.append(at)
        for each in pending:
            _fail_op(each, failure)
        if back is not None:
            self._play_on(back)
        elif self.log is not None:
            self.log.close(failure)
        return waiting

    def is_current(self, op: Op) -> bool:
        """Returns True if `op` is still current; if not, the branch was stopped and its results must be dropped."""
        return self._current is op

    @property
    def sid(self) -> str:
        """Unique name of the branch."""
        if not self._sid:
            self._sid = uuid.uuid4().hex
        return self._sid

    def __del__(self) -> None:
        if getattr(self, "_failure", None) is not None and not self._failure_reported:
            logger.error("A program failed and its error was never read: %s", self._failure)


def _where(op: Op | None) -> Location | None:
    source = getattr(op, "node", None) or getattr(op, "variable", op)
    found: Location | None = getattr(source, "where", None)
    return found


def _begin(op: Op) -> None:
    """Records the time at which an operation begins to wait for its answer."""
    if isinstance(op, AnswerOp) and not op.began:
        op.began = time.perf_counter()


def _has_to_wait(op: Op) -> bool:
    if isinstance(op, AnswerOp):
        return not op.variable.done
    if isinstance(op, JoinOp):
        return not all(variable.done for variable in op.added)
    return isinstance(op, HookOp) or op is _NOTHING


def _goes_back(op: Op) -> bool:
    """Returns True if an operation rolls back to a mark that has been played already."""
    return isinstance(op, MarkOp) and op.back and op.mark.position is not None


def _call_hook(backend: BaseBackend, op: HookOp) -> None:
    getattr(backend, op.hook)(*op.args)


def _call_last_hook(backend: BaseBackend, op: HookOp) -> None:
    try:
        _call_hook(backend, op)
    except Exception:  # the program has already failed, with another error
        logger.exception("%s of %s failed", op.hook, type(backend).__name__)


def _fail_op(op: Op, failure: SglError) -> None:
    if isinstance(op, ForkOp):
        for child in op.children:
            child.mark_failure_reported()  # the parent reports the failure
            child.fail(failure)
    elif isinstance(op, HookOp):
        if op.hook == "end_program":  # a failed program has ended, too
            backend = op.args[0].backend
            backend.pool.submit(partial(_call_last_hook, backend, op))
    elif isinstance(op, AnswerOp | ReadOp | ScopeOp):
        op.variable.fail(failure)
        if isinstance(op, GenOp) and op.thoughts is not None:
            op.thoughts.fail(failure)
