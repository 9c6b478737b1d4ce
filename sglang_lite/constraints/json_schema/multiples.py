"""Multiples of a rational number as decimal digits.

A step is a whole number divided by a power of ten, so a multiple is recognised by its digits
without the point. Factors 2 and 5 are recognised by the last digits, powers of other small primes
by the remainder. Other factors have expressions of reasonable size only if the number of digits is
bounded.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache, lru_cache

from sglang_lite.constraints.formal.nodes import (
    EMPTY,
    NOTHING,
    CharSet,
    Multiple,
    Node,
    Repeat,
    alternation,
    concat,
    intersection,
    literal,
    optional,
    repeat,
)
from sglang_lite.constraints.syntax.regex import parse
from sglang_lite.protocol import ConstraintError

MAX_ENDINGS = 5_000  # maximum number of digits in an expression for last digits
MAX_DIVISOR = 31  # largest divisor whose remainder is tracked
MAX_BOUNDED = 20_000  # maximum number of digits in an expression for a bounded length

_DIGIT = CharSet(((48, 57),))
_DIGITS = Repeat(_DIGIT, 0, None)
_POINT = literal(".")


@lru_cache(maxsize=256)
def build_multiples_of_step(step: Fraction, most: int | None) -> Node:
    """Returns a node for the multiples of a step. Among the texts of numbers, the node matches
    exactly the multiples. Fractions may end in zeros. The node may also match texts that are not
    numbers.

    Args:
        step: positive finite decimal.
        most: maximum number of digits before the point, or None for no limit.

    Raises:
        ConstraintError: the expression would be too large.
    """
    decimals = 0
    while (step * 10**decimals).denominator != 1:
        decimals += 1
    unit = rest = int(step * 10**decimals)
    for prime in (2, 5):
        while not rest % prime:
            rest //= prime
    divisors = _prime_powers(rest)
    endless = (
        max(divisors, default=1) <= MAX_DIVISOR
        and _estimate_endings_size(unit // rest) <= MAX_ENDINGS
    )
    bounded = 0
    if most is not None and not endless:
        length = most + decimals
        bounded = most if length * _size_of_bounded_digits(unit, length) <= MAX_BOUNDED else 0
    if not endless and not bounded:
        raise ConstraintError(
            f"multiples of {float(step):g} can't be enforced: their automaton would be too large.",
            hint="Supported: products of 2 and 5 up to 64 over any power of ten, these times powers of primes up to "
            f"{MAX_DIVISOR}, and others between a minimum and a maximum of a few digits.",
        )

    def multiples_with_digits(digits: int) -> Node:
        number = unit // math.gcd(unit, 10 ** (decimals - digits))
        if bounded:
            return alternation(
                _bounded_digits(number, 0, before + digits, digits)
                for before in range(1, bounded + 1)
            )
        return _digits_with_remainder(number // rest, 0, digits)

    fractions = [
        concat(multiples_with_digits(digits), parse("0*")) for digits in range(1, decimals + 1)
    ]
    sign = optional(literal("-"))
    node = concat(
        sign, alternation([concat(multiples_with_digits(0), optional(parse(r"\.0+"))), *fractions])
    )
    for divisor in () if bounded else divisors:
        node = intersection(node, concat(sign, Multiple(divisor)))
    return node


def _prime_powers(number: int) -> list[int]:
    """Factorises a number into powers of different primes. A remaining factor without prime
    divisors up to `MAX_DIVISOR` is the last item.
    """
    found = []
    prime = 2
    while prime <= MAX_DIVISOR:
        power = 1
        while not number % prime:
            number = number // prime
            power = power * prime
        found += [power] if power > 1 else []
        prime += 1
    return [*found, number] if number > 1 else found


# -------------------------------------------------------------------------------------- last digits


def _estimate_endings_size(number: int) -> int:
    size = 1
    sizes = []
    while number > 1:
        common = math.gcd(10, number)
        number //= common
        sizes.append(min(10 // common, number))
    for count in reversed(sizes):
        size = count * (size + 1)
    return size


@cache
def _digits_with_remainder(number: int, remainder: int, after: int) -> Node:
    """Returns a node for digits with the given remainder modulo `number`, which divides a power of
    ten. The last `after` digits stand after the point. The node is built from the last digit
    backwards.
    """
    if number == 1:
        return concat(_DIGITS, _POINT, repeat(_DIGIT, after, after)) if after > 0 else _DIGITS
    common = math.gcd(10, number)
    rest = number // common
    inverse: int = pow(10 // common, -1, rest) if rest > 1 else 0
    by_rest: dict[int, list[int]] = {}
    for digit in range(remainder % common, 10, common):
        before = (remainder - digit) // common * inverse % rest if rest > 1 else 0
        by_rest.setdefault(before, []).append(48 + digit)
    options: list[Node] = [EMPTY] if not remainder % number and after <= 0 else []
    for before, digits in by_rest.items():
        point = _POINT if after == 1 else EMPTY
        last = CharSet(tuple((digit, digit) for digit in digits))
        options.append(
            concat(_digits_with_remainder(rest, before, after - 1 if after > 0 else 0), point, last)
        )
    return alternation(options)


# ------------------------------------------------------------------------------------- a few digits


def _size_of_bounded_digits(number: int, length: int) -> int:
    """Returns an upper bound for the number of digits in the expression of `_bounded_digits`."""
    if length == 1:
        return 1 + 10 // number
    half = length // 2
    count: int = min(number, 10**half)
    return count * (
        _size_of_bounded_digits(number, half) + _size_of_bounded_digits(number, length - half)
    )


@cache
def _bounded_digits(number: int, remainder: int, length: int, after: int) -> Node:
    """Returns a node for exactly `length` digits with the given remainder modulo `number`. The last
    `after` digits stand after the point. The node is built from two halves.
    """
    if length == 1:
        codes = tuple(
            (48 + digit, 48 + digit) for digit in range(10) if digit % number == remainder
        )
        return CharSet(codes) if codes else NOTHING
    right = length // 2
    left = length - right
    options = []
    for first in range(number):
        last = (remainder - first * 10**right) % number
        point = _POINT if after == right else EMPTY
        options.append(
            concat(
                _bounded_digits(number, first, left, max(0, after - right)),
                point,
                _bounded_digits(number, last, right, after if after < right else 0),
            )
        )
    return alternation(options)
