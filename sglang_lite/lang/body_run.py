"""A run of a program: where its body runs, and what becomes of what it raises."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from functools import partial
from threading import Thread
from types import TracebackType

from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.concurrency.variables import Variable
from sglang_lite.lang.execution.branch import Branch
from sglang_lite.lang.execution.player import Player
from sglang_lite.lang.execution.reading import finished
from sglang_lite.lang.execution.run import BoundCall, Run, RunSettings, current_run
from sglang_lite.lang.expressions import BaseProgram
from sglang_lite.lang.state import ProgramState, user_location
from sglang_lite.protocol import Location, ProgramError, RequestAbortedError
from sglang_lite.protocol.anything import UserValue


def _wait_for(ref: weakref.ref[Player]) -> None:
    """Waits until all that was added to a run has been played."""
    player = ref()
    if player is not None:
        finished(player).wait()


class BodyRun:
    """A run of a program: its state, and its body with its arguments, which runs inside `with`: what it raises ends
    the run.

    Args:
        args, kwargs: of the body; they are known to fit.
    """

    __slots__ = ("_args", "_branch", "_kwargs", "_program", "_token", "state")

    def __init__(
        self,
        program: BaseProgram,
        args: Sequence[UserValue],
        kwargs: dict[str, UserValue],
        backend: BaseBackend,
        settings: RunSettings,
    ) -> None:
        self._program, self._args, self._kwargs = program, args, kwargs
        outer = current_run.get()
        run = Run(backend, settings, is_async=program.is_async, outer=outer, new_state=ProgramState)
        run.called = BoundCall(program, args, kwargs)
        if program.speculation.tokens is not None:
            run.speculation, run.speculates = program.speculation, program.speculation.on
        branch = self._branch = Branch(Player(run, run.pushed()))
        self.state = ProgramState(branch)
        if run.budgets:  # whose errors have it
            run.state = weakref.ref(self.state)
        if outer is not None:
            outer.register_inner(branch)
        if "begin_run" in backend.hooks:
            backend.begin_run(partial(_wait_for, weakref.ref(branch.player)))
        branch.call_hook("begin_program")

    def __enter__(self) -> None:
        run = self._branch.run
        run.context = copy_context()
        self._token = current_run.set(run)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        branch = self._branch
        try:
            if error is not None:
                branch.abandon(error)
        finally:
            current_run.reset(self._token)
            branch.end()

    def run(self) -> ProgramState:
        """Runs the body here. What it raises ends the run and is raised."""
        state, program = self.state, self._program
        with self:
            result = program.func(state, *self._args, **self._kwargs)
            state.ret_value = asyncio.run(result) if program.is_async else returned(program, result)
        return state

    def run_streaming(self) -> None:
        """Runs the body in a thread of its own: what it raises is raised where the state is read."""
        with contextlib.suppress(Exception):  # the state has it
            self.run()

    def run_in_thread(self) -> None:
        """Runs a coroutine body although this thread's event loop is running."""
        ended, raised = self._started()
        ended.wait()
        if raised:
            raise raised[0]

    def _started(self) -> tuple[Variable, list[BaseException]]:
        """Starts the body in a thread of its own; a variable that is set when it has ended, and what it raised."""
        ended, raised = Variable(), list[BaseException]()

        def run() -> None:
            try:
                self.run()
            except BaseException as error:  # raised again by who waits
                raised.append(error)
            ended.set(None)

        start_thread(run)
        return ended, raised

    async def arun_body(self) -> ProgramState:
        """Awaits the body here; a plain function's in a thread."""
        state, program = self.state, self._program
        if not program.is_async:
            ended, raised = self._started()
            with self._stopped_with_the_task():
                await ended.get()
            if raised:
                raise raised[0]
            return state
        with self:
            state.ret_value = await program.func(state, *self._args, **self._kwargs)
        return state

    async def arun(self) -> None:
        """Awaits the body and everything it has added."""
        await self.arun_body()
        with self._stopped_with_the_task():
            await finished(self.state.branch.player).get()

    @contextlib.contextmanager
    def _stopped_with_the_task(self) -> Iterator[None]:
        """Stops what is still under way when the task that awaits it is cancelled."""
        try:
            yield
        except asyncio.CancelledError:
            self.state.branch.stop(RequestAbortedError("the program was cancelled."))
            raise

    async def arun_streaming(self) -> None:
        with contextlib.suppress(Exception):  # the state has it
            await self.arun_body()


def returned(program: BaseProgram, result: object) -> UserValue:
    """The value that a plain body returned. Raises ProgramError: it is a coroutine, which has not run."""
    if result is not None and inspect.iscoroutine(result):
        result.close()
        where = Location(program.func.__code__, 0) if inspect.isfunction(program.func) else user_location()
        raise ProgramError(
            f"{program.name} returned a coroutine that is never awaited.", hint="Make it `async def`.", where=where
        )
    return result


def start_thread(target: Callable[[], None]) -> Thread:
    """Runs a body in a thread of its own, in a copy of the caller's context."""
    thread = Thread(target=copy_context().run, args=(target,), name="sglang_lite-body", daemon=True)
    thread.start()
    return thread
