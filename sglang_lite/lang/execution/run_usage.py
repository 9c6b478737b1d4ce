"""Usage of a run: what its nodes have used, and how long it has taken."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import msgspec

from sglang_lite.lang.results import usages_of
from sglang_lite.protocol import Generation, Usage, total_usage


class RunUsage:
    """Usage of a run, from when it is made.

    Attributes:
        started: `time.perf_counter()` when the run began.
        replayed: its nodes were played elsewhere, so only how long each took is known.
    """

    __slots__ = ("_failed", "_last_end", "_records", "replayed", "started")

    def __init__(self) -> None:
        self._records: list[Any] = []
        self._failed: tuple[Usage, ...] = ()  # of attempts that failed
        self.started = self._last_end = time.perf_counter()
        self.replayed = False

    def played(self, record: object) -> float:
        """Keeps the result of a node. Returns when that was."""
        self._records.append(record)
        self._last_end = now = time.perf_counter()
        return now

    def failed(self, usages: Iterable[Usage | None]) -> None:
        """Keeps what an attempt has used that failed."""
        for usage in usages:
            if usage is not None:
                self._failed += (msgspec.structs.replace(usage, thrown_away_tokens=usage.completion_tokens),)

    def restore(self, usage: Usage) -> None:
        """Takes over what an earlier run has used."""
        self.played(Generation("", usage=usage))
        self.started = self._last_end - usage.total_s

    def took(self, seconds: float) -> None:
        """Sets the time that the run has taken, of one whose nodes were played elsewhere."""
        self.started, self.replayed = self._last_end - seconds, True

    def usage(self) -> Usage:
        """Usage of all nodes, and the run's own time."""
        total = total_usage([*usages_of(self._records[:]), *self._failed])
        return msgspec.structs.replace(total, total_s=self._last_end - self.started)
