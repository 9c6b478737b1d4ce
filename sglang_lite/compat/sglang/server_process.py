"""Starts a server in a separate process, through the package's command line. The server's output
goes to `logging`. The server ends with this process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence

from sglang_lite.lang.backend.http.client import ServerClient
from sglang_lite.process.import_paths import import_paths
from sglang_lite.protocol import BackendError, ParameterError, SglError
from sglang_lite.protocol.anything import UserValue
from sglang_lite.runtime.host.child_process import KEPT_LINES, format_last_output, log_printed_lines

logger = logging.getLogger("sglang_lite.server")

_PATIENCE_S = 10.0  # longest wait for a process that was asked to exit
_POLL_S = 0.05
_SERVING = re.compile(r"Serving .* at (http://\S+)$")
_USAGE = 2  # exit status of argparse for an invalid command line, with these messages
_REFUSED = re.compile(
    r"serve: (?:unrecognized arguments: --([\w-]+)|argument --([\w-]+)[^:]*: (.*?)\. See )"
)
# The process ends with its parent, however the parent ends, and its engine ends with it.
_CODE = """\
import sys
sys.path[:] = {paths!r}
from sglang_lite.runtime.host.parent import end_with_parent
end_with_parent({parent})
from sglang_lite.cli import main
sys.exit(main({arguments!r}))
"""


class ServerProcess:
    """Process that runs `sglang-lite serve`.

    Args:
        settings: flags of `sglang-lite serve`, with underscores. Without a port, the server takes a
            free one.
        timeout_s: longest wait until the server is ready, in seconds.

    Attributes:
        url: address of the server.
        pid: id of the process.

    Raises:
        ParameterError: the command does not have this flag, or does not accept this value.
        BackendError: the server could not be started, or was not ready in time.
    """

    def __init__(self, settings: Mapping[str, UserValue], timeout_s: float) -> None:
        keys, flags = _split_keys(settings)
        arguments = ["serve", *flags_of({"port": 0, **flags})]
        code = _CODE.format(paths=import_paths(), parent=os.getpid(), arguments=arguments)
        self._home = os.getpid()
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._settled = threading.Event()  # set when the address is known, or the process has ended
        self.url = ""
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=keys,
            )
        except OSError as error:
            raise BackendError(f"the server can't be started: {error}.") from error
        self.pid = self._process.pid
        self._finalizer = weakref.finalize(self, _end, self._process, self._home)
        reader = threading.Thread(
            target=_relay_output,
            args=(weakref.ref(self), self._process, self._settled),
            name="sglang_lite-server",
            daemon=True,
        )
        reader.start()
        try:
            self._wait(timeout_s)
        except BaseException:
            self.end_server()
            raise

    @property
    def running(self) -> bool:
        return os.getpid() == self._home and self._process.poll() is None

    def take_line(self, line: str) -> None:
        """Stores a line of the process's output, and looks for the server's address in it."""
        self._lines.append(line)
        found = _SERVING.search(line)
        if found and not self.url:
            self.url = found[1]
            self._settled.set()

    def _wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        if not self._settled.wait(timeout_s):
            raise self._timeout_error(timeout_s)
        if not self.url:
            raise self._exit_error()
        server = ServerClient(self.url, None, None, _PATIENCE_S, 0)
        while True:
            with contextlib.suppress(SglError):
                if server.request_status("GET", "/ready") == 200:
                    return
            if self._process.poll() is not None:
                raise self._exit_error()
            if time.monotonic() > deadline:
                raise self._timeout_error(timeout_s)
            time.sleep(_POLL_S)

    def _exit_error(self) -> SglError:
        status = self._process.wait()
        refused = filter(None, map(_REFUSED.search, list(self._lines)))
        for found in refused if status == _USAGE else ():
            name = (found[1] or found[2]).replace("-", "_")
            problem = found[3] or "is not a flag of `sglang-lite serve`"
            return ParameterError(
                name, f"{problem}.", hint="`sglang-lite serve --help` lists its flags."
            )
        return BackendError(
            f"the server ended with status {status}.{format_last_output(self._lines)}"
        )

    def _timeout_error(self, timeout_s: float) -> BackendError:
        return BackendError(
            f"the server was not ready after {timeout_s:g} s.{format_last_output(self._lines)}",
            hint="Raise launch_timeout.",
        )

    def end_server(self) -> None:
        """Terminates the process and waits for it. Does nothing in a forked copy, because the
        process belongs to the original.
        """
        self._finalizer()


def _relay_output(
    owner: weakref.ref[ServerProcess], process: subprocess.Popen[bytes], settled: threading.Event
) -> None:
    for line in log_printed_lines(process, logger):
        server = owner()
        if server is not None:
            server.take_line(line)
            del server  # which this thread doesn't keep alive
    settled.set()


def _end(process: subprocess.Popen[bytes], home: int) -> None:
    if os.getpid() != home:
        return
    for patience_s in (1.0, _PATIENCE_S):  # the second signal ends open requests
        with contextlib.suppress(OSError):
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
            return
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _split_keys(settings: Mapping[str, UserValue]) -> tuple[dict[str, str], dict[str, UserValue]]:
    """Moves the API keys from the settings to environment variables, and returns the server's
    environment and the remaining settings. On a command line, all users of this machine could see
    the keys.
    """
    environment = dict(os.environ)
    flags = dict(settings)
    for name in ("api_key", "admin_api_key"):
        variable = f"SGLANG_LITE_{name.upper()}"
        given = flags.pop(name, None)
        environment.pop(variable, None)  # a caller's own variable is not meant for this server
        keys = (
            given
            if isinstance(given, Sequence) and not isinstance(given, str | bytes)
            else (given,)
        )
        texts = [key for key in keys if key is not None]
        if not all(isinstance(key, str) for key in texts):
            raise ParameterError(name, "is neither a text nor a sequence of texts.")
        if texts:
            environment[variable] = "\n".join(map(str, texts))
    return environment, flags


def flags_of(settings: Mapping[str, UserValue]) -> list[str]:
    """Converts settings to flags of a command line.

    Raises:
        ParameterError: a value can't be written as a flag.
    """
    found = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if value is None:
            continue
        if isinstance(value, bool):
            if value:
                found.append(flag)
            # The others are off by default, without a negative form.
            elif name == "enable_multimodal" or not name.startswith(
                ("disable_", "enable_", "skip_")
            ):
                found.append(f"--no-{flag[2:]}")
            continue
        if isinstance(value, Mapping):
            value = json.dumps(value)
        values = (
            value
            if isinstance(value, Sequence) and not isinstance(value, str | bytes)
            else (value,)
        )
        for each in values:
            if not isinstance(each, str | int | float | os.PathLike):
                raise ParameterError(
                    name, f"a {type(each).__name__} can't be passed as a flag of the server."
                )
            found.append(f"{flag}={os.fspath(each) if isinstance(each, os.PathLike) else each}")
    return found
