"""Interface of drafters, which guess one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.requests.request import Request


class Guess(NamedTuple):
    """A token that may come next, and the evidence for it: a small number of the drafter's own, by which it is counted
    how often such guesses are right."""

    token: int
    evidence: int


Chance: TypeAlias = Callable[[int], float]  # share of the guesses that were right, by evidence
# Guesses the token behind the last tokens of a text, and in a state of its grammar: `Matcher.state_key`, or None.
Guesser: TypeAlias = Callable[[Sequence[int], Hashable], Guess | None]


class Drafter(Protocol):
    """Source of guesses. None depends on a text of another namespace than the request's.

    Attributes:
        name: its name in `EngineConfig.speculation`.
    """

    @property
    def name(self) -> str: ...

    def drafts(self, request: Request) -> bool:
        """False if it has no guesses for any text of the request."""
        ...

    def guesser(self, request: Request, known: Ints, chance: Chance) -> Guesser:
        """Makes the function that guesses the next tokens of a request's text one by one, each behind those before.

        Args:
            request: request of the row.
            known: all its tokens, prompt included, int32.
            chance: share of this drafter's guesses that were right, by evidence.
        """
        ...

    def learn(self, request: Request, text: Sequence[int], start: int) -> None:
        """Takes note of new tokens of a request.

        Args:
            request: the request.
            text: its last tokens.
            start: index in `text` of the first new one.
        """
        ...
