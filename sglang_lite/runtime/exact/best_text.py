"""Finds the likeliest text of a language, and proves that no other text is likelier.

The most probable beginnings are continued first. A text can be spelled in several ways, so its
probability can still grow while beginnings that lead to it are open. An upper bound is the
probability found so far plus that of all these beginnings.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_lite.constraints.reader import TextReader
from sglang_lite.runtime.exact.beginnings import Beginning, MassRow
from sglang_lite.runtime.exact.text_limits import TextLimits
from sglang_lite.runtime.structured_output.outcomes import Outcomes

_MAX_TAKEN = 16  # most beginnings that are computed in one step
# The step computes only beginnings with at least this share of the likeliest one's probability.
_ALIKE = 0.5
_MAX_COUNTED = 256  # most texts of a row that are counted when the row is added
# Masses below this share of the likeliest text's probability are bounded together.
_SMALL = 1e-3


@dataclass(eq=False, slots=True)
class _OpenRow:
    """A row whose live tokens are continued one after another.

    Attributes:
        row: the row.
        order: indices of its live tokens, the likeliest first.
        rest: probability of each end that has not been counted, and 0 for the others, float64 [E].
        taken: number of live tokens that have been continued.
    """

    row: MassRow
    order: NDArray[np.int64]
    rest: NDArray[np.float64]
    taken: int = 0


class BestText:
    """Search for the likeliest text.

    Args:
        reader: reader of the language.
        token_bytes: bytes of each token.
        limits: limits of the texts.

    Attributes:
        masses: probability of each text found so far, summed over the spellings found so far.
    """

    def __init__(
        self,
        reader: TextReader,
        token_bytes: Sequence[bytes],
        limits: TextLimits,
    ) -> None:
        self.masses: dict[bytes, float] = {}
        self._reader = reader
        self._token_bytes = token_bytes
        self._limits = limits
        self._rows: list[_OpenRow] = []
        self._next: list[tuple[float, int]] = []  # heap: -probability of a row's next beginning
        self._live_tokens: dict[Outcomes, tuple[NDArray[np.bool_], int]] = {}

    def add_row(self, row: MassRow) -> None:
        """Adds the distribution after a beginning."""
        masses = row.beginning.mass * row.ends
        order = np.argsort(-masses, kind="stable")[:_MAX_COUNTED]
        counted = order[masses[order] > _SMALL * max(self.masses.values(), default=0.0)]
        self._count_texts(row, masses, counted)
        masses[counted] = 0.0
        self._rows.append(_OpenRow(row, np.argsort(-row.live, kind="stable"), masses))
        self._push(len(self._rows) - 1)

    def count_rest(self) -> None:
        """Counts all texts that were too unlikely when their rows were added."""
        for open_row in self._rows:
            self._count_texts(open_row.row, open_row.rest, np.flatnonzero(open_row.rest))
            open_row.rest[:] = 0.0

    def _count_texts(
        self, row: MassRow, masses: NDArray[np.float64], indices: NDArray[np.int64]
    ) -> None:
        ends = list(row.outcomes.ends)
        for index in indices:
            text = row.beginning.text_with(ends[index])
            if self._limits.is_allowed(text):
                self.masses[text] = self.masses.get(text, 0.0) + float(masses[index])

    def find_best(self) -> bytes | None:
        """Returns the likeliest text among those found, or None if there is none."""
        return min(self.masses, key=lambda text: (-self.masses[text], text), default=None)

    def is_certain(self, best: bytes) -> bool:
        """Returns whether it is certain that no other text is likelier than `best`."""
        found = self.masses[best]
        if self._next and -self._next[0][0] > found:
            return False
        others = {text: mass for text, mass in self.masses.items() if text != best}
        open_masses = self._sum_open_masses(_SMALL * found)
        bounds = _sum_along_beginnings(open_masses, [*open_masses, *others])
        return all(bound + others.get(text, 0.0) <= found for text, bound in bounds.items())

    def take_beginnings(self, most: int) -> list[Beginning]:
        """Removes and returns the likeliest open beginnings, at most `most` of them."""
        taken: list[Beginning] = []
        while self._next and len(taken) < min(most, _MAX_TAKEN):
            if taken and -self._next[0][0] < _ALIKE * taken[0].mass:
                break
            number = heapq.heappop(self._next)[1]
            open_row = self._rows[number]
            index = int(open_row.order[open_row.taken])
            beginning = open_row.row.continue_with_live(index, self._token_bytes)
            open_row.taken += 1
            self._push(number)
            taken.append(beginning)
        return taken

    def _push(self, number: int) -> None:
        open_row = self._rows[number]
        if open_row.taken < len(open_row.order) and self._limits.may_continue(
            open_row.row.beginning
        ):
            share = float(open_row.row.live[open_row.order[open_row.taken]])
            if share > 0:
                heapq.heappush(self._next, (-open_row.row.beginning.mass * share, number))

    def _sum_open_masses(self, small: float) -> dict[bytes, float]:
        """Returns how much probability texts may still gain, by the bytes that they begin with.

        Open beginnings and uncounted ends whose texts certainly begin with the same bytes are
        added up.

        Args:
            small: probability of a beginning, up to which the beginnings of a row share one bound.
        """
        masses: dict[bytes, float] = {}
        for open_row in self._rows:
            row = open_row.row
            order = open_row.order[open_row.taken :]
            if not self._limits.may_continue(row.beginning):
                order = order[:0]
            rest = row.beginning.mass * row.live[order]
            likely = int(np.searchsorted(-rest, -small))
            for index in order[:likely]:
                beginning = row.continue_with_live(int(index), self._token_bytes)
                certain = self._certain_bytes(beginning)
                masses[certain] = masses.get(certain, 0.0) + beginning.mass
            unlikely = self._bound_unlikely(row.outcomes, order[likely:], rest[likely:])
            certain = self._certain_bytes(row.beginning)
            masses[certain] = (
                masses.get(certain, 0.0) + unlikely + float(open_row.rest.max(initial=0.0))
            )
        return masses

    def _bound_unlikely(
        self, outcomes: Outcomes, indices: NDArray[np.int64], masses: NDArray[np.float64]
    ) -> float:
        """Returns an upper bound of the probability that a single text can gain from live tokens.

        Args:
            outcomes: outcomes that contain the tokens.
            indices: indices of the tokens in `outcomes.live_tokens`.
            masses: for each of them, probability of the beginning whose last token it is.
        """
        open_bytes, longest = self._describe_live_tokens(outcomes)
        together = float(masses[open_bytes[indices]].sum())
        return together + longest * float(masses.max(initial=0.0))

    def _certain_bytes(self, beginning: Beginning) -> bytes:
        """Returns the part of a beginning with which every text read after it starts."""
        left = self._reader.count_open_bytes(beginning.position)
        return beginning.text[: len(beginning.text) - left]

    def _describe_live_tokens(self, outcomes: Outcomes) -> tuple[NDArray[np.bool_], int]:
        """Describes the live tokens of some outcomes. Cached.

        Returns:
            For each live token, whether it is still open if the last bytes belong to the text.
            Then the length of the longest chain of the other live tokens in which each token
                begins with the bytes of the previous one. At most that many of these tokens can
                lead to the same text.
        """
        if outcomes not in self._live_tokens:
            positions = outcomes.live_positions.tolist()
            open_bytes = np.array([self._reader.count_open_bytes(each) > 0 for each in positions])
            chain: list[bytes] = []
            longest = 0
            tokens = outcomes.live_tokens[~open_bytes] if len(open_bytes) else []
            for text in (self._token_bytes[token] for token in tokens):  # in the order of bytes
                while chain and not text.startswith(chain[-1]):
                    chain.pop()
                chain.append(text)
                longest = max(longest, len(chain))
            self._live_tokens[outcomes] = open_bytes.astype(bool), longest
        return self._live_tokens[outcomes]


def _sum_along_beginnings(masses: dict[bytes, float], texts: Sequence[bytes]) -> dict[bytes, float]:
    """Returns, for each text, the sum of the masses of all its prefixes and its own mass."""
    found: dict[bytes, float] = {}
    chain: list[tuple[bytes, float]] = []
    for text in sorted(set(texts)):
        while chain and not text.startswith(chain[-1][0]):
            chain.pop()
        before = chain[-1][1] if chain else 0.0
        found[text] = before + masses.get(text, 0.0)
        chain.append((text, found[text]))
    return found
