"""Link to an engine's process. It sends messages to the process, passes events to sinks on a single
thread, and restarts the process if it dies.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeAlias

from sglang_lite.engine import frames, spawned_process, switch_interval
from sglang_lite.engine.engine_process import EngineProcess
from sglang_lite.engine.frames import decode_reports, encode_frame
from sglang_lite.engine.open_submissions import OpenSubmission, OpenSubmissions
from sglang_lite.protocol import EngineClosedError, ProgramSink
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.core.gate import CLOSED, Gate
from sglang_lite.runtime.core.submission import OpenRequest
from sglang_lite.runtime.host import startup_messages
from sglang_lite.wire.failure import as_error

logger = logging.getLogger("sglang_lite")

MAX_RESTARTS = 3  # per RESTART_WINDOW_S
RESTART_WINDOW_S = 300.0
_SPENT = f" {MAX_RESTARTS} restarts in five minutes are spent. Find the cause, then make a new engine: sgl.Engine(…)."


Watch: TypeAlias = Callable[[frames.Ready | frames.Prefixes | None], object]


def ignore_status_message(_: object) -> None:
    """Does nothing. Used as the `watch` of a link whose owner needs no news about the process."""


class EngineLink:
    """Link to an engine's process and to each process that replaces it.

    Args:
        config: settings of the engine.
        path: folder of the weights.
        process: process that was started with both.
        gate: checks whether a caller may use the engine; closed when the last process has ended.
        watch: function called on the reader's thread when a process is ready, with changes of its
            radix tree, and with None when it has ended.

    Attributes:
        submissions: open submissions and unanswered calls.
        restarts: number of processes that were started in place of a dead one.
    """

    def __init__(
        self,
        config: EngineConfig,
        path: Path,
        process: EngineProcess,
        gate: Gate,
        watch: Watch = ignore_status_message,
    ) -> None:
        self._config = config
        self._path = path.absolute()
        self._process = process
        self._gate = gate
        self._watch = watch
        self._ids = itertools.count(1)
        self.submissions = OpenSubmissions(self.abort)
        self._starts: deque[float] = deque()
        self.restarts = 0
        switch_interval.shorten_switch_interval()
        self._start_reader()
        _open_links.add(self)

    @property
    def responds(self) -> bool:
        """False while the process is stopped or swapped out, and from the moment it begins to end:
        see `SignsOfLife`.

        Asks the operating system, which takes about 0.1 ms.
        """
        return not (self.is_silent or self._process.signs.is_ending)

    @property
    def pids(self) -> list[int]:
        """Process id of the current process; empty if it runs on another machine."""
        pid = self._process.child.pid
        return [] if pid is None else [pid]

    @property
    def is_silent(self) -> bool:
        """True if the process was stopped or swapped out when last checked."""
        return self._process.signs.missing

    @property
    def is_ready(self) -> bool:
        """True once the current process has loaded its engine."""
        ready = self._process.ready
        return ready.done() and ready.exception() is None

    def remember_weights(self, config: EngineConfig, path: Path | None = None) -> None:
        """Remembers the settings and folder of the weights that are loaded now. A replacement
        process loads these.

        Args:
            path: the folder; None if it has not changed.
        """
        self._config = config
        self._path = path or self._path

    def close(self, patience_s: float | None = None) -> None:
        """Ends the process. In a forked copy, only closes the gate, because the process belongs to
        the original.

        Args:
            patience_s: seconds to wait for a sink that has not returned; None for no limit.
        """
        if self._gate.is_forked_copy:
            self._gate.reason = CLOSED
            return
        self.disconnect()
        if threading.current_thread() is not self.submissions.reader:
            self.submissions.reader.join(patience_s)

    def disconnect(self) -> None:
        """Closes the connection, which ends the process and fails open requests. Does not block and
        takes no lock, because a garbage collector may call it on any thread.
        """
        if not self._gate.is_forked_copy and not self._gate.reason:
            self._gate.reason = CLOSED
            self._process.child.connection.close()

    def end_process(self, reason: str) -> None:
        """Kills the process. Open requests fail with the given reason. Does nothing if the process
        was already ended.
        """
        if not self._gate.reason:
            self._gate.reason = reason
            self._process.child.kill()

    # -------------------------------------------------------------------------------------- sending

    def next_submission_number(self) -> int:
        """Returns the number for a new submission."""
        return next(self._ids)

    def send_submission(
        self,
        number: int,
        request: frames.Submitted,
        entry: OpenSubmission,
        # sinks of each kind of submission have their own events
        counted: Callable[[], Callable[[Any], None]],
    ) -> None:
        """Registers a submission and sends it to the process. From then on, its sink receives all
        its events.

        Args:
            counted: function that counts the submission as open and returns its sink.
        """
        data = encode_frame([(number, request)])
        with self.submissions.lock:
            if self._gate.reason:  # closed since the caller has checked it
                self._gate.check_open()
            entry.sink = counted()
            entry.process = self._process
            self.submissions.open[number] = entry
            _send_to(self._process, data)

    def register_program(
        self, number: int, request: OpenRequest, entry: OpenSubmission, sink: ProgramSink
    ) -> None:
        """Registers a program that will be extended. Nothing is sent yet: the request to open the
        program goes out together with its first nodes.
        """
        entry.unsent = encode_frame([(number, request)])
        with self.submissions.lock:
            if self._gate.reason:  # as in `send_submission`
                self._gate.check_open()
            entry.sink = sink
            entry.process = self._process
            self.submissions.open[number] = entry

    def send(self, number: int, message: frames.Later) -> None:
        """Sends a message of an open submission, unless it has ended. Raises EngineClosedError if
        the engine is closed or this process is a forked copy.
        """
        self._gate.check_open()
        self._send_data(number, encode_frame([(number, message)]))

    def notify_submission(self, number: int, message: frames.Later) -> None:
        """Sends a message that needs no answer. Does nothing if the submission has ended or if this
        process is a forked copy.
        """
        if not self._gate.is_forked_copy:
            self._send_data(number, encode_frame([(number, message)]))

    def _send_data(self, number: int, data: bytes) -> None:
        with self.submissions.lock:
            if (entry := self.submissions.open.get(number)) is not None:
                _send_to(entry.process, entry.unsent + data)
                entry.unsent = b""

    def abort(self, number: int) -> None:
        self.notify_submission(number, frames.Abort())

    def call_engine(
        self, call: Any
    ) -> Future[Any]:  # any of `ASKED`; each has its own type of answer
        number = self.next_submission_number()
        data = encode_frame([(number, call)])
        with self.submissions.lock:
            self._gate.check_open()
            future = self.submissions.register_call(number, self._process)
            _send_to(self._process, data)
        return future

    # -------------------------------------------------------------------------- the reader's thread

    def _read_until_end(self, process: EngineProcess) -> None:
        """Reads the frames of a process until it ends. Then fails everything that is open in that
        process.
        """
        problem = ""
        self._gate.claim_thread()
        try:
            for content in process.child.connection.read_frames(
                process.signs.look_for_sign, process.signs.every_s
            ):
                process.signs.record_sign()
                for message in decode_reports(content):
                    self._handle_report(message, process)
                self.submissions.run_deferred_calls()
        except Exception as error:  # any error; otherwise callers would wait forever
            problem = f"sent what can't be read ({error!r}), and "
            process.child.kill()
        closed = bool(self._gate.reason)
        ended = process.child.await_process_end()
        process.child.connection.release_socket()
        startup_messages.update_progress_bar(process.bar, 1, 1, self._config.log_level)
        if closed:
            why = "the engine was closed before the request finished."
            reason = self._gate.reason
            self.submissions.fail_all_of(
                process, EngineClosedError(why if reason == CLOSED else reason)
            )
        elif process.failure is not None:
            self._gate.reason = f"the engine could not be started: {process.failure}"
            self.submissions.fail_all_of(process, process.failure)
        else:
            self._on_death(process, f"{process.name} {problem}{ended.text}")
        self._watch(None)
        self._gate.release_thread()
        # unless the reader is that of a restarted process
        if threading.current_thread() is self.submissions.reader:
            switch_interval.restore_switch_interval()

    def _handle_report(self, message: frames.Report, process: EngineProcess) -> None:
        match message:
            case frames.RequestEvent():
                self.submissions.deliver_event(message)
            case frames.AskReply():
                self.submissions.complete_call(message)
            case frames.Log():
                with contextlib.suppress(Exception):  # the caller's logging handlers may raise
                    logging.getLogger(message.logger).log(message.level, "%s", message.line)
            case frames.Progress():
                process.bar = startup_messages.update_progress_bar(
                    process.bar, message.done, message.total, self._config.log_level
                )
            case frames.Ready():
                self._watch(message)
                process.ready.set_result(message)
            case frames.Prefixes():
                self._watch(message)
            case frames.StartFailed():
                process.failure = as_error(message.failure)
                process.child.connection.close()

    def _on_death(self, process: EngineProcess, why: str) -> None:
        """Fails everything that was open in a process that has died. If the settings allow it,
        starts another process.
        """
        with contextlib.suppress(Exception):  # the caller's logging handlers may raise
            logger.error("%s", why)
        with self.submissions.lock:
            ran = process.ready.done() or self._starts  # this process, or the one that it replaced
            if not (self._config.restart and ran and self._may_restart()):
                self._gate.reason = why = why + (_SPENT if len(self._starts) > MAX_RESTARTS else "")
            elif not self._gate.reason:
                self._restart(why)
        self.submissions.fail_all_of(process, EngineClosedError(why))

    def _may_restart(self) -> bool:
        now = time.monotonic()
        while self._starts and now - self._starts[0] > RESTART_WINDOW_S:
            self._starts.popleft()
        self._starts.append(now)
        return len(self._starts) <= MAX_RESTARTS

    def _restart(self, why: str) -> None:
        """Starts another process for the engine, with the weights that were loaded last. New
        submissions wait until the process is ready.
        """
        try:
            self._process = EngineProcess(self._config, self._path, self._process.name)
            self.restarts += 1
            self._start_reader()
        except Exception as error:  # any error: open submissions must still be failed
            self._gate.reason = f"{why} It could not be started again: {error}"

    def _start_reader(self) -> None:
        reader = self.submissions.reader = threading.Thread(
            target=self._read_until_end,
            args=(self._process,),
            name="sglang_lite-events",
            daemon=True,
        )
        reader.start()


def _send_to(process: EngineProcess, data: bytes) -> None:
    # the process has ended, and its reader fails all submissions
    with contextlib.suppress(OSError):
        process.child.connection.send(data)


_open_links: weakref.WeakSet[EngineLink] = weakref.WeakSet()


@atexit.register
def _close_all_links() -> None:
    running = list(_open_links)
    for link in running:
        link.disconnect()
    for link in running:
        link.close(2 * spawned_process.PATIENCE_S)  # waits for a sink that has not returned
