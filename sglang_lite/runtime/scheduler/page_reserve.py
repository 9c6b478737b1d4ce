"""Pages that admission keeps free for the growth of running requests."""

from __future__ import annotations

import math

import numpy as np

from sglang_lite.program.play.branch import ExpectedTokens
from sglang_lite.runtime.kv_cache.pages import Ints

_FIRST = 0.7
_MIN = 0.1
_STEPS = 600
_LONGEST = 4096  # tokens; no request or program reserves more, regardless of max_tokens
_SPARE = 20  # steps that the remaining requests can run after a retraction


class PageReserve:
    """Estimate of the tokens that running requests will still generate.

    Most requests end before their limit, so room is kept only for a share of what each may still
    generate. The share falls with every step, and a retraction raises it to twenty more tokens for
    each decoding request. (SGLang's new-token ratio.)
    """

    def __init__(self) -> None:
        self._share = _FIRST

    def reserved_tokens_for_program(self, expected: ExpectedTokens) -> int:
        """Returns the tokens to reserve for a program's remaining nodes."""
        return min(expected.text, _LONGEST) + math.ceil(
            min(expected.generated, _LONGEST) * self._share
        )

    def reserved_tokens_for_request(self, length: int, limit: int) -> int:
        """Returns the tokens to reserve for a request with `length` tokens and room for up to
        `limit`.
        """
        return math.ceil(min(limit - length, _LONGEST) * self._share)

    def reserved_tokens_for_rows(self, length: Ints, limit: Ints) -> Ints:
        """Returns the tokens to reserve for each request, int32 [R].

        Args:
            length, limit: current and maximum number of tokens of each request, int32 [R].
        """
        left = np.minimum(limit - length, _LONGEST)
        growth: Ints = np.ceil(left * self._share).astype(np.int32)
        return growth

    def lower_reserved_share(self) -> None:
        """Lowers the share of tokens to reserve a little. Called once per plan."""
        self._share = max(_MIN, self._share - (_FIRST - _MIN) / _STEPS)

    def raise_reserved_share(self, length: Ints, limit: Ints) -> None:
        """Raises the share of tokens to reserve after a retraction, given the current and maximum
        lengths of the running requests.
        """
        left = np.minimum(limit - length, _LONGEST).sum()
        self._share = min(1.0, max(self._share, float(_SPARE * len(length) / max(left, 1))))
