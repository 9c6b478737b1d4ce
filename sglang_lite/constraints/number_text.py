"""Numbers in free text: which texts are numbers, and where a number ends in a text that continues.

Digits may be grouped by commas in threes. A comma, point or exponent belongs to the
number only if digits follow it: "1, 2", "24." and "5e" begin with the numbers 1, 24 and
5.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from copy import copy

from sglang_lite.protocol import Number

_WHOLE = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)"
_WHOLE_PREFIX = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})*,[0-9]{0,3}|[0-9]*)"
_POINT = r"(?:\.[0-9]+)?"
_EXPONENT = r"[eE][-+]?"

# A backend that can't cut off the end of a number returns one of these characters after it.
TERMINATORS = " \n,;:.)"
# Complete numbers, by kind.
PATTERNS = {
    "integer": rf"[-+]?{_WHOLE}",
    "float": rf"[-+]?{_WHOLE}{_POINT}(?:{_EXPONENT}[0-9]+)?",
}
_FIRST = {kind: re.compile(rf"{pattern}(?![0-9])") for kind, pattern in PATTERNS.items()}
# Prefixes of numbers, by kind.
_PREFIXES = {
    "integer": re.compile(rf"[-+]?{_WHOLE_PREFIX}"),
    "float": re.compile(
        rf"[-+]?(?:{_WHOLE_PREFIX}|{_WHOLE}(?:\.[0-9]*|{_POINT}(?:[eE]|{_EXPONENT}[0-9]*)))"
    ),
}
# End of a prefix that belongs to the number only if more digits follow.
_OPEN = re.compile(r"(?:,[0-9]{0,3}|\.|[eE]?[-+]|[eE])\Z")


def extract_leading_number(number: Number, text: str) -> str:
    """Returns the number that a finished text begins with, or "" if it does not begin with one."""
    found = _FIRST[number.kind].match(text)
    return found[0] if found else ""


class NumberText:
    """A text that begins with a number and grows token by token.

    Args:
        number: constraint with the kind of the number.
        before: text before the first token that already belongs to the number.

    Attributes:
        finished: True once no further text can extend the number.
        committed: prefix of the text that belongs to the number, no matter what follows.
    """

    def __init__(self, number: Number, before: str = "") -> None:
        self._number = number
        self._text = before
        self._ends: list[int] = []  # end offset of each token in the text
        self.finished = False
        self.committed = ""
        self._before = len(before)
        self._update_committed()

    def copy(self) -> NumberText:
        """Returns an independent copy."""
        copied = copy(self)
        vars(copied).update(_ends=self._ends.copy())
        return copied

    @property
    def text(self) -> str:
        """Text so far: a prefix of a number unless `finished` is set."""
        return self._text

    def push(self, piece: str) -> None:
        """Appends the text of the next token."""
        self._text += piece
        self._ends.append(len(self._text))
        self._update_committed()

    def _update_committed(self) -> None:
        if _PREFIXES[self._number.kind].fullmatch(self._text):
            self.committed = _OPEN.sub("", self._text)
        else:
            self.close()

    def close(self, kept: int | None = None) -> None:
        """Marks the text as finished. `committed` becomes the number that the text begins with.

        Args:
            kept: number of tokens that belong to the text; None for all.
        """
        self.finished = True
        if kept is not None and kept < len(self._ends):
            self._text = self._text[: [self._before, *self._ends][kept]]
            del self._ends[kept:]
        self.committed = extract_leading_number(self._number, self._text)

    @property
    def certain_text(self) -> str:
        """Part of `committed` that comes from pushed tokens. The text before the first token is
        left out.
        """
        return self.committed[self._before :]

    @property
    def tokens(self) -> int:
        """Number of pushed tokens that lie entirely within `committed`."""
        return bisect_right(self._ends, len(self.committed))

    @property
    def is_number(self) -> bool:
        """True if the text so far is a number."""
        return extract_leading_number(self._number, self._text) == self._text != ""
