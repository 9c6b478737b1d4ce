"""A Python process of our own that ends with this one, however this one ends.

It is started afresh by its own command line, which tells nothing: what it is to do comes over its standard input, whose
other end this process holds for as long as it lives. A copy of it, made before anything else is loaded, waits there for
the end: the process itself may be busy in code that lets no thread of Python run.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from sglang_lite.protocol import BackendError
from sglang_lite.protocol.anything import Json

_LOOK_S = 1.0  # between two looks whether the process itself has ended
_MOST_DESCRIPTORS = 1 << 16


class TiedProcess:
    """
    Args:
        function: that it runs, as `module:name`; it is given the content and returns the exit status.
        content: plain data.
        environment: beside this process's own.
        descriptors: of this process that it has, too.

    Raises:
        BackendError: it can't be started.
    """

    def __init__(
        self,
        function: str,
        content: Mapping[str, Json],
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        code = (
            f"import sys; sys.path[:] = {_paths()!r}; from sglang_lite.server.replicas.tied_process import main; main()"
        )
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.PIPE, pass_fds=descriptors,
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # Ctrl-C is this process's, which ends the others in their order
            )  # fmt: skip
        except OSError as error:
            raise BackendError(
                f"a server's process can't be started: {error}.", hint="Free memory or processes, or lower replicas."
            ) from error
        self.pid = self._process.pid
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and whoever waits for it hears of that
            self._process.stdin.write(json.dumps({"function": function, "content": content}).encode() + b"\n")
            self._process.stdin.flush()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Waits for its end. The exit status, or None: it runs."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def ask_to_end(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        """Ends it now."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()


def _paths() -> list[str]:
    """The paths of this process, absolute."""
    return [path or os.getcwd() for path in sys.path]


def main() -> None:
    """Runs the process."""
    line = b""
    while not line.endswith(b"\n"):
        more = os.read(0, 1 << 16)
        if not more:
            os._exit(1)
        line += more
    _tie()
    task = json.loads(line)
    module, _, name = task["function"].partition(":")
    sys.exit(getattr(importlib.import_module(module), name)(task["content"]))


def _tie() -> None:
    process = os.getpid()
    if os.fork():
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.closerange(1, _MOST_DESCRIPTORS)  # pipes and ports are the process's alone
    while os.getppid() == process:
        if select.select([0], [], [], _LOOK_S)[0] and os.getppid() == process:
            os.kill(process, signal.SIGKILL)
    os._exit(0)
