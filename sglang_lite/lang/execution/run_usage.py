"""Usage of a run: tokens of its nodes, and elapsed time."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import msgspec

from sglang_lite.lang.results import usages_of
from sglang_lite.protocol import Generation, Usage, total_usage


class RunUsage:
    """Account of a run's usage, beginning when the object is made.

    Attributes:
        started: `time.perf_counter()` when the run began.
        replayed: True if the nodes were played elsewhere (by an engine that played the whole program), so that only
            their durations are known.
    """

    __slots__ = ("_failed", "_last_end", "_records", "replayed", "started")

    def __init__(self) -> None:
        self._records: list[Any] = []
        self._failed: tuple[Usage, ...] = ()  # usage of attempts that failed
        self.started = self._last_end = time.perf_counter()
        self.replayed = False

    def played(self, record: object) -> float:
        """Records the result of a node, and returns the current `time.perf_counter()`."""
        self._records.append(record)
        self._last_end = now = time.perf_counter()
        return now

    def failed(self, usages: Iterable[Usage | None]) -> None:
        """Records the usage of failed attempts; their generated tokens count as thrown away."""
        for usage in usages:
            if usage is not None:
                self._failed += (msgspec.structs.replace(usage, thrown_away_tokens=usage.completion_tokens),)

    def restore(self, usage: Usage) -> None:
        """Takes over the usage of an earlier run, its time included."""
        self.played(Generation("", usage=usage))
        self.started = self._last_end - usage.total_s

    def took(self, seconds: float) -> None:
        """Sets the duration of a run whose nodes were played elsewhere."""
        self.started, self.replayed = self._last_end - seconds, True

    def usage(self) -> Usage:
        """Usage of all nodes and failed attempts, with `total_s` from the run's start to its last result."""
        total = total_usage([*usages_of(self._records[:]), *self._failed])
        return msgspec.structs.replace(total, total_s=self._last_end - self.started)
