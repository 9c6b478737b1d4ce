"""Sets of characters as ranges of code points. Surrogates are not characters, so no set contains
them.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
_SURROGATE = re.compile("[\ud800-\udfff]")

# (first, last) code points, inclusive; sorted, disjoint, not adjacent
Ranges: TypeAlias = tuple[tuple[int, int], ...]

ALL: Ranges = ((0, SURROGATES[0] - 1), (SURROGATES[1] + 1, LAST))


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Returns the union of ranges, normalised."""
    merged: list[tuple[int, int]] = []
    found = sorted(ranges)
    if all(before[1] + 1 < after[0] for before, after in pairwise(found)):
        return tuple(found)
    for low, high in found:
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Returns the complement of a set."""
    found = union([*ranges, SURROGATES])
    starts = [0, *[high + 1 for _, high in found]]
    ends = [*[low - 1 for low, _ in found], LAST]
    return tuple([(low, high) for low, high in zip(starts, ends) if low <= high])


def difference(ranges: Ranges, without: Iterable[tuple[int, int]]) -> Ranges:
    """Returns the difference of two sets."""
    return complement([*complement(ranges), *without])


def intersection(ranges: Ranges, others: Ranges) -> Ranges:
    """Returns the intersection of two sets."""
    return difference(ranges, complement(others))


def has_surrogates(text: str) -> bool:
    return _SURROGATE.search(text) is not None


def without_surrogates(low: int, high: int) -> list[tuple[int, int]]:
    """Returns the ranges of the characters from `low` to `high`, neither of which is a surrogate."""
    if low < SURROGATES[0] and high > SURROGATES[1]:
        return [(low, SURROGATES[0] - 1), (SURROGATES[1] + 1, high)]
    return [(low, high)]


@lru_cache(maxsize=1)
def _every_character() -> str:
    return "".join(map(chr, (code for low, high in ALL for code in range(low, high + 1))))


@lru_cache(maxsize=16)
def python_class_characters(expression: str) -> Ranges:
    """Returns the characters that Python's own `re` matches with a one-character expression. `re`
    defines the dialect.
    """
    found = re.finditer(f"(?:{expression})+", _every_character())
    return union(
        [
            piece
            for match in found
            for piece in without_surrogates(ord(match[0][0]), ord(match[0][-1]))
        ]
    )


_LONG_NAMES = {  # all of Unicode's with their aliases, as in ECMA-262
    "Letter": "L", "Cased_Letter": "LC", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Titlecase_Letter": "Lt",
    "Modifier_Letter": "Lm", "Other_Letter": "Lo", "Mark": "M", "Combining_Mark": "M", "Nonspacing_Mark": "Mn",
    "Spacing_Mark": "Mc", "Enclosing_Mark": "Me", "Number": "N", "Decimal_Number": "Nd", "digit": "Nd",
    "Letter_Number": "Nl", "Other_Number": "No", "Punctuation": "P", "punct": "P", "Connector_Punctuation": "Pc",
    "Dash_Punctuation": "Pd", "Open_Punctuation": "Ps", "Close_Punctuation": "Pe", "Initial_Punctuation": "Pi",
    "Final_Punctuation": "Pf", "Other_Punctuation": "Po", "Symbol": "S", "Math_Symbol": "Sm", "Currency_Symbol": "Sc",
    "Modifier_Symbol": "Sk", "Other_Symbol": "So", "Separator": "Z", "Space_Separator": "Zs", "Line_Separator": "Zl",
    "Paragraph_Separator": "Zp", "Other": "C", "Control": "Cc", "cntrl": "Cc", "Format": "Cf", "Surrogate": "Cs",
    "Private_Use": "Co", "Unassigned": "Cn",
}  # fmt: skip


@lru_cache(maxsize=64)
def unicode_category(name: str) -> Ranges:
    """Returns the characters of a general category (`Lu`, `Uppercase_Letter`) or of all categories
    with a common prefix (`L`). Returns no ranges if the name is unknown.
    """
    name = _LONG_NAMES.get(name, name)
    wanted = ("Lu", "Ll", "Lt") if name == "LC" else (name,)
    codes = [ord(c) for c in _every_character() if unicodedata.category(c).startswith(wanted)]
    return union((code, code) for code in codes)


@lru_cache(maxsize=1)
def _cased_characters() -> str:
    """Returns the characters that have other cases. Only the first two planes are searched, because
    scripts above them have no case.
    """
    forms = ((c, c.lower(), c.upper()) for c in map(chr, range(0x20000)))
    return "".join(
        sorted({each for some in forms if len(set(some)) > 1 for each in some if len(each) == 1})
    )


@lru_cache(maxsize=256)
def close_under_case(ranges: Ranges) -> Ranges:
    """Returns the closure of a set under case, as defined by Python's `re.IGNORECASE`."""
    cased = _cased_characters()
    inside = "".join(
        [
            cased[bisect_left(cased, chr(low)) : bisect_right(cased, chr(high))]
            for low, high in ranges
        ]
    )
    return union(
        [
            *ranges,
            *(_cases_of_one(inside) if len(inside) == 1 else _matching_cased_characters(inside)),
        ]
    )


@lru_cache(maxsize=64)
def _matching_cased_characters(chars: str) -> Ranges:
    """Returns the cased characters that match one of the given characters when case is ignored."""
    return (
        singles("".join(re.findall(f"[{re.escape(chars)}]", _cased_characters(), re.IGNORECASE)))
        if chars
        else ()
    )


@lru_cache(maxsize=4096)  # more than there are cased characters
def _cases_of_one(char: str) -> Ranges:
    return singles("".join(re.findall(re.escape(char), _cased_characters(), re.IGNORECASE)))


def singles(text: str) -> Ranges:
    """Returns the set of the characters of a text."""
    return union((ord(c), ord(c)) for c in text)


# Class escapes of ECMA-262 (with the u flag), 22.2.2.9: the dialect of JSON Schema's `pattern`.
ECMA = {
    "d": union([(48, 57)]),
    "w": union([(48, 57), (65, 90), (95, 95), (97, 122)]),
    "s": union([(9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
                (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)]),
    ".": complement(singles("\n\r\u2028\u2029")),
}  # fmt: skip
