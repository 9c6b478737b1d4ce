"""Drafter that copies from the row's own text. It finds earlier occurrences of the last tokens, and
guesses the tokens that followed them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.drafting.guess import Chance, Guess, Guesser
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.requests.request import Request

_MIN = 1  # number of tokens that have to be equal
_SEARCHED = 8192  # last tokens of the row that are searched
_COMPARED = 32  # number of latest equally long matches that are compared
_AROUND = np.arange(1, 17)  # distances of tokens before an end that are compared


class PromptDrafter:
    """Drafts texts that repeat parts of their prompt or of themselves.

    Args:
        config: its `draft_context` is the longest match that is searched for.
    """

    name = "prompt"

    def __init__(self, config: EngineConfig) -> None:
        self._most = config.draft_context

    def can_draft(self, request: Request) -> bool:
        return True

    def make_guesser(self, request: Request, known: Ints, chance: Chance) -> Guesser:
        return _Copy(known[-_SEARCHED:], self._most)

    def learn_tokens(self, request: Request, text: Sequence[int], start: int) -> None:
        """Remembers nothing, because it only needs the row's own text."""


class _Copy:
    """Guesses the token after the longest earlier match of the last tokens.

    Among equally long matches, compares the texts before them with the text before the last tokens,
    and picks the latest of the most similar ones.

    Args:
        known: tokens to search.
        most: length in tokens of the longest match that is searched for.
    """

    def __init__(self, known: Ints, most: int) -> None:
        self._known = known
        self._most = most
        # index of the token to guess next, and number of equal tokens before it
        self._next = 0
        self._length = 0
        self._guess: int | None = None

    def __call__(self, text: Sequence[int], state: Hashable) -> Guess | None:
        if self._guess is not None and text[-1] == self._guess:
            self._next = self._next + 1
            self._length = self._length + 1
        else:
            self._find_match(text)
        if self._length < _MIN or self._next >= len(self._known):
            self._guess = None
            return None
        self._guess = int(self._known[self._next])
        return Guess(self._guess, min(self._length, self._most))

    def _find_match(self, text: Sequence[int]) -> None:
        known = self._known
        count = min(self._most, len(text))
        ends = np.flatnonzero(known[:-1] == text[-1]) + 1  # ends of matches
        length = 1
        while length < count and len(ends):
            longer = ends[
                (ends > length) & (known[np.maximum(ends - length - 1, 0)] == text[-length - 1])
            ]
            if not len(longer):
                break
            ends = longer
            length = length + 1
        if len(ends) > 1:
            ends = self._most_similar(ends[-_COMPARED:], text)
        self._next, self._length = (int(ends[-1]), length) if len(ends) else (0, 0)

    def _most_similar(self, ends: NDArray[np.int64], text: Sequence[int]) -> NDArray[np.int64]:
        """Returns the ends of the matches whose preceding tokens overlap most with the end of the
        text. So if part of the copied text is changed, copying continues after the change, whatever
        its length.
        """
        before = self._known[np.maximum(ends[:, None] - _AROUND, 0)]
        shared = (before[:, :, None] == np.array(text, dtype=np.int32)).any(2).sum(1)
        alike: NDArray[np.int64] = ends[shared == shared.max()]
        return alike
