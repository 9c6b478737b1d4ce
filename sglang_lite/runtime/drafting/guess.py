"""Interface of drafters, which guess one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.requests.request import Request


class Guess(NamedTuple):
    """Token that may come next, and the kind of evidence for it: a small number chosen by the
    drafter. Right guesses are counted separately for each number.
    """

    token: int
    evidence: int


Chance: TypeAlias = Callable[[int], float]  # share of the guesses that were right, by evidence
# Guesses the token after the last tokens of a text, in a state of its grammar: `Matcher.state_key`,
# or None.
Guesser: TypeAlias = Callable[[Sequence[int], Hashable], Guess | None]


class Drafter(Protocol):
    """Source of guesses. Guesses never depend on a text of another namespace than the request's.

    Attributes:
        name: its name in `EngineConfig.speculation`.
    """

    @property
    def name(self) -> str: ...

    def can_draft(self, request: Request) -> bool:
        """Returns False if it has no guesses for any text of the request."""
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
