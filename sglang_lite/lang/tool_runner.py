"""Runs the calls of one turn within their time limit, and returns the results in the model's order.

Calls of async tools and of MCP servers run concurrently. Plain functions run one after another,
because they may not be thread-safe, unless the caller allows running them concurrently.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import wait as wait_for_futures
from contextlib import AbstractContextManager
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import Final, Generic, NoReturn, TypeVar

from sglang_lite.lang.suspension import Suspension
from sglang_lite.lang.tools import SchemaTool, ToolCall
from sglang_lite.protocol import ToolError
from sglang_lite.protocol.anything import UserValue

_R = TypeVar("_R")
_log = logging.getLogger("sglang_lite")
_GRACE_S: Final = 1.0  # seconds in which cancelled coroutines have to end


class ToolRunner(Generic[_R]):
    """Runs the calls of a tool loop. A context manager: leaving it cancels coroutines that are
    still running.

    Args:
        begin: returns a context manager that is entered to start a call.
        finish: makes the result of a call. Its arguments are the call, and a function that returns
            the tool's result or raises the tool's exception.
        parallel: whether plain functions run concurrently, each in a thread.
        limits_functions: whether the time limit applies to plain functions, too, so that they run
            in threads.
    """

    def __init__(
        self,
        begin: Callable[[ToolCall], AbstractContextManager[None]],
        finish: Callable[[ToolCall, Callable[[], UserValue]], _R],
        *,
        parallel: bool,
        limits_functions: bool,
    ) -> None:
        self._begin = begin
        self._finish = finish
        self._parallel = parallel
        self._limits_functions = limits_functions
        self._loop: _LoopThread | None = None

    def __enter__(self) -> ToolRunner[_R]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._loop is not None:
            self._loop.close()

    # ------------------------------------------------------------------------------------- threads

    def run_turn(self, calls: Sequence[ToolCall], seconds: float | None) -> list[_R]:
        """Runs the calls of a turn.

        Args:
            seconds: time limit of each call; None for no limit.
        """
        began = time.monotonic()
        started = list[Future[UserValue] | None]()
        ended = set[int]()  # indices of calls whose results were requested
        try:
            for call in calls:
                started.append(self._start(call))
            waits = [
                partial(self._wait_for_call, call, each, began, seconds)
                for call, each in zip(calls, started)
            ]
            # the functions, in order, while the others run
            done = self._finish_in_order(
                {i: (calls[i], waits[i]) for i, each in enumerate(started) if each is None}
            )
            for i, future in enumerate(started):
                if future is not None:
                    ended.add(i)
                    done[i] = self._finish(calls[i], waits[i])
            return [done[i] for i in range(len(calls))]
        except Exception:
            self._finish_others(
                calls, [None if i in ended else each for i, each in enumerate(started)]
            )
            raise
        finally:
            for future in started:
                if future is not None:
                    future.cancel()

    def _finish_others(
        self,
        calls: Sequence[ToolCall],
        started: Sequence[Future[UserValue] | asyncio.Future[UserValue] | None],
    ) -> None:
        """Finishes calls that have already ended when an error in another call ends the turn, so
        that they are recorded as made. Drops their errors.

        Args:
            started: for each call, its future if the call was started and is not finished yet.
        """
        for call, future in zip(calls, started):
            if future is None or not future.done() or future.cancelled():
                continue
            if future.exception() is None and inspect.isawaitable(future.result()):
                continue
            with contextlib.suppress(Exception):  # a tool may raise anything
                self._finish(call, future.result)

    def _finish_in_order(
        self, waits: Mapping[int, tuple[ToolCall, Callable[[], UserValue]]]
    ) -> dict[int, _R]:
        """Finishes calls one after another. If a program inside a call is suspended, later calls
        are not made.
        """
        done = dict[int, _R]()
        stopped: Suspension | None = None
        for i, (call, wait) in waits.items():
            if stopped is None:
                wait, stopped = _keep_outcome(wait)
            else:
                wait = partial(_raise_error, stopped)
            done[i] = self._finish(call, wait)
        return done

    def _start(self, call: ToolCall) -> Future[UserValue] | None:
        """Starts a call. Returns None if the call has to wait until earlier ones have ended."""
        function = call.function
        if _runs_in_calling_thread(function) and not self._parallel:
            return None
        with self._begin(call):
            if _runs_in_calling_thread(function):
                return _start_thread(call)
            if isinstance(function, SchemaTool):
                return function.start(call.arguments)
            return self._start_awaitable(function(**call.arguments))

    def _start_awaitable(self, awaitable: Awaitable[UserValue]) -> Future[UserValue]:
        if self._loop is None:
            self._loop = _LoopThread()
        return self._loop.start(awaitable)

    def _wait_for_call(
        self,
        call: ToolCall,
        future: Future[UserValue] | None,
        began: float,
        seconds: float | None,
    ) -> UserValue:
        """Waits for a call. Returns the tool's result, or raises the tool's exception.

        Raises:
            ToolError: the call took too long, or was cancelled.
        """
        result: UserValue = None
        if future is None:
            with self._begin(call):
                if self._limits_functions:
                    future = _start_thread(call)
                    began = time.monotonic()
                else:
                    result = call.function(**call.arguments)
        while future is not None or inspect.isawaitable(result):
            if future is None:
                future = self._start_awaitable(result)
            left = None if seconds is None else max(began + seconds - time.monotonic(), 0.0)
            wait_for_futures([future], timeout=left)
            if not future.done():
                if not future.cancel():
                    _warn_of_left_thread(call)
                raise _late_error(seconds)
            try:
                result = future.result()
            except CancelledError as error:  # cancelled by the tool, or when its connection ended
                raise ToolError("it was cancelled.") from error
            future = None
        return result

    # ---------------------------------------------------------------------------------- coroutines

    async def arun_turn(self, calls: Sequence[ToolCall], seconds: float | None) -> list[_R]:
        """Runs the calls of a turn, like `run_turn`, for coroutines. Plain functions run in
        threads, so that they do not block the event loop.
        """
        began = time.monotonic()
        started = list[asyncio.Future[UserValue] | None]()
        try:
            for call in calls:
                started.append(self._start_task(call))
            # the functions, in order, while the others run
            done = dict[int, _R]()
            stopped: Suspension | None = None
            for i, call in enumerate(calls):
                if started[i] is None:
                    end: Callable[[], UserValue] = partial(_raise_error, stopped)
                    if stopped is None:
                        end = await self._await_call(call, None, began, seconds)
                        end, stopped = _keep_outcome(end)
                    done[i] = self._finish(call, end)
            for i, task in enumerate(started):
                if task is not None:
                    end = await self._await_call(calls[i], task, began, seconds)
                    started[i] = None
                    done[i] = self._finish(calls[i], end)
            return [done[i] for i in range(len(calls))]
        except Exception:
            self._finish_others(calls, started)
            raise
        finally:
            await _cancel_tasks([each for each in started if each is not None])

    def _start_task(self, call: ToolCall) -> asyncio.Future[UserValue] | None:
        function = call.function
        if _runs_in_calling_thread(function) and not self._parallel:
            return None
        with self._begin(call):
            if _runs_in_calling_thread(function):
                return asyncio.wrap_future(_start_thread(call))
            if isinstance(function, SchemaTool):
                return asyncio.wrap_future(function.start(call.arguments))
            task: asyncio.Future[UserValue] = asyncio.ensure_future(function(**call.arguments))
            return task

    async def _await_call(
        self,
        call: ToolCall,
        task: asyncio.Future[UserValue] | None,
        began: float,
        seconds: float | None,
    ) -> Callable[[], UserValue]:
        """Waits for a call. Returns a function that returns the tool's result or raises the tool's
        exception.
        """
        in_thread = _runs_in_calling_thread(call.function)
        if task is None:
            with self._begin(call):
                task = asyncio.wrap_future(_start_thread(call))
            began = time.monotonic()
        while True:
            left = None if seconds is None else max(began + seconds - time.monotonic(), 0.0)
            try:
                await asyncio.wait([task], timeout=left)
            except asyncio.CancelledError:
                task.cancel()
                raise
            if not task.done():
                if in_thread:
                    _warn_of_left_thread(call)
                await _cancel_tasks([task])
                return partial(_raise_error, _late_error(seconds))
            if task.cancelled():
                return partial(_raise_error, ToolError("it was cancelled."))
            if task.exception() or not inspect.isawaitable(task.result()):
                return task.result
            task = asyncio.ensure_future(task.result())
            in_thread = False


def _runs_in_calling_thread(function: Callable[..., UserValue]) -> bool:
    """Returns True if a call of the function runs in the calling thread, until it returns."""
    if isinstance(function, SchemaTool):
        return not function.can_start
    return not inspect.iscoroutinefunction(function)


def _warn_of_left_thread(call: ToolCall) -> None:
    _log.warning("the tool %s still runs, and is left behind", call.name)


def _late_error(seconds: float | None) -> ToolError:
    return ToolError(f"it did not end within {seconds:g} s.")


def _keep_outcome(
    work: Callable[[], UserValue],
) -> tuple[Callable[[], UserValue], Suspension | None]:
    """Calls `work`. Returns a function that returns its result or raises its exception. Also
    returns the suspension if `work` raised one, else None.
    """
    try:
        result = work()
    except Suspension as error:
        return partial(_raise_error, error), error
    except Exception as error:  # a tool may raise anything
        return partial(_raise_error, error), None
    return lambda: result, None


def _raise_error(error: BaseException | None) -> NoReturn:
    assert error is not None
    raise error


def _start_thread(call: ToolCall) -> Future[UserValue]:
    """Calls a function in a new daemon thread, which may be left running after a timeout."""
    future = Future[UserValue]()
    future.set_running_or_notify_cancel()  # it can't be cancelled
    context = copy_context()

    def run() -> None:
        try:
            result = context.run(call.function, **call.arguments)
        except BaseException as error:  # raised where the call is waited for
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=f"sglang_lite-tool-{call.name}", daemon=True).start()
    return future


async def _cancel_tasks(tasks: Iterable[asyncio.Future[UserValue]]) -> None:
    """Cancels tasks and waits briefly until they have ended. Logs those that are still running."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        _, pending = await asyncio.wait(running, timeout=_GRACE_S)
        for task in pending:
            _log.warning("the tool %r still runs after its end, and is left behind", task)


class _LoopThread:
    """Event loop in a thread of its own, for the async tools of a plain function."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="sglang_lite-tools", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        loop = self._loop
        try:
            while not self._closing:
                # If a tool raises one of these, the loop stops. The tool's future is settled
                # when the loop runs again.
                with contextlib.suppress(KeyboardInterrupt, SystemExit):
                    loop.run_forever()
            loop.run_until_complete(_cancel_tasks(asyncio.all_tasks(loop)))
            loop.run_until_complete(loop.shutdown_asyncgens())
            with contextlib.suppress(TimeoutError):
                loop.run_until_complete(
                    asyncio.wait_for(loop.shutdown_default_executor(), _GRACE_S)
                )
        finally:
            loop.close()

    def start(self, awaitable: Awaitable[UserValue]) -> Future[UserValue]:
        coroutine = awaitable if isinstance(awaitable, Coroutine) else _as_coroutine(awaitable)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancels running tasks and ends the thread, unless a tool blocks it."""
        self._closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(3 * _GRACE_S)
        if self._thread.is_alive():
            _log.warning("an async tool blocks its event loop, whose thread is left behind")


async def _as_coroutine(awaitable: Awaitable[UserValue]) -> UserValue:
    return await awaitable
