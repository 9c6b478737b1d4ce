"""Commands from other threads for the one that runs the step loop."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from sglang_lite.protocol import BackendError, EngineClosedError

logger = logging.getLogger("sglang_lite")
T = TypeVar("T")


def forked_copy_error(process: int) -> EngineClosedError:
    """The error of an engine of another process, of which this one is a forked copy."""
    return EngineClosedError(
        f"the engine belongs to process {process}, and this one ({os.getpid()}) is a forked copy of it.",
        hint="Start an engine in this process (and make it the default backend here), or start processes with "
        'multiprocessing\'s "spawn" method.',
    )


def self_wait_error(name: str) -> BackendError:
    """The error of a call that would wait for the thread that it was made on."""
    return BackendError(
        f"{name} was called on the engine's own thread, by a logit processor or a sink, and waits for it.",
        hint="Call it on another thread; submit() and its like don't wait.",
    )


def _tried(command: Callable[[], object]) -> None:
    try:
        command()
    except Exception:  # the caller's, not the loop's
        logger.exception("what was left to the engine's thread failed")


class Inbox:
    """
    Args:
        interrupt: called when a command has come: the loop may be waiting for something else. Takes no lock.

    Attributes:
        closing: the loop was told to end; read and written on its thread.
        crash: what ended the loop, if that was no `close`.
    """

    def __init__(self, interrupt: Callable[[], object] = lambda: None) -> None:
        self.closing = False
        self.crash: BaseException | None = None
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._shut = False
        self._ended = False  # takes no more commands; under the lock
        self._process = os.getpid()
        self._thread: int | None = None  # that runs the commands
        self._interrupt = interrupt

    # ------------------------------------------------------------------------------------- any thread

    @property
    def empty(self) -> bool:
        return self._commands.empty()

    @property
    def is_copy(self) -> bool:
        """True if this process is a forked copy, which does not have the loop's thread."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """To be called before any lock is taken: in a forked copy it may be held by a thread that is not there.

        Raises:
            EngineClosedError: this process is a forked copy.
        """
        if self.is_copy:
            raise forked_copy_error(self._process)

    def check_open(self) -> None:
        """
        Raises:
            EngineClosedError: nothing more may be asked; or as `check_process`.
        """
        self.check_process()
        if self._shut:
            raise EngineClosedError("the engine is closed.")

    def check_wait(self, name: str) -> None:
        """
        Raises:
            BackendError: `name` was called on the loop's own thread, which would wait for itself.
            EngineClosedError: as `check_open`.
        """
        self.check_process()
        if threading.get_ident() == self._thread:
            raise self_wait_error(name)
        self.check_open()

    def shut(self) -> None:
        """Lets `check_open` refuse what is asked from now on; the loop runs on."""
        self._shut = True

    def post(self, command: Callable[[], object]) -> None:
        """Runs `command` on the loop's thread, soon.

        Raises:
            EngineClosedError: the loop has ended, or runs in another process; nothing was posted.
        """
        self.check_process()
        with self._lock:
            if self._ended:
                raise EngineClosedError("the engine is closed.") from self.crash
            self._put(command)

    def _put(self, command: Callable[[], object]) -> None:
        self._commands.put(command)
        self._interrupt()

    def call(self, command: Callable[[], T]) -> T:
        """Runs `command` on the loop's thread and returns its result.

        Raises:
            EngineClosedError: the loop has ended.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(command())
            except Exception as error:  # the caller's, not the loop's
                future.set_exception(error)

        self.post(run)
        return future.result()

    def tell(self, command: Callable[[], object]) -> None:
        """`post`, but nothing happens if the loop has ended."""
        with contextlib.suppress(EngineClosedError):
            self.post(command)

    def later(self, command: Callable[[], object]) -> None:
        """`tell` without a lock: whoever collects garbage calls it, whatever it holds."""
        if not self.is_copy:
            self._put(partial(_tried, command))

    def close(self) -> None:
        """Tells the loop to end. Takes no lock: whoever collects garbage calls it, whatever it holds."""
        self._put(self._close)

    def _close(self) -> None:
        self.closing = True

    # --------------------------------------------------------------------------------- the loop's thread

    def claim(self) -> None:
        """Makes the calling thread the one that runs the commands."""
        self._thread = threading.get_ident()

    @property
    def runs_here(self) -> bool:
        """True if this is the thread of the loop, which has not ended."""
        return threading.get_ident() == self._thread and not self._ended

    def wait(self, seconds: float | None = None) -> bool:
        """Waits for a command and runs it. False: none came.

        Args:
            seconds: at most; None for as long as it takes.
        """
        try:
            command = self._commands.get(timeout=seconds)
        except queue.Empty:
            return False
        command()
        return True

    def gather(self, pause: float, most: float) -> None:
        """Runs all commands that are there. Where there are any, others may follow: those too, until none has come for
        `pause` seconds, or `most` seconds are over."""
        until = time.monotonic() + most
        more = not self.empty
        while more and time.monotonic() < until:
            self.run()
            more = self.wait(pause) or not self.empty  # the wait may end late, beside a thread that computes

    def run(self) -> None:
        """Runs all commands that are there."""
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def end(self) -> None:
        """Refuses all further commands."""
        self.closing = True
        with self._lock:
            self._ended = True
