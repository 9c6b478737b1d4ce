"""Worker process that compiles constraints within limits on time and memory.

The process is killed if a constraint takes too long, and compiling fails if it takes too much
memory. The time limit is CPU time, so a busy machine rejects nothing that an idle one accepts. A
process whose memory has grown is replaced. The process does not import torch, unless its engine is
xgrammar, which imports torch itself.

When the parent ends, so does the worker process. If it is idle, it ends because its socket is
closed. If it is compiling, the system kills it on Linux; elsewhere, the time limit ends it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sglang_lite.protocol import Constraint, ConstraintError, EngineClosedError
from sglang_lite.runtime.host.child_process import start_child
from sglang_lite.runtime.host.parent import be_killed_with_parent
from sglang_lite.runtime.structured_output.base import GrammarEngine, PreparedGrammar
from sglang_lite.runtime.structured_output.registry import make_engine
from sglang_lite.runtime.structured_output.ruled_grammar import extract_mask_rules, pack_mask_rules
from sglang_lite.runtime.structured_output.vocabulary import Vocabulary

# limit for a process to start and import an engine. This takes 1 s of CPU time, but a busy machine
# gives the process little CPU time.
START_SECONDS = 300.0
# seconds without any CPU time after which a process with work to do counts as stuck
STILL_SECONDS = 30.0
PATIENCE = 30  # limit on a constraint's wall-clock time, as a multiple of its CPU time limit
LONGEST_SECONDS = 1e6  # longest time that timers accept
MAX_GROWN = 64 << 20  # bytes that a process may grow by before it is replaced
_DISCONNECTED = (EOFError, OSError)
_READY = "ready"
_NICE = 10


class TransientError(ConstraintError):
    """Raised if a constraint exceeds its time or memory limit, or if no worker starts. Not cached,
    as a retry may succeed.
    """


class Worker:
    """Handle of a worker process. Must be used by one thread at a time, except for `close`.

    Args:
        vocabulary: vocabulary of the model.
        backend: name of the grammar engine, or "auto".
        timeout_s: CPU time limit of a constraint, in seconds.
        memory_mb: memory limit of the process, in MB.
    """

    def __init__(
        self, vocabulary: Vocabulary, backend: str, timeout_s: float, memory_mb: int
    ) -> None:
        self._vocabulary = vocabulary
        self._backend = backend
        self._timeout = timeout_s
        self._memory = memory_mb
        self._lock = threading.Lock()
        self._closed = False
        self._connection: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._kill: Callable[[], object] = lambda: None

    def prepare(self, constraint: Constraint) -> tuple[tuple[PreparedGrammar, bytes], float]:
        """Prepares a constraint. Returns the prepared grammar with packed mask rules, and the CPU
        seconds taken.

        Raises:
            ConstraintError: the constraint can't be enforced, at least not within the limits.
            EngineClosedError: `close` was called before the process started.
        """
        connection = self._connection or self._start_process()
        try:
            connection.send(constraint)
            response, grown = self._next_message(
                connection, START_SECONDS + PATIENCE * self._timeout
            )
        except TimeoutError:
            self._discard_process()
            raise self._compile_timeout_error() from None
        except _DISCONNECTED as error:
            if self._discard_process() == -signal.SIGPROF:
                raise self._compile_timeout_error() from None
            raise TransientError(
                f"compiling the constraint ended its process: it may need more than {self._memory} MB.",
                hint="Simplify it, or raise the engine's compile_memory_mb.",
            ) from error
        if grown > MAX_GROWN:
            self._discard_process()
        if isinstance(response, ConstraintError):
            raise response
        prepared, seconds = response
        return prepared, seconds

    def _compile_timeout_error(self) -> TransientError:
        return TransientError(
            f"compiling the constraint took more than {self._timeout:g} s.",
            hint="Simplify it, or raise the engine's compile_timeout_s.",
        )

    def close(self) -> None:
        """Kills the process, whatever it is doing. A pending `prepare` fails."""
        with self._lock:
            self._closed = True
            self._kill()

    def _next_message(self, connection: Connection, seconds: float) -> Any:
        """Returns the next message from the process.

        Raises:
            TimeoutError: the process takes longer than `seconds`, or has stopped using CPU time.
        """
        assert self._process is not None
        end = time.monotonic() + min(seconds, LONGEST_SECONDS)
        before = None
        used = _cpu_ticks(self._process.pid)
        while not connection.poll(min(STILL_SECONDS, max(end - time.monotonic(), 0.0))):
            before = used
            used = _cpu_ticks(self._process.pid)
            if time.monotonic() >= end or (used is not None and used == before):
                raise TimeoutError
        return connection.recv()

    def _start_process(self) -> Connection:
        with self._lock:
            if self._closed:
                raise EngineClosedError("the engine is closed.")
            # Low priority, so that decoding goes first. Niceness applies within a session
            # (autogroups, see sched(7)), so this process stays in the engine's session.
            process, ours = start_child(
                __name__,
                self._memory,
                nice=_NICE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C goes to the parent only
            )
            # also runs at exit
            self._process, self._kill = process, weakref.finalize(self, _kill, process)
        connection = self._connection = Connection(ours.detach())
        connection.send((self._vocabulary, self._backend, self._timeout))
        try:
            self._next_message(connection, START_SECONDS)
        except (TimeoutError, *_DISCONNECTED) as error:
            self._discard_process()
            raise TransientError(
                "the process that compiles constraints does not start.",
                hint=f"Try again; or raise the engine's compile_memory_mb, which is {self._memory}.",
            ) from error
        return connection

    def _discard_process(self) -> int | None:
        """Kills the process, so that the next constraint starts a new one. Returns its exit code."""
        self._kill()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        return None if self._process is None else self._process.returncode


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _cpu_ticks(pid: int) -> int | None:
    """Returns the CPU time that a process has used, in ticks (10 ms), or None if the system does
    not report it.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12])


# ----------------------------------------------------------------------------------- in the process


def main(descriptor: int, memory_mb: int) -> None:
    """Runs the worker process until its parent has ended.

    Args:
        descriptor: file descriptor of the socket to the parent.
        memory_mb: memory limit of the process, in MB.
    """
    # to the system, the parent is the thread that started this process. The thread ends when the
    # compiler is closed.
    be_killed_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the parent may ignore it
    resource.setrlimit(resource.RLIMIT_DATA, (memory_mb << 20, memory_mb << 20))
    connection = Connection(descriptor)
    with contextlib.suppress(*_DISCONNECTED):
        vocabulary, backend, timeout = connection.recv()
        engine = make_engine(backend, vocabulary)
        connection.send(_READY)
        started = _resident_bytes()
        while True:
            gc.collect()
            # memoised objects live on; scanning them would be charged to each constraint
            gc.freeze()
            response = _respond(engine, connection.recv(), timeout, memory_mb)
            connection.send((response, _resident_bytes() - started))
    os._exit(0)


@contextlib.contextmanager
def _cpu_time_limit(seconds: float) -> Iterator[None]:
    """Kills the process, whatever it is doing, if the block takes more than `seconds` of CPU time."""
    signal.setitimer(signal.ITIMER_PROF, min(seconds, LONGEST_SECONDS))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _resident_bytes() -> int:
    """Returns the resident memory of this process in bytes, or 0 if the system does not report it."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def _respond(
    engine: GrammarEngine, constraint: Constraint, timeout: float, memory_mb: int
) -> tuple[tuple[PreparedGrammar, bytes], float] | ConstraintError:
    try:
        began = time.process_time()
        with _cpu_time_limit(timeout):
            prepared = engine.prepare(constraint), pack_mask_rules(extract_mask_rules(constraint))
        return prepared, time.process_time() - began
    except ConstraintError as error:
        return error
    except Exception as error:  # from a library, and must fail the request
        if isinstance(error, MemoryError) or "bad_alloc" in str(error):
            return TransientError(
                f"compiling the constraint needs more than {memory_mb} MB.",
                hint="Simplify it, or raise the engine's compile_memory_mb.",
            )
        return ConstraintError(f"the constraint could not be compiled: {error!r}")
