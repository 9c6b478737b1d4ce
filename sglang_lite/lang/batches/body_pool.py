"""Pools that run the bodies of a batch, either on threads or as tasks of an event loop. Threads are
added when the bodies are waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable
from contextvars import copy_context
from typing import Any, Protocol, TypeAlias

from sglang_lite.lang.body_run import BodyRun
from sglang_lite.lang.concurrency.loop import executor
from sglang_lite.lang.concurrency.variables import copy_as_sgl_error, of_thread
from sglang_lite.lang.execution.reading import call_when_done, record_wait_for_all
from sglang_lite.lang.state import ProgramState
from sglang_lite.lang.tracebacks import trim
from sglang_lite.protocol import RequestAbortedError
from sglang_lite.protocol.anything import UserValue

# Outcome of an item: its state, executed to the end, or the exception that ended it.
Outcome: TypeAlias = "ProgramState | Exception"
Job: TypeAlias = "tuple[int, Any]"
Report: TypeAlias = Callable[[int, "ProgramState | Exception"], None]


class Pool(Protocol):
    """Pool that runs the items of a batch and reports the outcome of each."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def release_run_slot(self) -> None: ...


_STALL = 0.002  # seconds without a taken item after which the pool grows


class BodyPool:
    """Pool of threads that runs the body of a synchronous program over items. Adds threads only as
    needed to keep `window` runs under way.

    The pool begins with one thread. It grows when all its threads wait for values, or when no item
    has been taken for 2 ms (the bodies do slow work themselves), up to one thread for each run that
    may be under way.

    Args:
        prepare: prepares the run of an item.
        jobs: items with their indices.
        window: maximum number of runs under way.
        report: called with the index and outcome of each item, on any thread.
        until_released: whether a run counts as under way until `release_run_slot` is called, not only
            until it has finished.
    """

    def __init__(
        self,
        prepare: Callable[[UserValue], BodyRun],
        jobs: Iterable[Job],
        window: int,
        report: Report,
        *,
        until_released: bool,
    ) -> None:
        self._prepare = prepare
        self._jobs = iter(jobs)
        self._window = window
        self._report = report
        self._until_released = until_released
        self._states: dict[int, ProgramState] = {}  # states of the runs under way, by index
        self._stopped = False
        self._context = copy_context()  # bodies see the caller's context variables, each in a copy
        self._bell = threading.Condition()
        self._room = window  # runs that may still be started
        # total; waiting for values; waiting for room
        self._threads = self._waiting = self._idle = 0
        self._items_taken = 0
        self._has_watch = False
        self._over = False

    def start(self) -> None:
        with self._bell:
            self._add_thread()
            self._start_growth_timer()

    def stop(self) -> None:
        """Takes no more items, and stops the runs under way."""
        with self._bell:
            self._over = self._stopped = True
            self._bell.notify_all()
            states = list(self._states.values())
        for state in states:
            state.branch.stop(_batch_stopped_error())

    def add_waiting_thread(self) -> None:
        with self._bell:
            self._waiting += 1
            self._ensure_thread()

    def remove_waiting_thread(self) -> None:
        with self._bell:
            self._waiting -= 1

    def _ensure_thread(self) -> None:
        """Ensures that a thread takes the next item, if another run may be started now. Called with
        the lock held.
        """
        if self._over or not self._room:
            return
        self._start_growth_timer()
        if self._idle:
            self._bell.notify()
        elif self._waiting == self._threads:
            self._add_thread()

    def _add_thread(self) -> None:
        if self._threads < self._window:
            self._threads += 1
            threading.Thread(target=self._run_items, name="sglang_lite-body", daemon=True).start()

    def _start_growth_timer(self) -> None:
        """Starts the timer that grows the pool, if it is not running. Called with the lock held."""
        if not self._has_watch:
            self._has_watch = True
            executor().post(self._schedule_growth_check, self._items_taken)

    def _grow_if_stalled(self, items_taken: int) -> None:
        """Adds threads if no item has been taken since the last check, when `items_taken` items had
        been taken. Schedules the next check as long as runs may be started. Runs on the executor
        loop.
        """
        with self._bell:
            self._has_watch = bool(self._room) and not self._over
            if not self._has_watch:
                return
            if not self._idle and items_taken == self._items_taken:
                for _ in range(max(self._threads, 1)):
                    self._add_thread()
            items_taken = self._items_taken
        self._schedule_growth_check(items_taken)

    def _schedule_growth_check(self, items_taken: int) -> None:
        executor().loop.call_later(_STALL, self._grow_if_stalled, items_taken)

    def _run_items(self) -> None:
        of_thread.pool = self
        while (job := self._next_job()) is not None:
            self._run_item(*job)
            del job  # an idle thread must keep no item alive

    def _next_job(self) -> Job | None:
        with self._bell:
            while not self._room and not self._over:
                self._idle += 1
                self._bell.wait()
                self._idle -= 1
            job = None if self._over else next(self._jobs, None)
            if job is None:
                self._over = True
                self._threads -= 1
                self._bell.notify_all()
            else:
                self._room -= 1
                self._items_taken += 1
            return job

    def _run_item(self, index: int, item: Any) -> None:
        try:
            state = self._context.copy().run(self._run_body, index, item)
        # a body may raise anything, SystemExit too; it is that item's outcome
        except BaseException as error:
            self._finish_run(index, _error_outcome(error))
            return
        call_when_done(
            state.branch.player, lambda: self._finish_run(index, finish_item_outcome(state))
        )

    def _run_body(self, index: int, item: Any) -> ProgramState:
        call = self._prepare(item)
        with self._bell:
            self._states[index] = call.state
            if self._stopped:
                raise _batch_stopped_error()
        return call.run()

    def _finish_run(self, index: int, outcome: Outcome) -> None:
        with self._bell:
            self._states.pop(index, None)
        self._report(index, outcome)
        if not self._until_released:
            self.release_run_slot()

    def release_run_slot(self) -> None:
        """Stops counting one run as under way, so that the next one may start."""
        with self._bell:
            self._room += 1
            self._ensure_thread()


class AsyncBodyPool:
    """`BodyPool` for coroutines: the bodies are tasks of one event loop."""

    def __init__(
        self,
        prepare: Callable[[UserValue], BodyRun],
        jobs: Iterable[Job],
        window: int,
        report: Report,
        *,
        until_released: bool,
    ) -> None:
        self._prepare = prepare
        self._jobs = iter(jobs)
        self._window = window
        self._report = report
        self._until_released = until_released
        self._loop: asyncio.AbstractEventLoop | None = None
        self._room: asyncio.Semaphore | None = None
        self._running: asyncio.Task[Any] | None = None
        self._over = False

    def start(self) -> None:
        """Runs all items on a new event loop, in a thread of its own."""

        def run_until_stopped() -> None:
            with contextlib.suppress(asyncio.CancelledError):  # it was stopped
                asyncio.run(self.run())

        threading.Thread(
            target=copy_context().run,
            args=(run_until_stopped,),
            name="sglang_lite-body",
            daemon=True,
        ).start()

    def stop(self) -> None:
        self._over = True
        if self._loop is not None and self._running is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._running.cancel)

    def release_run_slot(self) -> None:
        if self._loop is not None and self._room is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._room.release)

    async def run(self) -> None:
        """Runs all items on the running event loop."""
        self._loop, self._room = asyncio.get_running_loop(), asyncio.Semaphore(self._window)
        self._running = asyncio.current_task()
        tasks: set[asyncio.Task[None]] = set()
        try:
            while not self._over:
                await self._room.acquire()
                job = None if self._over else next(self._jobs, None)
                if job is None:
                    break
                task = asyncio.ensure_future(self._arun_item(*job))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _arun_item(self, index: int, item: Any) -> None:
        try:
            call = self._prepare(item)
            await call.arun()
            outcome = finish_item_outcome(call.state)
        except BaseException as error:  # as in BodyPool
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the batch was cancelled, not the body
            outcome = _error_outcome(error)
        self._report(index, outcome)
        if not self._until_released and self._room is not None:
            self._room.release()


def _batch_stopped_error() -> RequestAbortedError:
    return RequestAbortedError("the batch was stopped.")


def _error_outcome(error: BaseException) -> Exception:
    if not isinstance(error, Exception):
        return copy_as_sgl_error(error, None)
    trim(error)
    return error


def finish_item_outcome(state: ProgramState) -> Outcome:
    player = state.branch.player
    player.failure_reported = True  # the batch reports the failure
    record_wait_for_all(player)
    return state if player.failure is None else player.failure
