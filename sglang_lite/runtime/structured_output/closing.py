"""Closing of constrained texts: draws after which the text could no longer be completed within its budget are refused.

A completion that fits is known when a text begins. A token is taken if it follows that completion, or if a completion
is known after it that fits what is left; else it is drawn again without it. So the text ends within the budget, and
where the free answer fits, nothing is refused.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.structured_output.base import (
    CompiledGrammar,
    DelegatingMatcher,
    Endings,
    Mask,
    Matcher,
    TextState,
)
from sglang_lite.runtime.structured_output.repeated_items import RepeatGuard
from sglang_lite.runtime.structured_output.vocabulary import mask_of

_SPARE = 8  # tokens more than the completion that have to fit into the time that is left
_REFUSALS = 4  # refused tokens in one place before the known completion is followed


class ClosingMatcher(DelegatingMatcher):
    """Matcher of a text that has to end within a budget.

    Args:
        inner: matcher of the text.
        endings: endings of its grammar, or None if they are not known; then nothing is refused.
        budget: maximum number of tokens.
        required: whether the text has to be complete at its end; if not, nothing is refused if no text fits.
        repeats: guard that also refuses tokens, where the budget refuses none; None for no guard.
        sources: texts that parts of the text are copied from.

    Attributes:
        repeats, sources: the arguments of these names.
        busy: whether a mask is being made for it, so that it must not be copied.
        shortened: whether a token was refused for the budget; "unknown" if a completion was not known all the time.

    Raises:
        ParameterError: the budget is too small for any text of the grammar.
    """

    def __init__(
        self,
        inner: Matcher,
        endings: Endings | None,
        budget: int,
        *,
        required: bool = True,
        repeats: RepeatGuard | None = None,
        sources: Sequence[str] = (),
    ) -> None:
        super().__init__(inner)
        self._endings, self._left, self.repeats, self.sources = endings, budget, repeats, sources
        self._state = None if endings is None else endings.start
        self._completion: list[int] | None = None  # completion that is known to fit, once one was needed
        self._after: tuple[int, TextState] | None = None  # token that was found to fit, and the state after it
        self._next: list[int] | None = None  # completion after that token, if one was needed
        self._refused: list[int] = []
        self._unseen: list[int] = []  # accepted tokens that `_state` lacks
        self._sleep = 0  # number of tokens until the completion is looked at again
        self._hurries = False  # True once only the completion may follow, as the time is up
        self.busy = False
        self.shortened: bool | Literal["unknown"] = False
        if endings is not None and not self._fits(endings.start, budget) and required:
            _check_least(endings, budget)
        if endings is None or not self._fits(endings.start, budget):
            self._give_up()
        else:
            self._completion = self._next
            self._rest()
            if not self._sleep:
                prepare_states(endings)

    def _give_up(self) -> None:
        self._state, self._completion, self._refused, self._unseen = None, None, [], []
        self._sleep, self._hurries, self.shortened = 0, False, "unknown"

    def _rest(self) -> None:
        """Decides for how many tokens the completion need not be looked at."""
        assert self._endings is not None
        self._sleep = _rest(self._endings, self._state, self._left)

    def _fits(self, state: TextState, left: int) -> bool:
        """Returns True if a completion of a state is known to fit. Keeps it if it was not enough to count."""
        assert self._endings is not None
        self._next = None
        if self._endings.count(state) <= left:
            return True
        self._next = self._endings.within(state, left)
        return self._next is not None

    # ---------------------------------------------------------------------------------------------- tokens

    def refuses(self, token: int) -> bool:
        """Returns True if a token that was drawn has to be drawn again: `cached_mask` then lacks it."""
        repeats = self.repeats
        if self._exceeds(token):
            if repeats is not None:
                repeats.give_way()
            return True
        return repeats is not None and repeats.refuses(token)

    def _exceeds(self, token: int) -> bool:
        """True if no completion fits the budget after a token."""
        if self._sleep or self._state is None:
            return False
        assert self._endings is not None
        after = self._endings.after(self._state, token)
        if after is None:  # what ends a number is not in its language
            return False
        if self._completion is not None and self._completion[:1] == [token]:
            self._after, self._next = (token, after), self._completion[1:]
            return False
        if self._fits(after, self._left - 1):
            self._after = token, after
            return False
        if self._completion is None:
            self._completion = self._endings.within(self._state, self._left)
            if self._completion is None:
                self._give_up()
                return False
        self._refused.append(token)
        self.shortened = True
        return True

    def accept(self, token: int) -> bool:
        if not self._inner.accept(token):
            return False
        if self.repeats is not None:
            self.repeats.accept(token)
        self._left -= 1
        if self._sleep:
            self._sleep -= 1
            self._unseen.append(token)
            if not self._sleep and not self._inner.finished:
                self._wake()
        elif self._state is not None:
            self._advance(token)
        if self._left == 0 and not (self._inner.complete or self._inner.finished):
            self._give_up()
        return True

    def accept_all(self, tokens: Sequence[int]) -> bool:
        if not self._sleeps(len(tokens)):
            return super().accept_all(tokens)
        if not self._inner.accept_all(tokens):
            return False
        self._pass(tokens)
        return True

    def skip(self, tokens: Sequence[int], inner: Matcher) -> bool:
        """Moves behind tokens at once, as `refuses` and `accept` of each would. Returns False, unmoved, if one needs a
        look.

        Args:
            tokens: tokens that the grammar allows, none of which ends the text.
            inner: a `copy` that has accepted them.
        """
        if not self._sleeps(len(tokens)):
            return False
        self._inner = inner
        self._pass(tokens)
        return True

    def _sleeps(self, count: int) -> bool:
        """True if none of the next tokens needs a look."""
        awake = self._state is not None and self._sleep <= count
        return not awake and self._left > count and self.repeats is None

    def _pass(self, tokens: Sequence[int]) -> None:
        self._left -= len(tokens)
        if self._sleep:
            self._sleep -= len(tokens)
            self._unseen += tokens

    def close_within(self, steps: float) -> int | None:
        """Lets only the shortest completion follow if hardly more fits into some steps of a token each.

        Returns:
            Number of tokens that are left then, or None if there is time for more, or no completion is known.
        """
        if self._hurries or self._state is None:
            return None
        assert self._endings is not None
        if self._unseen:
            growth = self._endings.growth
            if (
                steps
                > self._endings.count(self._state) + growth.longest * (1 + len(self._unseen) * growth.nests) + _SPARE
            ):
                return None
            self._wake()
            if self._state is None:
                return None
        if steps >= self._endings.count(self._state) + _SPARE:
            return None
        self._completion = self._endings.within(self._state, self._left)
        if self._completion is None:
            return None
        self._hurries, self._sleep, self._left, self.shortened = True, 0, len(self._completion), True
        return self._left

    def _wake(self) -> None:
        """Advances the state past the tokens that were not looked at."""
        assert self._endings is not None
        self._state = self._endings.advance(self._state, b"".join(map(self._endings.text_of, self._unseen)))
        self._unseen = []
        if self._state is None or not self._fits(self._state, self._left):
            self._give_up()
        else:
            self._completion = self._next
            self._rest()

    def _advance(self, token: int) -> None:
        assert self._endings is not None
        if self._after is not None and self._after[0] == token:
            self._state, self._completion = self._after[1], self._next
        else:  # it is forced
            follows = self._completion is not None and self._completion[:1] == [token]
            self._completion = self._completion[1:] if self._completion is not None and follows else None
            self._state = self._endings.after(self._state, token)
            if self._state is None and not self._inner.finished:
                self._give_up()
        self._after, self._next, self._refused = None, None, []

    def copy(self) -> Matcher | None:
        """Copy without a budget, whose masks are the same but for tokens that are refused; None if there can be none
        now, or only the completion may follow."""
        return None if self._hurries or self.busy else self._inner.copy()

    def cached_mask(self) -> Mask | None:
        if self._hurries and self._completion:
            return mask_of(self._completion[:1], self.engine.vocab_size)
        mask = self._inner.cached_mask()
        if mask is not None and self._refused:
            mask = self._within_budget(mask)
        return mask if mask is None or self.repeats is None else self.repeats.narrowed(mask)

    def _within_budget(self, mask: Mask) -> Mask:
        allowed: Mask = mask & ~mask_of(self._refused, 32 * len(mask))
        if self._completion and (len(self._refused) >= _REFUSALS or not allowed.any()):
            # The mask may lack this token, where it allows only the tokenizer's own split.
            return mask_of(self._completion[:1], 32 * len(mask))
        return allowed

    def forced(self) -> list[int]:
        """Forced tokens; none if they are so many that another split of their text has to be found."""
        if self._hurries:
            return self._completion or []
        forced = self._inner.forced()
        if not forced or self._sleep or self._state is None:
            return forced
        assert self._endings is not None
        state, left = self._state, self._left
        for token in forced:
            state, left = self._endings.after(state, token), left - 1
            if state is None:
                return forced
        if not self._fits(state, left):
            return []
        self._completion = None if self._next is None else [*forced, *self._next]
        return forced

    @property
    def state_key(self) -> Hashable:
        narrowed = self._refused or self._hurries or (self.repeats is not None and self.repeats.narrows)
        return id(self) if narrowed else self._inner.state_key

    def advance(self, text: bytes) -> bool:
        self._give_up()
        return self._inner.advance(text)


def _rest(endings: Endings, state: TextState, left: int) -> int:
    """Number of tokens for which the completion of a text need not be looked at."""
    longest = endings.growth.longest
    if endings.growth.nests:  # each token may open a level
        return max(int(left - endings.count(state) - longest) // (1 + longest), 0)
    return max(left - longest, 0)


def prepare(grammar: CompiledGrammar, budget: int | None = None) -> None:
    """Does what is slow about the first ClosingMatcher of a grammar, as it may be made on the loop's thread.

    Args:
        grammar: grammar of the texts.
        budget: maximum number of tokens, if it is known.
    """
    endings = grammar.endings()
    if endings is None:
        return
    if endings.count(endings.start) > (math.inf if budget is None else budget):
        endings.fewest(endings.start)
    if budget is not None and not _rest(endings, endings.start, budget):
        prepare_states(endings)


def prepare_states(endings: Endings) -> None:
    """Finds the first states of a grammar's texts, which would take long on the loop's thread: mostly less than a
    millisecond, but up to a second."""
    endings.advance(endings.start, b"")


def _check_least(endings: Endings, budget: int) -> None:
    """Raises ParameterError if no completion fits into a budget."""
    least = endings.fewest(endings.start)
    if least is not None and least > budget:
        raise ParameterError(
            "max_tokens",
            f"leaves {budget:,} tokens for the answer, and the shortest text of the constraint has {least:,}.",
            hint="Raise it, or shorten the prompt if the context is full.",
        )
