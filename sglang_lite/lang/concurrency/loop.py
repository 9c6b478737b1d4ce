"""The executor loop: a single event loop that executes programs, in one background thread."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from typing import Any

_LOOKUPS = 2  # threads for what blocks in libraries that run on the loop


class Mailbox:
    """Carries calls from any thread onto an event loop, in order. Many calls cost one wake-up.

    Args:
        loop: where the calls are made.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._lock = threading.Lock()
        self._told = False  # the loop is on its way here; under the lock

    def post(self, callback: Callable[..., object], *args: object) -> None:
        """Runs `callback(*args)` on the loop, soon."""
        with self._lock:
            self._calls.append((callback, args))
            told, self._told = self._told, True
        if not told:
            self.loop.call_soon_threadsafe(self._deliver)

    def put(self, callback: Callable[..., object], *args: object) -> None:
        """Runs `callback(*args)` on the loop after `wake`: of many calls only the last one has to wake it."""
        with self._lock:
            self._calls.append((callback, args))

    def wake(self) -> None:
        """Has the loop make the calls that were put, soon."""
        with self._lock:
            if self._told or not self._calls:
                return
            self._told = True
        self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._told = False
                    return
                callback, args = self._calls.popleft()
            try:
                callback(*args)
            except Exception as error:  # one bad call must not stop the others
                self.loop.call_exception_handler({"message": "a posted call failed", "exception": error})


_executor: Mailbox | None = None
_lock = threading.Lock()
_forks = 0


def executor() -> Mailbox:
    """The way onto the process's executor loop, which is started on first use. The loop's state is that of no program:
    it only runs what it is given."""
    global _executor
    if _executor is None:
        with _lock:
            if _executor is None:
                loop = Context().run(asyncio.new_event_loop)  # else it would keep the run that starts it
                threading.Thread(target=_run, args=(loop,), name="sglang_lite-executor", daemon=True).start()
                _executor = Mailbox(loop)
    return _executor


def executor_loop() -> asyncio.AbstractEventLoop | None:
    """The executor loop, None where it has not been started."""
    return None if _executor is None else _executor.loop


def running_mailbox() -> Mailbox:
    """The way onto the event loop that runs here."""
    return executor() if on_executor() else Mailbox(asyncio.get_running_loop())


def on_executor() -> bool:
    """Tells whether this is the executor loop's thread, which must not wait for what it executes itself."""
    return _executor is not None and asyncio._get_running_loop() is _executor.loop


def forks() -> int:
    """Number of forks from the first process to this one. What was made at another number waits for threads that are
    not here."""
    return _forks


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    # SDKs look up names and the like in threads: asyncio would start one a look-up, up to four more than CPUs.
    loop.set_default_executor(ThreadPoolExecutor(_LOOKUPS, "sglang_lite-lookups"))
    loop.run_forever()


def _forget() -> None:
    global _executor, _lock, _forks
    _executor, _lock, _forks = None, threading.Lock(), _forks + 1


os.register_at_fork(after_in_child=_forget)  # threads do not survive a fork
