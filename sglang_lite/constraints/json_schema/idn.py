"""Internationalised host names and mail addresses: the formats `idn-hostname` and `idn-email`.

The package idna checks names according to IDNA 2008 (RFC 5890 to 5893). No automaton of
reasonable size recognises all of them (normal forms, lengths in Punycode), so only a
subset is generated: up to four labels of letters that are valid in any context. A label
may contain one character that is valid only in its context.
"""

from __future__ import annotations

import re
from functools import cache

from sglang_lite.constraints.formal import charsets
from sglang_lite.constraints.formal.nodes import (
    CharSet,
    Node,
    alternation,
    concat,
    literal,
    optional,
    repeat,
)
from sglang_lite.constraints.syntax.regex import parse

MAX_LABELS = 4
MAX_BYTES = 253  # maximum length of a name in ASCII

_DOTS = re.compile("[.\u3002\uff0e\uff61]")  # RFC 3490, 3.1

_DIGITS = (0x30, 0x39)
_SMALL = (0x61, 0x7A)
_CAPITAL = (0x41, 0x5A)
# Latin, Greek, Cyrillic, Armenian, Devanagari, Thai, Georgian, Hiragana, Katakana, Han, Hangul. All
# code points are PVALID by RFC 5892, are in the normal form of no other code point, and are short
# enough in Punycode for labels of 12.
LEFT_TO_RIGHT = (
    (0xDF, 0xF6), (0xF8, 0xFF), *((code, code) for code in (*range(0x101, 0x132, 2), *range(0x15B, 0x178, 2))),
    (0x3AC, 0x3CE), (0x430, 0x45F), (0x561, 0x586), (0x905, 0x928), (0x92A, 0x930), (0x935, 0x939), (0xE01, 0xE2E),
    (0xF0B, 0xF0B), (0x10D0, 0x10F0), (0x3007, 0x3007), (0x3041, 0x3096), (0x30A1, 0x30FA),
    (0x4E00, 0x9FA5), (0xAC00, 0xD7A3),
)  # fmt: skip
RIGHT_TO_LEFT = ((0x5D0, 0x5EA), (0x621, 0x63A), (0x641, 0x64A), (0x6FD, 0x6FE))  # Hebrew, Arabic

# In contexts of RFC 5892, appendix A: middle dot, keraia, Katakana middle dot, joiners after a
# virama; geresh and gershayim, a non-joiner between letters that join, Arabic-Indic digits.
_KANA_OR_HAN = r"[\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5]"
_JOINING = r"[\u0628\u062a-\u062e\u0633-\u063a\u0641-\u0647\u064a]"
_IN_CONTEXT = parse(
    rf"l\u00b7l|\u0375[\u03ac-\u03ce]|\u30fb{_KANA_OR_HAN}|{_KANA_OR_HAN}\u30fb"
    r"|[\u0915-\u0928]\u094d[\u200c\u200d]?[\u092a-\u0939]"
)
_RIGHT_TO_LEFT_IN_CONTEXT = parse(
    rf"[\u05d0-\u05ea][\u05f3\u05f4]|{_JOINING}\u200c{_JOINING}|[\u0621-\u063a][\u0660-\u0669]{{1,3}}"
)


def is_hostname(text: str) -> bool:
    """Returns True if a text is a host name whose labels are ASCII or valid in IDNA 2008."""
    try:
        return len(".".join(map(_ascii_label, _DOTS.split(text)))) <= MAX_BYTES
    except UnicodeError:  # base class of idna's errors
        return False


def _ascii_label(label: str) -> str:
    """Returns the ASCII form of a label.

    Raises:
        UnicodeError: the text is not a valid label.
    """
    import idna

    written: str = idna.alabel(label).decode()
    if idna.alabel(idna.ulabel(written)).decode() != written.lower():
        raise UnicodeError(f"{label!r} is not the label in ASCII of any other.")
    return written


@cache
def build_hostname_language() -> Node:
    """Returns the language of the host names that are generated."""
    small = (_SMALL, *LEFT_TO_RIGHT)
    plain = (
        _hyphenated_label((_DIGITS, _SMALL, _CAPITAL), (), 62),
        _hyphenated_label((_DIGITS, *small, (0x6F0, 0x6F9)), (), 12),
        _surround_with_letters(_IN_CONTEXT, small),
    )
    # In a name with right-to-left letters, all labels begin with a letter (RFC 5893, 2).
    mixed = (
        _hyphenated_label((_SMALL, _CAPITAL), (_DIGITS,), 62),
        _hyphenated_label(small, (_DIGITS,), 12),
        repeat(CharSet(RIGHT_TO_LEFT), 1, 12),
        _surround_with_letters(_RIGHT_TO_LEFT_IN_CONTEXT, RIGHT_TO_LEFT),
    )
    return alternation(map(_dotted_labels, (plain, mixed)))


def _surround_with_letters(inner: Node, letters: charsets.Ranges) -> Node:
    few = repeat(CharSet(charsets.union(letters)), 0, 4)
    return concat(few, inner, few)


def _dotted_labels(labels: tuple[Node, ...]) -> Node:
    label = alternation(labels)
    return concat(
        label,
        repeat(concat(CharSet(charsets.singles(".\u3002\uff0e\uff61")), label), 0, MAX_LABELS - 1),
    )


def _hyphenated_label(first: charsets.Ranges, more: charsets.Ranges, longest: int) -> Node:
    """Returns the labels that consist of the given characters, with hyphens inside. The third and
    the fourth character are not both hyphens.
    """
    start = CharSet(charsets.union(first))
    inner = CharSet(charsets.union((*first, *more)))
    either = CharSet(charsets.union((*inner.ranges, (0x2D, 0x2D))))
    third = alternation([concat(inner, either), concat(literal("-"), inner)])
    short = concat(repeat(either, 0, 2), inner)
    long = concat(either, third, repeat(either, 0, longest - 5), inner)
    return concat(start, optional(alternation([short, long])))
