"""Clock of a step loop, and the measured time of its steps."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median

from sglang_lite.runtime.scheduler.batch import Batch

_STEPS = 16  # number of recent steps that are measured


class StepClock:
    """Clock that estimates how many steps can be run before a deadline.

    Attributes:
        now: function that returns the time in seconds.
    """

    def __init__(self) -> None:
        self.now: Callable[[], float] = time.perf_counter
        self._seconds = deque[float](maxlen=_STEPS)

    def record_step_time(self, seconds: float) -> None:
        """Records how long a step took."""
        self._seconds.append(seconds)

    def steps_until(self, moment: float) -> float:
        """Returns how many steps can be run before a time, if each takes as long as the median of
        recent steps. Infinite if no step was recorded.
        """
        if not self._seconds or (step := median(self._seconds)) <= 0:
            return math.inf
        return (moment - self.now()) / step


class DeviceTime:
    """Measures how long a GPU takes for the tokens of prompts.

    The host launches steps ahead, so its own time for a step means nothing. Instead, a step is
    measured from its launch or the end of the previous step, whichever is later, until its tokens
    can be read.

    Args:
        record: callback for numbers of tokens, and the seconds that they took.
    """

    def __init__(self, record: Callable[[int, float], None]) -> None:
        self._record = record
        self._read = 0.0
        self._began = math.inf
        self._tokens = 0

    def record_settled_step(self, batch: Batch, began: float, *, read: bool) -> None:
        """Records that the loop has processed the results of a step.

        Args:
            batch: rows of the step.
            began: time of the step's launch, on the clock `time.perf_counter()`.
            read: whether the step's tokens were read from a GPU. If not, the step may still be
                running.
        """
        self._began = min(self._began, began)
        if not batch.drafts:  # drafted tokens are not prompt tokens
            self._tokens += batch.tokens - batch.decoding
        if read:
            now = time.perf_counter()
            self._record(self._tokens, now - max(self._began, self._read))
            self._read = now
            self._began = math.inf
            self._tokens = 0
