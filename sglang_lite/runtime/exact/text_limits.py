"""Texts of an open language that may be drawn."""

from __future__ import annotations

from collections.abc import Callable

from sglang_lite.runtime.exact.beginnings import Beginning


class TextLimits:
    """Decides which texts of an open language may be drawn. Where another one is read, or where it
    is still open what is read after as many tokens as a text may have, the draw begins again.

    Args:
        count_tokens: returns the usual number of a text's tokens.
        limit: maximum number of a text's tokens.
        allows: returns whether a text is one of the constraint's.
    """

    def __init__(
        self, count_tokens: Callable[[str], int], limit: int, allows: Callable[[str], bool]
    ) -> None:
        self.limit = limit
        self._count_tokens = count_tokens
        self._allows = allows
        self._allowed: dict[bytes, bool] = {}
        self._longest = limit  # tokens of a beginning after which a row can be computed

    def give_up(self, beginning: Beginning) -> None:
        """Lets a beginning be too long, and all that have as many tokens."""
        self._longest = min(self._longest, len(beginning.tokens) - 1)

    def is_allowed(self, text: bytes) -> bool:
        """Returns whether a text that is read may be drawn."""
        if text not in self._allowed:
            found = text.decode()
            self._allowed[text] = self._count_tokens(found) <= self.limit and self._allows(found)
        return self._allowed[text]

    def is_too_long(self, beginning: Beginning) -> bool:
        """Returns whether a beginning is not continued."""
        return len(beginning.tokens) > self._longest

    def may_continue(self, beginning: Beginning) -> bool:
        """Returns whether a beginning may have another token."""
        return len(beginning.tokens) < self._longest
