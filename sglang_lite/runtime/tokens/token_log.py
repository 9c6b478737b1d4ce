"""Token ids of a prompt: what a model wrote keeps its ids, text between is tokenised as one.

It holds on every path (call by call, whole programs), so their tokens, cache hits and scores agree.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterable, Sequence

from sglang_lite.errors import shown
from sglang_lite.protocol import ParameterError, Span
from sglang_lite.runtime.tokens.detokenize import IncrementalDecoder
from sglang_lite.runtime.tokens.tokenizer import Tokenizer


class TokenLog:
    """A growing prompt. What is known of its ids is kept, and only text after the last generated token is encoded.

    Args:
        tokenizer: the model's.
        spans: what it starts with.
        all_special: every text can name special tokens, whatever its span says.
    """

    def __init__(self, tokenizer: Tokenizer, spans: Iterable[Span] = (), *, all_special: bool = False) -> None:
        self._tokenizer, self._all_special = tokenizer, all_special
        self.fixed = array("i")  # up to the last generated token
        self.open: list[Span] = []  # the text after it
        self._known: array[int] | None = None  # the ids of that
        self.append(spans)

    def append(self, spans: Iterable[Span]) -> None:
        for span in spans:
            if span.ids is not None:
                if self.open:
                    self.fixed += self._open_ids()
                    self.open, self._known = [], None
                self._extend(span.ids)
            elif span.text:
                self.open.append(span)
                self._known = None

    def _extend(self, ids: Sequence[int]) -> None:
        try:
            self.fixed.extend(ids)
        except (TypeError, OverflowError):  # what else is wrong is seen when the prompt is whole
            raise ParameterError("input_ids", f"{shown(ids)} are no token ids.") from None

    def encode(self, spans: Iterable[Span], *, alone: bool = False) -> array[int]:
        """The ids of texts after the fixed ones, or of a prompt of their own. The beginning-of-sequence id is added
        once, before the first text."""
        return self.encode_after(spans, first=alone or not self.fixed)

    def encode_after(self, spans: Iterable[Span], *, first: bool) -> array[int]:
        """The ids of texts after others, or of a prompt's `first` ones. On any thread."""
        if self._all_special:
            spans = [Span(span.text) for span in spans]
        return self._tokenizer.encode_spans(spans, first=first)

    def ids(self) -> array[int]:
        """The ids of the whole prompt."""
        return self.fixed + self._open_ids() if self.open or not self.fixed else self.fixed[:]

    def _open_ids(self) -> array[int]:
        if self._known is None:
            self._known = self.encode(self.open)
        return self._known

    @property
    def ready(self) -> bool:
        """True where nothing is left to be encoded."""
        return self._known is not None or (not self.open and bool(self.fixed))

    def learn(self, text: Sequence[Span], ids: array[int]) -> None:
        """Takes the ids of further text, which may already be open, that were encoded elsewhere: so is all of it now.
        Only after fixed ids."""
        self.open, self._known = list(text), ids

    def copy(self) -> TokenLog:
        """A copy that grows by itself."""
        twin = copy.copy(self)
        twin.fixed, twin.open = self.fixed[:], list(self.open)
        return twin


def kept_spans(tokenizer: Tokenizer, ids: tuple[int, ...], text: str, *, skip_special: bool = True) -> tuple[Span, ...]:
    """Spans of a generation in the prompt that follows it.

    The longest run of its tokens whose text lies within `text` (a stop may cut inside a token) keeps its ids; what is
    left of the text is tokenised with what comes next, and names no special tokens.

    Args:
        ids: what the model wrote.
        text: the text of `ids`, or its beginning.
        skip_special: that text has no special tokens.
    """
    if ids and tokenizer.decode(ids, skip_special=skip_special) == text and not text.endswith("\ufffd"):
        return (Span(text, ids),)
    decoder = IncrementalDecoder(tokenizer, skip_special=skip_special)
    kept = length = at = 0
    for count, i in enumerate(ids, 1):
        at += len(decoder.push((i,)))
        if at > len(text):
            break
        if not decoder.pending:
            kept, length = count, at
    head = (Span(text[:length], ids[:kept]),) if kept else ()
    return (*head, Span(text[length:], special=False)) if length < len(text) else head
