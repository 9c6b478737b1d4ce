"""The process that compiles kernels for a GPU, as an engine's process knows it. Light: where the cache of kernels is
empty, it is started before torch is imported, and both import that at a time."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from sglang_lite.runtime.socket_pair import socket_pair

logger = logging.getLogger("sglang_lite")

MARKS = "sglang_lite"  # folder in the cache that says of which runners it has all kernels
MODULE = "sglang_lite.runtime.executor.compile_ahead"
DRIVER = Path("/proc/driver/nvidia/version")
PATIENCE_S = 60.0  # between two kernels


class CompileProcess:
    """A process that waits for work, and tells which kernels are in the cache.

    Raises:
        OSError: it can't be started.
    """

    def __init__(self) -> None:
        self._told: set[bytes] = set()
        self._rest = b""
        ours, theirs = socket_pair()
        # Ctrl-C is the caller's. This process's paths come before anything is imported.
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
            f"from {MODULE} import main; main({theirs.fileno()})"
        )
        kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                    start_new_session=True, env={**kept, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                )  # fmt: skip
            except OSError:
                ours.close()
                raise
        ours.settimeout(PATIENCE_S)
        self._line: socket.socket | None = ours

    def send(self, work: bytes) -> None:
        """Hands it all that it is to do."""
        assert self._line is not None
        with contextlib.suppress(OSError):  # it has ended or stands still, which whoever waits for it hears
            self._line.sendall(work)
            self._line.shutdown(socket.SHUT_WR)

    def wait_for(self, kernel: str) -> None:
        """Waits until a kernel is in the cache, or none can be expected any more, which the log says."""
        while self._line is not None and kernel.encode() not in self._told:
            try:
                data = self._line.recv(1 << 16)
            except TimeoutError:
                self._give_up(f"has compiled none for {PATIENCE_S:.0f} s")
            except OSError as error:
                self._give_up(f"can't be heard ({error})")
            else:
                *told, self._rest = (self._rest + data).split(b"\n")
                self._told.update(told)
                if not data:
                    self._ended()

    def _ended(self) -> None:
        try:
            status = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._give_up("does not end")
            return
        self.end() if not status else self._give_up(f"ended with status {status}")

    def _give_up(self, reason: str) -> None:
        logger.warning("a process that compiles kernels %s: the engine compiles the rest.", reason)
        self.end()

    def end(self) -> None:
        """Ends it and what it has started, if they still run."""
        if self._line is None:
            return
        self._line.close()
        self._line = None
        with contextlib.suppress(OSError):  # it has none any more
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def start_early(model: str, device: str, processes: int | None) -> CompileProcess | None:
    """A process, where it is likely to have work: there is a GPU, and the cache has none of the model's kernels.

    Args:
        model, device, processes: as a config has them.
    """
    if device == "cpu" or processes == 0 or not DRIVER.exists() or mark_of(model).exists():
        return None
    with contextlib.suppress(OSError):  # it is tried again, and said, when the model is known
        return CompileProcess()
    return None


def mark_of(model: str) -> Path:
    """The file that says that kernels of a model are in the cache, before more is known of it than its name.

    Triton's folder, by its rules: importing it would take the time that is to be gained.
    """
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~/")
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))
    return cache / MARKS / hashlib.sha256(model.encode("utf-8", "surrogatepass")).hexdigest()
