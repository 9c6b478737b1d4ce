r"""ECMA-262 regular expressions as texts: the format `regex`.

Accepts the patterns of ECMA-262 (2024, 22.2.1) with the u flag, as JSON Schema
recommends. Any property name may stand in `\p{…}`. Groups nest without limit, so no
regular language contains all patterns. The generated patterns are those that nest at most
twice and that Python also accepts.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NoReturn

from sglang_lite.constraints.formal.nodes import Node
from sglang_lite.constraints.syntax.regex import parse

MAX_NESTING = 100  # nesting depth of groups that is accepted
_NESTING = 2  # nesting depth of groups that is generated

_SYNTAX = "^$\\.*+?()[]{}|"
_QUANTIFIER = re.compile(r"(?:[*+?]|\{([0-9]{1,100})(?:(,)([0-9]{0,100}))?\})\??")
_NAME = re.compile(r"<([^\W\d]\w*|\$[\w$]*)>")
_PROPERTY = re.compile(r"[pP]\{[A-Za-z0-9_]+(?:=[A-Za-z0-9_]+)?\}")
_CODE = re.compile(r"(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,100})\})")
_CONTROL = re.compile("c([A-Za-z])")
_BACK_REFERENCE = re.compile("([1-9][0-9]{0,100})")
_SHORT = {"f": 12, "n": 10, "r": 13, "t": 9, "v": 11}


def is_pattern(text: str) -> bool:
    """Returns True if a text is a valid pattern."""
    try:
        _Reader(text).check_pattern()
    except _NoPattern:
        return False
    return True


class _NoPattern(Exception):  # noqa: N818 # never leaves this module
    """Raised if the text is not a valid pattern."""


class _Reader:
    """Recursive-descent parser with a method for each symbol of the grammar."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._groups = 0
        self._names: set[str] = set()
        self._referenced: list[int | str] = []  # numbers or names of groups that are referred to

    def check_pattern(self) -> None:
        self._disjunction()
        if self._at < len(self._text):
            self._fail()
        for group in self._referenced:
            if group not in self._names if isinstance(group, str) else group > self._groups:
                self._fail()

    def _fail(self) -> NoReturn:
        raise _NoPattern

    def _skip_sign(self, sign: str) -> bool:
        found = self._text.startswith(sign, self._at)
        self._at += len(sign) * found
        return found

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._text, self._at)
        self._at = found.end() if found else self._at
        return found

    def _next_character(self) -> str:
        """Reads the next character."""
        if self._at == len(self._text):
            self._fail()
        self._at += 1
        return self._text[self._at - 1]

    def _disjunction(self) -> None:
        self._depth += 1
        if self._depth > MAX_NESTING:
            self._fail()
        while self._at < len(self._text) and self._text[self._at] != ")":
            if not self._skip_sign("|"):
                self._term()
        self._depth -= 1

    def _term(self) -> None:
        if any(self._skip_sign(sign) for sign in ("^", "$", "\\b", "\\B")):
            return
        if any(self._skip_sign(sign) for sign in ("(?=", "(?!", "(?<=", "(?<!")):
            self._inside()
            return
        self._atom()
        found = self._match(_QUANTIFIER)
        if found and found[3] and int(found[1]) > int(found[3]):
            self._fail()

    def _inside(self) -> None:
        """Reads a group after its opening bracket."""
        self._disjunction()
        if not self._skip_sign(")"):
            self._fail()

    def _atom(self) -> None:
        if self._skip_sign("(?:"):
            self._inside()
        elif self._skip_sign("("):
            self._groups += 1
            if self._skip_sign("?"):
                self._names.add(self._name())
            self._inside()
        elif self._skip_sign("["):
            self._class()
        elif self._skip_sign("\\"):
            self._escape()
        elif (char := self._next_character()) in _SYNTAX and char != ".":
            self._fail()

    def _name(self) -> str:
        found = self._match(_NAME)
        return found[1] if found else self._fail()

    def _escape(self) -> None:
        """Reads an escape outside character classes, after its backslash."""
        if found := self._match(_BACK_REFERENCE):
            self._referenced.append(int(found[1]))
        elif self._skip_sign("k"):
            self._referenced.append(self._name())
        else:
            self._character("/")

    def _character(self, more: str) -> int | None:
        """Reads an escape after its backslash. Returns its code point, or None if it denotes a
        class of characters. Characters in `more` may be escaped, in addition to syntax characters.
        """
        if self._match(_PROPERTY):
            return None
        if found := self._match(_CODE):
            code = int(next(filter(None, found.groups())), 16)
            return code if code <= 0x10FFFF else self._fail()
        if found := self._match(_CONTROL):
            return ord(found[1]) % 32
        char = self._next_character()
        if char == "0":
            return 0 if not self._text[self._at : self._at + 1].isdigit() else self._fail()
        if char in "dDsSwW":
            return None
        return (
            _SHORT[char]
            if char in _SHORT
            else ord(char)
            if char in _SYNTAX + more
            else self._fail()
        )

    def _class(self) -> None:
        self._skip_sign("^")
        while not self._skip_sign("]"):
            low = self._class_member()
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                high = self._class_member()
                if low is None or high is None or low > high:
                    self._fail()

    def _class_member(self) -> int | None:
        """Reads a member of a character class. Returns its code point, or None if it is a class
        itself.
        """
        char = self._next_character()
        if char != "\\":
            return ord(char)
        return 8 if self._skip_sign("b") else self._character("/-")


@cache
def patterns() -> Node:
    """Returns the language of the patterns that are generated."""
    escaped = r"\\[dDsSwWfnrtv^$\\.*+?()\[\]{}|]"
    ranges = "|".join(
        f"{first}-[{first}-{last}]" for last in "9Zz" for first in _characters_up_to(last)
    )
    in_class = rf"(?:[^\\\]\[\^&~|\-]|{escaped}|\\-|{ranges})"
    counts = "|".join(f"{least},(?:[{least}-9]|[1-9][0-9])" for least in range(10))
    repeats = rf"(?:[*+?]|\{{(?:[0-9]{{1,2}},?|{counts})\}})\??"
    simple = rf"[^\^$\\.*+?()\[\]{{}}|]|\.|{escaped}|\[\^?{in_class}+\]"
    inside = ""
    for _ in range(_NESTING + 1):
        groups = rf"|\((?:\?:)?{inside}\)" if inside else ""
        ahead = rf"|\(\?[=!]{inside}\)" if inside else ""
        term = rf"(?:(?:{simple}{groups})(?:{repeats})?|[$^]|\\[bB]{ahead})"
        inside = rf"(?:{term}*(?:\|{term}*)*)"
    return parse(inside)


def _characters_up_to(last: str) -> str:
    """Returns the digits or letters of one kind up to `last`."""
    first = {"9": "0", "Z": "A", "z": "a"}[last]
    return "".join(map(chr, range(ord(first), ord(last) + 1)))
