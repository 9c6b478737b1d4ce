"""Processes of the ranks that share a model with the engine's process. That process is rank 0, and
starts and ends the others.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from sglang_lite.engine.frames import (
    HEADER,
    Loaded,
    Start,
    StartFailed,
    decode_reports,
    encode_frame,
)
from sglang_lite.engine.nodes import NodeListener, RemoteProcess
from sglang_lite.engine.signs_of_life import processor_time
from sglang_lite.engine.spawned_process import CAUSE_FIRST_S, SpawnedProcess
from sglang_lite.protocol import BackendError, SglError
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.parallel.addresses import GLOO, rendezvous_url
from sglang_lite.wire.failure import as_error

if TYPE_CHECKING:
    from sglang_lite.runtime.parallel.collectives import Collectives

START_S = 300  # default of `dist_timeout`
BEAT_S = 0.5  # between two frames of a rank
# a rank that sends nothing and uses no processor time for this many looks is ended
_LOOK_S = 1.0
_LOOKS = 3
# longest time from a failed collective until it is known which rank ended; another node may be busy
_REASON_S = 10.0


class RankProcesses:
    """Processes of all ranks except 0, on this machine and others. The engine's process uses them
    as its `RankLinks`.

    Args:
        config: settings of the engine, which are sent to each rank.
        path: folder or file of the model.
        failed: called once, on its own thread, with the reason why a rank has ended. All others
            have then ended, too.

    Raises:
        BackendError: a process can't be started, or this machine can't listen for those of other
            machines.
    """

    def __init__(
        self, config: EngineConfig, path: Path, failed: Callable[[SglError], object]
    ) -> None:
        self._parallel = config.parallel
        self._timeout = config.dist_timeout or START_S
        self._failed = failed
        self._lock = threading.Lock()  # guards the next three
        self._error: SglError | None = None
        self._closed = False
        self._taken = 0  # maximum number of bytes in use on a rank's GPU
        self._ended = threading.Event()
        self._meeting = (
            _create_rendezvous_file()
            if self._parallel.nodes == 1
            else rendezvous_url(config.dist_init_addr, GLOO)
        )
        start = encode_frame([(0, Start(asdict(config), os.fspath(path), os.getpid()))])
        self._children: dict[int, SpawnedProcess | RemoteProcess] = {}
        self._loaded = {rank: threading.Event() for rank in range(1, self._parallel.ranks)}
        self._nodes = (
            None
            if self._parallel.nodes == 1
            else NodeListener(config, path, self._register_process)
        )
        for rank in range(1, self._parallel.ranks_per_node):
            name = f"rank {rank} of {self._parallel.ranks}"
            child = SpawnedProcess("sglang_lite.engine.child.rank", name, rank, self._meeting)
            with contextlib.suppress(OSError):  # it has ended already, and its reader notices that
                child.connection.send(start)
            self._register_process(rank, child)

    def _register_process(self, rank: int, child: SpawnedProcess | RemoteProcess) -> None:
        """Registers a rank's process and starts the thread that reads from it."""
        with self._lock:
            self._children[rank] = child
            ended = self._closed or self._error is not None
        if ended:
            child.kill()
        name = f"sglang_lite-rank-{rank}"
        threading.Thread(
            target=self._read_frames, args=(rank, child), name=name, daemon=True
        ).start()

    @cached_property
    def collectives(self) -> Collectives:
        if self._nodes is not None:
            try:
                self._nodes.wait_for_processes(self._timeout, lambda: self._error is not None)
            except BackendError as error:
                self._end_all_ranks(error)
            if self._error is not None:
                raise self._error
        from sglang_lite.runtime.parallel.collectives import GlooCollectives  # imports torch

        return GlooCollectives(self._parallel, self._meeting, self._timeout)

    def states(self) -> list[dict[str, int]]:
        pids = {0: os.getpid()} | {
            rank: child.pid for rank, child in sorted(self._children.items())
        }
        of_node = (
            {}
            if self._nodes is None
            else {rank: {"node": rank // self._parallel.ranks_per_node} for rank in pids}
        )
        known = {rank: {"pid": pid} for rank, pid in pids.items() if pid is not None}
        return [{"rank": rank} | of_node.get(rank, {}) | known.get(rank, {}) for rank in pids]

    def wait_until_loaded(self) -> int:
        for rank, loaded in self._loaded.items():
            if not loaded.wait(self._timeout) and self._error is None:
                name = f"rank {rank} of {self._parallel.ranks}"
                problem = f"{name} has not loaded its part {self._timeout} s after rank 0."
                self._end_all_ranks(
                    BackendError(
                        problem, hint="Raise dist_timeout, or free what the machine lacks."
                    )
                )
            if self._error is not None:
                raise self._error
        return self._taken

    def send(self, content: bytes) -> None:
        data = len(content).to_bytes(HEADER, "big") + content
        for child in self._children.values():
            child.connection.send(data)

    def end_ranks_and_raise(self, error: BaseException) -> NoReturn:
        self._ended.wait(_REASON_S)
        self._end_all_ranks(
            BackendError(
                f"rank 0 of {self._parallel.ranks} failed: {type(error).__name__}: {error}"
            )
        )
        assert self._error is not None
        raise self._error from error

    def close(self) -> None:
        if self._nodes is not None:
            self._nodes.close()
        with self._lock:
            self._closed = True
            children = list(self._children.values())
        for child in children:
            child.connection.close()
            child.kill()  # also one that is stopped; ranks keep nothing

    def _read_frames(self, rank: int, child: SpawnedProcess | RemoteProcess) -> None:
        """Reads a rank's frames until it ends, and then ends all others."""
        name = f"rank {rank} of {self._parallel.ranks}"
        silent = 0
        used = _processor_time_of(child)
        error: SglError | None = None

        def look() -> None:
            nonlocal silent, used, error
            before = used
            used = _processor_time_of(child)
            silent = silent + 1 if used == before else 0
            if silent == _LOOKS:
                error = BackendError(
                    f"{name} has given no sign of life for {_LOOKS * _LOOK_S:g} s, and was ended."
                )
                child.kill()

        for content in child.connection.read_frames(look, _LOOK_S):
            silent = 0
            for message in decode_reports(content):
                match message:
                    case Loaded():
                        with self._lock:
                            self._taken = max(self._taken, message.taken)
                        self._loaded[rank].set()
                    case StartFailed():
                        error = as_error(message.failure)
        end = child.await_process_end()
        child.connection.release_socket()
        if error is None and end.by_itself:
            self._ended.wait(CAUSE_FIRST_S)
        hint = (
            "With restart=True a new engine takes later requests."
            if self._nodes is None
            else "Start all nodes again."
        )
        self._end_all_ranks(error or BackendError(f"{name} {end.text}", hint=hint))

    def _end_all_ranks(self, error: SglError) -> None:
        """Ends all ranks because of an error. Only the first error counts."""
        with self._lock:
            first = self._error is None and not self._closed
            self._error = self._error or error
            children = list(self._children.values())
        for child in children:
            child.kill()
        self._ended.set()
        for loaded in self._loaded.values():
            loaded.set()
        if first:
            self._failed(self._error)


def _processor_time_of(child: SpawnedProcess | RemoteProcess) -> int | None:
    """Returns the `processor_time` of a rank's process, or None if it runs on another machine."""
    return None if child.pid is None else processor_time(child.pid)


def _create_rendezvous_file() -> str:
    """Creates the file through which ranks find each other, and returns its path. Only this user
    can read the file. On Linux it has no name in any folder, and it disappears with this process
    even after a crash.
    """
    if hasattr(os, "memfd_create"):
        return f"/proc/{os.getpid()}/fd/{os.memfd_create('sglang_lite-ranks')}"
    return os.fspath(Path(tempfile.mkdtemp(prefix="sglang_lite-ranks-"), "meeting"))
