"""Computes the probabilities of the texts that are read from a model's free text. A text's
probability is the sum over all its spellings.

The tree of token prefixes is computed branch by branch. The total probability of the open branches
bounds the error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sglang_lite.runtime.exact.beginnings import Beginning, MassRow

_MAX_TAKEN = 64  # most branches that are computed in one step
# Share of the permitted gap that a step leaves open. Later steps may leave open the rest.
_FINER = 0.5


class MassTree:
    """Tree of token prefixes. Holds the probabilities of the texts found so far, and the branches
    that have not been computed yet.

    Args:
        start: position of the text reader before the first token.
        spellings: the tokenizer's tokens for each text. Their prefixes are computed first, because
            they soon show how unlikely a branch must be to be left out.

    Attributes:
        masses: lower bound of the probability of each text found so far, by the text's bytes.
    """

    def __init__(self, start: int, spellings: Iterable[Sequence[int]]) -> None:
        self.masses: dict[bytes, float] = {}
        self._open = [Beginning((), b"", start, 1.0)]
        self._given_up = 0.0
        self._whole = {tuple(tokens) for tokens in spellings}
        self._usual = {tokens[:count] for tokens in self._whole for count in range(len(tokens) + 1)}

    @property
    def known_mass(self) -> float:
        """Probability of all texts that have been found."""
        return math.fsum(self.masses.values())

    @property
    def gap(self) -> float:
        """Upper bound of the total variation distance between two distributions of the texts: the
        one that `masses` gives, and the true one.
        """
        left = math.fsum(branch.mass for branch in self._open) + self._given_up
        return left / (left + self.known_mass) if left else 0.0

    def take_branches(self, gap: float, most: int) -> list[Beginning]:
        """Removes and returns the open branches that must be computed next. Returns none if the gap
        is small enough.

        Args:
            gap: largest gap that is small enough.
            most: maximum number of branches.
        """
        if self.gap <= gap or not self._open:
            return []
        needed = self._list_likely_branches(_FINER * gap * self._expect_mass())
        needed.sort(key=lambda branch: (branch.tokens not in self._usual, -branch.mass))
        taken = {branch.tokens: branch for branch in needed[: min(_MAX_TAKEN, most)]}
        self._open = [branch for branch in self._open if branch.tokens not in taken]
        return list(taken.values())

    def _expect_mass(self) -> float:
        """Estimates the total probability of the texts: that of the texts found so far, plus that
        of the open branches that are the tokenizer's spelling of a text. If both are 0, returns the
        probability of the likeliest open branch.
        """
        whole = math.fsum(branch.mass for branch in self._open if branch.tokens in self._whole)
        return self.known_mass + whole or max(branch.mass for branch in self._open)

    def give_up(self, branch: Beginning) -> None:
        """Records that a branch will never be computed, so its probability stays in the gap."""
        self._given_up += branch.mass

    def _list_likely_branches(self, left_out: float) -> list[Beginning]:
        """Returns the open branches except the least likely ones. Those that are left out have a
        total probability of at most `left_out`.
        """
        rest = 0.0
        by_mass = sorted(self._open, key=lambda branch: branch.mass)
        for count, branch in enumerate(by_mass):
            rest += branch.mass
            if rest > left_out:
                return by_mass[count:]
        return []

    def add_row(self, row: MassRow, token_bytes: Sequence[bytes]) -> None:
        """Adds the distribution that was computed after a branch from `take_branches`.

        Args:
            row: the distribution.
            token_bytes: bytes of each token.
        """
        before = row.beginning
        for end, share in zip(row.outcomes.ends, row.ends.tolist(), strict=True):
            text = before.text_with(end)
            self.masses[text] = self.masses.get(text, 0.0) + before.mass * share
        tokens = row.outcomes.live_tokens.tolist()
        positions = row.outcomes.live_positions.tolist()
        for token, position, share in zip(tokens, positions, row.live.tolist(), strict=True):
            if share > 0:
                self._open.append(before.continue_with(token, token_bytes, position, share))
