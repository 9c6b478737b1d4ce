"""Room that admission keeps for requests that are running."""

from __future__ import annotations

import math

import numpy as np

from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.schedule_hints import ExpectedTokens

_FIRST, _LEAST, _STEPS = 0.7, 0.1, 600
_LONGEST = 4096  # tokens: nobody keeps room for more, whatever max_tokens says
_SPARE = 20  # steps that those who stay can continue after a retraction


class PageReserve:
    """Most requests end before their limit, so room is kept for a share of what each may still generate. The share
    falls with every admission round, and a retraction sets it back to what the running requests have turned out to
    need. (SGLang's new-token ratio.)"""

    def __init__(self) -> None:
        self._share = _FIRST

    def of_program(self, ahead: ExpectedTokens) -> int:
        """Tokens to keep room for, of nodes that a program has yet to play."""
        return min(ahead.text, _LONGEST) + math.ceil(min(ahead.generated, _LONGEST) * self._share)

    def of_request(self, length: int, limit: int) -> int:
        """Tokens to keep room for, of a request with so many tokens that may have `limit`."""
        return math.ceil(min(limit - length, _LONGEST) * self._share)

    def growth(self, length: Ints, limit: Ints) -> Ints:
        """Tokens to keep room for, per request.

        Args:
            length, limit: tokens that each has, and may have [R].
        """
        left = np.minimum(limit - length, _LONGEST)
        growth: Ints = np.ceil(left * self._share).astype(np.int32)
        return growth

    def decay(self) -> None:
        """A step has gone well."""
        self._share = max(_LEAST, self._share - (_FIRST - _LEAST) / _STEPS)

    def retracted(self, length: Ints, limit: Ints) -> None:
        """A request had to be retracted: those running are this far."""
        left = np.minimum(limit - length, _LONGEST).sum()
        self._share = min(1.0, max(self._share, float(_SPARE * len(length) / max(left, 1))))
