"""Finds the token sequences with which a model may spell a given text. The last token may go on
after the end of the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.exact.beginnings import Beginning, MassRow
from sglang_lite.runtime.structured_output.outcomes import Outcomes
from sglang_lite.runtime.structured_output.spelling_tokens import SPELLED

GAP = 2e-3  # share of the spellings' total probability that may be left out
_MAX_ROWS = 64


@dataclass(frozen=True, eq=False, slots=True)
class Spellings:
    """Spellings of a text. The last token of a spelling is the one that contains the text's end.

    Spellings that differ only in the last token form a group.

    Attributes:
        befores: for each group, the tokens before the last one.
        groups: index of each spelling's group in `befores`, int64 [N].
        tokens: last token of each spelling, int64 [N].
        skipped: number of the last token's bytes that belong to the text, int64 [N].
        masses: probability of each spelling, float64 [N].
        gap: share of the total probability that may belong to spellings not found.
        rows: number of computed distributions.
    """

    befores: Sequence[tuple[int, ...]]
    groups: NDArray[np.int64]
    tokens: NDArray[np.int64]
    skipped: NDArray[np.int64]
    masses: NDArray[np.float64]
    gap: float
    rows: int

    def tokens_of(self, number: int) -> tuple[int, ...]:
        """Returns the tokens of a spelling."""
        return (*self.befores[self.groups[number]], int(self.tokens[number]))


class SpellingSearch:
    """Search for the spellings of a text.

    Args:
        text: the text.
        usual: tokens with which the tokenizer spells the text. The distributions after all their
            prefixes are computed in one step.
        find_tokens: returns the outcomes of the tokens that may spell the remainder of the text,
            like `find_spelling_tokens`.
        token_bytes: bytes of each token.
        greedy: whether only the likeliest spelling is needed.
    """

    def __init__(
        self,
        text: bytes,
        usual: Sequence[int],
        find_tokens: Callable[[bytes], Outcomes],
        token_bytes: Sequence[bytes],
        *,
        greedy: bool,
    ) -> None:
        self._text = text
        self._usual = usual
        self._find_tokens = find_tokens
        self._token_bytes = token_bytes
        self._greedy = greedy
        self._rows: dict[tuple[int, ...], MassRow] = {}
        self._given_up: set[tuple[int, ...]] = set()

    def take_beginnings(self) -> list[Beginning]:
        """Returns the beginnings of spellings whose rows must be computed next; empty if no more
        are needed.
        """
        if not self._rows:
            beginnings = [Beginning((), b"", 0, 1.0)]
            for token in self._usual[:-1]:
                before = beginnings[-1]
                position = before.position + len(self._token_bytes[token])
                beginnings.append(before.continue_with(token, self._token_bytes, position, 1.0))
            return beginnings
        missing = sorted(self._iterate_missing(), key=lambda each: -each.mass)
        possible = [each for each in missing if each.tokens not in self._given_up]
        masses = [row.live[self._find_ends(row)] * mass for row, mass in self._iterate_rows()]
        known = math.fsum(each.sum() for each in masses)
        best = max((float(each.max()) for each in masses if len(each)), default=0.0)
        least = best if self._greedy else 0.0
        open_mass = math.fsum(each.mass for each in missing)
        needed = []
        for each in possible[: max(_MAX_ROWS - len(self._rows), 0)]:
            if each.mass <= least or open_mass <= GAP * (known + open_mass):
                break
            needed.append(each)
            open_mass -= each.mass
        return needed

    def outcomes_after(self, beginning: Beginning) -> Outcomes:
        """Returns the outcomes of the tokens after a beginning. Tokens that spell more of the text,
        or its end, are live.
        """
        return self._find_tokens(self._text[beginning.position :])

    def add_row(self, row: MassRow) -> None:
        """Adds the row of one of the beginnings."""
        self._rows[row.beginning.tokens] = row

    def give_up(self, beginning: Beginning) -> None:
        """Continues without the row of a beginning, which is too long for the model's context."""
        self._given_up.add(beginning.tokens)

    def list_spellings(self) -> Spellings:
        """Returns the spellings. Must be called only after `take_beginnings` has returned none."""
        befores: list[tuple[int, ...]] = []
        groups, tokens, skipped, masses = [], [], [], []
        for row, mass in self._iterate_rows():
            ends = self._find_ends(row)
            left = len(self._text) - row.beginning.position
            count = int(ends.sum())
            groups.append(np.full(count, len(befores)))
            befores.append(row.beginning.tokens)
            tokens.append(row.outcomes.live_tokens[ends])
            skipped.append(np.full(count, left))
            masses.append(row.live[ends] * mass)
        found = np.concatenate(masses)
        missing = math.fsum(each.mass for each in self._iterate_missing())
        return Spellings(
            befores,
            np.concatenate(groups),
            np.concatenate(tokens),
            np.concatenate(skipped),
            found,
            missing / (missing + float(found.sum())),
            len(self._rows),
        )

    def _iterate_rows(self) -> Iterator[tuple[MassRow, float]]:
        """Yields each known row with the probability of its beginning."""
        return ((row, mass) for row, mass in self._walk() if isinstance(row, MassRow))

    def _iterate_missing(self) -> Iterator[Beginning]:
        """Yields the beginnings whose rows are not known."""
        return (each for each, _ in self._walk() if isinstance(each, Beginning))

    def _walk(self) -> Iterator[tuple[MassRow | Beginning, float]]:
        waiting = [Beginning((), b"", 0, 1.0)]
        while waiting:
            beginning = waiting.pop()
            row = self._rows.get(beginning.tokens)
            if row is None:
                yield beginning, beginning.mass
                continue
            yield row, beginning.mass
            for at in (~self._find_ends(row)).nonzero()[0].tolist():
                token = int(row.outcomes.live_tokens[at])
                position = beginning.position + len(self._token_bytes[token])
                share = float(row.live[at])
                waiting.append(beginning.continue_with(token, self._token_bytes, position, share))

    def _find_ends(self, row: MassRow) -> NDArray[np.bool_]:
        """Returns which of a row's live tokens spell the end of the text, bool [L]."""
        ends: NDArray[np.bool_] = row.outcomes.live_positions == SPELLED
        return ends
