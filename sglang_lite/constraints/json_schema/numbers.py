"""Sets of numbers, exactly: unions of ranges of which some multiples are kept or left out. Knows no text.

Numbers of a schema are decimals as they are written (`0.1` is a tenth), so everything here is a fraction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from itertools import chain

from sglang_lite.protocol import ConstraintError

MAX_COUNTED = 10_000
MAX_NEGATED = 500


@dataclass(frozen=True, slots=True)
class NumberRange:
    """The numbers of a range.

    Attributes:
        low, high: its ends, None for none.
        low_open, high_open: the end is not part of it.
        step: multiples of it only; 1 makes them whole numbers.
        avoid: no multiples of any of these.
    """

    low: Fraction | None = None
    high: Fraction | None = None
    low_open: bool = False
    high_open: bool = False
    step: Fraction | None = None
    avoid: tuple[Fraction, ...] = ()

    @property
    def integral(self) -> bool:
        return self.step is not None and self.step.denominator == 1

    def __contains__(self, value: Fraction) -> bool:
        if self.low is not None and (value < self.low or (value == self.low and self.low_open)):
            return False
        if self.high is not None and (value > self.high or (value == self.high and self.high_open)):
            return False
        return (self.step is None or not value % self.step) and all(value % each for each in self.avoid)

    def members(self, most: int = MAX_COUNTED) -> list[Fraction] | None:
        """List of the numbers; None where they are too many to count.

        Args:
            most: multiples of the step that are looked at.
        """
        if self.low is not None and self.low == self.high:
            return [self.low] if self.low in self else []
        if self.step is None or self.low is None or self.high is None:
            return None
        first, last = math.ceil(self.low / self.step), math.floor(self.high / self.step)
        if last - first > most:
            return None
        return [value for i in range(first, last + 1) if (value := i * self.step) in self]

    def empty(self) -> bool:
        if self.low is not None and self.high is not None and self.low >= self.high:
            return self.low not in self or self.high not in self
        if self.step is not None and self.low is not None and self.high is not None and not self.avoid:
            first = math.ceil(self.low / self.step) * self.step  # or the next one, where this is an open end
            return first not in self and first + self.step not in self
        # With no end on one side there is always one: step * (1 + k * any common multiple) is no multiple of `avoid`.
        return (self.step is not None and any(not self.step % a for a in self.avoid)) or self.members() == []


Numbers = tuple[NumberRange, ...]  # their union

EVERY: Numbers = (NumberRange(),)
WHOLE: Numbers = (NumberRange(step=Fraction(1)),)
NONE: Numbers = ()


def is_finite(value: float) -> bool:
    """Tells whether a number is finite; whole numbers of any length are."""
    return isinstance(value, int) or math.isfinite(value)


def exact(value: float) -> Fraction:
    """A number of a schema or document, as it is written."""
    return Fraction(value) if isinstance(value, int) else Fraction(Decimal(repr(value)))


def just(value: Fraction) -> Numbers:
    return (NumberRange(value, value),)


def intersect(a: Numbers, b: Numbers) -> Numbers:
    if a == EVERY:
        return b
    if b == EVERY:
        return a
    return _kept(_both(p, q) for p in a for q in b)


def unite(*sets: Numbers) -> Numbers:
    return EVERY if EVERY in sets else _kept(chain.from_iterable(sets))


def negate(numbers: Numbers) -> Numbers:
    if len(numbers) > MAX_NEGATED:
        raise ConstraintError(f"what is none of more than {MAX_NEGATED} numbers or ranges can't be enforced.")
    result = EVERY
    for piece in numbers:
        result = intersect(result, _outside(piece))
    return result


def _kept(pieces: Iterable[NumberRange]) -> Numbers:
    return tuple(dict.fromkeys(piece for piece in pieces if not piece.empty()))


def _both(p: NumberRange, q: NumberRange) -> NumberRange:
    low, low_open = max(_end(p.low, -1, p.low_open), _end(q.low, -1, q.low_open))[1:]
    high, high_open = min(_end(p.high, 1, p.high_open), _end(q.high, 1, q.high_open))[1:]
    step = p.step if q.step is None else q.step if p.step is None else _common(p.step, q.step)
    return NumberRange(low, high, low_open, high_open, step, tuple(dict.fromkeys((*p.avoid, *q.avoid))))


def _end(at: Fraction | None, side: int, is_open: bool) -> tuple[tuple[int, Fraction, int], Fraction | None, bool]:
    """An end with a key that orders ends: for lows the larger, for highs the smaller is the narrower."""
    return (side if at is None else 0, at or Fraction(0), -side if is_open else 0), at, is_open


def _common(a: Fraction, b: Fraction) -> Fraction:
    """The least common multiple."""
    return Fraction(math.lcm(a.numerator * b.denominator, b.numerator * a.denominator), a.denominator * b.denominator)


def _outside(piece: NumberRange) -> Numbers:
    found = []
    if piece.low is not None:
        found.append(NumberRange(high=piece.low, high_open=not piece.low_open))
    if piece.high is not None:
        found.append(NumberRange(low=piece.high, low_open=not piece.high_open))
    inside = replace(piece, step=None, avoid=())
    if piece.step is not None:
        found.append(replace(inside, avoid=(piece.step,)))
    found += [replace(inside, step=each) for each in piece.avoid]
    return _kept(found)
