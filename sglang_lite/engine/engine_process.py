"""Process of an engine, seen from its handle. Imports little: the process is started before the
rest is imported.
"""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_lite.engine.frames import Meeting, Ready, Start, encode_frame
from sglang_lite.engine.signs_of_life import SignsOfLife
from sglang_lite.engine.spawned_process import SpawnedProcess
from sglang_lite.errors import SglError
from sglang_lite.runtime.config import EngineConfig

if TYPE_CHECKING:
    from sglang_lite.engine.nodes import RemoteProcess


class EngineProcess:
    """Process that loads and runs an engine.

    Args:
        config: settings of the engine.
        path: folder of the model.
        name: name of the process in messages.
        child: the process, if it runs on another machine, where it already has its settings.
        meeting: files through which it synchronizes with replicas that share the weights of its
            feed-forward layers, or None. With such files, the process is killed if it falls silent,
            because the other replicas wait for it.

    Attributes:
        name: the argument.
        child: the process.
        ready: future of the message that the engine sends when it runs.
        failure: error that kept the engine from starting, or None.
        bar: tqdm's progress bar while the model loads.
        signs: signs of life of the process.

    Raises:
        BackendError: the process can't be started, or a Ray cluster has no room for its ranks.
        CapabilityError: Ray is not installed.
    """

    def __init__(
        self,
        config: EngineConfig,
        path: Path,
        name: str = "the engine's process",
        child: SpawnedProcess | RemoteProcess | None = None,
        meeting: Meeting | None = None,
    ) -> None:
        self.name = name
        if config.use_ray:
            from sglang_lite.engine.ray_ranks import start_rank_actors

            config = start_rank_actors(config)
        self.child = child or SpawnedProcess(
            "sglang_lite.engine.child.main",
            name,
            config.model,
            config.device,
            config.compile_processes,
        )
        self.ready: Future[Ready] = Future()
        self.failure: SglError | None = None
        self.bar: Any = None
        self.signs = SignsOfLife(self.child.pid, None if meeting is None else self.child.kill)
        if child is None:
            # the process has ended already, and its reader notices that
            with contextlib.suppress(OSError):
                start = Start(asdict(config), os.fspath(path), os.getpid(), meeting)
                self.child.connection.send(encode_frame([(0, start)]))
