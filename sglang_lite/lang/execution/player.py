"""Executes a branch: its operations in order, one at a time, on whichever thread can execute the
current one.

Text and turns are executed immediately on the submitting thread. After an answer of a pushed-down
program, the thread that delivers it continues the branch. Everything else that waits for a backend
is executed on the executor loop (concurrency/loop.py). Only one thread at a time owns a branch and
executes it; ownership is handed over under the branch's lock.

A branch that fails stays failed: all queued and later operations fail with the same error, and none
of them waits.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import NoReturn, TypeAlias, TypeGuard

from sglang_lite.lang.concurrency.loop import executor, is_on_executor_thread
from sglang_lite.lang.concurrency.variables import (
    TextLog,
    Variable,
    copy_as_sgl_error,
    when_all_done,
)
from sglang_lite.lang.execution import generation, selection
from sglang_lite.lang.execution.base_player import BasePlayer
from sglang_lite.lang.execution.immediate import IMMEDIATE, play_async, play_join
from sglang_lite.lang.execution.operations import (
    AnswerOp,
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
    find_removed_range,
    on_pool,
)
from sglang_lite.lang.execution.push_down import PushedBranch
from sglang_lite.lang.execution.run import Run, current_run
from sglang_lite.lang.execution.waits import NUMBERED, Cancellation, Place, Waits
from sglang_lite.lang.expressions import NO_OPTIONS
from sglang_lite.program.nodes import Text
from sglang_lite.protocol import (
    UNSET,
    Location,
    RequestAbortedError,
    SglError,
    UnknownVariableError,
)
from sglang_lite.protocol.anything import UserValue

logger = logging.getLogger("sglang_lite")

_Task: TypeAlias = asyncio.Task[None]
_Awaited: TypeAlias = GenOp | SelectOp | JoinOp
_NOTHING = Text("")  # current operation of a forked branch until its parent has played the fork
# Shared by branches that have never queued anything: one deque each would take much memory.
_NO_QUEUE: deque[Op] = deque()
_NO_CLAIMS: Mapping[int, Op] = {}


class Player(BasePlayer):
    """Executes the operations of one branch.

    An operation goes from `play_or_queue` to `_play_until_wait`. If it has to wait, `_dispatch`
    hands the branch to `_resume`, `_play_on_pool` or `_play_in_task`.

    Args:
        run, pushed: as for BasePlayer.
        depth: number of forks above the branch. A forked branch begins when its parent has executed
            the fork.

    Attributes:
        later: text log of a branch to which something was added after the end of the body, if the
            run is not streamed.
        children: branches forked from it.
        claims: last operation that a join has claimed, by the depth of the joining branch.
        waits: how far the branch has been waited for.
    """

    __slots__ = (
        "__weakref__", "_lock", "_queue", "_taken_back", "_waiting", "children", "claims", "depth", "later", "waits",
    )  # fmt: skip

    def __init__(
        self,
        run: Run,
        pushed: PushedBranch | None = None,
        depth: int = 0,
        waits: Waits | None = None,
    ) -> None:
        super().__init__(run, pushed, TextLog() if run.settings.stream else None)
        self.depth = depth
        self.waits = waits or Waits()
        self.later: TextLog | None = None
        self.children: list[Player] = []
        self._lock = threading.Lock()
        self._queue = _NO_QUEUE
        self.claims = _NO_CLAIMS
        # Current operation; the thread that plays it owns the branch until it is replaced.
        self._current = _NOTHING if depth else None
        self._waiting: _Task | _Awaited | None = None  # plays on when the answer has come
        # operation ahead of a queued rollback; must not wait any more
        self._taken_back: Op | None = None

    # ----------------------------------------------------------------------------------- any thread

    def play_or_queue(self, op: Op) -> None:
        """Executes an operation immediately if no thread is executing the branch and the operation
        need not wait. Otherwise queues it.
        """
        if self.waits.cancelled is not None and type(op) not in (ReadOp, EventOp, MarkOp):
            self._refuse_after_cancellation(op, self.waits.cancelled)
            return
        with self._lock:
            failure = self._failure
            if type(op) in NUMBERED:
                self.waits.number_op(op)
            if failure is None:
                if self.pushed is not None and type(op) not in (ReadOp, EventOp):
                    self.pushed = self.pushed.push_op(op, self.transcript.pieces)
                if self._current is not None:
                    if self._queue is _NO_QUEUE:
                        self._queue = deque()
                    self._queue.append(op)
                    return
                # an open grammar could refuse the text
                if type(op) is Text and self.transcript.matcher is None:
                    self.transcript.append_text(op)
                    self.played.append(op)
                    return
                self._current = op
            elif self.pushed is not None and type(op) is JoinOp:
                self.pushed.put_late_join(op)
        if failure is not None:
            _fail_op(op, failure)
        elif (waits := self._play_until_wait(op)) is not None:
            self._dispatch(waits)

    def _refuse_after_cancellation(self, op: Op, cancelled: Cancellation) -> None:
        """Fails an operation that was added after the branch was cancelled, and fails the branch."""
        if not self.waits.refuses:
            self.waits.refuses = True
            self._fail_after_queued_ops(cancelled.error)
        if self.pushed is not None and type(op) is JoinOp:
            self.pushed.put_late_join(op)
        if isinstance(op, ScopeOp):  # which may have failed at its beginning
            op.variable.replace_with_error(cancelled.error)
        _fail_op(op, cancelled.error)

    def _fail_after_queued_ops(self, error: SglError) -> None:
        """Makes the branch fail with a cancellation's error once everything queued has been
        executed.
        """
        ended = Variable()
        ended.when_done(partial(self._replace_failure, error))
        self.play_or_queue(ReadOp(ended, partial(_raise_for_reader, error, self)))

    def _replace_failure(self, error: SglError) -> None:
        """Replaces the branch's failure with the error of its cancellation. Does nothing if the
        branch has not failed, or if the cancellation has been undone.
        """
        with self._lock:
            if (
                self.waits.cancelled is not None
                and self.waits.cancelled.error is error
                and self._failure is not None
            ):
                self._failure = copy_as_sgl_error(error, None)

    def prepare_for_addition(self, where: Location | None) -> None:
        """Checks that something may be added. After the end of the body, also starts a log of the
        text for streams.
        """
        self.names.raise_if_removed(where)
        if not self.run.body_open and self.log is None and self.later is None:
            self.later = TextLog()
            self.play_or_queue(ReadOp(Variable(), partial(_begin_text_log, self, self.later)))

    def read_when_played(
        self, what: Callable[[Player], UserValue], where: Location | None = None
    ) -> Variable:
        """Returns a variable that is set to `what(player)` once everything queued so far has been
        executed.
        """
        variable = Variable(where, self.run.made)
        variable.awaited = Place(self.waits, self.waits.last)
        self.play_or_queue(ReadOp(variable, partial(what, self)))
        return variable

    def tree(self) -> list[Player]:
        """Returns this branch and the branches forked from it, parents first."""
        found = [self]
        for player in found:  # the list grows meanwhile
            found += player.children
        return found

    @property
    def is_idle(self) -> bool:
        """True if nothing is being executed or queued."""
        return self._current is None

    @property
    def has_waiting_operation(self) -> bool:
        """True if the current operation or a queued one has to wait."""
        with self._lock:
            ops = [*self._queue] if self._current is None else [self._current, *self._queue]
        return any(map(_operation_must_wait, ops))

    def roll_back_to(self, mark: BranchMark) -> None:
        """Rolls back to a mark. A branch that has failed since works again."""
        ends = [
            end
            for child in self.children[mark.children :]
            for end in child.end_by_rollback(self.depth)
        ]
        with self._lock:
            found = find_removed_range(mark, (self._current, *self._queue), self.claims, self.depth)
            running = (
                None
                if mark.position is None or found.claimed or self._current is _NOTHING
                else self._current
            )
            self._taken_back = running or self._taken_back
            back = MarkOp(mark, back=True)
            revives = self.waits.roll_back_waits(mark)
            if mark.position is not None and revives:
                self._failure = None
            self._queue = found.kept
            if self.pushed is not None:
                self.pushed.forget_ops((running, *found.removed))
            # under the lock, as the current operation may fail any time
            if queued := self._current is not None:
                if self.pushed is not None:
                    self.pushed = self.pushed.push_op(back, self.transcript.pieces)
                self._queue.append(back)
        for op in found.removed:
            _fail_op(op, _removed_by_rollback_error())
        if not queued:
            self.play_or_queue(back)
        # now that the rollback is queued, a join that waits for these branches may fail
        for end in ends:
            end()
        if running is not None:
            executor().post(_abort, self, _removed_by_rollback_error(), running)

    def claim_for_join(self, depth: int) -> None:
        """Reserves everything queued so far, in this branch and those forked from it, for a join in
        the branch at `depth`. Rollbacks can remove these operations only after they have been
        executed.
        """
        for child in self.children:
            child.claim_for_join(depth)
        self.waits.claims = {**(self.waits.claims or {}), depth: self.waits.last}
        with self._lock:
            last = self._queue[-1] if self._queue else self._current
            if last is not None:
                self.claims = {**self.claims, depth: last}

    def end_by_rollback(self, depth: int) -> list[Callable[[], object]]:
        """Ends the branch and those forked from it, because a rollback in the branch at `depth`
        removed its fork. Operations that joins above that branch have claimed are still executed.
        Returns callbacks that fail all other operations.
        """
        ends = [end for child in self.children for end in child.end_by_rollback(depth)]
        error = self.names.gone
        assert error is not None
        with self._lock:
            self.failure_reported = True
            self.stopped = self.stopped or error
            found = find_removed_range(None, (self._current, *self._queue), self.claims, depth)
            if found.claimed:
                self._queue = found.kept
        if not found.claimed:
            return [*ends, partial(_abort, self, error)]
        self.read_when_played(partial(_raise_for_reader, error))
        return [*ends, *(partial(_fail_op, op, error) for op in found.removed)]

    def _record_wait_target(self, op: Op, waiting: _Task | _Awaited) -> bool:
        """Records what an operation waits for. Called before the result can arrive. Returns False
        if the operation has been stopped or rolled back in the meantime.
        """
        with self._lock:
            if self._current is op and self._taken_back is not op:
                self._waiting = waiting
                return True
        self.fail_branch(_removed_by_rollback_error(), op)  # if it is current
        return False

    def stop(self, error: SglError, *, reported: bool = True) -> None:
        """Fails the branch and the branches forked from it if they are executing anything, and
        cancels their requests to backends. Results that have arrived are kept. If the body is still
        running and is stopped from outside, it can add nothing more.

        Args:
            reported: whether the holder of the branch already knows of the error, so that it need
                not be logged.
        """
        self.failure_reported = self.failure_reported or reported
        if self.run.body_open and current_run.get() is not self.run:
            self.stopped = self.stopped or error
        with self._lock:
            # Only the event of the program's end is left.
            ending = isinstance(self._current, EventOp) and self._current.event == "end_program"
            busy = (self._current is not None and not ending) or (
                self.log is not None and not self.log.closed
            )
        if busy or self.stopped:
            _abort(self, error)
        for child in self.children:
            child.stop(error)

    def cancel_this_branch(
        self, error: SglError, kept: int, depth: int, *, final: bool, ends: bool
    ) -> None:
        """Cancels this branch, but not the branches forked from it (see `cancel_tree`).

        Args:
            kept: number of the last node that stays.
            depth: depth of the branch where the cancellation started.
            final: whether rollbacks can't undo it.
            ends: whether the branch fails even if it loses nothing.
        """
        whole = later = False
        removed: Sequence[Op] = ()
        with self._lock:
            if final and ends:
                self.stopped = self.stopped or error
            if self.waits.cancelled is not None and (self.waits.refuses or not ends):
                return
            if self._failure is not None and self.waits.failure_known:
                return
            self.waits.cancelled = Cancellation(error, kept, final)
            if ends or kept < self.waits.last:
                self.waits.refuses = True
                found = find_removed_range(
                    None, (self._current, *self._queue), self.claims, depth, kept
                )
                later = found.claimed
                if later:
                    self._queue = found.kept
                    removed = found.removed
                else:
                    whole = True
                    self._failure = None
        if later:
            self._fail_after_queued_ops(error)
        elif whole:
            _abort(self, error)
        for op in removed:
            _fail_op(op, error)
        self.waits.withdraw_variables(self.names.own_variables(), kept, error)

    # ----------------------------------------------------------------------------- the playing side

    def start_playing(self, op: Op = _NOTHING) -> None:
        """Executes `op`, the current operation, and those after it, up to the first one that has to
        wait, which it dispatches. Without `op`, starts a forked branch whose parent has executed
        the fork.
        """
        if (waits := self._play_until_wait(op)) is not None:
            self._dispatch(waits)

    def _dispatch(self, op: Op) -> None:
        _record_wait_start(op)
        if _resumes_on_answer(op, self):
            if self._record_wait_target(op, op) and _has_arrived_or_notify(
                op, partial(self._resume, op)
            ):
                self._resume(op)
        elif self.backend.answer_pool is not None and _goes_to_pool(op, self):
            self.backend.answer_pool.submit(
                partial(self.run.context.copy().run, self._play_on_pool, op)
            )
        elif is_on_executor_thread():
            self._start_task(op)
        else:
            executor().post(self._start_task, op)

    def _play_until_wait(self, op: Op, *, awaited: bool = False) -> Op | None:
        """Executes `op`, the current operation, and then the queue. Returns the first operation
        that has to wait, or None if the caller no longer owns the branch: nothing is left to
        execute, or it was stopped.

        Args:
            awaited: whether `op` had to wait and has already been executed.
        """
        while True:
            try:
                if type(op) is Text:
                    self.transcript.append_text(op)
                elif not awaited and (
                    (isinstance(op, AnswerOp) and not self.backend.answers_now)
                    or not IMMEDIATE[type(op)](self, op)
                ):
                    return op
                awaited = False
                if type(op) is not ReadOp and type(op) is not EventOp:
                    self.played.append(op)
            # anything raised fails the branch, and its readers must know
            except BaseException as error:
                self.fail_branch(error, op)
                if not isinstance(error, Exception):
                    raise
                return None
            with self._lock:
                if self._current is not op:
                    return None
                if self.pushed is not None and self.pushed.judged:
                    self.pushed.send_final_verdict(op, self.transcript.pieces)
                if not self._queue:
                    self._current = None
                    return None
                op = self._current = self._queue.popleft()

    def _start_task(self, op: Op) -> None:
        task = asyncio.get_running_loop().create_task(
            self._play_in_task(op), context=self.run.context.copy()
        )
        if not self._record_wait_target(op, task):
            task.cancel()

    def _resume(self, op: _Awaited) -> None:
        """Continues the branch after an operation whose results have all arrived. Does nothing if
        the operation was stopped in the meantime.
        """
        with self._lock:
            if self._waiting is not op:
                return
            self._waiting = None
        token = current_run.set(self.run)
        try:
            _finish_with_answer(self, op)
            following = self._play_until_wait(op, awaited=True)
        except BaseException as error:  # as in _play_until_wait
            self.fail_branch(error, op)
            return
        finally:
            current_run.reset(token)
        if following is not None:
            self._dispatch(following)

    async def _play_in_task(self, op: Op) -> None:
        """Executes the branch as a task of the executor loop, starting with an operation that has
        to wait.
        """
        current_run.set(self.run)
        task = self._waiting
        while True:
            try:
                await play_async(self, op)
                following = self._play_until_wait(op, awaited=True)
            except asyncio.CancelledError:
                self.fail_branch(RequestAbortedError("the program was cancelled."), op)
                return
            except BaseException as error:  # a backend's SystemExit must not end this thread
                self.fail_branch(error, op)
                return
            if following is None or _resumes_on_answer(following, self):
                break
            op = following
            _record_wait_start(op)
        with self._lock:  # as another thread may be waiting by now
            if self._waiting is task:
                self._waiting = None
        if following is not None:
            self._dispatch(following)

    def _play_on_pool(self, op: Op) -> None:
        """Executes the branch on a thread of the backend's pool, where answers may block. Starts
        with the given operation.
        """
        current_run.set(self.run)
        on_pool.set(self)
        try:
            following = self._play_until_wait(op)
        # it has failed the branch; a backend's SystemExit must not end this thread
        except BaseException:
            return
        if following is not None:
            self._dispatch(following)

    def fail_branch(
        self, error: BaseException, op: Op | None = None, *, waits: bool = False
    ) -> _Task | None:
        """Fails the branch and all its queued operations. If a queued rollback would undo the
        failed operation, continues with that rollback instead. Returns the task that was waiting
        for the current operation, if any.

        Args:
            op: operation that failed; ignored if it is no longer the current one because the branch
                was stopped meanwhile. None if the branch fails as a whole.
            waits: whether to do nothing while a thread plays the operation.
        """
        with self._lock:
            if (op is not None and self._current is not op) or (waits and self._waiting is None):
                return None
            at = self._current
            self._current = None
            failure = self._failure or copy_as_sgl_error(error, _location_of_op(op))
            if (
                failure.origin is not None
                and failure.origin.node is None
                and isinstance(op, AnswerOp)
            ):
                failure.origin = replace(failure.origin, node=op.node.name)
            final = op is None or self.stopped is not None
            back = None if final else next(filter(_is_rollback_to_played_mark, self._queue), None)
            pending = list[Op]()
            while self._queue and self._queue[0] is not back:
                pending.append(self._queue.popleft())
            # the failed operation is already taken back, by a rollback that is queued
            if back is not None:
                self._current = self._queue.popleft()
            else:
                self._failure = failure
            if self.pushed is not None:
                self.pushed.cancel_ops((at, *pending), taken_back=back is not None)
            waiting = self._waiting
            self._waiting = None
        if at is not None and not isinstance(at, EventOp):  # the listener was already notified
            pending.insert(0, at)
            if isinstance(at, AnswerOp):
                at.ended = time.perf_counter()
            if not isinstance(at, ReadOp):
                self.played.append(at)
        for each in pending:
            _fail_op(each, failure)
        if back is not None:
            self.start_playing(back)
        elif self.log is not None:
            self.log.close(failure)
        return waiting if isinstance(waiting, asyncio.Task) else None


def cancel_tree(
    player: Player,
    error: SglError,
    *,
    waited: bool = True,
    reported: bool = True,
    ends: bool = False,
) -> None:
    """Cancels a branch and the branches forked from it. Answers that someone has waited for are
    kept; everything else fails, even if it has arrived.

    Args:
        waited: False to keep nothing, not even answers that were waited for.
        reported: as for `Player.stop`.
        ends: whether the branches fail even if they lose nothing.
    """
    final = not waited or current_run.get() is not player.run
    ends = ends or (final and player.run.body_open) or not waited
    for each in player.tree()[::-1]:  # gathered variables fail after the variables they consist of
        kept = each.waits.last_kept_node(player.depth) if waited else -1
        each.cancel_this_branch(error, kept, player.depth, final=final, ends=ends)
        each.failure_reported = each.failure_reported or reported or each is not player


def unknown_variable_error(player: Player, name: str, where: Location | None = None) -> SglError:
    """Returns the error for an unknown name. If the body could not declare the name because the
    branch has failed, this is the branch's failure.

    A failed node alone does not count as the reason: the body continues after it, and whether it
    has failed yet depends on timing.
    """
    if player.failure is not None and (player.stopped is not None or player.names.cut):
        player.failure_reported = True
        return copy_as_sgl_error(player.failure, where)
    hint = "A generation counts once it is added, `s += gen(…)`, and a branch's once `join()` has joined the fork."
    misspelled = bool(get_close_matches(name, player.names.variables, 1))
    if player.run.pending:
        misspelled = False
        hint = "The run is suspended: decide about state.pending(), and call state.resume(…)."
    return UnknownVariableError(
        f"the program has no variable {name!r}; it has: {player.names.quote_names()}.",
        where=where,
        hint="" if misspelled else hint,
    )


def _begin_text_log(player: Player, log: TextLog) -> None:
    player.transcript.log = log
    log.append(player.transcript.collect_text())


def _removed_by_rollback_error() -> SglError:
    return RequestAbortedError("a rollback removed this node.")


def _raise_for_reader(error: SglError, _: Player) -> NoReturn:
    raise error


def _abort(player: Player, error: SglError, op: Op | None = None) -> None:
    """Fails a branch and cancels the request that it waits for. If `op` is given, does nothing
    unless the branch is waiting for it.
    """
    if (task := player.fail_branch(error, op, waits=op is not None)) is not None:
        executor().post(task.cancel)


def _goes_to_pool(op: Op, player: Player) -> bool:
    """Returns True if the backend should answer an operation on its own threads. This requires that
    nobody reads the text as it grows, that the run has no retries or limits, and that the caller is
    not already on such a thread.
    """
    answers = player.backend.answers_now and player.log is None and player.run.plain
    return answers and isinstance(op, AnswerOp | EventOp) and on_pool.get() is not player


def _resumes_on_answer(op: Op, player: Player) -> TypeGuard[_Awaited]:
    """Returns True if the thread that delivers an operation's answer can continue the branch, which
    saves a costly task.

    This holds for a join, and for a pushed-down node with a single answer, unless Python code in
    this process has to decide on the answer.
    """
    if not isinstance(op, GenOp | SelectOp):
        return isinstance(op, JoinOp)
    if op.pushed_node is None or op.node.judged or not player.run.plain:
        return False
    if isinstance(op, SelectOp):
        return True
    own = op.expression
    followed = player.transcript.log is not None
    return (
        own.options is NO_OPTIONS
        and own.value_type is None
        and not followed
        and op.node.params.n in (UNSET, 1)
    )


def _has_arrived_or_notify(op: _Awaited, then: Callable[[], object]) -> bool:
    """Returns True if the answer to a pushed-down node has arrived. If not, calls `then` when it
    arrives. For a join, calls `then` when the joined branches have been executed.
    """
    if isinstance(op, JoinOp):
        when_all_done(op.added, then)
        return False
    assert op.pushed_node is not None
    pushed, place = op.pushed_node
    return pushed.events.has_event_or_notify((place, 0), then)


def _finish_with_answer(player: Player, op: _Awaited) -> None:
    if isinstance(op, JoinOp):
        play_join(player, op)
        return
    assert op.pushed_node is not None
    pushed, place = op.pushed_node
    answer = pushed.events.pop_event((place, 0))
    if isinstance(op, GenOp):
        generation.finish_generation(player, op, [answer])
    else:
        selection.finish_selection(player, op, answer)


def _location_of_op(op: Op | None) -> Location | None:
    source = getattr(op, "node", None) or getattr(op, "variable", op)
    found: Location | None = getattr(source, "where", None)
    return found


def _record_wait_start(op: Op) -> None:
    """Records when an operation begins to wait for its answer."""
    if isinstance(op, AnswerOp) and not op.began:
        op.began = time.perf_counter()


def _is_rollback_to_played_mark(op: Op) -> TypeGuard[MarkOp]:
    """Returns True if an operation rolls back to a mark that has already been executed."""
    return isinstance(op, MarkOp) and op.back and op.mark.position is not None


def _notify_program_end(op: EventOp) -> None:
    try:
        op.call()
    except Exception:  # the program has already failed, with another error
        logger.exception("%s failed", op.event)


def _fail_op(op: Op, failure: SglError) -> None:
    if isinstance(op, ForkOp):
        for child in op.children:
            child.failure_reported = True  # the parent reports the failure
            child.fail_branch(failure)
    elif isinstance(op, EventOp):
        if op.event == "end_program":  # a failed program has ended, too
            op.pool.submit(partial(_notify_program_end, op))
    elif isinstance(op, AnswerOp | ReadOp | ScopeOp):
        op.variable.set_error(failure)
        if isinstance(op, GenOp) and op.thoughts is not None:
            op.thoughts.set_error(failure)


def _operation_must_wait(op: Op) -> bool:
    """Returns True if an operation that has not been executed yet has to wait."""
    if isinstance(op, AnswerOp):
        return not op.variable.done
    if isinstance(op, JoinOp):
        return not all(variable.done for variable in op.added)
    return isinstance(op, EventOp) or op is _NOTHING
