"""Closing of constrained texts: draws after which the text could no longer be completed within its budget are refused.

A completion that fits is known when a text begins. A token is taken if it follows that completion, or if a completion
is known after it that fits what is left; else it is drawn again without it. So the text ends within the budget, and
where the free answer fits, nothing is refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.structured_output.base import (
    CompiledGrammar,
    Endings,
    Mask,
    MaskMaker,
    Matcher,
    NumberSoFar,
    TextState,
)
from sglang_lite.runtime.structured_output.repeated_items import RepeatGuard
from sglang_lite.runtime.structured_output.vocabulary import mask_of

_MARGIN = 32  # tokens that a completion may have more than were counted
# While many tokens are left, the completion is not looked at after each one. It grows by less than `_GROWTH` tokens for
# each token of a text on average, and hardly ever by `_LEAP` at once.
_GROWTH, _LEAP = 3, 64
_REFUSALS = 4  # refused tokens in one place before the known completion is followed


class ClosingMatcher:
    """Matcher of a text that has to end within a budget.

    Args:
        inner: matcher of the text.
        endings: endings of its grammar, or None if they are not known; then nothing is refused.
        budget: maximum number of tokens.
        required: whether the text has to be complete at its end; if not, nothing is refused if no text fits.
        repeats: guard that also refuses tokens, where the budget refuses none; None for no guard.

    Attributes:
        repeats: the argument of this name.
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
    ) -> None:
        self._inner, self._endings, self._left, self.repeats = inner, endings, budget, repeats
        self._state = None if endings is None else endings.start
        self._completion = None if endings is None else self._found(b"", endings.start)
        self._next: tuple[int, list[int]] | None = None  # token that was found to fit, and the completion after it
        self._refused: list[int] = []
        self._unseen: list[int] = []  # accepted tokens that `_state` lacks
        self._margin = _MARGIN
        self._sleep = 0  # number of tokens until the completion is looked at again
        self.shortened: bool | Literal["unknown"] = False
        if self._completion is not None and len(self._completion) > budget:
            assert endings is not None
            self._completion = _fewest(endings, budget) if required else None
        if endings is None or self._completion is None:
            self._give_up()
        else:
            # Rules that no grammar can express may make completions longer.
            self._margin += 2 * max(0, len(self._completion) - int(endings.count(endings.start)))
            self._rest()

    def _give_up(self) -> None:
        self._state, self._completion, self._refused, self._unseen = None, None, [], []
        self._sleep, self.shortened = 0, "unknown"

    def _rest(self) -> None:
        """Decides for how many tokens the completion need not be looked at."""
        assert self._endings is not None
        slack = self._left - self._endings.count(self._state) - self._margin - _LEAP
        self._sleep = int(slack) // (1 + _GROWTH) if slack > 0 else 0

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
        if self._sleep or self._state is None or self._follows(token):
            return False
        assert self._endings is not None
        after = self._endings.after(self._state, token)
        if after is None or self._is_far(after, self._left - 1):
            return False
        completion = self._found(self._endings.text_of(token), after)
        if completion is not None and len(completion) < self._left:
            self._next = token, completion
            return False
        if self._completion is None:  # it was far away until now
            self._completion = self._found(b"", self._state)
            if self._completion is None or len(self._completion) > self._left:
                self._give_up()
                return False
        self._refused.append(token)
        self.shortened = True
        return True

    def _follows(self, token: int) -> bool:
        return self._completion is not None and self._completion[:1] == [token]

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
            self._refused = []
            self._advance(token)
        return True

    def _wake(self) -> None:
        """Advances the state past the tokens that were not looked at."""
        assert self._endings is not None
        self._state = self._endings.advance(self._state, b"".join(map(self._endings.text_of, self._unseen)))
        self._unseen = []
        if self._state is None:  # the language has too many states
            self._give_up()
            return
        self._completion = None
        self._rest()

    def _advance(self, token: int) -> None:
        assert self._endings is not None
        self._state = self._endings.after(self._state, token)
        if self._follows(token):
            assert self._completion is not None
            self._completion = self._completion[1:]
        elif self._next is not None and self._next[0] == token:
            self._completion = self._next[1]
        elif self._state is not None:
            self._completion = None if self._is_far(self._state, self._left) else self._found(b"", self._state)
        elif not self._inner.finished:
            self._give_up()
        self._next = None

    def _is_far(self, state: TextState, left: int) -> bool:
        """Returns True if the completion of a state certainly fits."""
        assert self._endings is not None
        return self._endings.count(state) + self._margin <= left

    def _found(self, written: bytes, state: TextState) -> list[int] | None:
        """Tokens of a completion of the text so far and `written`."""
        assert self._endings is not None
        text = self._inner.completion(self._endings, written, state)
        return None if text is None else self._endings.spell(text)

    def cached_mask(self) -> Mask | None:
        mask = self._inner.cached_mask()
        if mask is not None and self._refused:
            mask = self._within_budget(mask)
        return mask if mask is None or self.repeats is None else self.repeats.narrowed(mask)

    def _within_budget(self, mask: Mask) -> Mask:
        if self._completion and len(self._refused) >= _REFUSALS:
            allowed: Mask = mask & mask_of(self._completion[:1], 32 * len(mask))
        else:
            allowed = mask & ~mask_of(self._refused, 32 * len(mask))
        if not allowed.any():
            self._give_up()
            return mask
        return allowed

    # ------------------------------------------------------------------------------------- as the inner matcher

    @property
    def engine(self) -> MaskMaker:
        return self._inner.engine

    @property
    def parts(self) -> Sequence[Matcher]:
        return self._inner.parts

    @property
    def lock_key(self) -> Hashable:
        return self._inner.lock_key

    @property
    def state_key(self) -> Hashable:
        narrowed = self._refused or (self.repeats is not None and self.repeats.narrows)
        return id(self) if narrowed else self._inner.state_key

    @property
    def number(self) -> NumberSoFar | None:
        return self._inner.number

    def set_mask(self, mask: Mask) -> None:
        self._inner.set_mask(mask)

    def advance(self, text: bytes) -> bool:
        self._give_up()
        return self._inner.advance(text)

    def completion(self, endings: Endings, written: bytes, state: TextState) -> bytes | None:
        return self._inner.completion(endings, written, state)

    def forced(self) -> list[int]:
        return self._inner.forced()

    @property
    def complete(self) -> bool:
        return self._inner.complete

    @property
    def finished(self) -> bool:
        return self._inner.finished

    @property
    def error(self) -> str:
        return self._inner.error


def prepare(grammar: CompiledGrammar, budget: int | None = None) -> None:
    """Does what is slow about the first ClosingMatcher of a grammar, as it may be made on the loop's thread.

    Args:
        grammar: grammar of the texts.
        budget: maximum number of tokens, if it is known.
    """
    endings = grammar.endings()
    if endings is None:
        return
    text = grammar.matcher().completion(endings, b"", endings.start)
    tokens = None if text is None else endings.spell(text)
    if tokens is not None and budget is not None and len(tokens) > budget:
        endings.fewest(endings.start)


def prepare_states(grammar: CompiledGrammar) -> None:
    """Finds the first states of a large grammar's texts, which would take long on the loop's thread: up to a second."""
    endings = grammar.endings()
    if endings is not None:
        endings.advance(endings.start, b"")


def _fewest(endings: Endings, budget: int) -> list[int] | None:
    """Tokens of a completion within a budget that is small for the grammar, or None if none was found.

    Raises:
        ParameterError: there is none.
    """
    found = endings.fewest(endings.start)
    if found is None:
        return None
    least, tokens = found
    if least > budget:
        raise ParameterError(
            "max_tokens",
            f"leaves {budget:,} tokens for the answer, and the shortest text of the constraint has {least:,}.",
            hint="Raise it, or shorten the prompt if the context is full.",
        )
    return tokens if len(tokens) <= budget else None
