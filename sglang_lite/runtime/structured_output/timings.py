"""Statistics on how long the last few thousand masks took to compute."""

from __future__ import annotations

import numpy as np

MAX_SAMPLES = 4096


class Durations:
    """Ring buffer of the last MAX_SAMPLES durations."""

    def __init__(self) -> None:
        self._ring = np.zeros(MAX_SAMPLES)
        self._count = 0

    def add_duration(self, seconds: float) -> None:
        self._ring[self._count % MAX_SAMPLES] = seconds
        self._count += 1

    def summary(self, name: str) -> dict[str, float]:
        """Returns the median, 99th percentile and maximum of the stored durations in seconds, or 0
        if there are none.
        """
        samples = self._ring[: self._count] if self._count else np.zeros(1)
        p50, p99, longest = np.percentile(samples, [50, 99, 100]).tolist()
        return {f"{name}_p50_s": p50, f"{name}_p99_s": p99, f"{name}_max_s": longest}
