"""The executor loop: a single event loop that executes programs, in one background thread."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, ContextVar
from typing import Any

_LOOKUPS = 2  # threads for blocking calls (DNS look-ups, say) of libraries that run on the loop


class Mailbox:
    """Carries calls from any thread onto an event loop, in order. Many calls cost one wake-up.

    Args:
        loop: event loop that makes the calls.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._lock = threading.Lock()
        self._scheduled = False  # a delivery is scheduled on the loop; guarded by the lock

    def post(self, callback: Callable[..., object], *args: object) -> None:
        """Schedules `callback(*args)` on the loop, and wakes the loop."""
        with self._lock:
            self._calls.append((callback, args))
            scheduled = self._scheduled
            self._scheduled = True
        if not scheduled:
            self.loop.call_soon_threadsafe(self._deliver)

    def enqueue(self, callback: Callable[..., object], *args: object) -> None:
        """Queues `callback(*args)` without waking the loop: of many calls only the last one has to
        be followed by `wake`.
        """
        with self._lock:
            self._calls.append((callback, args))

    def wake(self) -> None:
        """Makes the loop deliver the calls that were queued by `enqueue`. Does nothing if the loop
        is closed: nobody waits there any more.
        """
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
            except Exception as error:  # a failed call must not stop the calls behind it
                self.loop.call_exception_handler(
                    {"message": "a posted call failed", "exception": error}
                )


_executor: Mailbox | None = None
_lock = threading.Lock()
_forks = 0


def executor() -> Mailbox:
    """Mailbox of the process's executor loop, which is started on first use. The loop is created in
    an empty context, so that it keeps no program's context variables alive.
    """
    global _executor
    if _executor is None:
        with _lock:
            if _executor is None:
                # An empty context: else the loop would keep that of the run that starts it.
                loop = Context().run(asyncio.new_event_loop)
                threading.Thread(
                    target=_run, args=(loop,), name="sglang_lite-executor", daemon=True
                ).start()
                _executor = Mailbox(loop)
    return _executor


def executor_loop() -> asyncio.AbstractEventLoop | None:
    """The executor loop, or None if it has not been started."""
    return None if _executor is None else _executor.loop


def running_mailbox() -> Mailbox:
    """Mailbox of the event loop that runs in this thread."""
    return executor() if on_executor() else Mailbox(asyncio.get_running_loop())


def on_executor() -> bool:
    """Returns True if this is the executor loop's thread, which must not block on work that it
    executes itself.
    """
    return _executor is not None and asyncio._get_running_loop() is _executor.loop


def forks() -> int:
    """Number of `os.fork` calls between the first process and this one. Objects that were made at
    another number rely on threads that don't exist in this process.
    """
    return _forks


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    # SDKs resolve host names and the like in threads: asyncio's default executor would start one
    # for each look-up, up to four more than there are CPUs.
    loop.set_default_executor(ThreadPoolExecutor(_LOOKUPS, "sglang_lite-lookups"))
    loop.run_forever()


def _forget() -> None:
    global _executor, _lock, _forks
    _executor = None
    _lock = threading.Lock()
    _forks = _forks + 1


os.register_at_fork(after_in_child=_forget)  # threads don't survive a fork


def in_event_loop() -> bool:
    """True if an event loop is running in this thread."""
    return asyncio._get_running_loop() is not None


# Deadline of the current task, as `time.monotonic()`, or None if it has no deadline.
current_deadline: ContextVar[float | None] = ContextVar("sglang_lite_deadline", default=None)
# `time.monotonic()` from which on the current task's generation is to end where a limit may cut it,
# or None for never. Read by backends with the capability `winds_down`.
winds_down_at: ContextVar[float | None] = ContextVar("sglang_lite_winds_down_at", default=None)
