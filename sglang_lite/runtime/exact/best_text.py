"""Finds the likeliest text of a language, and proves that it is.

The most probable beginnings are continued first. A text can be spelled in several ways, so its
probability is bounded by what is found plus what is open in all beginnings that can lead to it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_lite.constraints.reader import TextReader
from sglang_lite.runtime.exact.beginnings import Beginning, MassRow
from sglang_lite.runtime.structured_output.outcomes import Outcomes

_MAX_TAKEN = 16  # beginnings that are computed in one step
_ALIKE = (
    0.5  # share of the likeliest beginning's probability from which others are computed with it
)
_SMALL = 1e-3  # share of the likeliest text's probability below which masses are bounded together


@dataclass(eq=False, slots=True)
class _OpenRow:
    """A row whose live tokens are continued one after another.

    Attributes:
        row: the row.
        order: indices of its live tokens, the likeliest first.
        left_out: probability of the likeliest of its ends that are not counted.
        taken: number of live tokens that have been continued.
    """

    row: MassRow
    order: NDArray[np.int64]
    left_out: float
    taken: int = 0


class BestText:
    """Search of the likeliest text.

    Args:
        reader: reader of the language.
        token_bytes: bytes of each token.
        is_allowed: returns whether a text counts.
        is_too_long: returns whether a beginning is too long to be continued.

    Attributes:
        masses: probability of each text that has been found, as far as it is known.
    """

    def __init__(
        self,
        reader: TextReader,
        token_bytes: Sequence[bytes],
        is_allowed: Callable[[bytes], bool],
        is_too_long: Callable[[Beginning], bool],
    ) -> None:
        self.masses: dict[bytes, float] = {}
        self._reader = reader
        self._token_bytes = token_bytes
        self._is_allowed = is_allowed
        self._is_too_long = is_too_long
        self._rows: list[_OpenRow] = []
        self._next: list[tuple[float, int]] = []  # heap: -probability of a row's next beginning
        self._allowed: dict[bytes, bool] = {}
        self._chains: dict[Outcomes, int] = {}

    def add_row(self, row: MassRow) -> None:
        """Adds the distribution after a beginning."""
        masses = row.beginning.mass * row.ends
        counted = masses > _SMALL * max(self.masses.values(), default=0.0)
        ends = list(row.outcomes.ends)
        for index in np.flatnonzero(counted):
            text = row.beginning.text_with(ends[index])
            self.masses[text] = self.masses.get(text, 0.0) + float(masses[index])
        left_out = float(masses[~counted].max(initial=0.0))
        self._rows.append(_OpenRow(row, np.argsort(-row.live, kind="stable"), left_out))
        self._push(len(self._rows) - 1)

    def find_best(self) -> bytes | None:
        """Returns the likeliest text among those found, or None if there is none."""
        for text in sorted(self.masses, key=lambda text: (-self.masses[text], text)):
            if self._counts(text):
                return text
        return None

    def is_certain(self, best: bytes) -> bool:
        """Returns whether no other text can have more probability than one that has been found."""
        found = self.masses[best]
        if self._next and -self._next[0][0] > found:
            return False
        others = {text: mass for text, mass in self.masses.items() if text != best}
        open_masses = self._sum_open_masses(_SMALL * found)
        bounds = _sum_along_beginnings(open_masses, [*open_masses, *others])
        return all(
            bound + (others[text] if text in others and self._counts(text) else 0.0) <= found
            for text, bound in bounds.items()
        )

    def take_beginnings(self, most: int) -> list[Beginning]:
        """Takes the likeliest open beginnings, at most `most`."""
        taken: list[Beginning] = []
        while self._next and len(taken) < min(most, _MAX_TAKEN):
            if taken and -self._next[0][0] < _ALIKE * taken[0].mass:
                break
            number = heapq.heappop(self._next)[1]
            open_row = self._rows[number]
            beginning = self._continue(open_row.row, int(open_row.order[open_row.taken]))
            open_row.taken += 1
            self._push(number)
            if not self._is_too_long(beginning):
                taken.append(beginning)
        return taken

    def _push(self, number: int) -> None:
        open_row = self._rows[number]
        if open_row.taken < len(open_row.order):
            share = float(open_row.row.live[open_row.order[open_row.taken]])
            if share > 0:
                heapq.heappush(self._next, (-open_row.row.beginning.mass * share, number))

    def _continue(self, row: MassRow, index: int) -> Beginning:
        return row.beginning.continue_with(
            int(row.outcomes.live_tokens[index]),
            self._token_bytes,
            row.outcomes.live_positions[index],
            float(row.live[index]),
        )

    def _counts(self, text: bytes) -> bool:
        if text not in self._allowed:
            self._allowed[text] = self._is_allowed(text)
        return self._allowed[text]

    def _sum_open_masses(self, small: float) -> dict[bytes, float]:
        """Returns the probability of what is open, by the bytes with which its texts begin.

        Args:
            small: masses up to this one are bounded together: of a row's tokens, only those can
                lead to one text of which each begins with the one before.
        """
        masses: dict[bytes, float] = {}
        for open_row in self._rows:
            row = open_row.row
            rest = row.beginning.mass * row.live[open_row.order[open_row.taken :]]
            likely = int(np.searchsorted(-rest, -small))
            for index in open_row.order[open_row.taken : open_row.taken + likely]:
                beginning = self._continue(row, int(index))
                if not self._is_too_long(beginning):
                    certain = self._certain_bytes(beginning)
                    masses[certain] = masses.get(certain, 0.0) + beginning.mass
            unlikely = float(rest[likely]) if likely < len(rest) else 0.0
            certain = self._certain_bytes(row.beginning)
            masses[certain] = (
                masses.get(certain, 0.0)
                + unlikely * self._longest_chain(row.outcomes)
                + open_row.left_out
            )
        return masses

    def _certain_bytes(self, beginning: Beginning) -> bytes:
        """Returns the bytes with which each text begins that is read after a beginning."""
        return beginning.text[
            : len(beginning.text) - self._reader.count_open_bytes(beginning.position)
        ]

    def _longest_chain(self, outcomes: Outcomes) -> int:
        """Returns the largest number of live tokens of which each begins with the one before."""
        if outcomes not in self._chains:
            chain: list[bytes] = []
            longest = 0
            for text in sorted(self._token_bytes[token] for token in outcomes.live_tokens):
                while chain and not text.startswith(chain[-1]):
                    chain.pop()
                chain.append(text)
                longest = max(longest, len(chain))
            self._chains[outcomes] = longest
        return self._chains[outcomes]


def _sum_along_beginnings(masses: dict[bytes, float], texts: Sequence[bytes]) -> dict[bytes, float]:
    """Returns for each text the sum of the masses of all beginnings of it, itself included."""
    found: dict[bytes, float] = {}
    chain: list[tuple[bytes, float]] = []
    for text in sorted(set(texts)):
        while chain and not text.startswith(chain[-1][0]):
            chain.pop()
        before = chain[-1][1] if chain else 0.0
        found[text] = before + masses.get(text, 0.0)
        chain.append((text, found[text]))
    return found
