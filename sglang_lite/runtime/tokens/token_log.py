"""Token ids of a growing prompt. Generated tokens keep their ids, and all text between two
generations is tokenised together.

Used both for single calls and for whole programs, so that their tokens, cache hits and scores
agree.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterable, Sequence

from sglang_lite.errors import short_repr
from sglang_lite.protocol import ParameterError, Span
from sglang_lite.runtime.tokens.detokenize import IncrementalDecoder
from sglang_lite.runtime.tokens.image_span import ImageSpan, MediaItem
from sglang_lite.runtime.tokens.tokenizer import Tokenizer


class TokenLog:
    """Growing prompt. Known ids are kept, and only text after the last generated token is encoded.

    Args:
        tokenizer: tokenizer of the model.
        spans: first spans of the prompt.
        all_special: whether every text can name special tokens, regardless of its span.

    Attributes:
        fixed: final token ids, up to the last generated token.
        open: spans of text after these.
    """

    def __init__(
        self, tokenizer: Tokenizer, spans: Iterable[Span] = (), *, all_special: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._all_special = all_special
        self.fixed = array("i")  # up to the last generated token
        self.open: list[Span] = []  # text after these
        self.media: tuple[MediaItem, ...] = ()  # images among these ids
        self._known: array[int] | None = None  # ids of the open text, if encoded
        # token in the model's text for the image with which the fixed ids end
        self._placeholder: Span | None = None
        self.append(spans)

    def append(self, spans: Iterable[Span]) -> None:
        for span in spans:
            if isinstance(span, ImageSpan):
                self._append_image(span)
            elif span.ids is not None:
                if self.open:
                    self.fixed += self._encode_open_text()
                    self.open = []
                    self._known = None
                self._append_fixed_ids(span.ids)
                self._placeholder = None
            elif span.text:
                self.open.append(span)
                self._known = None

    def _append_image(self, span: ImageSpan) -> None:
        """Appends the virtual ids of an image. Text before the image is encoded as if the image's
        placeholder token followed it.
        """
        token = Span(span.text)
        if self.open or not self.fixed:
            self.fixed += self.encode([*self.open, token])[:-1]
            self.open = []
            self._known = None
        self._append_fixed_ids(span.ids or ())
        self._placeholder = token
        if span.item is not None:
            self.media += (span.item,)

    def _append_fixed_ids(self, ids: Sequence[int]) -> None:
        try:
            self.fixed.extend(ids)
        except (TypeError, OverflowError):  # other errors are found when the prompt is complete
            raise ParameterError("input_ids", f"{short_repr(ids)} are no token ids.") from None

    def encode(self, spans: Iterable[Span], *, alone: bool = False) -> array[int]:
        """Encodes spans that follow the fixed ids, or that form a separate prompt if `alone`. The
        beginning-of-sequence id is added once, before the first text.
        """
        if alone or self._placeholder is None:
            return self.encode_after(spans, first=alone or not self.fixed)
        return self.encode_after([self._placeholder, *spans], first=False)[1:]

    def encode_after(self, spans: Iterable[Span], *, first: bool) -> array[int]:
        """Encodes spans that follow other text, or that start a prompt if `first`. May be called on
        any thread.
        """
        if self._all_special:
            spans = [Span(span.text) for span in spans]
        return self._tokenizer.encode_spans(spans, first=first)

    def ids(self) -> array[int]:
        """Returns the token ids of the whole prompt."""
        return (
            self.fixed + self._encode_open_text() if self.open or not self.fixed else self.fixed[:]
        )

    def _encode_open_text(self) -> array[int]:
        if self._known is None:
            self._known = self.encode(self.open)
        return self._known

    def count_text_tokens(self) -> int:
        """Returns the number of tokens after the fixed ids."""
        return len(self._encode_open_text()) if self.open else 0

    @property
    def ready(self) -> bool:
        """True if no text is left to encode."""
        return self._known is not None or (not self.open and bool(self.fixed))

    def set_open_text(self, text: Sequence[Span], ids: array[int]) -> None:
        """Replaces the text after the fixed ids by `text`, which was encoded elsewhere as `ids`.
        Must not be called if the fixed ids end with an image.
        """
        self.open = list(text)
        self._known = ids

    def copy(self) -> TokenLog:
        """Returns an independent copy."""
        twin = copy.copy(self)
        twin.fixed = self.fixed[:]
        twin.open = list(self.open)
        return twin


def spans_for_next_prompt(
    tokenizer: Tokenizer,
    ids: tuple[int, ...],
    text: str,
    *,
    skip_special: bool = True,
    before: bytes = b"",
) -> tuple[Span, ...]:
    """Converts a generation to spans of the prompt that continues after it.

    The longest prefix of its tokens whose text lies within `text` (a stop may cut inside a token)
    keeps its ids. The rest of the text is tokenised together with the text that follows, and can't
    name special tokens.

    Args:
        tokenizer: tokenizer of the model.
        ids: generated token ids.
        text: text of `ids`, or its beginning.
        skip_special: whether that text leaves out special tokens.
        before: bytes with which `text` begins, before those of `ids`. They are tokenised together
            with the text before the generation.
    """
    if before:
        return _spans_after_text(tokenizer, ids, text, skip_special, before)
    if (
        ids
        and tokenizer.decode(ids, skip_special=skip_special) == text
        and not text.endswith("\ufffd")
    ):
        return (Span(text, ids),)
    decoder = IncrementalDecoder(tokenizer, skip_special=skip_special)
    kept = length = at = 0
    for count, i in enumerate(ids, 1):
        at += len(decoder.push((i,)))
        if at > len(text):
            break
        if not decoder.pending:
            kept = count
            length = at
    head = (Span(text[:length], ids[:kept]),) if kept else ()
    return (*head, Span(text[length:], special=False)) if length < len(text) else head


def _spans_after_text(
    tokenizer: Tokenizer, ids: tuple[int, ...], text: str, skip_special: bool, before: bytes
) -> tuple[Span, ...]:
    """Returns the spans of a text that begins with bytes that belong to no token. The tokens keep
    their ids only if these bytes form whole characters.
    """
    try:
        given = before.decode()
    except UnicodeDecodeError:
        given = text
    head = Span(text[: len(given)], special=False)
    rest = text[len(given) :]
    kept = spans_for_next_prompt(tokenizer, ids, rest, skip_special=skip_special) if rest else ()
    return tuple(span for span in (head, *kept) if span.text)
