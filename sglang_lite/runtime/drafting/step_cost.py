"""Time of a step by the number of its tokens, measured before, or learned from the steps before."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

_SLOPE = 0.05  # time of a token, as a share of a step's, before anything is known
_KEPT = 0.98  # weight of the steps before, for each new one
_MAX_TOKENS = 256  # larger steps tell nothing about those with a few tokens more


class StepCost:
    """Line through the durations of the last steps: a time for each step, and one for each of its tokens. If times were
    measured, the line is of what steps take beyond them."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # of 1, tokens, seconds, tokens², tokens * seconds
        self._step, self._token = 1.0, _SLOPE
        self._measured: list[float] = []  # by number of tokens
        self._most = _MAX_TOKENS

    def set_measured(self, seconds: Mapping[int, float]) -> None:
        """Takes over measured times of steps by numbers of tokens, more than one."""
        counts = sorted(seconds)
        times = np.maximum.accumulate([seconds[count] for count in counts])
        self._measured, self._most = np.interp(np.arange(counts[-1] + 2), counts, times).tolist(), counts[-1]
        self._step = self._token = 0.0

    def record(self, tokens: int, seconds: float) -> None:
        """Records a step."""
        if tokens > self._most:
            return
        if self._measured:
            seconds -= self._measured[tokens]
        self._sums = self._sums * _KEPT + (1, tokens, seconds, tokens * tokens, tokens * seconds)
        count, x, y, xx, xy = self._sums.tolist()
        spread = count * xx - x * x
        if spread > 0.01 * count * xx:  # steps of several sizes
            self._token = max((count * xy - x * y) / spread, 0.0)
            self._step = max((y - self._token * x) / count, 0.0)
        elif self._measured:
            self._step = max((y - self._token * x) / count, 0.0)
        else:
            self._step, self._token = 1.0, _SLOPE

    def seconds(self, tokens: int) -> float:
        """Seconds of a step."""
        measured = self._measured[min(tokens, self._most)] if self._measured else 0.0
        return measured + self._step + self._token * tokens

    def least_chance(self, tokens: int, expected: float) -> float:
        """Chance of being right that one more drafted token needs, to add more to what the step is expected to give
        than to its time.

        Args:
            tokens: number of tokens of the step so far.
            expected: number of tokens that it is expected to give.
        """
        seconds = self.seconds(tokens)
        return (self.seconds(tokens + 1) - seconds) * expected / max(seconds, 1e-9)
