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
        tokens: tokens of the beginning.
        text: bytes of these tokens.
        position: position of the text reader after these tokens. In a search of spellings, number
            of bytes that these tokens spell.
        mass: probability that the model writes these tokens.
    """

    tokens: tuple[int, ...]
    text: bytes
    position: int
    mass: float

    def continue_with(
        self, token: int, token_bytes: Sequence[bytes], position: int, share: float
    ) -> Beginning:
        """Returns this beginning extended by a token.

        Args:
            token: the token.
            token_bytes: bytes of each token.
            position: position after the token.
            share: probability of the token after this beginning.
        """
        return Beginning(
            (*self.tokens, token), self.text + token_bytes[token], position, self.mass * share
        )

    def text_with(self, end: End) -> bytes:
        """Returns the text that is read if the next token ends it.

        Args:
            end: first bytes of the token, if they still belong to the text; otherwise minus the
                number of bytes between the end of the text and the token.
        """
        if isinstance(end, bytes):
            return self.text + end
        return self.text[: len(self.text) + end]


@dataclass(frozen=True, eq=False, slots=True)
class MassRow:
    """Distribution of the next token after a beginning.

    Attributes:
        beginning: the beginning.
        outcomes: outcomes of all tokens after the beginning.
        ends: for each end in `outcomes.ends`, total probability of the tokens with this end,
            float64 [E].
        live: probability of each token in `outcomes.live_tokens`, float64 [L].
    """

    beginning: Beginning
    outcomes: Outcomes
    ends: NDArray[np.float64]
    live: NDArray[np.float64]

    def continue_with_live(self, number: int, token_bytes: Sequence[bytes]) -> Beginning:
        """Returns the beginning extended by one of the live tokens.

        Args:
            number: index of the token in `outcomes.live_tokens`.
            token_bytes: bytes of each token.
        """
        return self.beginning.continue_with(
            int(self.outcomes.live_tokens[number]),
            token_bytes,
            int(self.outcomes.live_positions[number]),
            float(self.live[number]),
        )
