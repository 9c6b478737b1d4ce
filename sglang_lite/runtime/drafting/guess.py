"""Interface of drafters, which guess one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.requests.request import Request


class Guess(NamedTuple):
    """Token that may come next, and the kind of evidence for it. The kind is a small number chosen
    by the drafter. For each kind, right guesses are counted separately.
    """

    token: int
    evidence: int


Chance: TypeAlias = Callable[[int], float]  # share of the guesses that were right, by evidence
# Guesses the token after the last tokens of a text, in a state of its grammar: `Matcher.state_key`,
# or None.
Guesser: TypeAlias = Callable[[Sequence[int], Hashable], Guess | None]


class Drafter(Protocol):
    """Source of guesses. Guesses for a request never depend on texts of another namespace.

    Attributes:
        name: its name in `EngineConfig.speculation`.
    """

    @property
    def name(self) -> str: ...

    def can_draft(self, request: Request) -> bool:
        """Returns False if the drafter can have no guesses for the request, whatever its text."""
        ...

    def make_guesser(self, request: Request, known: Ints, chance: Chance) -> Guesser:
        """Creates the function that guesses the next tokens of a request's text one by one, each
        from those before it.

        Args:
            request: request of the row.
            known: all its tokens, prompt included, int32.
            chance: share of this drafter's guesses that were right, by evidence.
        """
        ...

    def learn_tokens(self, request: Request, text: Sequence[int], start: int) -> None:
        """Records new tokens of a request.

        Args:
            request: the request.
            text: its last tokens.
            start: index in `text` of the first new one.
        """
        ...
