"""Drafter of what a row's grammar forces."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_lite.runtime.drafting.guess import Chance, Guess, Guesser
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.requests.request import Request


class GrammarDrafter:
    """Drafter of forced tokens that are scored, so that they are not appended as a whole."""

    name = "grammar"

    def guesser(self, request: Request, known: Ints, chance: Chance) -> Guesser:
        matcher = request.output.matcher
        return _Forced(matcher.forced() if drafts(request) and matcher is not None else [])

    def learn(self, request: Request, text: Sequence[int], start: int) -> None:
        """Remembers nothing: the grammar is all that it needs."""


def drafts(request: Request) -> bool:
    """True if the drafter may have guesses for a request."""
    return request.output.matcher is not None and request.params.scores_tokens


class _Forced:
    """Guesses some tokens one after another, until another one comes."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens, self._start = tokens, -1

    def __call__(self, text: Sequence[int]) -> Guess | None:
        if self._start < 0:
            self._start = len(text)
        came = len(text) - self._start
        as_guessed = came < len(self._tokens) and list(text[self._start :]) == self._tokens[:came]
        return Guess(self._tokens[came], 0) if as_guessed else None
