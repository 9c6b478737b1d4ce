"""Looks for lost pages of the KV cache while an engine is idle, and runs a callback in its first
quiet second.

A lost page is neither free nor used by anyone, and stays so until the engine is restarted. This is
a bug of the engine, reported in its counts and in the log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from sglang_lite.runtime.kv_cache.check import count_lost_pages
from sglang_lite.runtime.scheduler.scheduler import Scheduler

logger = logging.getLogger("sglang_lite")

EVERY_S = 60.0
# without a command before a recount, so its milliseconds don't delay closely spaced requests
QUIET_S = 1.0


class Recount:
    """Recounts the pages of a scheduler's cache, once a minute. Used on the loop's thread, when
    nothing runs.

    Args:
        scheduler: scheduler whose cache is recounted.

    Attributes:
        lost: number of pages without an owner, as last counted.
        when_quiet: called once, in the first quiet second; None for nothing.
    """

    when_quiet: Callable[[], object] | None = None

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.lost = 0
        self._due = time.monotonic() + EVERY_S

    @property
    def seconds_until_recount(self) -> float:
        """Seconds the loop may wait for a command before it should recount."""
        return (
            QUIET_S if self.when_quiet is not None else max(self._due - time.monotonic(), QUIET_S)
        )

    def run(self) -> None:
        """Calls `when_quiet`. Recounts, and logs pages lost since the last time."""
        if self.when_quiet is not None:
            self.when_quiet()
            self.when_quiet = None
        handles = [h for each in self._scheduler.queues.running() if (h := each.handle) is not None]
        before = self.lost
        self.lost = count_lost_pages(self._scheduler.store, handles)
        self._due = time.monotonic() + EVERY_S
        if self.lost > before:
            total = self._scheduler.store.pool.total
            logger.error(
                "%d of %d pages of the KV cache have no owner, so no request can use them. Please report it; a restart "
                "frees them.",
                self.lost,
                total,
            )
