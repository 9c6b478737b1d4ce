"""Texts as the fewest tokens that spell them, which need not be the tokenizer's own split."""

from __future__ import annotations

from collections.abc import Container, Sequence

_LONGEST = 24  # most bytes of a token that is tried: longer ones are words that no short completion has
_MAX_KNOWN = 100_000  # texts whose spelling is kept


class Spelling:
    """Spelling of texts in the fewest tokens of a vocabulary.

    Args:
        token_bytes: bytes of each token.
        special: tokens that have no text.
    """

    def __init__(self, token_bytes: Sequence[bytes], special: Container[int]) -> None:
        self._tokens: dict[bytes, int] = {}
        for token, text in enumerate(token_bytes):
            if 0 < len(text) <= _LONGEST and token not in special:
                self._tokens.setdefault(text, token)
        self._longest = max(map(len, self._tokens), default=1)
        self._known: dict[bytes, tuple[int, bytes]] = {}  # number of tokens by text, and the text of the first one

    def count(self, text: bytes) -> int | None:
        """Number of tokens of a text, or None if no tokens spell it."""
        if not text:
            return 0
        if text not in self._known:
            self._find(text)
        count, first = self._known[text]
        return count if first else None

    def tokens(self, text: bytes) -> list[int] | None:
        """Tokens of a text, or None if no tokens spell it."""
        if self.count(text) is None:
            return None
        found: list[int] = []
        while text:
            if text not in self._known:  # forgotten meanwhile
                self._find(text)
            first = self._known[text][1]
            found.append(self._tokens[first])
            text = text[len(first) :]
        return found

    def _find(self, text: bytes) -> None:
        """Finds the fewest tokens of a text and all its ends: the last ones first, as each continues with others."""
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        known = self._known
        unknown = next((at for at in range(1, len(text)) if text[at:] in known), len(text))
        for start in range(unknown - 1, -1, -1):
            best, first = len(text) + 1, b""
            for end in range(start + 1, min(start + self._longest, len(text)) + 1):
                piece = text[start:end]
                if piece not in self._tokens:
                    continue
                rest = known[text[end:]] if end < len(text) else (0, piece)
                if rest[1] and rest[0] + 1 < best:
                    best, first = rest[0] + 1, piece
            known[text[start:]] = best, first
