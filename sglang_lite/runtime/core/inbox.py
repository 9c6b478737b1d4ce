"""Queue of commands from other threads for the thread that runs the step loop."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from sglang_lite.protocol import EngineClosedError
from sglang_lite.runtime.core.gate import CLOSED, Gate

logger = logging.getLogger("sglang_lite")
T = TypeVar("T")


def _run_and_log_errors(command: Callable[[], object]) -> None:
    try:
        command()
    except Exception:  # the caller's code must not end the loop
        logger.exception("a call posted to the engine's thread failed")


class Inbox:
    """Queue of commands for a loop's thread.

    Args:
        interrupt: function called after each new command, in case the loop waits for something
            else; must take no lock.
        prepare: function called on the loop's thread before it runs commands.

    Attributes:
        gate: checks of callers; rejects them once the engine is being closed, while the loop may
            still run.
        closing: whether the loop should end; used on its thread only.
        crash: exception that ended the loop, or None if it was closed.
    """

    def __init__(
        self,
        interrupt: Callable[[], object] = lambda: None,
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        self.gate = Gate()
        self.closing = False
        self.crash: BaseException | None = None
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended = False  # accepts no more commands; guarded by the lock
        self._interrupt = interrupt
        self._prepare = prepare

    # ----------------------------------------------------------------------------------- any thread

    @property
    def empty(self) -> bool:
        return self._commands.empty()

    def post(self, command: Callable[[], object]) -> None:
        """Queues a command to run on the loop's thread.

        Raises:
            EngineClosedError: the loop has ended, or this process is a forked copy; nothing was
                posted.
        """
        self.gate.check_process()
        with self._lock:
            if self._ended:
                raise EngineClosedError(CLOSED) from self.crash
            self._put(command)

    def _put(self, command: Callable[[], object]) -> None:
        self._commands.put(command)
        self._interrupt()

    def post_for_result(self, command: Callable[[], T]) -> Future[T]:
        """Queues a command to run on the loop's thread, and returns the future of its result.

        Raises:
            EngineClosedError: the loop has ended, or this process is a forked copy.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(command())
            except Exception as error:  # belongs to the caller and must not end the loop
                future.set_exception(error)

        self.post(run)
        return future

    def call_and_wait(self, command: Callable[[], T]) -> T:
        """Runs a command like `post_for_result`, waits for it and returns its result or raises its
        exception.
        """
        return self.post_for_result(command).result()

    def post_if_open(self, command: Callable[[], object]) -> None:
        """Posts a command like `post`, but does nothing if the loop has ended."""
        with contextlib.suppress(EngineClosedError):
            self.post(command)

    def post_lock_free(self, command: Callable[[], object]) -> None:
        """Posts a command without taking a lock, so it can be called during garbage collection,
        whatever locks the thread holds. Exceptions of the command are logged.
        """
        if not self.gate.is_forked_copy:
            self._put(partial(_run_and_log_errors, command))

    def close(self) -> None:
        """Tells the loop to end. Takes no lock, so it can be called during garbage collection,
        whatever locks the thread holds.
        """
        self._put(self._close)

    def _close(self) -> None:
        self.closing = True

    # ---------------------------------------------------------------------------- the loop's thread

    def wait(self, seconds: float | None = None) -> bool:
        """Waits for a command and runs it. Returns False if none came in time.

        Args:
            seconds: maximum time to wait; None for no limit.
        """
        try:
            command = self._commands.get(timeout=seconds)
        except queue.Empty:
            return False
        self._prepare()
        command()
        return True

    def run_until_quiet(self, pause: float, limit: float) -> None:
        """Runs all queued commands. If there were any, also runs the commands that follow, until
        none has come for `pause` seconds or `limit` seconds have passed.
        """
        until = time.monotonic() + limit
        more = not self.empty
        while more and time.monotonic() < until:
            self.run()
            # on a busy machine the wait may end late, with commands queued
            more = self.wait(pause) or not self.empty

    def run(self) -> None:
        """Runs all queued commands."""
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            self._prepare()
            command()

    def reject_commands(self) -> None:
        """Rejects all further commands."""
        self.closing = True
        with self._lock:
            self._ended = True
        self.gate.release_thread()
