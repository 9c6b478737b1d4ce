"""Grammar of a text's continuation, for a generation in the middle of a constrained text.

The whole grammar is compiled once. Each generation advances through the existing text by bytes, as
different tokens may spell it.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from sglang_lite.protocol import ConstraintError
from sglang_lite.runtime.structured_output.base import (
    CompiledGrammar,
    DelegatingMatcher,
    Endings,
    Mask,
    Matcher,
    TextLengths,
    next_mask,
)
from sglang_lite.runtime.structured_output.limited_endings import PartEndings
from sglang_lite.runtime.structured_output.open_end import OpenEndMatcher


class ContinuedGrammar:
    """Grammar of texts that continue an existing text.

    Args:
        whole: grammar of the whole text: the existing text and everything that follows it.
        text: existing text.
        part: grammar of only this generation, or None. With a part, a text need not complete the
            whole; without one, it must.
        end: mask of the tokens that end a text.
    """

    def __init__(
        self, whole: CompiledGrammar, text: str, part: CompiledGrammar | None, end: Mask
    ) -> None:
        self._whole = whole if part is None else whole.as_combinable()
        self._text = text
        self._part = part
        self._end = end
        self.size = 0  # its grammars are counted by their own cache entries
        self.sources = (whole if part is None else part).sources

    def matcher(self) -> Matcher:
        """Returns a matcher after the existing text. Raises ConstraintError if no text of the
        grammar begins with it.
        """
        whole = start_matcher_after_text(self._whole, self._text)
        return (
            whole
            if self._part is None
            else ContinuedMatcher(whole, self._part.matcher(), self._end)
        )

    def as_combinable(self) -> ContinuedGrammar:
        return ContinuedGrammar(self._whole.as_combinable(), self._text, self._part, self._end)

    def lengths(self, written: str = "") -> TextLengths:
        """Returns bounds on the number of tokens in the continuation. If there is a part, they are
        the bounds of the part, but the upper bound is that of the whole if it is smaller. They may
        be loose, since the whole may allow only some of the part's texts.
        """
        whole = self._whole.lengths(self._text + written)
        if self._part is None:
            return whole
        part = self._part.lengths(written)
        known = [most for most in (whole.most, part.most) if most is not None]
        return TextLengths(part.known, min(known, default=None), lambda: part.fewest)

    def endings(self) -> Endings | None:
        """Returns the positions in the continuation, or None if they are not known. If there is a
        part, the result has those of its positions that the whole allows.
        """
        found = self._whole.endings()
        whole = None if found is None else found.after_text(self._text)
        if self._part is None:
            return whole
        part = self._part.endings()
        return None if part is None or whole is None else PartEndings(part, whole)


def start_matcher_after_text(grammar: CompiledGrammar, text: str) -> Matcher:
    """Returns a matcher that has advanced past a text.

    Raises:
        ConstraintError: no text of the grammar begins with this text.
    """
    matcher = grammar.matcher()
    if text and not matcher.accept_text(text.encode("utf-8", "surrogatepass")):
        end = repr(text) if len(text) < 80 else f"…{text[-80:]!r}"
        raise ConstraintError(f"no text of the grammar begins with {end}.")
    return matcher


class ContinuedMatcher(DelegatingMatcher):
    """Intersection of two matchers: a token must be allowed by both the whole and the part. Only
    the part determines whether the text may end.
    """

    error = ""

    def __init__(self, whole: Matcher, part: Matcher, end: Mask) -> None:
        super().__init__(part)
        self._whole = whole
        self._end = end
        self._finished = False

    @property
    def parts(self) -> Sequence[Matcher]:
        return (*self._whole.parts, *self._inner.parts)

    def cached_mask(self) -> Mask | None:
        whole = self._whole.cached_mask()
        part = self._inner.cached_mask()
        return None if whole is None or part is None else part & (whole | self._end)

    def copy(self) -> ContinuedMatcher | None:
        whole = self._whole.copy()
        part = self._inner.copy()
        if whole is None or part is None:
            return None
        copied = copy(self)
        vars(copied).update(_whole=whole, _inner=part)
        return copied

    def accept(self, token: int) -> bool:
        ends = bool(self._end[token // 32] >> (token % 32) & 1)
        if not self._inner.accept(token) or not (ends or self._whole.accept(token)):
            reason = self._inner.error or self._whole.error
            self.error = (
                "the surrounding grammar does not allow the text that this generation's own constraint allows: "
                f"{reason}. Let the two agree, or leave out the generation's own constraint."
            )
            return False
        self._finished = self._inner.finished
        if self._inner.complete and not self._finished:
            going_on = (
                self._inner.continuing_matcher
                if isinstance(self._inner, OpenEndMatcher)
                else self._inner
            )
            self._finished = not (next_mask(self._whole) & next_mask(going_on) & ~self._end).any()
        return True

    def accept_text(self, text: bytes) -> bool:
        return self._inner.accept_text(text) and self._whole.accept_text(text)

    @property
    def finished(self) -> bool:
        return self._finished
