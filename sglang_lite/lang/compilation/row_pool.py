"""Pools for the rows of a compiled batch. One thread, or the executor loop, fills and submits the rows and collects
their outcomes; no body runs, and no row has a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeAlias

from sglang_lite.lang.backend.base_backend import BaseBackend, priority_keywords
from sglang_lite.lang.batches.body_pool import Outcome, Report
from sglang_lite.lang.compilation.held_row import HeldRow
from sglang_lite.lang.compilation.whole_row import WholeRow
from sglang_lite.lang.concurrency.loop import executor
from sglang_lite.lang.execution.run import current_run, deadline_of, too_long
from sglang_lite.protocol import RequestAbortedError, SglError

Row: TypeAlias = HeldRow | WholeRow


class RowPool:
    """Pool that plays the rows of a batch, of which at most `window` are under way.

    Args:
        jobs: index of each row, and a function that makes the row.
        window: maximum number of rows under way.
        report: called with each row's index and outcome, on the pool's thread.
        until_released: whether a row is under way until `release` is called for it, instead of until it has ended.
        timeout: seconds for each row, or None for no limit.
    """

    def __init__(
        self,
        jobs: Iterable[tuple[int, Callable[[], Row]]],
        window: int,
        report: Report,
        *,
        until_released: bool,
        timeout: float | None,
    ) -> None:
        self._jobs, self._room, self._report, self._until_released = iter(jobs), window, report, until_released
        self._timeout, self._outer = timeout, current_run.get()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()  # wakes the pool's thread
        self._ended: deque[tuple[int, Row]] = deque()
        self._released: deque[None] = deque()
        self._open: dict[int, Row] = {}
        self._due: deque[tuple[float, int, SglError]] = deque()  # deadline, row and error, in order of the deadlines
        self._stopped = threading.Event()
        self._error: SglError | None = None  # outcome of the remaining rows after `stop`
        self._flush = self._ring  # one object for all rows, so that a backend calls it once a step
        if self._outer is not None:
            self._outer.register_inner(self)

    def start(self) -> None:
        threading.Thread(target=self._run, name="sglang_lite-rows", daemon=True).start()

    def release(self) -> None:
        """Makes room for another row, if rows are under way until they are released."""
        self._released.append(None)
        self._bell.put(None)

    def stop(self, error: SglError | None = None) -> None:
        """Starts no further rows, and stops those under way.

        Args:
            error: outcome to report for all remaining rows; None to report none.
        """
        self._error = self._error or error
        self._stopped.set()
        self._bell.put(None)

    def _run(self) -> None:
        more = True
        while not self._stopped.is_set():
            while more and self._room and not self._stopped.is_set():
                more = self._begin_next()
            if not more and not self._open:
                break
            self._wait()
            self._take()
        error = self._error or RequestAbortedError("the batch was stopped.")
        for row in list(self._open.values()):
            row.told = None
            row.stop(error)
        if self._error is not None:
            for index in [*self._open, *(index for index, _ in self._jobs)]:
                self._report(index, error)

    def _begin_next(self) -> bool:
        job = next(self._jobs, None)
        if job is None:
            return False
        index, make = job
        self._room -= 1
        try:
            row = make()
            row.told, row.flush = partial(self._told, index), self._flush
            self._open[index] = row
            due, timeout = deadline_of(self._timeout, self._outer)
            if due is not None:
                self._due.append((due, index, too_long(timeout)))
            row.start()
        except Exception as error:  # the outcome of that row
            self._open.pop(index, None)
            self._end(index, error)
        return True

    def _told(self, index: int, row: Row) -> None:
        """Queues a row that has ended. Called on any thread; `_ring` follows once for all rows that end together."""
        self._ended.append((index, row))

    def _ring(self) -> None:
        if self._ended:
            self._bell.put(None)

    def _wait(self) -> None:
        while self._due and self._due[0][1] not in self._open:
            self._due.popleft()
        if not self._due:
            self._bell.get()
            return
        due, index, error = self._due[0]
        try:
            self._bell.get(timeout=max(due - time.monotonic(), 0))
        except queue.Empty:
            self._open[index].stop(error)  # which ends the row

    def _take(self) -> None:
        while self._ended:
            index, row = self._ended.popleft()
            if self._open.pop(index, None) is None:
                continue
            self._end(index, _outcome(row))
        while self._released:
            self._released.popleft()
            self._room += 1

    def _end(self, index: int, outcome: Outcome) -> None:
        self._report(index, outcome)
        if not self._until_released:
            self._room += 1


def _outcome(row: Row) -> Outcome:
    try:
        return row.outcome()
    except Exception as error:  # the outcome of that row
        return error


class RemoteRowPool:
    """Pool that hands all rows of a batch to a backend in one request. Runs on the executor loop.

    Args:
        backend: backend that plays the rows.
        rows: rows by index.
        failed: errors of rows that can't be played, by index.
        window: maximum number of rows under way at the backend, and of outcomes that were not released here.
        report, until_released, timeout: as for RowPool.
    """

    def __init__(
        self,
        backend: BaseBackend,
        rows: Mapping[int, WholeRow],
        failed: Mapping[int, Exception],
        window: int,
        report: Report,
        *,
        until_released: bool,
        timeout: float | None,
    ) -> None:
        self._backend, self._rows, self._failed, self._window = backend, dict(rows), failed, window
        self._report, self._until_released, self._timeout = report, until_released, timeout
        self._outer = current_run.get()
        self._unread = 0
        self._read = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        if self._outer is not None:
            self._outer.register_inner(self)

    def start(self) -> None:
        executor().post(self._start)

    def release(self) -> None:
        """Counts one outcome as read."""
        executor().post(self._release)

    def stop(self, error: SglError | None = None) -> None:
        """Ends the request. `error` is as for RowPool.stop."""
        executor().post(self._stop, error)

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._run())
        deadline, timeout = deadline_of(None, self._outer)
        if deadline is not None:
            timer = loop.call_later(max(deadline - time.monotonic(), 0), self._stop, too_long(timeout))
            self._task.add_done_callback(lambda _: timer.cancel())

    def _release(self) -> None:
        self._unread -= 1
        self._read.set()

    def _stop(self, error: SglError | None) -> None:
        if self._task is not None:
            self._task.cancel()
        if error is not None:
            for index in list(self._rows):
                self._end(index, error)

    async def _run(self) -> None:
        for index, error in self._failed.items():
            self._unread += 1
            self._report(index, error)
        try:
            await self._play()
        except Exception as lost:  # the request failed, and so did all remaining rows
            for index in list(self._rows):
                self._end(index, lost)

    async def _play(self) -> None:
        if not self._rows:
            return
        compiled = next(iter(self._rows.values())).specialized.compiled
        arguments = {index: row.arguments for index, row in self._rows.items()}
        seeds = {index: row.seed for index, row in self._rows.items()}
        priority = next(iter(self._rows.values())).settings.priority
        played = self._backend.play_rows(
            compiled, arguments, seeds, self._window, self._timeout, **priority_keywords(priority)
        )
        async with contextlib.aclosing(played):
            async for index, events in played:
                row = self._rows[index]
                for event in events:
                    row.take(event)
                self._end(index, _outcome(row))
                while self._until_released and self._unread >= self._window:  # the server then waits, too
                    self._read.clear()
                    await self._read.wait()

    def _end(self, index: int, outcome: Outcome) -> None:
        del self._rows[index]
        self._unread += 1
        self._report(index, outcome)
