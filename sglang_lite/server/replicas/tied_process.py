"""A child process that ends with this process, even if this process is killed.

The process is started by its own command line, which has no settings in it. Its task arrives on its
standard input, whose other end this process holds open as long as it lives. A forked copy of the
child, made before anything else is loaded, waits for the end of that input and then kills the
child, which may be busy in code that lets no Python thread run.
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

from sglang_lite.process.import_paths import import_paths
from sglang_lite.protocol import BackendError
from sglang_lite.protocol.anything import Json

_LOOK_S = 1.0  # between two checks that the process itself still runs
_MAX_DESCRIPTORS = 1 << 16


class TiedProcess:
    """Child process that is killed when this process ends.

    Args:
        function: function to run, as `module:name`; called with the content, it returns the exit
            status.
        content: plain data.
        environment: variables to add to this process's environment.
        descriptors: file descriptors of this process to inherit.

    Raises:
        BackendError: the process can't be started.
    """

    def __init__(
        self,
        function: str,
        content: Mapping[str, Json],
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        code = f"import sys; sys.path[:] = {import_paths()!r}; from {__name__} import main; main()"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                pass_fds=descriptors,
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # the parent handles Ctrl-C, and ends the others in order
            )
        except OSError as error:
            raise BackendError(
                f"a server's process can't be started: {error}.",
                hint="Free memory or processes, or lower replicas.",
            ) from error
        self.pid = self._process.pid
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended, and `wait` reports that
            self._process.stdin.write(
                json.dumps({"function": function, "content": content}).encode() + b"\n"
            )
            self._process.stdin.flush()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Returns the exit status once the process has ended, or None if it is still running after
        `timeout_s`.
        """
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        """Kills the process."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()


def main() -> None:
    """Runs the task that arrives on standard input. Entry point of the child process."""
    line = b""
    while not line.endswith(b"\n"):
        more = os.read(0, 1 << 16)
        if not more:
            os._exit(1)
        line += more
    _fork_watchdog()
    task = json.loads(line)
    module, _, name = task["function"].partition(":")
    sys.exit(getattr(importlib.import_module(module), name)(task["content"]))


def _fork_watchdog() -> None:
    process = os.getpid()
    if os.fork():
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.closerange(1, _MAX_DESCRIPTORS)  # the copy must not keep pipes and ports open
    while os.getppid() == process:
        if select.select([0], [], [], _LOOK_S)[0] and os.getppid() == process:
            os.kill(process, signal.SIGKILL)
    os._exit(0)
