"""Probabilities of the texts that are read from a model's free text, summed over the ways in which
tokens spell them.

The tree of token prefixes is computed branch by branch. What is still open bounds the error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sglang_lite.constraints.reader import ReadPosition
from sglang_lite.runtime.structured_output.outcomes import Outcomes

_MAX_TAKEN = 64  # branches that are computed in one step
# Share of the gap that one step leaves open, so that the next steps can leave open some, too.
_FINER = 0.5


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
    position: ReadPosition
    mass: float


class MassTree:
    """Probabilities of texts, and the branches that are not computed yet.

    Args:
        start: position of the reader at the beginning.
        spellings: usual tokens of each text. The branches on the way to them are computed first,
            which soon shows how unlikely another branch has to be to be left out.

    Attributes:
        masses: probability of each text that has been found, by its bytes: a lower bound.
    """

    def __init__(self, start: ReadPosition, spellings: Iterable[Sequence[int]]) -> None:
        self.masses: dict[bytes, float] = {}
        self._open = [Beginning((), b"", start, 1.0)]
        self._given_up = 0.0
        self._usual = {
            tuple(tokens[:count]) for tokens in spellings for count in range(len(tokens) + 1)
        }

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
        # While nothing is known, the likeliest branch stands for what will be.
        known = self.known_mass or max(branch.mass for branch in self._open)
        needed = self._list_likely_branches(_FINER * gap * known)
        needed.sort(key=lambda branch: (branch.tokens not in self._usual, -branch.mass))
        taken = {branch.tokens: branch for branch in needed[: min(_MAX_TAKEN, most)]}
        self._open = [branch for branch in self._open if branch.tokens not in taken]
        return list(taken.values())

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

    def add_row(
        self,
        branch: Beginning,
        outcomes: Outcomes,
        token_bytes: Sequence[bytes],
        ends: Sequence[float],
        live: Sequence[float],
    ) -> None:
        """Adds what was computed for a branch.

        Args:
            branch: branch that was taken.
            outcomes: outcomes of the tokens after it.
            token_bytes: bytes of each token.
            ends: total probability of the tokens with each of `outcomes.ends`.
            live: probability of each of the live tokens.
        """
        for end, mass in zip(outcomes.ends, ends, strict=True):
            text = (
                branch.text + end
                if isinstance(end, bytes)
                else branch.text[: len(branch.text) + end]
            )
            self.masses[text] = self.masses.get(text, 0.0) + branch.mass * mass
        for (token, position), mass in zip(outcomes.live, live, strict=True):
            if mass > 0:
                self._open.append(
                    Beginning(
                        (*branch.tokens, token),
                        branch.text + token_bytes[token],
                        position,
                        branch.mass * mass,
                    )
                )
