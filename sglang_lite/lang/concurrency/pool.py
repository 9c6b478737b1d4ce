"""A bounded thread pool for blocking work, such as the bodies of programs and backends with
blocking hooks.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from sglang_lite.lang.concurrency.loop import Mailbox, fork_count
from sglang_lite.lang.concurrency.variables import copy_as_sgl_error
from sglang_lite.protocol.anything import UserValue


class ThreadPool:
    """Runs jobs on at most `size` daemon threads, which start on demand and end when idle.

    Waking a thread costs more than many jobs do. Only one thread is therefore woken first, and it
    wakes the next one if it finds more jobs. Few threads work off a burst of short jobs, while a
    burst of long ones still uses all of them.

    Args:
        size: maximum number of threads.
        name: name of the threads.
        idle: seconds after which a thread without a job ends.
    """

    def __init__(self, size: int, name: str, idle: float = 5.0) -> None:
        self._size = size
        self._name = name
        self._longest = idle
        self._reset_threads()

    def _reset_threads(self) -> None:
        self._made = fork_count()
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], object]] = deque()
        self._idle: list[threading.Lock] = []
        self._threads = 0
        self._waking = False

    def submit(self, job: Callable[[], object]) -> None:
        """Adds a job to the queue, to be run on a thread of the pool. The job must handle its own
        exceptions.
        """
        if (
            self._made != fork_count()
        ):  # after a fork, the pool's threads exist only in the parent process
            self._reset_threads()
        with self._lock:
            self._jobs.append(job)
            self._wake_one()

    def _wake_one(self) -> None:
        """Wakes or starts a thread unless one is already being woken. Called with the lock held."""
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
                del job  # an idle thread must not keep its last job alive
            elif not bell.acquire(timeout=self._longest):
                with self._lock:
                    if bell in self._idle:
                        self._idle.remove(bell)
                        self._threads -= 1
                        return
                bell.acquire()  # the bell was released between the timeout and taking the lock, so a job is waiting


async def run_in_pool(pool: ThreadPool, work: Callable[[], UserValue]) -> UserValue:
    """Executes blocking work on a pool and returns its result. If the caller is cancelled, the
    thread still finishes the work.
    """
    return await run_on_other_thread(pool.submit, work)


async def run_on_other_thread(
    submit: Callable[[Callable[[], object]], object], work: Callable[[], UserValue]
) -> UserValue:
    """Executes `work` on another thread, in a copy of this task's context, and returns its result.

    Args:
        submit: schedules a job on that thread.
        work: blocking function.
    """
    context = copy_context()
    mailbox = Mailbox(asyncio.get_running_loop())
    future: asyncio.Future[Any] = mailbox.loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(result)

    def run() -> None:
        try:
            result = context.run(work)
            failure = None
        # hooks may raise anything; a future rejects StopIteration and non-Exceptions, so they are wrapped
        except BaseException as error:
            passes = isinstance(error, Exception) and not isinstance(error, StopIteration)
            result = None
            failure = error if passes else copy_as_sgl_error(error, None)
        mailbox.post(settle, result, failure)

    submit(run)
    return await future
