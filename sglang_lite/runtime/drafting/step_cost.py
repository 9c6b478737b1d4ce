"""Time of a step by the number of its tokens, learned from the steps before."""

from __future__ import annotations

import numpy as np

_SLOPE = 0.05  # time of a token, as a share of a step's, before anything is known
_KEPT = 0.98  # weight of the steps before, for each new one
_MAX_TOKENS = 256  # larger steps tell nothing about those with a few tokens more


class StepCost:
    """Line through the durations of the last steps: a time for each step, and one for each of its tokens."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # of 1, tokens, seconds, tokens², tokens * seconds
        self._step, self._token = 1.0, _SLOPE

    def record(self, tokens: int, seconds: float) -> None:
        """Records a step."""
        if tokens > _MAX_TOKENS:
            return
        self._sums = self._sums * _KEPT + (1, tokens, seconds, tokens * tokens, tokens * seconds)
        count, x, y, xx, xy = self._sums.tolist()
        spread = count * xx - x * x
        if spread > 0.01 * count * xx:  # steps of several sizes
            self._token = max((count * xy - x * y) / spread, 0.0)
            self._step = max((y - self._token * x) / count, 0.0)
        else:
            self._step, self._token = 1.0, _SLOPE

    def least_chance(self, tokens: int, expected: float) -> float:
        """Chance of being right that one more drafted token needs, to add more to what the step is expected to give
        than to its time.

        Args:
            tokens: number of tokens of the step so far.
            expected: number of tokens that it is expected to give.
        """
        return self._token * expected / max(self._step + self._token * tokens, 1e-9)
