"""Drafts of a row's next tokens, and a writer of drafts that follows the row's grammar."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.structured_output.base import Matcher


class DraftedGuess(NamedTuple):
    """Token of a draft that no grammar forces.

    Attributes:
        place: its index in the draft.
        token: its id.
        drafter: name of the drafter that guessed it.
        evidence: the drafter's evidence for it.
        chance: share of such guesses that were right.
        likely: chance that this guess and all guesses before it in its row are right.
    """

    place: int
    token: int
    drafter: str
    evidence: int
    chance: float
    likely: float


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next in a row.

    The step that computes a draft draws a token after each of its tokens. A draw counts if all
    drafted tokens before it equal the tokens that were drawn or forced at their positions.

    Attributes:
        tokens: int32 [D].
        guesses: drafted tokens that no grammar forces.
        drawn: numbers of drafted tokens after which the next one is drawn, ascending: 1 … D, except
            those within text that a grammar forces.
        matchers: matcher after each number of tokens in `drawn`, which must not be advanced; empty
            without a grammar.
    """

    tokens: Ints
    guesses: tuple[DraftedGuess, ...]
    drawn: tuple[int, ...]
    matchers: tuple[Matcher, ...] = ()

    def cut_to_tokens(self, count: int) -> Draft:
        """Returns the draft of the first `count` tokens."""
        if count >= len(self.tokens):
            return self
        drawn = tuple(place for place in self.drawn if place <= count)
        guesses = tuple(guess for guess in self.guesses if guess.place < count)
        return Draft(self.tokens[:count], guesses, drawn, self.matchers[: len(drawn)])

    def count_matching_tokens(self, came: Sequence[int]) -> int:
        """Returns how many of the draft's first tokens equal those that actually came."""
        tokens = self.tokens.tolist()
        return next(
            (i for i, (a, b) in enumerate(zip(tokens, came)) if a != b), min(len(tokens), len(came))
        )

    def cut_to_guesses(self, count: int) -> Draft:
        """Returns the draft of the first `count` guesses, including the text forced after them."""
        return self.cut_to_tokens(self.guesses[count].place) if count < len(self.guesses) else self


class DraftWriter:
    """Writes one draft.

    Args:
        matcher: matcher of the row, which is copied and never advanced, or None without a grammar.
        room: maximum number of tokens.
        jump: whether text that the grammar forces is appended as a whole, with no draws within it.

    Attributes:
        tokens: tokens so far.
        is_open: whether more tokens can be appended.
    """

    def __init__(self, matcher: Matcher | None, room: int, *, jump: bool) -> None:
        self._matcher = matcher
        self._room = room
        self._jump = jump
        self.tokens: list[int] = []
        self._drawn: list[int] = []
        self._matchers: list[Matcher] = []
        self.is_open = room > 0

    @property
    def state(self) -> Hashable:
        """State of the row's grammar after the tokens so far; None without a grammar, or if the
        state is not known.
        """
        return None if self._matcher is None else self._matcher.state_key

    def append_with_forced(self, token: int) -> list[int]:
        """Appends a token and the text that the grammar forces after it. Returns the appended
        tokens. Returns an empty list if the grammar forbids a token or fails, or if its matcher
        can't be copied.
        """
        forced: list[int] = []
        if self._matcher is not None:
            moved = self._advance_copy(self._matcher, token)
            if moved is None:
                return []
            self._matcher, forced = moved
            self.is_open = not self._matcher.finished and not self._matcher.error
        new = [token, *forced]
        self.tokens += new
        self.is_open = self.is_open and len(self.tokens) <= self._room
        if self.is_open:
            self._drawn.append(len(self.tokens))
            if self._matcher is not None:
                self._matchers.append(self._matcher)
            self.is_open = len(self.tokens) < self._room
        return new

    def _advance_copy(self, before: Matcher, token: int) -> tuple[Matcher, list[int]] | None:
        """Copies a matcher and advances the copy past a token. With `jump`, also advances it past
        the tokens that the grammar forces next, if there are two or more. Returns the copy and
        those forced tokens. Returns None if the grammar forbids a token or fails, or if the matcher
        can't be copied.
        """
        try:
            matcher = before.copy() if _is_allowed_by_mask(before, token) else None
            if matcher is None or not matcher.accept(token):
                return None
            forced = matcher.find_forced_tokens() if self._jump and not matcher.finished else []
            if len(forced) < 2:
                return matcher, []
            return (matcher, forced) if matcher.accept_all(forced) else None
        # raised by the grammar engine's library; the row reports it when it reaches this token
        except Exception:
            return None

    def build_draft(self, guesses: tuple[DraftedGuess, ...]) -> Draft:
        """Returns the written tokens as a Draft. `guesses` are the tokens that no grammar forces."""
        tokens = np.array(self.tokens[: self._room], dtype=np.int32)
        return Draft(tokens, guesses, tuple(self._drawn), tuple(self._matchers))


def _is_allowed_by_mask(matcher: Matcher, token: int) -> bool:
    """Returns False if the matcher's mask is cached and forbids a token."""
    mask = matcher.cached_mask()
    return mask is None or bool(mask[token >> 5] >> (token & 31) & 1)
