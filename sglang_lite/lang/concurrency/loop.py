"""The executor loop: a single event loop in a background thread that executes all programs."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, ContextVar
from typing import Any

_LOOKUPS = 2  # threads for blocking calls (such as DNS look-ups) by libraries that run on the loop


class Mailbox:
    """Carries calls from any thread to an event loop, in order. A burst of calls costs one wake-up.

    Args:
        loop: event loop that makes the calls.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._lock = threading.Lock()
        self._scheduled = False  # a delivery is scheduled on the loop; guarded by the lock

    def post(self, callback: Callable[..., object], *args: object) -> None:
        """Adds `callback(*args)` to the loop's queue and wakes the loop."""
        with self._lock:
            self._calls.append((callback, args))
            scheduled = self._scheduled
            self._scheduled = True
        if not scheduled:
            self.loop.call_soon_threadsafe(self._deliver)

    def enqueue(self, callback: Callable[..., object], *args: object) -> None:
        """Adds `callback(*args)` to the queue without waking the loop. The caller must call `wake`
        after the last callback.
        """
        with self._lock:
            self._calls.append((callback, args))

    def wake(self) -> None:
        """Makes the loop deliver the queued calls. Does nothing if the loop is closed."""
        with self._lock:
            if self._scheduled or not self._calls:
                return
            self._scheduled = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            if not self.loop.is_closed():
                raise

    def _deliver(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._scheduled = False
                    return
                callback, args = self._calls.popleft()
            try:
                callback(*args)
            except Exception as error:  # a failed call must not stop those after it
                self.loop.call_exception_handler(
                    {"message": "a posted call failed", "exception": error}
                )


_executor: Mailbox | None = None
_lock = threading.Lock()
_forks = 0


def executor() -> Mailbox:
    """Returns the mailbox of the process's executor loop, starting the loop on first use."""
    global _executor
    if _executor is None:
        with _lock:
            if _executor is None:
                # In an empty context, so that the loop keeps no program's context variables alive.
                loop = Context().run(asyncio.new_event_loop)
                threading.Thread(
                    target=_run_loop, args=(loop,), name="sglang_lite-executor", daemon=True
                ).start()
                _executor = Mailbox(loop)
    return _executor


def executor_loop() -> asyncio.AbstractEventLoop | None:
    """Returns the executor loop, or None if it has not been started."""
    return None if _executor is None else _executor.loop


def running_mailbox() -> Mailbox:
    """Returns a mailbox of the event loop that runs in this thread."""
    return executor() if is_on_executor_thread() else Mailbox(asyncio.get_running_loop())


def is_on_executor_thread() -> bool:
    """Returns True on the executor loop's thread, which must not block on work that it executes
    itself.
    """
    return _executor is not None and asyncio._get_running_loop() is _executor.loop


def fork_count() -> int:
    """Returns how many times `os.fork` was called on the way from the first process to this one. An
    object created at another count relies on threads that don't exist in this process.
    """
    return _forks


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    # SDKs resolve host names and the like in threads. Asyncio's default executor would start one
    # per look-up, up to four more than there are CPUs.
    loop.set_default_executor(ThreadPoolExecutor(_LOOKUPS, "sglang_lite-lookups"))
    loop.run_forever()


def _reset_after_fork() -> None:
    global _executor, _lock, _forks
    _executor = None
    _lock = threading.Lock()
    _forks = _forks + 1


os.register_at_fork(after_in_child=_reset_after_fork)  # threads don't survive a fork


def in_event_loop() -> bool:
    """Returns True if an event loop is running in this thread."""
    return asyncio._get_running_loop() is not None


# Deadline of the current task, as `time.monotonic()`, or None if it has no deadline.
current_deadline: ContextVar[float | None] = ContextVar("sglang_lite_deadline", default=None)
# `time.monotonic()` after which the current task's generation ends wherever a limit may cut it,
# or None if it need not. Read by backends with the capability `winds_down`.
winds_down_at: ContextVar[float | None] = ContextVar("sglang_lite_winds_down_at", default=None)
