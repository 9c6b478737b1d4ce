"""Probabilities of the texts that are read from a model's free text, summed over the ways in which
tokens spell them.

The tree of token prefixes is computed branch by branch. What is still open bounds the error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sglang_lite.runtime.exact.beginnings import Beginning, MassRow

_MAX_TAKEN = 64  # branches that are computed in one step
# Share of the gap that one step leaves open, so that the next steps can leave open some, too.
_FINER = 0.5


class MassTree:
    """Probabilities of texts, and the branches that are not computed yet.

    Args:
        start: position of the reader at the beginning.
        spellings: usual tokens of each text. The branches on the way to them are computed first,
            which soon shows how unlikely another branch has to be to be left out.

    Attributes:
        masses: probability of each text that has been found, by its bytes: a lower bound.
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
        """Upper bound of the total variation distance between the shares of the found masses and
        the true ones.
        """
        left = math.fsum(branch.mass for branch in self._open) + self._given_up
        return left / (left + self.known_mass) if left else 0.0

    def take_branches(self, gap: float, most: int) -> list[Beginning]:
        """Takes the branches that have to be computed next. Returns none if the gap is small
        enough.

        Args:
            gap: gap that is small enough.
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
        """Returns the probability of all texts that is expected when the branches are computed that
        spell a whole text as usual. If there are none, and no text has been found, the likeliest
        branch stands for what will be.
        """
        whole = math.fsum(branch.mass for branch in self._open if branch.tokens in self._whole)
        return self.known_mass + whole or max(branch.mass for branch in self._open)

    def give_up(self, branch: Beginning) -> None:
        """Leaves a branch open for good."""
        self._given_up += branch.mass

    def _list_likely_branches(self, left_out: float) -> list[Beginning]:
        """Returns the open branches without the least likely ones, which have a probability of at
        most `left_out` together.
        """
        rest = 0.0
        by_mass = sorted(self._open, key=lambda branch: branch.mass)
        for count, branch in enumerate(by_mass):
            rest += branch.mass
            if rest > left_out:
                return by_mass[count:]
        return []

    def add_row(self, row: MassRow, token_bytes: Sequence[bytes]) -> None:
        """Adds what was computed for a branch that was taken.

        Args:
            row: distribution after the branch.
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
