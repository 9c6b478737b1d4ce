"""Values and texts that are still being produced, for any number of threads and event loops that
wait for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Protocol

from sglang_lite.lang.concurrency.loop import forks, on_executor
from sglang_lite.lang.tracebacks import trim
from sglang_lite.protocol import Location, ProgramError, RequestTimeoutError, SglError
from sglang_lite.protocol.anything import Json, UserValue
from sglang_lite.service_threads import this_thread


def located(error: BaseException, where: Location | None) -> SglError:
    """Fresh error to raise for `error`, with the line of the user's program: a copy of the same
    class and cause if `error` is an SglError, else a ProgramError that is caused by it.

    Several readers raise it, each in its own thread, so each of them needs its own copy.
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


class Blocking(Protocol):
    """Watcher of threads that wait for values, so that a pool of bodies can run another thread
    meanwhile.
    """

    def blocked(self) -> None: ...

    def unblocked(self) -> None: ...


class _PoolOfThread(threading.local):
    pool: Blocking | None = None


of_thread = _PoolOfThread()  # set by a pool of bodies on its own threads


class Awaited(Protocol):
    """Part of a program that is known to be finished once somebody has waited for a variable."""

    def note(self, *, failed: bool = False) -> None:
        """Notes that the variable was waited for, and has its value or, if `failed`, an error."""


class Variable:
    """The value of a node: set once or failed once, read any number of times.

    Args:
        where: line of the user's code that made the variable.
        made: `forks()` of the process that will set the variable. Defaults to this process.

    Attributes:
        where: line of the user's code that made the variable.
        record: the backend's result for the node (a list for several samples); None for values set
            by hand.
        kind: Python type of the value, if one was requested.
        node: path in the program's tree of the node that makes it; "" for a value that no node
            makes.
        log: text of the node while it is generated, closed when the variable is settled; None if no
            stream is read.
        question: question that the node has answered, if its confidence was requested; else None.
        end_position: position in the branch's transcript directly after the node; None if no node
            of the branch made the variable.
        awaited: what is known to be finished once somebody has waited for the variable; None if
            nothing is.
        taken_away: True if its value or its failure had come, and was replaced by an error.
    """

    __slots__ = (
        "_callbacks", "_done", "_error", "_lock", "_made", "_value", "awaited", "end_position", "kind", "log", "node",
        "question", "record", "taken_away", "where",
    )  # fmt: skip

    def __init__(self, where: Location | None = None, made: int | None = None) -> None:
        self.where = where
        self._made = forks() if made is None else made
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
    def of(value: object) -> Variable:
        """Variable that has its value already."""
        variable = Variable()
        variable.set(value)
        return variable

    @property
    def done(self) -> bool:
        return self._done

    def fail(self, error: BaseException) -> None:
        self.set(None, error)

    def set(self, value: object, error: BaseException | None = None) -> bool:
        """Sets the value, or the error that readers raise instead. Does nothing, and returns False,
        if the variable is already set or failed.
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

    def take_away(self, error: BaseException) -> None:
        """Fails the variable, even if it has its value already or has failed with another error."""
        if self.set(None, error):
            return
        with self._lock:
            self.taken_away = True
            self._error = error

    def so_far(self) -> tuple[UserValue, ...]:
        """The value if it has come, even if it was taken away since; empty if it has not."""
        if not self._done:
            return ()
        had_one = self._value is not None or self.record is not None
        return (self._value,) if self._error is None or (self.taken_away and had_one) else ()

    def when_done(self, callback: Callable[[], object]) -> None:
        """Calls `callback` once, when the variable is set or failed: immediately, or later on the
        thread that settles it.
        """
        with self._lock:
            if not self._done:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                return
        callback()

    def result(self) -> UserValue:
        """Value of a settled variable. Raises the error with which it failed."""
        if self._error is not None:
            raise located(self._error, self.where)
        return self._value

    def error(self) -> BaseException | None:
        return self._error

    def wait(self, timeout: float | None = None) -> UserValue:
        """Blocks until the variable is settled, and returns its value.

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
                of_thread.pool.blocked()
            settled_in_time = settled.acquire(timeout=-1 if timeout is None else timeout)
            if of_thread.pool is not None:
                of_thread.pool.unblocked()
            if not settled_in_time:
                raise RequestTimeoutError(f"no value within {timeout:g} s.", where=self.where)
        if self.awaited is not None:
            self.awaited.note(failed=self._error is not None)
        return self.result()

    async def get(self) -> UserValue:
        """Coroutine form of `wait`, for any event loop."""
        if not self._done:
            future, wake = _bell()
            self.when_done(wake)
            await future
        if self.awaited is not None:
            self.awaited.note(failed=self._error is not None)
        return self.result()


def _check_can_wait(made: int, where: Location | None = None) -> None:
    if made != forks():
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
    if on_executor():
        raise ProgramError(
            "waiting here would stop what it waits for: this coroutine or rule runs where programs are executed.",
            hint="Use `await program.arun(…)` or `await s.get(…)`, or a plain function as check.",
        )


def when_all_done(variables: Sequence[Variable], callback: Callable[[], object]) -> None:
    """Calls `callback` once, when the last of the variables (at least one) is settled."""
    # counts down atomically: variables settle on several threads
    remaining = itertools.count(len(variables) - 1, -1)

    def one_more() -> None:
        if not next(remaining):
            callback()

    for variable in variables:
        variable.when_done(one_more)


def resolve(future: asyncio.Future[None]) -> None:
    """Resolves a future unless it was cancelled or resolved before. Called on the future's event
    loop.
    """
    if not future.done():
        future.set_result(None)


def _bell() -> tuple[asyncio.Future[None], Callable[[], None]]:
    """Future of the running event loop, and a function that resolves it from any thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(resolve, future)

    return future, wake


class TextLog:
    """Text that grows, as a replayable broadcast: every reader, early or late, receives every piece
    from the first one on.

    A piece is (text, metadata); the metadata is None if the backend gave none.

    Attributes:
        awaited: what is known to be finished once somebody has read the text to its end; None if
            nothing is.
    """

    def __init__(self) -> None:
        self.awaited: Awaited | None = None
        self._lock = threading.Lock()
        self._made = forks()
        self._pieces: list[tuple[str, dict[str, Any] | None]] = []
        self._closed = False
        self._error: BaseException | None = None
        self._where: Location | None = None
        self._copies: tuple[TextLog, ...] = ()  # logs that end earlier
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

    def until(self, end: Variable) -> TextLog:
        """Log with the same text, which is closed when a variable is settled."""
        found = TextLog()
        found.awaited = end.awaited
        with self._lock:
            for text, meta in self._pieces:
                found.append(text, meta)
            self._copies += (found,)

        def close() -> None:
            with self._lock:
                self._copies = tuple([each for each in self._copies if each is not found])
            found.close(end.error(), end.where)

        end.when_done(close)
        return found

    def so_far(self) -> str:
        """The text until now."""
        with self._lock:
            return "".join(text for text, _ in self._pieces)

    def __iter__(self) -> Iterator[tuple[str, dict[str, UserValue] | None]]:
        at = 0
        while True:
            ready = threading.Lock()
            ready.acquire()
            pieces, ended = self._from(at, ready.release)
            yield from pieces
            at += len(pieces)
            if ended:
                break
            if not pieces:
                _check_can_wait(self._made)
                ready.acquire()
        self._end()

    async def __aiter__(self) -> AsyncIterator[tuple[str, dict[str, UserValue] | None]]:
        at = 0
        while True:
            future, wake = _bell()
            pieces, ended = self._from(at, wake)
            for piece in pieces:
                yield piece
            at += len(pieces)
            if ended:
                break
            if not pieces:
                await future
        self._end()

    def _from(
        self, at: int, wake: Callable[[], object]
    ) -> tuple[list[tuple[str, dict[str, Any] | None]], bool]:
        """Pieces from index `at` on, and True if the log is closed. If there are none yet and the
        log is open, `wake` is called when the log changes.
        """
        with self._lock:
            pieces = self._pieces[at:]
            if not pieces and not self._closed:
                self._waiters.append(wake)
            return pieces, self._closed

    def _end(self) -> None:
        """Ends a reader's way through the text."""
        if self.awaited is not None:
            self.awaited.note(failed=self._error is not None)
        if self._error is not None:
            raise located(self._error, self._where)
