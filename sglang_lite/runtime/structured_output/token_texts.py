"""Tokens of a vocabulary as texts: how they spell other texts, and as arrays."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sglang_lite.constraints.formal.charsets import LAST
from sglang_lite.runtime.structured_output.spelling import Spelling

_LONGEST = 16  # most characters of a token in the arrays: longer ones are words that no short completion has


@dataclass(frozen=True, slots=True)
class TokenArrays:
    """Tokens of whole characters, the longest first.

    Attributes:
        tokens: their ids, int32 [N].
        letters: by position, the characters that the first of them have there, int32 indices into `alphabet`.
        alphabet: characters of all tokens.
    """

    tokens: NDArray[np.int32]
    letters: list[NDArray[np.int32]]
    alphabet: list[str]


class TokenTexts:
    """Texts of a vocabulary's tokens, shared by all its languages. Its parts are made when they are first needed.

    Args:
        token_bytes: bytes of each token.
        special: tokens that have no text.
    """

    def __init__(self, token_bytes: Sequence[bytes], special: Container[int]) -> None:
        self._token_bytes, self._special = token_bytes, special

    @cached_property
    def spelling(self) -> Spelling:
        return Spelling(self._token_bytes, self._special)

    @cached_property
    def arrays(self) -> TokenArrays:
        whole = [(whole_text(each), token) for token, each in enumerate(self._token_bytes)]
        texts = [(text, i) for text, i in whole if text and len(text) <= _LONGEST and i not in self._special]
        texts.sort(key=lambda each: -len(each[0]))
        lengths = np.array([len(text) for text, _ in texts], dtype=np.int64)
        codes = np.frombuffer("".join([text for text, _ in texts]).encode("utf-32-le"), dtype=np.uint32)
        seen = np.zeros(LAST + 1, dtype=bool)
        seen[codes] = True
        index = np.cumsum(seen, dtype=np.int32) - 1
        starts = np.cumsum(lengths) - lengths
        letters = [index[codes[starts[lengths > at] + at]] for at in range(int(lengths[:1].sum()))]
        alphabet = [chr(code) for code in np.flatnonzero(seen).tolist()]
        return TokenArrays(np.array([token for _, token in texts], dtype=np.int32), letters, alphabet)


def whole_text(token: bytes) -> str | None:
    """Text of a token, or None if it is not one of whole characters."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return None
