"""Rejects sampled tokens that would repeat an item of a list more often in a row than permitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_lite.constraints.json_schema.repeats import RepeatRules
from sglang_lite.runtime.structured_output.base import Endings, Mask
from sglang_lite.runtime.structured_output.list_text import ListText
from sglang_lite.runtime.structured_output.vocabulary import build_token_mask


class RepeatGuard:
    """Guard that keeps one text from repeating list items too often. Allows a repetition if no
    other token is possible.

    Args:
        rules: how many equal items may come in a row.
        endings: endings of the text's grammar, or None if they are not known.
        text_of: function that returns the text of tokens, skipping special ones.

    Attributes:
        refused: number of positions at which a token was rejected.
    """

    def __init__(
        self, rules: RepeatRules, endings: Endings | None, text_of: Callable[[Sequence[int]], bytes]
    ) -> None:
        self.refused = 0
        self._lists = ListText(rules, endings)
        self._text_of = text_of
        self._tokens: list[int] = []  # rejected at the current position
        self._gives_way = False
        # token that was not rejected, and the text including it
        self._next: tuple[int, ListText] | None = None

    @property
    def repeated(self) -> int:
        """Number of items repeated beyond the limit because nothing else was possible."""
        return self._lists.repeated

    @property
    def removes_tokens_here(self) -> bool:
        """True if tokens were rejected at the current position, so that the mask must exclude them."""
        return bool(self._tokens)

    def refuses(self, token: int) -> bool:
        """Returns True if a drawn token must be drawn again. `narrow_mask` then excludes it."""
        if self._gives_way:
            return False
        lists = self._lists.copy()
        if lists.append_and_find_repeat(self._text_of((token,))):
            self._tokens.append(token)
            return True
        self._next = token, lists
        return False

    def stop_rejecting_here(self) -> None:
        """Stops rejecting tokens at the current position."""
        self._tokens = []
        self._gives_way = True

    def advance_guard(self, token: int) -> None:
        """Advances by the next token, which need not be one that `refuses` has checked."""
        if self._next is not None and self._next[0] == token:
            self._lists = self._next[1]
        else:
            self._lists.append_and_find_repeat(self._text_of((token,)))
        self.refused += bool(self._tokens)
        self._tokens = []
        self._gives_way = False
        self._next = None

    def narrow_mask(self, mask: Mask) -> Mask:
        """Returns the mask without the rejected tokens, or the mask itself if none would be left."""
        if not self._tokens:
            return mask
        allowed: Mask = mask & ~build_token_mask(self._tokens, 32 * len(mask))
        if allowed.any():
            return allowed
        self.stop_rejecting_here()
        return mask
