"""JSON texts of sets of numbers. Whole numbers have no fraction, and exponents are used only if
every number is allowed.
"""

from __future__ import annotations

import math
from fractions import Fraction

from sglang_lite.constraints.formal.nodes import (
    EMPTY,
    NOTHING,
    CharSet,
    Complement,
    Node,
    Repeat,
    alternation,
    concat,
    intersection,
    literal,
    literal_texts,
    optional,
    repeat,
)
from sglang_lite.constraints.json_schema.multiples import build_multiples_of_step
from sglang_lite.constraints.json_schema.numbers import (
    EVERY,
    MAX_COUNTED,
    NONE,
    NumberRange,
    Numbers,
)
from sglang_lite.constraints.syntax.regex import parse
from sglang_lite.protocol import ConstraintError

MAX_DIGITS = 1_000  # maximum number of digits of a limit
MAX_LISTED = 1_000  # maximum number of a range's members that are listed

# Any number; exponents stay in the range of floats, after up to 8 digits.
ANY_NUMBER = parse(
    r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?|-?(?:0|[1-9][0-9]{0,7})(?:\.[0-9]+)?[eE][+-]?[0-2]?[0-9]{1,2}"
)
_DIGIT = CharSet(((48, 57),))
_DIGITS = Repeat(_DIGIT, 0, None)
_FRACTION = optional(parse(r"\.[0-9]+"))
_SOME_MORE = parse("0*[1-9][0-9]*")  # digits that are not all zero
_PLAIN = parse(r"0|-?[1-9][0-9]*|-?(?:0|[1-9][0-9]*)\.[0-9]*[1-9]")
_ZEROS = parse(r"\.0+")
_WHOLE = parse(r"-?(?:0|[1-9][0-9]*)")


def texts(numbers: Numbers, *, decimals: bool = False) -> Node:
    """Returns a node for the texts of a set of numbers, or NOTHING if the set is empty.

    Args:
        numbers: set of numbers.
        decimals: whether whole numbers may have a fraction of zeros.

    Raises:
        ConstraintError: the set has multiples that no small automaton recognises.
    """
    if numbers == EVERY:
        return ANY_NUMBER
    return alternation(
        concat(_write_number_piece(each), optional(_ZEROS))
        if decimals and _has_only_integers(each)
        else _write_number_piece(each)
        for each in numbers
    )


def _has_only_integers(piece: NumberRange) -> bool:
    return piece.integral or (
        piece.low is not None and piece.low == piece.high and piece.low.denominator == 1
    )


def write_plain_number_texts(numbers: Numbers) -> Node:
    """Returns a node for the texts of a set of numbers, each spelled as by `decimal_text`."""
    if numbers == NONE:
        return NOTHING
    if numbers == EVERY:
        return _PLAIN
    return alternation(
        node if literal_texts(node) is not None else intersection(node, _PLAIN)
        for node in map(_write_number_piece, numbers)
    )


def decimal_text(value: Fraction) -> str:
    """Returns the text of a number, which must be a finite decimal, without trailing zeros."""
    digits = 0
    while (value * 10**digits).denominator != 1:
        digits += 1
    scaled = abs(int(value * 10**digits))
    text = str(scaled).zfill(digits + 1)
    return ("-" if value < 0 else "") + (f"{text[:-digits]}.{text[-digits:]}" if digits else text)


def _write_number_piece(piece: NumberRange) -> Node:
    all_whole = piece.step == 1 and not piece.avoid  # listed only if the range has a single number
    members = piece.members(1 if all_whole else MAX_COUNTED) or ()
    if len(members) == 1 or (len(members) in range(1, MAX_LISTED) and piece.step != 1):
        return alternation(literal(decimal_text(value)) for value in members)
    node = _write_number_range(piece)
    ends = [abs(end) for end in (piece.low, piece.high) if end is not None]
    digits = len(str(int(max(ends)))) if len(ends) == 2 else None
    if piece.step is not None and piece.step != 1:
        node = intersection(node, build_multiples_of_step(piece.step, digits))
    for each in piece.avoid:
        node = intersection(node, Complement(build_multiples_of_step(each, digits)))
    return node


def _write_number_range(piece: NumberRange) -> Node:
    if piece.integral and piece.low is None and piece.high is None:
        return _WHOLE
    low = piece.low
    high = piece.high
    options: list[Node] = []
    if high is None or high > 0 or (high == 0 and not piece.high_open):
        start, start_open = (
            (low, piece.low_open) if low is not None and low >= 0 else (Fraction(0), False)
        )
        options.append(
            _write_nonnegative_range(start, start_open, high, piece.high_open, whole=piece.integral)
        )
    if low is None or low < 0:
        near, near_open = (
            (-high, piece.high_open) if high is not None and high < 0 else (Fraction(0), True)
        )
        far = None if low is None else -low
        options.append(
            concat(
                literal("-"),
                _write_nonnegative_range(
                    near, near_open, far, piece.low_open, whole=piece.integral
                ),
            )
        )
    return alternation(options)


def _write_nonnegative_range(
    low: Fraction, low_open: bool, high: Fraction | None, high_open: bool, *, whole: bool
) -> Node:
    """Returns a node for the texts of the numbers from `low` (at least 0) to `high`."""
    if whole:
        least = math.floor(low) + 1 if low_open else math.ceil(low)
        return _write_integers(
            least, None if high is None else math.ceil(high) - 1 if high_open else math.floor(high)
        )
    first, begin = _split_at_point(low)
    after = _fractions_at_least(begin, is_open=low_open)
    # If any fraction may follow `first`, it is written together with the larger whole parts, so
    # that a long round number has few options.
    from_first = [] if after == _FRACTION else [concat(literal(str(first)), after)]
    start = first + len(from_first)
    if high is None:
        return alternation([*from_first, concat(_write_integers(start, None), _FRACTION)])
    last, end = _split_at_point(high)
    until = _fractions_at_most(end, is_open=high_open)
    if first == last:
        return concat(literal(str(first)), intersection(after, until))
    return alternation(
        [
            *from_first,
            concat(_write_integers(start, last - 1), _FRACTION),
            concat(literal(str(last)), until),
        ]
    )


def _split_at_point(value: Fraction) -> tuple[int, str]:
    """Splits a number into its whole part and its digits after the point."""
    whole, _, digits = decimal_text(value).partition(".")
    return int(whole), digits


def _fractions_at_least(digits: str, *, is_open: bool) -> Node:
    """Returns a node for the texts that may follow a whole part if the fraction must be at least
    0.digits, or greater if `is_open`.
    """
    if not digits:
        return concat(literal("."), _SOME_MORE) if is_open else _FRACTION
    options = [
        concat(literal("." + digits[:i]), CharSet(((ord(digit) + 1, 57),)), _DIGITS)
        for i, digit in enumerate(digits)
        if digit < "9"
    ]
    return alternation(
        [*options, concat(literal("." + digits), _SOME_MORE if is_open else _DIGITS)]
    )


def _fractions_at_most(digits: str, *, is_open: bool) -> Node:
    """Returns a node for the texts that may follow a whole part if the fraction must be at most
    0.digits, or less if `is_open`. `digits` must not end in zero.
    """
    if not digits:
        return NOTHING if is_open else optional(parse(r"\.0+"))
    options: list[Node] = [EMPTY]
    for i, digit in enumerate(digits):
        if i:
            options.append(literal("." + digits[:i]))
        if digit > "0":
            options.append(
                concat(literal("." + digits[:i]), CharSet(((48, ord(digit) - 1),)), _DIGITS)
            )
    if not is_open:
        options.append(concat(literal("." + digits), parse("0*")))
    return alternation(options)


def _write_integers(low: int, high: int | None) -> Node:
    """Returns a node for the whole numbers from `low` (at least 0) to `high`."""
    if high is not None and low > high:
        return NOTHING
    a = str(low)
    b = None if high is None else str(high)
    if b is not None and len(a) == len(b):
        return _digits_between(a, b)
    options = [_digits_between(a, "9" * len(a))]
    if b is None or len(b) > len(a) + 1:
        more = Repeat(_DIGIT, len(a), None if b is None else len(b) - 2)
        options.append(concat(CharSet(((49, 57),)), more))
    if b is not None:
        options.append(_digits_between("1" + "0" * (len(b) - 1), b))
    return alternation(options)


def _digits_between(a: str, b: str) -> Node:
    """Returns a node for the digits from `a` to `b`, which have the same length. The node is one
    flat alternation, because nested ones would be deep.
    """
    same = 0
    while same < len(a) and a[same] == b[same]:
        same += 1
    if same == len(a):
        return literal(a)
    if len(a) > MAX_DIGITS:
        raise ConstraintError(
            f"json_schema: limits of more than {MAX_DIGITS:,} digits can't be enforced."
        )
    # Any digits may follow these ends.
    end_a, end_b = (max(len(text.rstrip(last)), same + 1) for text, last in ((a, "0"), (b, "9")))
    ranges = [(a[:same], ord(a[same]) + (end_a > same + 1), ord(b[same]) - (end_b > same + 1))]
    ranges += [(a[:i], ord(a[i]) + (i + 1 < end_a), 57) for i in range(same + 1, end_a)]
    ranges += [(b[:i], 48, ord(b[i]) - (i + 1 < end_b)) for i in range(same + 1, end_b)]
    return alternation(
        concat(
            literal(before),
            CharSet(((low, high),)),
            repeat(_DIGIT, rest := len(a) - len(before) - 1, rest),
        )
        for before, low, high in ranges
        if low <= high
    )
