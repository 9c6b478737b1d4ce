"""Draws each text in one try, token by token, and excludes tokens that would leave the language. A
weight corrects for the excluded tokens (importance sampling).

If the weight counts as 0 in draws of other texts, a text's mean weight over many draws is the
probability with which the model writes the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from sglang_lite.runtime.exact.beginnings import Beginning, MassRow
from sglang_lite.runtime.exact.text_limits import TextLimits
from sglang_lite.runtime.exact.walks import MIN_MASS, Rows, draw_weighted_index


class WeightedWalk:
    """Draws one text in a single try.

    Args:
        rows: rows that have been computed, by the tokens of their beginnings.
        start: the empty beginning.
        token_bytes: bytes of each token.
        draw_uniform: returns the next random number, from 0 to 1.
        limits: limits of the text.

    Attributes:
        text: bytes of the text; None until the draw has ended.
        log_weight: logarithm of the text's weight. The weight is the product, over all tokens, of
            the probability that was not excluded. None if the weight is 0, because the draw reached
            no allowed text; `text` has only the bytes read until then.
    """

    def __init__(
        self,
        rows: Rows,
        start: Beginning,
        token_bytes: Sequence[bytes],
        draw_uniform: Callable[[], float],
        limits: TextLimits,
    ) -> None:
        self.text: bytes | None = None
        self.log_weight: float | None = 0.0
        self._rows = rows
        self._at = start
        self._token_bytes = token_bytes
        self._draw_uniform = draw_uniform
        self._limits = limits

    def advance(self) -> Beginning | None:
        """Continues the walk until it ends or a row is needed. Returns the beginning whose row is
        needed, or None if the walk has ended.
        """
        while self.text is None:
            if self._limits.is_too_long(self._at):
                self._end_without_weight(self._at.text)
            elif (row := self._rows.get(self._at.tokens)) is not None:
                self._choose(row)
            else:
                return self._at
        return None

    def _choose(self, row: MassRow) -> None:
        """Draws the next token after a beginning, or the end of the text."""
        weights = np.concatenate((row.ends, row.live))
        if not self._limits.may_continue(row.beginning):
            weights[len(row.ends) :] = 0.0
        total = float(weights.sum())
        if total < MIN_MASS:
            self._end_without_weight(row.beginning.text)
            return
        assert self.log_weight is not None
        self.log_weight += min(math.log(total), 0.0)
        index = draw_weighted_index(weights, self._draw_uniform())
        number = index - len(row.ends)
        if number >= 0:
            self._at = row.continue_with_live(number, self._token_bytes)
            return
        text = row.beginning.text_with(list(row.outcomes.ends)[index])
        if self._limits.is_allowed(text):
            self.text = text
        else:
            self._end_without_weight(text)

    def _end_without_weight(self, text: bytes) -> None:
        self.text = text
        self.log_weight = None
