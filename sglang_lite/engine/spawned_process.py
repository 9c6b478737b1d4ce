"""A Python process of our own: started afresh by its own command line, tied to this one by a socket.

It is not forked, as this process has threads; and not started by `multiprocessing`, which would run the caller's main
module again. It has this process's `sys.path`, environment and folder, and no path or port that others could find.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from functools import partial

from sglang_lite.engine.connection import Connection
from sglang_lite.protocol import BackendError
from sglang_lite.runtime.socket_pair import socket_pair

logger = logging.getLogger("sglang_lite.engine")

PATIENCE_S = 5.0  # for a process that was asked to end
_KEPT_LINES = 20
_LONGEST_LINE = 10_000  # bytes; the rest is the next one


class SpawnedProcess:
    """
    Args:
        module: whose `main(descriptor, *arguments)` it runs.
        name: of what it is, for messages.
        arguments: numbers, texts or None.

    Attributes:
        connection: to it.
        pid: of the process.

    Raises:
        BackendError: it can't be started.
    """

    def __init__(self, module: str, name: str, *arguments: int | str | None) -> None:
        if not sys.executable:
            raise BackendError(
                f"{name} can't be started: Python does not say where its executable is.", hint="Use in_process=True."
            )
        try:
            ours, theirs = socket_pair()
        except OSError as error:
            raise _not_started(name, error) from error
        self.connection = Connection(ours)
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        with theirs:
            code = (
                f"import sys; sys.path[:] = {_paths()!r}\n"  # before a `signal.py` in its folder could be found
                "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"  # Ctrl-C is the parent's
                f"from {module} import main\n"
                f"main(*{(theirs.fileno(), *arguments)!r})"
            )
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                self.connection.release()
                raise _not_started(name, error) from error
        self.pid = self._process.pid
        self._drain = threading.Thread(target=self._read_lines, name="sglang_lite-output", daemon=True)
        self._drain.start()

    def _read_lines(self) -> None:
        """Hands what the process prints to `logging`: nobody else reads it, and a full pipe would stop the process."""
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            for line in iter(partial(pipe.readline, _LONGEST_LINE), b""):
                text = line.decode("utf-8", "replace").rstrip()
                self._lines.append(text)
                with contextlib.suppress(Exception):  # the caller's handlers
                    logger.info("%s", text)

    def end(self) -> str:
        """Waits `PATIENCE_S` for the process, which was told to end, and kills it when it does not.

        Returns:
            How it ended, and the last lines that it printed.
        """
        try:
            code = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        self._drain.join(PATIENCE_S)  # a process that it has started may keep the pipe open
        if code < 0:
            with contextlib.suppress(ValueError):
                return self._with_lines(f"was ended by {signal.Signals(-code).name}")
            return self._with_lines(f"was ended by signal {-code}")
        return self._with_lines(f"ended with status {code}")

    def _with_lines(self, reason: str) -> str:
        lines = [line for line in list(self._lines) if line]
        return f"{reason}. Its last output:\n" + "\n".join(lines) if lines else f"{reason}."

    def kill(self) -> None:
        self._process.kill()


def _paths() -> list[str]:
    """The paths of this process, absolute: the folder that it is in by its name, if it is there."""
    paths = []
    for path in sys.path:
        with contextlib.suppress(OSError):
            paths.append(path or os.getcwd())
    return paths


def _not_started(name: str, error: OSError) -> BackendError:
    return BackendError(f"{name} can't be started: {error}.", hint="Free what is short, or use in_process=True.")
