"""Decides which texts of a language may be drawn, and how long they may be."""

from __future__ import annotations

from collections.abc import Callable

from sglang_lite.runtime.exact.beginnings import Beginning


class TextLimits:
    """Limits of the texts that may be drawn. A try to draw a text fails if it reads a text that is
    not allowed, or if no text has ended after the maximum number of tokens.

    Args:
        count_tokens: returns the number of tokens with which the tokenizer spells a text.
        limit: maximum number of a text's tokens.
        allows: returns whether the constraint allows a text.
    """

    def __init__(
        self, count_tokens: Callable[[str], int], limit: int, allows: Callable[[str], bool]
    ) -> None:
        self.limit = limit
        self._count_tokens = count_tokens
        self._allows = allows
        self._allowed: dict[bytes, bool] = {}
        self._longest = limit  # most tokens of a beginning whose row can be computed

    def give_up(self, beginning: Beginning) -> None:
        """Counts a beginning as too long, and all others with at least as many tokens."""
        self._longest = min(self._longest, len(beginning.tokens) - 1)

    def is_allowed(self, text: bytes) -> bool:
        """Returns whether a text may be drawn: it is short enough and the constraint allows it."""
        if text not in self._allowed:
            found = text.decode()
            self._allowed[text] = self._count_tokens(found) <= self.limit and self._allows(found)
        return self._allowed[text]

    def is_too_long(self, beginning: Beginning) -> bool:
        """Returns whether a beginning has too many tokens for its row to be computed."""
        return len(beginning.tokens) > self._longest

    def may_continue(self, beginning: Beginning) -> bool:
        """Returns whether another token may be added to a beginning."""
        return len(beginning.tokens) < self._longest
