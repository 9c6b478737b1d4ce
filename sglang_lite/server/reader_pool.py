"""Processes that read large bodies. Parsing, rendering and tokenising megabytes takes seconds, and
must not block the event loop's thread or hold the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from sglang_lite.engine.connection import BrokenFrameError, Connection
from sglang_lite.engine.frames import HEADER
from sglang_lite.engine.spawned_process import SpawnedProcess
from sglang_lite.protocol import BackendError

MODULE: Final = "sglang_lite.server.body_process"


def send_object(connection: Connection, value: object) -> None:
    """Sends a value as a frame, pickled. The receiver can trust the pickle, since both processes
    run this package and one has started the other.

    Raises:
        OSError: the connection is closed at either end.
    """
    content = pickle.dumps(value, protocol=5)
    connection.send_now(len(content).to_bytes(HEADER, "big"))
    connection.send_now(content)


class ReaderPool:
    """Processes that read bodies, started when they are first needed.

    Args:
        most: largest number of processes.
        first: function that returns the first message to each process.
    """

    def __init__(self, most: int, first: Callable[[], object]) -> None:
        self._first = first
        self._threads = ThreadPoolExecutor(most, "sglang_lite-bodies")  # each waits for one process
        self._idle: list[_BodyProcess] = []
        self._busy: set[_BodyProcess] = set()
        self._closed = False
        self._lock = threading.Lock()  # guards the attributes above

    async def run_task(self, task: object) -> Any:  # what the task's function returns
        """Runs a task (body_process.py) once a process is free, and returns its result. Drops the
        task if its caller is cancelled before the task begins.

        Raises:
            SglError: the error of the task.
            BackendError: the process has ended.
        """
        found = await asyncio.get_running_loop().run_in_executor(
            self._threads, self._run_in_process, task
        )
        if isinstance(found, Exception):
            raise found
        return found

    def _run_in_process(self, task: object) -> object:
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is None:
            process = _BodyProcess(self._first())
        with self._lock:
            self._busy.add(process)
            if self._closed:
                process.kill()
        try:
            answer = process.perform(task)
        except (OSError, StopIteration, BrokenFrameError):
            with self._lock:
                self._busy.discard(process)
            raise BackendError(f"the process that reads large bodies {process.reap()}") from None
        with self._lock:
            self._busy.discard(process)
            self._idle.append(process)
        return answer

    def close(self) -> None:
        """Kills the processes."""
        with self._lock:
            self._closed = True
            for process in (*self._busy, *self._idle):
                process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._idle:
            process.reap()


class _BodyProcess:
    def __init__(self, first: object) -> None:
        self._child = SpawnedProcess(MODULE, "the process that reads large bodies", os.getpid())
        self._answers: Iterator[memoryview] = self._child.connection.read_frames()
        with contextlib.suppress(OSError):  # it has ended, which `perform` reports
            send_object(self._child.connection, first)

    def perform(self, task: object) -> object:
        """Performs a task and returns its result. Raises OSError, StopIteration or BrokenFrameError
        if the process has ended.
        """
        send_object(self._child.connection, task)
        return pickle.loads(next(self._answers))

    def kill(self) -> None:
        """Kills the process, which ends a call of `perform`."""
        self._child.connection.close()
        self._child.kill()

    def reap(self) -> str:
        """Kills the process if it is running, frees it, and returns how it ended."""
        self.kill()
        how = self._child.await_process_end().text
        self._child.connection.release_socket()
        return how
