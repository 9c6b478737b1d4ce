"""Beginnings of free texts, and the distributions of the tokens after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.structured_output.outcomes import End, Outcomes


@dataclass(frozen=True, slots=True)
class Beginning:
    """Beginning of a free text.

    Attributes:
        tokens: its tokens.
        text: their bytes.
        position: position of the reader after them.
        mass: their probability.
    """

    tokens: tuple[int, ...]
    text: bytes
    position: int
    mass: float

    def continue_with(
        self, token: int, token_bytes: Sequence[bytes], position: int, share: float
    ) -> Beginning:
        """Returns the beginning with another token.

        Args:
            token: the token.
            token_bytes: bytes of each token.
            position: position of the reader after it.
            share: its probability after this beginning.
        """
        return Beginning(
            (*self.tokens, token), self.text + token_bytes[token], position, self.mass * share
        )

    def text_with(self, end: End) -> bytes:
        """Returns the text that is read if a token follows of which `end` belongs to it."""
        if isinstance(end, bytes):
            return self.text + end
        return self.text[: len(self.text) + end]


@dataclass(frozen=True, eq=False, slots=True)
class MassRow:
    """Distribution of the next token after a beginning.

    Attributes:
        beginning: the beginning.
        outcomes: outcomes of the tokens after it.
        ends: total probability of the tokens with each of `outcomes.ends`, float64 [E].
        live: probability of each of the live tokens, float64 [L].
    """

    beginning: Beginning
    outcomes: Outcomes
    ends: NDArray[np.float64]
    live: NDArray[np.float64]

    def continue_with_live(self, number: int, token_bytes: Sequence[bytes]) -> Beginning:
        """Returns the beginning with one of the live tokens after it.

        Args:
            number: index of the token among the live ones.
            token_bytes: bytes of each token.
        """
        return self.beginning.continue_with(
            int(self.outcomes.live_tokens[number]),
            token_bytes,
            int(self.outcomes.live_positions[number]),
            float(self.live[number]),
        )
