"""Handle of the process that compiles GPU kernels. It imports little: if the kernel cache is empty,
the process is started before torch is imported, so that both processes import torch in parallel.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import socket
import subprocess
from pathlib import Path

from sglang_lite.runtime.host.child_process import start_child

logger = logging.getLogger("sglang_lite")

# folder in Triton's cache, with a marker file per runner and model whose kernels are cached
MARKS = "sglang_lite"
MODULE = "sglang_lite.runtime.executor.compile_ahead"
DRIVER = Path("/proc/driver/nvidia/version")
PATIENCE_S = 60.0  # longest wait for the next kernel


class CompileProcess:
    """Process that compiles kernels into the cache, and reports the digest of each one.

    Raises:
        OSError: the process can't be started.
    """

    def __init__(self) -> None:
        self._compiled: set[bytes] = set()
        self._rest = b""
        environment = {
            name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
        }
        self._process, ours = start_child(
            MODULE,
            start_new_session=True,
            env={**environment, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )
        ours.settimeout(PATIENCE_S)
        self._line: socket.socket | None = ours

    def send(self, work: bytes) -> None:
        """Sends the description of all kernels to compile; nothing can be sent after it."""
        assert self._line is not None
        with contextlib.suppress(OSError):  # the process has ended or hangs; `wait_for` will notice
            self._line.sendall(work)
            self._line.shutdown(socket.SHUT_WR)

    def wait_for(self, kernel: str) -> None:
        """Waits until the kernel with this digest is in the cache. Returns early if the process has
        ended. If it has failed or stopped responding, logs this and kills it.
        """
        while self._line is not None and kernel.encode() not in self._compiled:
            try:
                data = self._line.recv(1 << 16)
            except TimeoutError:
                self._give_up(f"has compiled none for {PATIENCE_S:.0f} s")
            except OSError as error:
                self._give_up(f"can't be heard ({error})")
            else:
                *digests, self._rest = (self._rest + data).split(b"\n")
                self._compiled.update(digests)
                if not data:
                    self._check_exit_status()

    def _check_exit_status(self) -> None:
        try:
            status = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._give_up("does not end")
            return
        self.kill() if not status else self._give_up(f"ended with status {status}")

    def _give_up(self, reason: str) -> None:
        logger.warning("a process that compiles kernels %s: the engine compiles the rest.", reason)
        self.kill()

    def kill(self) -> None:
        """Kills the process and its children if they are still running."""
        if self._line is None:
            return
        self._line.close()
        self._line = None
        with contextlib.suppress(OSError):  # the process group has already ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def start_compiler_early(model: str, device: str, processes: int | None) -> CompileProcess | None:
    """Starts a compile process early if it is likely to have work: an NVIDIA driver is present, and
    the cache has no kernels of the model. Otherwise, or if the process can't be started, returns
    None.

    Args:
        model, device, processes: fields `model`, `device` and `compile_processes` of an
            EngineConfig.
    """
    if device == "cpu" or processes == 0 or not DRIVER.exists() or marker_path(model).exists():
        return None
    with contextlib.suppress(OSError):  # tried again, with a message, once the model is known
        return CompileProcess()
    return None


def marker_path(model: str) -> Path:
    """Returns the path of the marker file for a model's cached kernels, which depends only on the
    model's name.

    Reimplements Triton's rules for its cache folder, as importing Triton would take the time that
    starting early saves.
    """
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~/")
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))
    return cache / MARKS / hashlib.sha256(model.encode("utf-8", "surrogatepass")).hexdigest()
