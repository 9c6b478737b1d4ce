"""Runs a program's body in this thread, in another one or in an event loop, and handles the errors
that the body raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from functools import partial
from threading import Thread
from types import TracebackType

from sglang_lite.lang.backend.base import Backend
from sglang_lite.lang.concurrency.loop import in_event_loop
from sglang_lite.lang.concurrency.variables import Variable
from sglang_lite.lang.dropped_parts import warn_of_unadded_expressions
from sglang_lite.lang.execution.answer_log import LoggedAnswers
from sglang_lite.lang.execution.branch import Branch
from sglang_lite.lang.execution.control_text import collect_argument_control_tokens
from sglang_lite.lang.execution.kept import Kept
from sglang_lite.lang.execution.player import Player
from sglang_lite.lang.execution.reading import call_when_done, completion_variable
from sglang_lite.lang.execution.run import BoundCall, Run, RunSettings, current_run
from sglang_lite.lang.execution.run_log import (
    JournalOptions,
    RunLog,
    find_suspension,
)
from sglang_lite.lang.execution.streamed_body import StreamedBody
from sglang_lite.lang.expressions import BaseProgram
from sglang_lite.lang.global_config import global_config
from sglang_lite.lang.runs.journal import Journal
from sglang_lite.lang.runs.resume import complete_log
from sglang_lite.lang.state import ProgramState, user_location
from sglang_lite.lang.suspension import Suspension
from sglang_lite.lang.tracebacks import trimmed
from sglang_lite.protocol import (
    Location,
    ParameterError,
    ProgramError,
    RequestAbortedError,
    RequestTimeoutError,
)
from sglang_lite.protocol.anything import UserValue

_UNCALLED = "'method' object does not support the context manager protocol"
# nesting level of a run from which a body's RecursionError is blamed on nested programs
_NESTED = 8


def _refuse_journal_inside(outer: Run | None) -> None:
    """Raises ParameterError if the enclosing run has a journal, which already logs this run."""
    if outer is not None and outer.log is not None and outer.log.journal is not None:
        raise ParameterError(
            "journal",
            "the enclosing run has one, which this run is logged to, too.",
            hint="Leave it out.",
        )


def nesting_error(name: str) -> ProgramError:
    """Returns the error for programs that are nested more deeply than Python's stack allows."""
    limit = sys.getrecursionlimit()
    return ProgramError(
        f"{name}(…) is nested in itself or in others more deeply than Python's {limit:,} frames.",
        hint="Write a loop in one body, or raise the limit: sys.setrecursionlimit(…).",
        where=user_location(),
    )


def _explain_uncalled_role(error: BaseException) -> None:
    """Adds a note to the TypeError that Python raises for `with s.user:`. The note says what to
    write instead.
    """
    if isinstance(error, TypeError) and _UNCALLED in str(error) and not hasattr(error, "__notes__"):
        error.add_note("A role is called: with s.user(): …")


def _wait_until_played(ref: weakref.ref[Player]) -> None:
    """Waits until everything that was added to a run has been executed. Returns immediately if the
    player has already been garbage-collected.
    """
    player = ref()
    if player is not None:
        completion_variable(player).wait()


class BodyRun:
    """One run of a program. The body runs inside `with run:`; an exception that leaves the `with`
    block ends the run.

    Args:
        args, kwargs: arguments of the body; the caller has checked that they fit its signature.
        kept: answers of an earlier run that this rerun keeps; None if it is not a rerun.
        log: log of the run that this one resumes, or None.
        journal: options of the file to which the run is logged, or None.
        is_item: whether the run is an item of a batch.

    Attributes:
        state: state of the run.
    """

    __slots__ = ("_args", "_branch", "_kwargs", "_program", "_token", "state")

    def __init__(
        self,
        program: BaseProgram,
        args: Sequence[UserValue],
        kwargs: dict[str, UserValue],
        backend: Backend,
        settings: RunSettings,
        kept: Kept | None = None,
        log: RunLog | None = None,
        journal: JournalOptions | None = None,
        is_item: bool = False,
    ) -> None:
        self._program = program
        self._args = args
        self._kwargs = kwargs
        outer = current_run.get()
        called = BoundCall(program, args, kwargs)
        if journal is not None:
            _refuse_journal_inside(outer)
            log = Journal(journal, called, settings).log
        path = ""
        logged = log
        if outer is not None and log is None and not is_item:
            path = outer.next_inner_path()
            logged = outer.log if outer.is_logged else None
        if logged is not None and logged.replays and kept is None:
            kept = LoggedAnswers(logged, path)
        run = Run(
            backend,
            settings,
            is_async=program.is_async,
            outer=outer,
            new_state=ProgramState,
            kept=kept,
            log=log,
            path=path,
            is_item=is_item,
        )
        run.called = called
        warn_of_unadded_expressions(program.func)
        if args or kwargs:
            run.spelled = collect_argument_control_tokens(
                None, backend.control_texts, program, args, kwargs
            )
        branch = self._branch = Branch(
            Player(run, run.new_pushed_branch()), planner=run.planner_for_backend(backend)
        )
        self.state = ProgramState(branch)
        if run.budgets:  # a BudgetError carries the state
            run.state = weakref.ref(self.state)
        if outer is not None:
            outer.register_inner(branch)
        if backend.on_run is not None:
            backend.on_run(partial(_wait_until_played, weakref.ref(branch.player)))
        branch.notify_listener("begin_program")

    def __enter__(self) -> None:
        run = self._branch.run
        run.context = copy_context()
        self._token = current_run.set(run)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> bool:
        branch = self._branch
        run = branch.run
        suspension = None if error is None else find_suspension(error)
        try:
            if error is None:
                pass
            elif suspension is not None:
                run.pending = suspension.calls
                complete_log(branch)
            else:
                branch.abandon(error)
                _explain_uncalled_role(error)
            if isinstance(error, RequestTimeoutError) and branch.run.deadline is not None:
                error.state = self.state
        finally:
            current_run.reset(self._token)
            if run.is_logged and run.outer is None and run.log is not None:
                call_when_done(branch.player, run.log.close)
            branch.end_body()
        if isinstance(error, RecursionError) and branch.run.level >= _NESTED:
            raise nesting_error(self._program.name) from error
        if error is None and run.is_logged:
            self._check_end()
        if suspension is None or run.outer is None or run.is_item:
            return suspension is not None
        raise suspension

    def _check_end(self) -> None:
        """Checks that a body that has ended did not skip a suspension or a logged call.

        Raises:
            ProgramError: the body has caught a suspension.
            ResumeError: the body did not reach one of the logged calls.
        """
        run = self._branch.run
        if run.pending:
            raise ProgramError(
                f"{self._program.name} went on after its run was suspended at a call that waits "
                "for approval.",
                hint="Catch Exception, not BaseException, and don't return in `finally`.",
            )
        if run.log is not None:
            run.log.check_reached(run.path)

    def start(self) -> ProgramState:
        """Runs the body, or starts it in a thread if the run streams, and returns the state.
        Implements `program.run`.
        """
        settings = self._branch.run.settings
        with trimmed:
            if settings.stream:
                start_thread(self.run_streaming)
            else:
                self.run()
        if not (settings.use_thread or settings.stream):
            completion_variable(self._branch.player).wait()
            self.state.error()
        if settings.stream:
            return self._state_for_caller()
        if global_config.verbosity >= 2:
            print(self.state.text())
        return self.state

    def _state_for_caller(self) -> ProgramState:
        """Creates the state for the caller of a streamed run. The body has a separate one."""
        body_state = self.state
        found = ProgramState(self._branch)
        found.streamed_body = StreamedBody(self._branch.run, lambda: body_state.ret_value)
        return found

    async def astart(self) -> ProgramState:
        """Runs the body like `start`, for coroutines. Unless the run streams, also awaits
        everything that the body adds. Implements `program.arun`.
        """
        run = self._branch.run
        if not run.settings.stream:
            with trimmed:
                await self.arun()
            return self.state
        if self._program.is_async:
            run.body = asyncio.ensure_future(self.arun_streaming())
            run.loop = asyncio.get_running_loop()
        else:
            start_thread(self.run_streaming)
        return self._state_for_caller()

    def run(self) -> ProgramState:
        """Runs the body in this thread. A coroutine body gets a new thread if this one already runs
        an event loop. An exception of the body ends the run and is raised.
        """
        state = self.state
        program = self._program
        if program.is_async and in_event_loop():
            if (raised := self._start_in_thread().wait()) is not None:
                raise raised
            return state
        with self:
            result = program.func(state, *self._args, **self._kwargs)
            state.ret_value = (
                asyncio.run(result) if program.is_async else check_return_value(program, result)
            )
        return state

    def run_streaming(self) -> None:
        """Runs the body of a streamed run; called on a thread of its own. Exceptions are not raised
        here, but when the state is read.
        """
        with contextlib.suppress(Exception, Suspension):  # kept in the state
            self.run()

    def _start_in_thread(self) -> Variable:
        """Starts the body in a new thread. Returns a variable that is set when the body ends. Its
        value is the exception that the body raised, or None.
        """
        ended = Variable()

        def run() -> None:
            raised = None
            try:
                self.run()
            except BaseException as error:  # raised again in the waiting thread or task
                raised = error
            ended.set(raised)

        start_thread(run)
        return ended

    async def arun_body(self) -> ProgramState:
        """Awaits the body: a coroutine body in this event loop, a plain one in a new thread."""
        state = self.state
        program = self._program
        if not program.is_async:
            with self._stop_if_cancelled():
                raised = await self._start_in_thread().wait_async()
            if raised is not None:
                raise raised
            return state
        with self:
            state.ret_value = await program.func(state, *self._args, **self._kwargs)
        return state

    async def arun(self) -> None:
        """Awaits the body and everything that it has added to the state."""
        await self.arun_body()
        with self._stop_if_cancelled():
            await completion_variable(self.state.branch.player).wait_async()

    @contextlib.contextmanager
    def _stop_if_cancelled(self) -> Iterator[None]:
        """Stops the run if the task that awaits it is cancelled inside the `with` block."""
        try:
            yield
        except asyncio.CancelledError:
            self.state.branch.stop(RequestAbortedError("the program was cancelled."))
            raise

    async def arun_streaming(self) -> None:
        with contextlib.suppress(Exception, Suspension):  # kept in the state
            await self.arun_body()


def check_return_value(program: BaseProgram, result: object) -> UserValue:
    """Returns the return value of a plain body. Raises ProgramError if the value is a coroutine,
    which nobody would await.
    """
    if result is not None and inspect.iscoroutine(result):
        result.close()
        where = user_location()
        if inspect.isfunction(program.func):
            code = program.func.__code__
            where = Location(code.co_filename, code.co_firstlineno, code.co_qualname)
        raise ProgramError(
            f"{program.name} returned a coroutine that is never awaited.",
            hint="Make it `async def`.",
            where=where,
        )
    return result


def start_thread(target: Callable[[], None]) -> Thread:
    """Starts a daemon thread that calls `target` in a copy of the caller's context."""
    thread = Thread(target=copy_context().run, args=(target,), name="sglang_lite-body", daemon=True)
    thread.start()
    return thread
