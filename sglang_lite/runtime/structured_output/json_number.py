"""JSON documents that are a single number: nothing in JSON ends them.

The grammar alone would leave only more digits and the end of the sequence to a model that wants to continue with text,
and most models then continue with digits. So once the text is a number, any token that does not begin with a digit may
end it, and is not part of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy

from sglang_lite.runtime.structured_output.base import (
    CompiledGrammar,
    DelegatingMatcher,
    Endings,
    Mask,
    Matcher,
    next_mask,
)

# Text that does not change the value of a number without an exponent.
_AFTER_WHOLE, _AFTER_FRACTION = re.compile(r"(?:\.0*)?(?:[eE][-+]?)?"), re.compile(r"0*(?:[eE][-+]?)?")


class WrittenNumber:
    """Number that is being written, with the count of tokens that belong to it."""

    def __init__(self) -> None:
        self._text = self._certain = ""
        self._sent = self._count = self.tokens = 0

    def push(self, piece: str, *, complete: bool) -> None:
        """Appends the next token.

        Args:
            piece: text of the token; empty for one that ends the sequence, which is no part of the number.
            complete: whether the text is a number now, not only the beginning of one.
        """
        self._text += piece
        self._count += 1
        if complete and piece:
            self._certain, self.tokens = self._text, self._count

    def take(self) -> str:
        """Returns the part of the number's text that has become certain since the last call."""
        new, self._sent = self._certain[self._sent :], len(self._certain)
        return new

    @property
    def may_end(self) -> bool:
        """True if the text has a number's value, even if JSON or the schema requires more, as after 24. or 2.50."""
        number, rest = self._certain, self._text[len(self._certain) :]
        if not number or not rest:
            return number != ""
        after = _AFTER_FRACTION if "." in number else _AFTER_WHOLE
        return "e" not in number.lower() and after.fullmatch(rest) is not None

    def close(self) -> None:
        """Ends the text: no more tokens follow. Digits that only a limit on tokens has cut off stay."""
        if not self.may_end:
            self._certain, self.tokens = self._text, self._count


class JsonNumberMatcher(DelegatingMatcher):
    """Matcher of a JSON text that may be a number, wrapped around the schema's own matcher.

    Attributes:
        number: number being written, or None before the first token and if the text does not begin with a number.
    """

    number: WrittenNumber | None = None

    def __init__(self, grammar: JsonNumberGrammar, inner: Matcher) -> None:
        super().__init__(inner)
        self._grammar, self._at_start, self._ended = grammar, True, False

    def cached_mask(self) -> Mask | None:
        mask = self._inner.cached_mask()
        return mask | self._grammar.ends if mask is not None and self._may_end else mask

    @property
    def _may_end(self) -> bool:
        return self.number is not None and self.number.may_end

    def copy(self) -> JsonNumberMatcher | None:
        inner = self._inner.copy()
        if inner is None:
            return None
        copied = copy(self)
        vars(copied).update(_inner=inner, number=copy(self.number))
        return copied

    def accept(self, token: int) -> bool:
        if self._may_end and not _allows(next_mask(self._inner), token):
            self._ended = _allows(self._grammar.ends, token)
            return self._ended
        if not self._inner.accept(token):
            return False
        piece = self._grammar.tokens[token]
        if self._at_start and (piece[:1].isdigit() or piece[:1] == b"-"):
            self.number = WrittenNumber()
        self._at_start = False
        if self.number is not None:
            self.number.push(piece.decode("latin-1"), complete=self._inner.complete)
        return True

    def advance(self, text: bytes) -> bool:
        self._at_start = False  # a number that began in this text ends as the grammar specifies
        return self._inner.advance(text)

    def forced(self) -> list[int]:
        return [] if self._may_end else self._inner.forced()

    @property
    def complete(self) -> bool:
        return self._inner.complete and not self._ended

    @property
    def finished(self) -> bool:
        return self._ended or self._inner.finished


class JsonNumberGrammar:
    """Schema's grammar whose texts may be a number that is ended by any free text.

    Args:
        inner: grammar of the schema.
        tokens: bytes of each token.
        ends: mask of the tokens that may end a number.
    """

    def __init__(self, inner: CompiledGrammar, tokens: Sequence[bytes], ends: Mask) -> None:
        self._inner, self.tokens, self.ends = inner, tokens, ends

    @property
    def size(self) -> int:
        return self._inner.size

    @property
    def sources(self) -> Sequence[str]:
        return self._inner.sources

    def matcher(self) -> JsonNumberMatcher:
        return JsonNumberMatcher(self, self._inner.matcher())

    def combinable(self) -> CompiledGrammar:
        return self._inner.combinable()

    def endings(self) -> Endings | None:
        return self._inner.endings()


def may_be_number(grammar: CompiledGrammar, digits: Mask) -> bool:
    """True if a text of the grammar may begin with one of the tokens in the mask `digits`, which begin with a digit."""
    return bool((next_mask(grammar.matcher()) & digits).any())


def _allows(mask: Mask, token: int) -> bool:
    return bool(mask[token >> 5] >> (token & 31) & 1)
