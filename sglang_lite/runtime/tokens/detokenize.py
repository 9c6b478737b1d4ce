"""Incremental decoding of token ids to text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from sglang_lite.runtime.tokens.tokenizer import Tokenizer


class IncrementalDecoder:
    """Decodes tokens incrementally. However the ids are split, the joined results of `push` equal
    `tokenizer.decode` of all ids. Only an incomplete UTF-8 sequence at the end is held back.

    Args:
        tokenizer: tokenizer whose byte table is used.
        skip_special: whether to leave special tokens out of the text.
        before: bytes before the first token, which the first call of `push` returns, too.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool = True, before: bytes = b""
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0  # number of characters so far
        self._before = before

    def push(self, ids: Sequence[int]) -> str:
        new = self._tokenizer.decode_bytes(ids, skip_special=self._skip_special)
        text = self._utf8.decode(self._before + new if self._before else new)
        self._before = b""
        self._length += len(text)
        return text

    def take_new_text(self, text: str) -> str:
        """Returns the new part of a text that was decoded elsewhere and begins with all text so
        far.
        """
        new = text[self._length :]
        self._length += len(new)
        return new

    @property
    def pending(self) -> bool:
        """True if the bytes so far end inside a character."""
        return bool(self._utf8.getstate()[0])
