"""The process that an engine runs in, as its handle knows it. Light: it is started before all else is imported."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_lite.engine.frames import Ready, Start, frame
from sglang_lite.engine.spawned_process import SpawnedProcess
from sglang_lite.errors import SglError
from sglang_lite.runtime.config import EngineConfig


class EngineProcess:
    """
    Args:
        config: of the engine.
        path: of its model.

    Attributes:
        child: the process.
        ready: what the engine says when it runs.
        failure: why it could not be started.
        bar: of tqdm, while it loads.

    Raises:
        BackendError: the process can't be started.
    """

    def __init__(self, config: EngineConfig, path: Path) -> None:
        start = frame([Start(0, asdict(config), os.fspath(path), os.getpid())])
        self.child = SpawnedProcess(
            "sglang_lite.engine.child.main", "the engine's process",
            config.model, config.device, config.compile_processes,
        )  # fmt: skip
        self.ready: Future[Ready] = Future()
        self.failure: SglError | None = None
        self.bar: Any = None
        with contextlib.suppress(OSError):  # it has ended, and whoever reads from it hears of that
            self.child.connection.send(start)
