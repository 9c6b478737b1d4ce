"""Ranks as threads of the test's own process, with real collectives between them: each has its own
model, cache and runner, and knows nothing but rank 0's messages.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import sglang_lite as sgl
from sglang_lite.protocol import ModelError, ParameterError
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.executor import make_runner
from sglang_lite.runtime.executor.ranks import follow_rank_0, read_message
from sglang_lite.runtime.loading.load_model import load_model
from sglang_lite.runtime.parallel.collectives import GlooCollectives
from sglang_lite.runtime.parallel.layout import Parallel

TIMEOUT_S = 300


class ThreadLinks:
    """Links to ranks in threads.

    Args:
        config: settings of all ranks.
        path: folder or file of the model.
        parallel: layout of the ranks, as rank 0 sees it.
        meeting: path of a file that is not there yet.
    """

    def __init__(self, config: EngineConfig, path: Path, parallel: Parallel, meeting: Path) -> None:
        self._config, self._path, self._meeting = config, path, meeting
        self._queues: list[queue.Queue] = [queue.Queue() for _ in range(parallel.ranks - 1)]
        self._threads = [
            threading.Thread(
                target=self._run, args=(parallel.as_seen_by(rank), self._queues[rank - 1])
            )
            for rank in range(1, parallel.ranks)
        ]
        for thread in self._threads:
            thread.start()
        self.collectives = GlooCollectives(parallel, meeting, TIMEOUT_S)

    def _run(self, parallel: Parallel, messages: queue.Queue) -> None:
        ranks = GlooCollectives(parallel, self._meeting, TIMEOUT_S)
        try:
            model = load_model(self._config, self._path, iter, ranks=ranks).model
        except (ModelError, ParameterError):
            return  # which rank 0 raises, too
        contents = iter(messages.get, None)
        follow_rank_0(
            map(read_message, contents), lambda capacity: make_runner(model, capacity, self._config)
        )

    def states(self) -> list[dict[str, int]]:
        return [{"rank": rank} for rank in range(self.collectives.parallel.ranks)]

    def wait_until_loaded(self) -> int:
        return 0  # messages wait in the queues

    def send(self, content: bytes) -> None:
        for each in self._queues:
            each.put(content)

    def end_ranks_and_raise(self, error: BaseException) -> NoReturn:
        raise error

    def close(self) -> None:
        for each in self._queues:
            each.put(None)
        for thread in self._threads:
            thread.join(TIMEOUT_S)


def engine_of_ranks(
    folder: Path,
    parallel: Parallel,
    meeting: Path,
    loading: dict[str, Any] | None = None,
    **settings: Any,
) -> sgl.Engine:
    """Engine in this process whose model is cut over ranks; `loading` are settings that one in a
    process refuses.
    """
    config = EngineConfig.make(model=str(folder), **settings, **(loading or {}))
    links = ThreadLinks(config, folder, parallel, meeting)
    loaded = replace(load_model(config, folder, iter, ranks=links.collectives), ranks=links)
    return sgl.Engine.of(loaded, **{"model": str(folder), **settings})
