"""Numbers as they are written in free text: which texts are one, and where one ends in a text that continues.

Digits may be grouped by commas in threes. A comma, point or exponent belongs to the number only with the digits after
it: "1, 2", "24." and "5e" begin with the numbers 1, 24 and 5.
"""

from __future__ import annotations

import re
from bisect import bisect_right

from sglang_lite.protocol import Number

_WHOLE = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)"
_BEGUN_WHOLE = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})*,[0-9]{0,3}|[0-9]*)"
_POINT, _EXPONENT = r"(?:\.[0-9]+)?", r"[eE][-+]?"

ENDS = " \n,;:.)"  # one of which may come behind a number, from who can't drop what ends it
# The texts that are a number.
PATTERNS = {
    "integer": rf"[-+]?{_WHOLE}",
    "float": rf"[-+]?{_WHOLE}{_POINT}(?:{_EXPONENT}[0-9]+)?",
}
_FIRST = {kind: re.compile(rf"{pattern}(?![0-9])") for kind, pattern in PATTERNS.items()}
# Those that one may begin with.
_BEGUN = {
    "integer": re.compile(rf"[-+]?{_BEGUN_WHOLE}"),
    "float": re.compile(rf"[-+]?(?:{_BEGUN_WHOLE}|{_WHOLE}(?:\.[0-9]*|{_POINT}(?:[eE]|{_EXPONENT}[0-9]*)))"),
}
# What of such a text belongs to the number only if more comes.
_OPEN = re.compile(r"(?:,[0-9]{0,3}|\.|[eE]?[-+]|[eE])\Z")


def first_number(number: Number, text: str) -> str:
    """The number that a finished text begins with; "" where it begins with none."""
    found = _FIRST[number.kind].match(text)
    return found[0] if found else ""


class NumberText:
    """A text that begins with a number, and grows token by token.

    Args:
        number: of which kind.
        before: the beginning of the text, which is there already.

    Attributes:
        over: no more of the number can come.
        certain: what of the text is the number, whatever comes.
    """

    def __init__(self, number: Number, before: str = "") -> None:
        self._number, self._text = number, before
        self._ends: list[int] = []  # of the tokens, in the text
        self.over = False
        self.certain = ""
        self._look()
        self._taken = len(before)

    @property
    def begun(self) -> str:
        """Text so far, which a number may begin with unless it is `over`."""
        return self._text

    def push(self, piece: str) -> None:
        """Append the text of the next token."""
        self._text += piece
        self._ends.append(len(self._text))
        self._look()

    def _look(self) -> None:
        if _BEGUN[self._number.kind].fullmatch(self._text):
            self.certain = _OPEN.sub("", self._text)
        else:
            self.close()

    def close(self) -> None:
        """End the text."""
        self.over = True
        self.certain = first_number(self._number, self._text)

    def take(self) -> str:
        """Take the part that has become certain since the last call."""
        new, self._taken = self.certain[self._taken :], max(self._taken, len(self.certain))
        return new

    @property
    def tokens(self) -> int:
        """Number of tokens that lie in `certain`, from their first to their last character."""
        return bisect_right(self._ends, len(self.certain))

    @property
    def whole(self) -> bool:
        """True if the whole text is a number."""
        return first_number(self._number, self._text) == self._text != ""
