"""Statistics of the time that masks take, over the last few thousand."""

from __future__ import annotations

import numpy as np

KEPT = 4096


class Durations:
    """Ring buffer of the last KEPT durations."""

    def __init__(self) -> None:
        self._ring = np.zeros(KEPT)
        self._count = 0

    def add(self, seconds: float) -> None:
        self._ring[self._count % KEPT] = seconds
        self._count += 1

    def summary(self, name: str) -> dict[str, float]:
        """Median, 99th percentile and maximum of the kept durations, in seconds; 0 if there are none."""
        kept = self._ring[: self._count] if self._count else np.zeros(1)
        p50, p99, most = np.percentile(kept, [50, 99, 100]).tolist()
        return {f"{name}_p50_s": p50, f"{name}_p99_s": p99, f"{name}_max_s": most}
