"""Searches that draw texts with the model's own probabilities. A search requests next-token
distributions after certain beginnings, until it knows enough to draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from sglang_lite.constraints.reader import TextReader
from sglang_lite.protocol import ConstraintError
from sglang_lite.runtime.exact.beginnings import Beginning, MassRow
from sglang_lite.runtime.exact.best_text import BestText
from sglang_lite.runtime.exact.mass_tree import MassTree
from sglang_lite.runtime.exact.text_limits import TextLimits
from sglang_lite.runtime.exact.walks import NoMassError, Rows, Walk, list_known_shares
from sglang_lite.runtime.exact.weighted import WeightedWalk
from sglang_lite.runtime.kernels.race import draw_exponentials

GAP = 2e-3  # largest permitted error of the shares of listed texts, as total variation distance
_MAX_ROWS = 512  # most rows that are computed to draw one text
_MORE_ROWS = 64  # additional rows for each further text
_MAX_LIVE_TOKENS = 32 << 20  # in all rows of a search, 8 bytes each
_MIN_LOG_MASS = -100.0
_HINT = "Show them in the prompt, give shorter ones, or leave exact out."


@dataclass(frozen=True, slots=True)
class DrawKey:
    """Settings that determine a draw.

    Attributes:
        seed: seed of the random numbers.
        position: number of tokens before the text, on which the random numbers also depend.
        temperature: temperature of the draw; 0 selects the likeliest text.
    """

    seed: int
    position: int
    temperature: float


@dataclass(frozen=True, slots=True)
class DrawnText:
    """A text that was drawn.

    Attributes:
        text: the text.
        figures: `log_mass`, `gap` and `tries` of `ExactShares`, or the `log_weight` of a weighted
            draw.
        probs: probabilities of the constraint's texts, as in `ExactShares`; empty for a weighted
            draw.
        cut: whether a weighted draw failed, so that `text` is only the text read until then.
    """

    text: str
    figures: Mapping[str, object]
    probs: Mapping[str, float] = field(default_factory=dict)
    cut: bool = False


class ExactSearch(Protocol):
    """Search that draws one text for each of several samples."""

    def take_beginnings(self) -> list[Beginning]:
        """Returns the beginnings whose rows must be computed next; empty if no more are needed.

        Raises:
            ConstraintError: the model gives the texts too little probability, or too many rows
                would be needed.
        """

    def add_row(self, row: MassRow) -> None:
        """Adds the row of one of the beginnings."""

    def give_up(self, beginning: Beginning) -> None:
        """Continues without the row of a beginning, which is too long for the model's context."""

    def draw(self) -> list[DrawnText]:
        """Returns the texts of the samples. Must be called only after `take_beginnings` has
        returned none.
        """


class Enumeration:
    """Computes the probabilities of all texts of a finite language.

    Args:
        spellings: the tokenizer's tokens for each text.
        keys: one for each sample.
        start: position of the text reader before the first token.
        token_bytes: bytes of each token.
        any_gap: whether a gap above `GAP` is accepted once the maximum number of rows has been
            computed.
    """

    def __init__(
        self,
        spellings: Mapping[str, Sequence[int]],
        keys: Sequence[DrawKey],
        start: int,
        token_bytes: Sequence[bytes],
        *,
        any_gap: bool,
    ) -> None:
        self._texts = list(spellings)
        self._keys = keys
        self._token_bytes = token_bytes
        self._any_gap = any_gap
        self._tree = MassTree(start, spellings.values())
        self._computed = 0

    def take_beginnings(self) -> list[Beginning]:
        taken = self._tree.take_branches(GAP, _MAX_ROWS - self._computed)
        self._computed += len(taken)
        if not taken and self._tree.gap > GAP and not self._any_gap:
            raise ConstraintError(
                f"exact: after {self._computed} beginnings of texts, the gap of the {len(self._texts)} texts is "
                f"{self._tree.gap:.2g}, above {GAP}: the model would hardly write them, or they are too long.",
                hint=f'Use exact="bound" for what is known. {_HINT}',
            )
        return taken

    def add_row(self, row: MassRow) -> None:
        self._tree.add_row(row, self._token_bytes)

    def give_up(self, beginning: Beginning) -> None:
        self._tree.give_up(beginning)

    def draw(self) -> list[DrawnText]:
        masses = [self._tree.masses.get(text.encode(), 0.0) for text in self._texts]
        total = math.fsum(masses)
        if not total or math.log(total) < _MIN_LOG_MASS:
            raise ConstraintError(
                f"exact: the model would write none of the {len(masses)} texts (log_mass below {_MIN_LOG_MASS:.0f}).",
                hint="Show them in the prompt, or leave exact out.",
            )
        probs = {text: mass / total for text, mass in zip(self._texts, masses)}
        figures = {"log_mass": math.log(total), "gap": self._tree.gap}
        drawn = [self._texts[_draw_index(masses, key)] for key in self._keys]
        return [DrawnText(text, figures, probs) for text in drawn]


class Drawing:
    """Draws texts of a language that may be infinite.

    Args:
        keys: one for each sample, all with temperature 1.
        start: position of the text reader before the first token.
        token_bytes: bytes of each token.
        limits: limits of the texts.
    """

    def __init__(
        self, keys: Sequence[DrawKey], start: int, token_bytes: Sequence[bytes], limits: TextLimits
    ) -> None:
        self._limits = limits
        self._rows: dict[tuple[int, ...], MassRow] = {}
        self._live_tokens = 0  # in all rows
        self._max_rows = _MAX_ROWS + _MORE_ROWS * (len(keys) - 1)
        self._walks = [
            Walk(
                self._rows,
                Beginning((), b"", start, 1.0),
                token_bytes,
                _make_uniform_draw(key),
                limits,
            )
            for key in keys
        ]

    def take_beginnings(self) -> list[Beginning]:
        try:
            needed = [walk.advance() for walk in self._walks]
        except NoMassError:
            raise _no_text_error() from None
        taken = {each.tokens: each for each in needed if each is not None}
        if taken and (
            len(self._rows) + len(taken) > self._max_rows or self._live_tokens > _MAX_LIVE_TOKENS
        ):
            left = sum(each is not None for each in needed)
            raise ConstraintError(
                f"exact: after {len(self._rows)} beginnings of texts, {left} of {len(needed)} draws have not ended: "
                "the model would hardly write what the constraint allows, or it is too long.",
                hint=_HINT,
            )
        return list(taken.values())

    def add_row(self, row: MassRow) -> None:
        self._rows[row.beginning.tokens] = row
        self._live_tokens += len(row.live)

    def give_up(self, beginning: Beginning) -> None:
        self._limits.give_up(beginning)

    def draw(self) -> list[DrawnText]:
        texts = [walk.text for walk in self._walks if walk.text is not None]
        drawn = _describe_texts(self._rows, texts, self._limits)
        return [
            replace(each, figures={**each.figures, "tries": walk.tries})
            for each, walk in zip(drawn, self._walks, strict=True)
        ]


class WeightedDrawing:
    """Draws each text in a single try, with a weight that corrects for the excluded tokens.

    Args:
        keys: one for each sample, all with temperature 1.
        start: position of the text reader before the first token.
        token_bytes: bytes of each token.
        limits: limits of the texts.
    """

    def __init__(
        self, keys: Sequence[DrawKey], start: int, token_bytes: Sequence[bytes], limits: TextLimits
    ) -> None:
        self._limits = limits
        self._rows: dict[tuple[int, ...], MassRow] = {}
        self._walks = [
            WeightedWalk(
                self._rows,
                Beginning((), b"", start, 1.0),
                token_bytes,
                _make_uniform_draw(key),
                limits,
            )
            for key in keys
        ]

    def take_beginnings(self) -> list[Beginning]:
        needed = [walk.advance() for walk in self._walks]
        self._rows.clear()  # no walk returns to an earlier beginning
        return list({each.tokens: each for each in needed if each is not None}.values())

    def add_row(self, row: MassRow) -> None:
        self._rows[row.beginning.tokens] = row

    def give_up(self, beginning: Beginning) -> None:
        self._limits.give_up(beginning)

    def draw(self) -> list[DrawnText]:
        drawn = []
        for walk in self._walks:
            assert walk.text is not None
            text = walk.text.decode(errors="ignore")
            figures = {"log_weight": walk.log_weight}
            drawn.append(DrawnText(text, figures, cut=walk.log_weight is None))
        return drawn


class Likeliest:
    """Finds the likeliest text of a language that may be infinite.

    Args:
        count: number of samples, all of which get the likeliest text.
        reader: reader of the language.
        token_bytes: bytes of each token.
        limits: limits of the texts.
        any_gap: whether the likeliest text found is accepted once the maximum number of rows has
            been computed, even if another text may be likelier.
    """

    def __init__(
        self,
        count: int,
        reader: TextReader,
        token_bytes: Sequence[bytes],
        limits: TextLimits,
        *,
        any_gap: bool,
    ) -> None:
        self._count = count
        self._any_gap = any_gap
        self._start = reader.start
        self._limits = limits
        self._rows: dict[tuple[int, ...], MassRow] = {}
        self._live_tokens = 0  # in all rows
        self._search = BestText(reader, token_bytes, limits)
        self._best: bytes | None = None

    def take_beginnings(self) -> list[Beginning]:
        if not self._rows and not self._limits.is_too_long(start := self._make_start()):
            return [start]
        self._best = self._search.find_best()
        if self._best is not None and self._search.is_certain(self._best):
            return []
        exhausted = len(self._rows) >= _MAX_ROWS or self._live_tokens > _MAX_LIVE_TOKENS
        if not exhausted:
            taken = self._search.take_beginnings(_MAX_ROWS - len(self._rows))
            if taken:
                return taken
        if not exhausted or self._any_gap:
            self._search.count_rest()
            self._best = self._search.find_best()
            if self._best is None:
                raise _no_text_error()
        if self._any_gap or (self._best is not None and self._search.is_certain(self._best)):
            return []
        raise _uncertain_error(len(self._rows))

    def _make_start(self) -> Beginning:
        return Beginning((), b"", self._start, 1.0)

    def add_row(self, row: MassRow) -> None:
        self._rows[row.beginning.tokens] = row
        self._live_tokens += len(row.live)
        self._search.add_row(row)

    def give_up(self, beginning: Beginning) -> None:
        self._limits.give_up(beginning)

    def draw(self) -> list[DrawnText]:
        assert self._best is not None
        return _describe_texts(self._rows, [self._best], self._limits) * self._count


def _uncertain_error(computed: int) -> ConstraintError:
    return ConstraintError(
        f"exact: after {computed} beginnings of texts, the likeliest text is not certain: the model has no clear "
        "answer, or it is too long.",
        hint='Use exact="bound" for the best one found, temperature=1, or leave exact out.',
    )


def _no_text_error() -> ConstraintError:
    return ConstraintError(
        "exact: the model would hardly write a text that the constraint allows within max_tokens.",
        hint="Show one in the prompt, raise max_tokens, or leave exact out.",
    )


def _describe_texts(rows: Rows, drawn: Sequence[bytes], limits: TextLimits) -> list[DrawnText]:
    """Returns drawn texts with the probabilities that the computed rows show."""
    known = list_known_shares(rows, drawn, limits)
    probs = {text.decode(): share for text, share in known.shares.items()}
    figures = {"log_mass": math.log(known.mass), "gap": known.gap}
    return [DrawnText(text.decode(), figures, probs) for text in drawn]


def _draw_index(masses: Sequence[float], key: DrawKey) -> int:
    """Returns the index of the text that a key draws. At temperature 0, it is the likeliest text.
    Otherwise it is the winner of a race between exponential random numbers with the key's seed.
    """
    with np.errstate(divide="ignore"):
        scores = np.log(masses)
    if not key.temperature:
        return int(scores.argmax())
    noise = np.log(draw_exponentials(key.seed % 2**64, key.position, len(masses)))
    return int((scores / key.temperature - noise).argmax())


def _make_uniform_draw(key: DrawKey) -> Callable[[], float]:
    """Returns a function that returns a key's random numbers from 0 to 1, one with each call. The
    numbers are the same with every version of numpy.
    """
    generator = np.random.Philox(key=[key.seed % 2**64, key.position])
    return lambda: float(int(generator.random_raw()) >> 11) * 2.0**-53
