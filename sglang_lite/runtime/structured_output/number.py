"""Grammar of a number within free text. Masks restrict only the number's sign and first digit;
after them, any token may come.

The first token that does not continue the number ends it, so a model ends a number just as it would
unconstrained. An integer has at most `MAX_DIGITS` digits: after them, tokens that begin with
another digit are masked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache

import numpy as np
from numpy.typing import NDArray

from sglang_lite.constraints.number_text import NumberText
from sglang_lite.protocol import Number
from sglang_lite.runtime.structured_output.base import (
    CompiledGrammar,
    LoneMatcher,
    Mask,
    TextLengths,
)
from sglang_lite.runtime.structured_output.vocabulary import Vocabulary, build_token_mask

MAX_DIGITS = 19  # number of digits of the largest 64-bit integer
_FIRST = re.compile(rb"[-+]?[0-9]|[-+]\Z")
_AFTER_SIGN = re.compile(rb"[0-9]")
_NO_DIGIT = re.compile(rb"[^0-9,]")
_NOTHING = "\0"  # stands in for tokens without text, which are not part of a number


class NumberMatcher(LoneMatcher):
    open_text: NumberText

    def __init__(self, grammar: NumberGrammar) -> None:
        self.engine = grammar
        self.open_text = NumberText(grammar.number)
        self.error = ""

    def cached_mask(self) -> Mask:
        return self.engine.mask(self.open_text.text)

    def copy(self) -> NumberMatcher:
        copied = copy(self)
        copied.open_text = self.open_text.copy()
        return copied

    def accept(self, token: int) -> bool:
        if self.finished or not self.cached_mask()[token >> 5] >> (token & 31) & 1:
            self.error = f"token {token} is not the beginning of a number"
            return False
        self.open_text.push(self.engine.text_of(token))
        return True

    def accept_text(self, text: bytes) -> bool:
        self.open_text = NumberText(
            self.engine.number, self.open_text.text + text.decode("latin-1")
        )
        return not self.open_text.finished

    @property
    def complete(self) -> bool:
        return self.open_text.is_number

    @property
    def finished(self) -> bool:
        return self.open_text.finished


class NumberGrammar:
    """Grammar of numbers. A number ends at the first text that can't continue it. The grammar also
    computes its masks.

    Args:
        number: kind of numbers.
        vocabulary: vocabulary of the model.
        as_combinable: function that compiles the grammar of texts that are exactly one number.
    """

    name = "number"
    sources = ()

    def __init__(
        self, number: Number, vocabulary: Vocabulary, as_combinable: Callable[[], CompiledGrammar]
    ) -> None:
        self.number = number
        self.vocab_size = vocabulary.size
        self._tokens = vocabulary.tokens
        self.as_combinable = cache(as_combinable)
        self._first, self._after_sign = (
            build_token_mask(
                (i for i, token in enumerate(self._tokens) if pattern.match(token)), vocabulary.size
            )
            for pattern in (_FIRST, _AFTER_SIGN)
        )
        self._any = np.full_like(self._first, -1)
        begun = (_NO_DIGIT.split(token, 1)[0] for token in self._tokens)
        self._counts = np.array([len(digits) - digits.count(b",") for digits in begun])
        self._longest = int(self._counts.max(initial=0))
        self._at_most = cache(
            lambda digits: build_token_mask(np.flatnonzero(self._counts <= digits), vocabulary.size)
        )
        self.size = (3 + min(self._longest, MAX_DIGITS)) * self._first.nbytes + self._counts.nbytes

    def mask(self, prefix: str) -> Mask:
        """Returns the mask of tokens that may follow the beginning of a number."""
        if not prefix:
            return self._first
        if prefix in "-+":
            return self._after_sign
        left = MAX_DIGITS - sum(map(str.isdigit, prefix))
        return (
            self._any
            if self.number.kind == "float" or left >= self._longest
            else self._at_most(max(left, 0))
        )

    def text_of(self, token: int) -> str:
        """Returns the text of a token, decoded as Latin-1 since only ASCII matters here."""
        return self._tokens[token].decode("latin-1") or _NOTHING

    def matcher(self) -> NumberMatcher:
        return NumberMatcher(self)

    def lengths(self, written: str = "") -> TextLengths:
        fewest = 0 if any(map(str.isdigit, written)) else 1  # a digit
        return TextLengths(fewest, search=lambda: fewest)

    def endings(self) -> None:
        """Returns None. No positions are needed, because the text written so far is either a number
        or lacks one digit.
        """

    def masks(self, matchers: Sequence[NumberMatcher]) -> NDArray[np.int32]:
        return np.stack([matcher.cached_mask() for matcher in matchers])
