"""Exact sets of numbers: unions of ranges in which multiples are required or excluded. Independent
of text.

Numbers of a schema are decimals as written (`0.1` is a tenth), so all calculations use
fractions.
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
    """Numbers in a range.

    Attributes:
        low, high: ends of the range, None for no limit.
        low_open, high_open: True if the end itself is excluded.
        step: all members are multiples of this number (1 for whole numbers), or None.
        avoid: no member is a multiple of any of these numbers.
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
        return (self.step is None or not value % self.step) and all(
            value % each for each in self.avoid
        )

    def members(self, limit: int = MAX_COUNTED) -> list[Fraction] | None:
        """Returns a list of the numbers, or None if the range is not finite or has too many to
        list.

        Args:
            limit: maximum number of multiples of the step that are examined.
        """
        if self.low is not None and self.low == self.high:
            return [self.low] if self.low in self else []
        if self.step is None or self.low is None or self.high is None:
            return None
        first = math.ceil(self.low / self.step)
        last = math.floor(self.high / self.step)
        if last - first > limit:
            return None
        return [value for i in range(first, last + 1) if (value := i * self.step) in self]

    def has_no_numbers(self) -> bool:
        if self.low is not None and self.high is not None and self.low >= self.high:
            return self.low not in self or self.high not in self
        if (
            self.step is not None
            and self.low is not None
            and self.high is not None
            and not self.avoid
        ):
            # or the next one, if this is an open end
            first = math.ceil(self.low / self.step) * self.step
            return first not in self and first + self.step not in self
        # A range without a limit on one side has members: step * (1 + k * any common multiple) is
        # no multiple of `avoid`.
        return (
            self.step is not None and any(not self.step % a for a in self.avoid)
        ) or self.members() == []


Numbers = tuple[NumberRange, ...]  # union of the ranges

EVERY: Numbers = (NumberRange(),)
WHOLE: Numbers = (NumberRange(step=Fraction(1)),)
NONE: Numbers = ()


def is_finite(value: float) -> bool:
    """Returns True if a number is finite. An int of any length is finite."""
    return isinstance(value, int) or math.isfinite(value)


def to_fraction(value: float) -> Fraction:
    """Returns the exact value of a number in a schema or document, as written in decimal."""
    return Fraction(value) if isinstance(value, int) else Fraction(Decimal(repr(value)))


def single_number_set(value: Fraction) -> Numbers:
    return (NumberRange(value, value),)


def intersect_numbers(a: Numbers, b: Numbers) -> Numbers:
    if a == EVERY:
        return b
    if b == EVERY:
        return a
    return _drop_empty_ranges(_intersect_ranges(p, q) for p in a for q in b)


def unite_numbers(*sets: Numbers) -> Numbers:
    return EVERY if EVERY in sets else _drop_empty_ranges(chain.from_iterable(sets))


def complement_numbers(numbers: Numbers) -> Numbers:
    if len(numbers) > MAX_NEGATED:
        raise ConstraintError(
            f"the negation (by not, oneOf or if) of more than {MAX_NEGATED} numbers or ranges can't be enforced.",
            hint="Shorten the enum, or set enforce='best_effort'.",
        )
    result = EVERY
    for piece in numbers:
        result = intersect_numbers(result, _complement_range(piece))
    return result


def _drop_empty_ranges(pieces: Iterable[NumberRange]) -> Numbers:
    return tuple(dict.fromkeys(piece for piece in pieces if not piece.has_no_numbers()))


def _intersect_ranges(p: NumberRange, q: NumberRange) -> NumberRange:
    low, low_open = max(
        _range_end_key(p.low, -1, p.low_open), _range_end_key(q.low, -1, q.low_open)
    )[1:]
    high, high_open = min(
        _range_end_key(p.high, 1, p.high_open), _range_end_key(q.high, 1, q.high_open)
    )[1:]
    step = (
        p.step if q.step is None else q.step if p.step is None else _common_multiple(p.step, q.step)
    )
    return NumberRange(
        low, high, low_open, high_open, step, tuple(dict.fromkeys((*p.avoid, *q.avoid)))
    )


def _range_end_key(
    at: Fraction | None, side: int, is_open: bool
) -> tuple[tuple[int, Fraction, int], Fraction | None, bool]:
    """Returns a sort key for an end of a range, followed by the end itself. A narrower low end has
    a greater key, a narrower high end a smaller one.
    """
    return (side if at is None else 0, at or Fraction(0), -side if is_open else 0), at, is_open


def _common_multiple(a: Fraction, b: Fraction) -> Fraction:
    """Returns the least common multiple of two fractions."""
    return Fraction(
        math.lcm(a.numerator * b.denominator, b.numerator * a.denominator),
        a.denominator * b.denominator,
    )


def _complement_range(piece: NumberRange) -> Numbers:
    found = []
    if piece.low is not None:
        found.append(NumberRange(high=piece.low, high_open=not piece.low_open))
    if piece.high is not None:
        found.append(NumberRange(low=piece.high, low_open=not piece.high_open))
    inside = replace(piece, step=None, avoid=())
    if piece.step is not None:
        found.append(replace(inside, avoid=(piece.step,)))
    found += [replace(inside, step=each) for each in piece.avoid]
    return _drop_empty_ranges(found)
