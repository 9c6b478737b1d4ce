"""Values and texts that are still being produced. Any number of threads and event loops can wait
for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Protocol

from sglang_lite.lang.concurrency.loop import fork_count, is_on_executor_thread
from sglang_lite.lang.tracebacks import trim
from sglang_lite.process.service_threads import this_thread
from sglang_lite.protocol import Location, ProgramError, RequestTimeoutError, SglError
from sglang_lite.protocol.anything import Json, UserValue


def copy_as_sgl_error(error: BaseException, where: Location | None) -> SglError:
    """Creates a new exception to raise for `error`, located at the given line of the user's
    program.

    The result is a copy of `error` with the same cause if it is an SglError (whose own line takes
    precedence), else a ProgramError caused by `error`. Several readers may raise it in different
    threads, so each of them needs its own copy.
    """
    if not isinstance(error, SglError):
        fresh: SglError = ProgramError(f"{type(error).__name__}: {error}", where=where)
        fresh.__cause__ = error
        trim(fresh)
        return fresh
    fresh = copy.copy(error)
    fresh.where = error.where or where
    fresh.__cause__ = error.__cause__
    trim(fresh)
    return fresh


class WaitObserver(Protocol):
    """Observes threads that wait for values, so that a pool of bodies can run another thread in the
    meantime.
    """

    def add_waiting_thread(self) -> None: ...

    def remove_waiting_thread(self) -> None: ...


class _PoolOfThread(threading.local):
    pool: WaitObserver | None = None


of_thread = _PoolOfThread()  # set by a pool of bodies on its own threads


class Awaited(Protocol):
    """Records what is known to have finished once someone has waited for a certain variable."""

    def note(self, *, failed: bool = False) -> None:
        """Records that someone has waited for the variable, and received its value or, if `failed`,
        its error.
        """


class Variable:
    """The value of a node: set once or failed once, read any number of times.

    Args:
        where: line of the user's code that made the variable.
        made: `fork_count()` in the process that will set the variable. Defaults to this process.

    Attributes:
        where: line of the user's code that made the variable.
        record: the backend's result for the node (a list for several samples); None for values set
            by hand.
        kind: Python type of the value, if one was requested.
        node: path, in the program's tree, of the node that produces the value; "" if no node does.
        log: text of the node while it is generated, closed when the variable is settled; None if no
            stream is read.
        question: question that the node has answered, if its confidence was requested; else None.
        end_position: position in the branch's transcript directly after the node; None if no node
            of the branch made the variable.
        awaited: notified when someone has waited for the variable, to record what is then known to
            have finished; None to record nothing.
        taken_away: True if the variable was already set or failed when an error replaced its
            result.
    """

    __slots__ = (
        "_callbacks", "_done", "_error", "_lock", "_made", "_value", "awaited", "end_position", "kind", "log", "node",
        "question", "record", "taken_away", "where",
    )  # fmt: skip

    def __init__(self, where: Location | None = None, made: int | None = None) -> None:
        self.where = where
        self._made = fork_count() if made is None else made
        self.record: Any = None
        self.kind: Any = None
        self.node = ""
        self.log: TextLog | None = None
        self.question: Any = None
        self.end_position: Any = None
        self.awaited: Awaited | None = None
        self.taken_away = False
        self._lock = threading.Lock()
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], object]] | None = None

    @staticmethod
    def from_value(value: object) -> Variable:
        """Creates a variable that already has its value."""
        variable = Variable()
        variable.set(value)
        return variable

    @property
    def done(self) -> bool:
        return self._done

    def set_error(self, error: BaseException) -> None:
        self.set(None, error)

    def set(self, value: object, error: BaseException | None = None) -> bool:
        """Sets the value, or the error that readers raise instead. Does nothing if the variable is
        already settled.
        """
        with self._lock:
            if self._done:
                return False
            self._value = value
            self._error = error
            self._done = True
            callbacks = self._callbacks
            self._callbacks = None
        if self.log is not None:
            self.log.close(error, self.where)
        for callback in callbacks or ():
            callback()
        return True

    def replace_with_error(self, error: BaseException) -> None:
        """Makes the variable fail with an error, even if it already has a value or another error."""
        if self.set(None, error):
            return
        with self._lock:
            self.taken_away = True
            self._error = error

    def value_so_far(self) -> tuple[UserValue, ...]:
        """Returns the value in a tuple if it has arrived, even if an error has replaced it since;
        otherwise an empty tuple.
        """
        if not self._done:
            return ()
        had_one = self._value is not None or self.record is not None
        return (self._value,) if self._error is None or (self.taken_away and had_one) else ()

    def when_done(self, callback: Callable[[], object]) -> None:
        """Calls `callback` once, when the variable is settled: immediately if it already is,
        otherwise later on the thread that settles it.
        """
        with self._lock:
            if not self._done:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                return
        callback()

    def result(self) -> UserValue:
        """Returns the value of a settled variable, or raises the error with which it failed. A
        KeyboardInterrupt of a check or a tool is raised unchanged, so `except Exception` does not
        catch it.
        """
        if self._error is not None:
            failure = copy_as_sgl_error(self._error, self.where)
            if isinstance(failure.__cause__, KeyboardInterrupt):
                raise KeyboardInterrupt(*failure.__cause__.args) from failure
            raise failure
        return self._value

    def error_or_none(self) -> BaseException | None:
        return self._error

    def wait(self, timeout: float | None = None) -> UserValue:
        """Returns the value, blocking until the variable is settled. Raises the error with which it
        failed.

        Raises:
            RequestTimeoutError: the variable was not settled within `timeout` seconds.
            ProgramError: the code that sets the variable runs in another process, or on this
                thread.
        """
        if not self._done:
            _check_can_wait(self._made, self.where)
            settled = threading.Lock()
            settled.acquire()
            self.when_done(settled.release)
            if of_thread.pool is not None:
                of_thread.pool.add_waiting_thread()
            settled_in_time = settled.acquire(timeout=-1 if timeout is None else timeout)
            if of_thread.pool is not None:
                of_thread.pool.remove_waiting_thread()
            if not settled_in_time:
                raise RequestTimeoutError(f"no value within {timeout:g} s.", where=self.where)
        if self.awaited is not None:
            self.awaited.note(failed=self._error is not None)
        return self.result()

    async def wait_async(self) -> UserValue:
        """Returns the value like `wait`, but as a coroutine, on any event loop."""
        if not self._done:
            future, wake = _future_with_waker()
            self.when_done(wake)
            await future
        if self.awaited is not None:
            self.awaited.note(failed=self._error is not None)
        return self.result()


def _check_can_wait(made: int, where: Location | None = None) -> None:
    if made != fork_count():
        raise ProgramError(
            "the program runs in the process that this one was forked from, so its values never arrive here.",
            hint="Read the value there, or run the program in this process.",
            where=where,
        )
    if this_thread.runs_engine:
        raise ProgramError(
            "waiting here would stop an engine: this code runs on its thread, in a logit processor or a sink.",
            hint="Wait on another thread.",
            where=where,
        )
    if is_on_executor_thread():
        raise ProgramError(
            "waiting here would stop what it waits for: this coroutine or rule runs where programs are executed.",
            hint="Use `await program.arun(…)` or `await s.get(…)`, or a plain function as check.",
        )


def when_all_done(variables: Sequence[Variable], callback: Callable[[], object]) -> None:
    """Calls `callback` once, when the last of the variables (at least one) is settled."""
    # counts down atomically, since variables settle on several threads
    remaining = itertools.count(len(variables) - 1, -1)

    def count_done() -> None:
        if not next(remaining):
            callback()

    for variable in variables:
        variable.when_done(count_done)


def resolve_future(future: asyncio.Future[None]) -> None:
    """Resolves a future unless it is already resolved or cancelled. Called on the future's event
    loop.
    """
    if not future.done():
        future.set_result(None)


def _future_with_waker() -> tuple[asyncio.Future[None], Callable[[], None]]:
    """Creates a future on the running event loop, and returns it with a function that resolves it
    from any thread.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed in the meantime
            loop.call_soon_threadsafe(resolve_future, future)

    return future, wake


class TextLog:
    """Growing text that many readers can follow. Every reader receives all pieces from the first
    one on, however late it starts.

    A piece is (text, metadata). The metadata is None if the backend gave none.

    Attributes:
        awaited: notified when someone has read the text to its end, to record what is then known to
            have finished; None to record nothing.
    """

    def __init__(self) -> None:
        self.awaited: Awaited | None = None
        self._lock = threading.Lock()
        self._made = fork_count()
        self._pieces: list[tuple[str, dict[str, Any] | None]] = []
        self._closed = False
        self._error: BaseException | None = None
        self._where: Location | None = None
        self._copies: tuple[TextLog, ...] = ()  # logs of the same text that end earlier
        self._waiters: list[Callable[[], object]] = []

    @property
    def closed(self) -> bool:
        return self._closed

    def append(self, text: str, meta: dict[str, Json] | None = None) -> None:
        with self._lock:
            if self._closed:
                return
            self._pieces.append((text, meta))
            copies = self._copies
            waiters = self._waiters
            self._waiters = []
        for each in copies:
            each.append(text, meta)
        for wake in waiters:
            wake()

    def close(self, error: BaseException | None = None, where: Location | None = None) -> None:
        """Ends the text. If `error` is given, readers raise it after the last piece."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._error = error
            self._where = where
            waiters = self._waiters
            self._waiters = []
        for wake in waiters:
            wake()

    def copy_until(self, end: Variable) -> TextLog:
        """Returns a log of the same text that is closed when a variable is settled."""
        found = TextLog()
        found.awaited = end.awaited
        with self._lock:
            for text, meta in self._pieces:
                found.append(text, meta)
            self._copies += (found,)

        def close() -> None:
            with self._lock:
                self._copies = tuple([each for each in self._copies if each is not found])
            found.close(end.error_or_none(), end.where)

        end.when_done(close)
        return found

    def pieces_so_far(self) -> list[tuple[str, dict[str, UserValue] | None]]:
        """Returns the pieces received so far."""
        with self._lock:
            return self._pieces[:]

    def text_so_far(self) -> str:
        """Returns the text received so far."""
        with self._lock:
            return "".join(text for text, _ in self._pieces)

    def __iter__(self) -> Iterator[tuple[str, dict[str, UserValue] | None]]:
        at = 0
        while True:
            ready = threading.Lock()
            ready.acquire()
            pieces, ended = self._pieces_from(at, ready.release)
            yield from pieces
            at += len(pieces)
            if ended:
                break
            if not pieces:
                _check_can_wait(self._made)
                ready.acquire()
        self._finish_reading()

    async def __aiter__(self) -> AsyncIterator[tuple[str, dict[str, UserValue] | None]]:
        at = 0
        while True:
            future, wake = _future_with_waker()
            pieces, ended = self._pieces_from(at, wake)
            for piece in pieces:
                yield piece
            at += len(pieces)
            if ended:
                break
            if not pieces:
                await future
        self._finish_reading()

    def _pieces_from(
        self, at: int, wake: Callable[[], object]
    ) -> tuple[list[tuple[str, dict[str, Any] | None]], bool]:
        """Returns the pieces from index `at` on, and whether the log is closed. If the log is open
        but has no such pieces yet, `wake` will be called when the log changes.
        """
        with self._lock:
            pieces = self._pieces[at:]
            if not pieces and not self._closed:
                self._waiters.append(wake)
            return pieces, self._closed

    def _finish_reading(self) -> None:
        """Records that a reader has waited for the end of the text. Raises the log's error if there
        is one.
        """
        if self.awaited is not None:
            self.awaited.note(failed=self._error is not None)
        if self._error is not None:
            raise copy_as_sgl_error(self._error, self._where)
