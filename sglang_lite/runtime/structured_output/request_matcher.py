"""Matcher of one request: its grammar's matcher with a guard against repeated items."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from sglang_lite.runtime.structured_output.base import DelegatingMatcher, Mask, Matcher
from sglang_lite.runtime.structured_output.repeated_items import RepeatGuard


class RequestMatcher(DelegatingMatcher):
    """Matcher of a request's text.

    Args:
        inner: matcher of the text's grammar.
        repeats: guard that rejects drawn tokens; None for no guard.
        sources: texts that parts of the text are copied from.

    Attributes:
        repeats, sources: the arguments of these names.
        busy: whether a mask is being computed for the matcher, so that it must not be copied.
    """

    def __init__(
        self, inner: Matcher, *, repeats: RepeatGuard | None = None, sources: Sequence[str] = ()
    ) -> None:
        super().__init__(inner)
        self.repeats = repeats
        self.sources = sources
        self.busy = False

    def refuses(self, token: int) -> bool:
        """Returns True if a drawn token must be drawn again. `cached_mask` then excludes it."""
        return self.repeats is not None and self.repeats.refuses(token)

    def accept(self, token: int) -> bool:
        if not self._inner.accept(token):
            return False
        if self.repeats is not None:
            self.repeats.advance_guard(token)
        return True

    def accept_all(self, tokens: Sequence[int]) -> bool:
        return (
            super().accept_all(tokens)
            if self.repeats is not None
            else self._inner.accept_all(tokens)
        )

    def adopt_copied_position(self, inner: Matcher) -> bool:
        """Moves to the position of a copy. If there is a guard, returns False without moving,
        because the guard must see each token.

        Args:
            inner: a `copy` that has accepted tokens which the grammar allows, none of which ends
                the text.
        """
        if self.repeats is not None:
            return False
        self._inner = inner
        return True

    def copy(self) -> Matcher | None:
        """Returns a copy without the guard, or None if it can't be copied now. The copy's masks may
        also allow tokens that the guard has rejected.
        """
        return None if self.busy else self._inner.copy()

    def cached_mask(self) -> Mask | None:
        mask = self._inner.cached_mask()
        return mask if mask is None or self.repeats is None else self.repeats.narrow_mask(mask)

    @property
    def state_key(self) -> Hashable:
        narrowed = self.repeats is not None and self.repeats.removes_tokens_here
        return id(self) if narrowed else self._inner.state_key

    def accept_text(self, text: bytes) -> bool:
        return self._inner.accept_text(text)
