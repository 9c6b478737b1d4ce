"""The parts of a pattern that denote one character: escapes and character classes, as sets of code
points.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Set
from itertools import chain
from typing import NoReturn

from sglang_lite.constraints.formal import charsets
from sglang_lite.constraints.formal.charsets import ECMA, LAST, Ranges
from sglang_lite.protocol import ConstraintError

MAX_RANGES = 1_000_000  # maximum for all character classes of a pattern
_CATEGORY = r"\{(\^?)([A-Za-z_]+)\}"
_CHARACTER_NAME = r"\{([^}]+)\}"
_OCTAL = "0[0-7]{0,2}|[1-7][0-7]{2}"  # octal escape: three digits, or fewer after a leading zero
_OCTAL_IN_CLASS = "[0-7]{1,3}"  # no escape is a backreference here
_ASCII: Ranges = ((0, 127),)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}


def apply_case_flags(ranges: Ranges, flags: Set[str]) -> Ranges:
    """Returns the characters that a set matches under the flags `i` and `a`."""
    if "i" not in flags:
        return ranges
    if "a" not in flags:
        return charsets.close_under_case(ranges)
    closed = charsets.close_under_case(charsets.intersection(ranges, _ASCII))
    return charsets.union([*ranges, *charsets.intersection(closed, _ASCII)])


class PatternCursor:
    """Reading position in a pattern. Its errors show the position.

    Attributes:
        pattern: the whole pattern.
        at: offset of the next character.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0

    def raise_regex_error(self, problem: str, at: int | None = None, hint: str = "") -> NoReturn:
        at = self.at if at is None else at
        start = max(0, at - 40)
        shown = self.pattern[start : at + 30].replace("\n", "⏎")
        raise ConstraintError(f"regex: {problem}\n  {shown}\n  {' ' * (at - start)}^", hint=hint)

    @property
    def ended(self) -> bool:
        return self.at >= len(self.pattern)

    @property
    def following(self) -> str:
        """Next character, or the empty text at the end."""
        return self.pattern[self.at : self.at + 1]

    def match(self, expression: str) -> re.Match[str] | None:
        """Matches a regular expression at the cursor, without moving it."""
        return re.compile(expression).match(self.pattern, self.at)

    def peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.at)

    def skip_over(self, text: str) -> bool:
        if self.peek(text):
            self.at += len(text)
            return True
        return False


class CharacterReader:
    """Reads escapes and character classes at a cursor, and moves it past them.

    Args:
        cursor: place in the pattern.
        ecma: whether escapes and classes are those of ECMA-262 instead of Python's.
    """

    def __init__(self, cursor: PatternCursor, *, ecma: bool) -> None:
        self._cursor = cursor
        self._ecma = ecma
        # by items, flags and negation
        self._classes: dict[tuple[frozenset[Ranges], frozenset[str], bool], Ranges] = {}
        self._ranges = 0  # total for all classes

    def escape(self, flags: Set[str], *, in_class: bool) -> Ranges:
        cursor = self._cursor
        start = cursor.at
        cursor.at += 1
        if cursor.ended:
            cursor.raise_regex_error("the pattern ends in a backslash", start)
        char = cursor.pattern[cursor.at]
        cursor.at += 1
        if char in "dDwWsS":
            if not self._ecma:
                return charsets.python_class_characters(
                    f"(?a:\\{char})" if "a" in flags else f"\\{char}"
                )
            ranges = ECMA[char.lower()]
            return ranges if char.islower() else charsets.complement(ranges)
        if char in "pP":
            match = cursor.match(_CATEGORY)
            if not match or not charsets.unicode_category(match[2]):
                cursor.raise_regex_error(
                    r"\p needs a Unicode category in braces", start, hint=r"As in \p{L} or \p{Nd}."
                )
            cursor.at = match.end()
            ranges = charsets.unicode_category(match[2])
            return charsets.complement(ranges) if (char == "P") != bool(match[1]) else ranges
        if char in "xuU":
            return self._read_code_point(char, start)
        if self._ecma and char == "c" and (letter := cursor.match("[A-Za-z]")):
            cursor.at = letter.end()
            return ((ord(letter[0]) % 32,) * 2,)
        if char == "b" and in_class:
            return ((8, 8),)
        if char in _ESCAPES:
            return ((ord(_ESCAPES[char]),) * 2,)
        if octal := re.compile(_OCTAL_IN_CLASS if in_class else _OCTAL).match(
            cursor.pattern, start + 1
        ):
            cursor.at = octal.end()
            if int(octal[0], 8) > 0o377:
                cursor.raise_regex_error(
                    f"\\{octal[0]} is above \\377, the last octal escape", start
                )
            return ((int(octal[0], 8),) * 2,)
        if char == "N" and not self._ecma:
            return self._read_named_character(start)
        if char.isalnum() and char.isascii():
            kind = f"\\{char}"
            backreference = char.isdigit() and not in_class
            cursor.raise_regex_error(
                "a backreference is not supported" if backreference else f"{kind} is not supported",
                start,
            )
        return ((ord(char), ord(char)),)

    def _read_named_character(self, start: int) -> Ranges:
        cursor = self._cursor
        name = cursor.match(_CHARACTER_NAME)
        try:
            char = unicodedata.lookup(name[1]) if name else ""
        except KeyError:
            char = ""
        if name is None or len(char) != 1:  # some names denote several characters in sequence
            cursor.raise_regex_error(r"\N needs the name of a Unicode character in braces", start)
        cursor.at = name.end()
        return ((ord(char), ord(char)),)

    def _read_code_point(self, kind: str, start: int) -> Ranges:
        cursor = self._cursor
        braces = cursor.match(r"\{([0-9a-fA-F]{1,6})\}") if self._ecma and kind == "u" else None
        width = {"x": 2, "u": 4, "U": 8}[kind]
        digits = braces[1] if braces else cursor.pattern[cursor.at : cursor.at + width]
        if (
            not re.fullmatch("[0-9a-fA-F]{1,6}" if braces else f"[0-9a-fA-F]{{{width}}}", digits)
            or int(digits, 16) > LAST
        ):
            cursor.raise_regex_error(
                f"\\{kind} needs {width} hexadecimal digits of a character", start
            )
        cursor.at = braces.end() if braces else cursor.at + width
        code = int(digits, 16)
        if charsets.has_surrogates(chr(code)):
            cursor.raise_regex_error("a lone surrogate is no character", start)
        return ((code, code),)

    def read_character_class(self, flags: frozenset[str]) -> Ranges:
        cursor = self._cursor
        start = cursor.at
        cursor.at += 1
        negated = cursor.skip_over("^")
        items: set[Ranges] = set()
        first = not self._ecma  # in Python, a ] in first position is a character
        while first or not cursor.peek("]"):
            first = False
            item = self._read_class_item(start, flags)
            if cursor.match("-[^]]"):
                dash = cursor.at
                cursor.at += 1
                upper = self._read_class_item(start, flags)
                single = (
                    len(item) == len(upper) == 1
                    and item[0][0] == item[0][1]
                    and upper[0][0] == upper[0][1]
                )
                # ECMA-262, B.1.2: a hyphen next to a class is a character
                if self._ecma and not single:
                    items |= {item, upper, ((ord("-"), ord("-")),)}
                    continue
                if not single or upper[0][0] < item[0][0]:
                    cursor.raise_regex_error("bad character range", dash)
                items.add(tuple(charsets.without_surrogates(item[0][0], upper[0][0])))
            else:
                items.add(item)
        cursor.at += 1
        key = frozenset(items), flags, negated
        if key not in self._classes:
            united = apply_case_flags(charsets.union(chain.from_iterable(items)), flags)
            self._classes[key] = charsets.complement(united) if negated else united
            self._ranges += len(self._classes[key])
            if self._ranges > MAX_RANGES:
                problem = f"its different character classes have more than {MAX_RANGES:,} ranges of characters"
                cursor.raise_regex_error(problem, start)
        return self._classes[key]

    def _read_class_item(self, start: int, flags: Set[str]) -> Ranges:
        cursor = self._cursor
        if cursor.ended:
            cursor.raise_regex_error("unterminated character set", start)
        if cursor.peek("\\"):
            return self.escape(flags, in_class=True)
        char = cursor.pattern[cursor.at]
        cursor.at += 1
        return ((ord(char), ord(char)),)
