"""A child process of an engine, whose output goes to `logging`."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass

from sglang_lite.engine.connection import Connection
from sglang_lite.protocol import BackendError
from sglang_lite.runtime.host.child_process import (
    KEPT_LINES,
    format_last_output,
    log_printed_lines,
    start_child,
)

logger = logging.getLogger("sglang_lite.engine")

PATIENCE_S = 5.0  # time for a process to exit after its connection was closed
# Ranks end by themselves when one of them was killed. So a rank that ended by itself is reported
# this much later: the killed one is the cause, and must be reported first.
CAUSE_FIRST_S = 0.5


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a process ended.

    Attributes:
        text: what happened, worded to follow the process's name in a message, and then the last
            lines that it printed.
        by_itself: True if it exited; False if a signal ended it, or if all that is known is that
            its connection has ended.
    """

    text: str
    by_itself: bool


class SpawnedProcess:
    """Child process that is connected by a socket. What it prints goes to `logging`.

    Args:
        module: module whose `main(descriptor, *arguments)` the process runs.
        name: description of the process for messages.
        arguments: integers, strings or None.

    Attributes:
        connection: connection to the process.
        pid: id of the process.

    Raises:
        BackendError: the process can't be started.
    """

    def __init__(self, module: str, name: str, *arguments: int | str | None) -> None:
        if not sys.executable:
            raise BackendError(
                f"{name} can't be started: Python does not say where its executable is.",
                hint="Use in_process=True.",
            )
        try:
            self._process, ours = start_child(
                module,
                *arguments,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise BackendError(
                f"{name} can't be started: {error}.",
                hint="Free what is short, or use in_process=True.",
            ) from error
        self.connection = Connection(ours)
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.pid = self._process.pid
        printed = log_printed_lines(self._process, logger)
        self._drain = threading.Thread(
            target=self._lines.extend, args=(printed,), name="sglang_lite-output", daemon=True
        )
        self._drain.start()

    def await_process_end(self) -> ProcessEnd:
        """Waits `PATIENCE_S` for the process to exit after its connection was closed, and then
        kills it. Returns how the process ended.
        """
        try:
            code = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        self._drain.join(PATIENCE_S)  # a process started by the child may keep the pipe open
        reason = f"ended with status {code}"
        if code < 0:
            reason = f"was ended by signal {-code}"
            with contextlib.suppress(ValueError):
                reason = f"was ended by {signal.Signals(-code).name}"
        return ProcessEnd(f"{reason}.{format_last_output(self._lines)}", by_itself=code >= 0)

    def kill(self) -> None:
        self._process.kill()
