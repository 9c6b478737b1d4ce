"""Clock of a step loop, and the measured time of its steps."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median

_STEPS = 16  # last steps that are measured


class StepClock:
    """Clock that tells how many steps are possible until a time.

    Attributes:
        now: function that returns the time in seconds.
    """

    def __init__(self) -> None:
        self.now: Callable[[], float] = time.perf_counter
        self._seconds = deque[float](maxlen=_STEPS)

    def record(self, seconds: float) -> None:
        """Records how long a step took."""
        self._seconds.append(seconds)

    def steps_until(self, moment: float) -> float:
        """Number of steps until a time, at the pace of the last ones; infinite if none is known."""
        if not self._seconds or (step := median(self._seconds)) <= 0:
            return math.inf
        return (moment - self.now()) / step
