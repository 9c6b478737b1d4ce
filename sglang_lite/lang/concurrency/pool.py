"""A bounded pool of threads for work that blocks: bodies of programs, and backends with blocking hooks."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from sglang_lite.lang.concurrency.loop import Mailbox, forks
from sglang_lite.lang.concurrency.variables import located
from sglang_lite.protocol.anything import UserValue


class ThreadPool:
    """Runs jobs on at most `size` daemon threads, started when they are needed and ended when they long were not.

    Waking a thread costs more than many a job, so one is woken at a time, and wakes the next if it finds more to do:
    a burst of short jobs is worked off by few threads, a burst of long ones still gets all of them.

    Args:
        size: most threads.
        name: of the threads.
        idle: seconds after which a thread without a job ends.
    """

    def __init__(self, size: int, name: str, idle: float = 5.0) -> None:
        self._size, self._name, self._longest = size, name, idle
        self._begin()

    def _begin(self) -> None:
        self._made = forks()
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], object]] = deque()
        self._idle: list[threading.Lock] = []
        self._threads = 0
        self._waking = False

    def submit(self, job: Callable[[], object]) -> None:
        """Runs `job` soon. It must deal with its own exceptions."""
        if self._made != forks():  # none of the threads is in this process
            self._begin()
        with self._lock:
            self._jobs.append(job)
            self._wake_one()

    def _wake_one(self) -> None:
        """Wakes or starts a thread, unless one is on its way. Under the lock."""
        if self._waking:
            return
        if self._idle:
            self._waking = True
            self._idle.pop().release()
        elif self._threads < self._size:
            self._waking = True
            self._threads += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _work(self) -> None:
        bell = threading.Lock()
        bell.acquire()
        while True:
            with self._lock:
                self._waking = False
                job = self._jobs.popleft() if self._jobs else None
                if job is None:
                    self._idle.append(bell)
                elif self._jobs:
                    self._wake_one()
            if job is not None:
                job()
                del job  # an idle thread keeps nothing alive
            elif not bell.acquire(timeout=self._longest):
                with self._lock:
                    if bell in self._idle:
                        self._idle.remove(bell)
                        self._threads -= 1
                        return
                bell.acquire()  # it has just been rung


async def in_pool(pool: ThreadPool, work: Callable[[], UserValue]) -> UserValue:
    """Runs blocking work on a pool. Cancelling leaves the thread to finish by itself."""
    return await elsewhere(pool.submit, work)


async def elsewhere(submit: Callable[[Callable[[], object]], object], work: Callable[[], UserValue]) -> UserValue:
    """Runs `work` in this task's context, on the thread that `submit` has jobs run on. Returns its result."""
    context = copy_context()
    mailbox = Mailbox(asyncio.get_running_loop())
    future: asyncio.Future[Any] = mailbox.loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(result)

    def run() -> None:
        try:
            result, failure = context.run(work), None
        except BaseException as error:  # a hook may raise anything; it is the caller's, as far as a future takes it
            passes = isinstance(error, Exception) and not isinstance(error, StopIteration)
            result, failure = None, error if passes else located(error, None)
        mailbox.post(settle, result, failure)

    submit(run)
    return await future
