"""Replicas that share feed-forwards as engines of the test's own process, with real collectives
between them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import sglang_lite as sgl
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.loading.load_model import load
from sglang_lite.runtime.parallel.layout import Parallel
from sglang_lite.runtime.parallel.shared_steps import SharedSteps
from tests.runtime.parallel import threads
from tests.waiting import until


class InTurn:
    """Engines that get what is submitted in turn."""

    def __init__(self, engines: list[sgl.Engine]) -> None:
        self._engines = cycle(engines)

    def submit(self, *args: Any, **given: Any) -> Any:  # as of an engine
        return next(self._engines).submit(*args, **given)

    def run_program(self, *args: Any, **given: Any) -> Any:  # the same
        return next(self._engines).run_program(*args, **given)


@contextmanager
def sharing(
    folder: Path, parallel: Parallel, meeting: Path, **settings: Any
) -> Iterator[list[sgl.Engine]]:
    """An engine for each rank of a layout, with all settings but those of the layout."""
    config = EngineConfig.make(model=str(folder), **settings)
    pipes = [os.pipe() for _ in range(parallel.dp)]

    def started(rank: int) -> sgl.Engine:
        others = [
            os.fdopen(os.dup(pipe), "wb", 0) for i, (_, pipe) in enumerate(pipes) if i != rank
        ]
        ranks = threads.GlooCollectives(parallel.as_seen_by(rank), meeting, threads.TIMEOUT_S)
        steps = SharedSteps(ranks, os.fdopen(pipes[rank][0], "rb"), others, threads.TIMEOUT_S)
        loaded: Any = load(config, folder, iter, shared=steps)
        return sgl.Engine.of(loaded, model=str(folder), **settings)

    with ThreadPoolExecutor(parallel.dp) as starting:
        engines = list(starting.map(started, range(parallel.dp)))
    for _, pipe in pipes:
        os.close(pipe)
    yield engines
    until(lambda: not any(engine.core.loop.busy for engine in engines))  # a step needs all
    for engine in engines:
        engine.close()
