"""The one event loop that executes programs, in one background thread."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class ExecutorLoop:
    """An asyncio loop on a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="sglang_lite-executor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def post(self, callback: Callable[..., object], *args: Any) -> None:
        """Runs `callback(*args)` on the loop, from any thread."""
        self.loop.call_soon_threadsafe(callback, *args)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine on the loop, from any other thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def here(self) -> bool:
        """Whether this is the loop's own thread."""
        return threading.current_thread() is self._thread


_executor: ExecutorLoop | None = None
_lock = threading.Lock()


def executor() -> ExecutorLoop:
    """The process's executor, started on first use. Its state is that of no program: it only runs what it is given."""
    global _executor
    if _executor is None:
        with _lock:
            if _executor is None:
                _executor = ExecutorLoop()
    return _executor


def _forget() -> None:
    global _executor, _lock
    _executor, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)  # threads do not survive a fork
