"""A draft, and how a grammar shortens a proposal to one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.structured_output.base import Matcher


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next in a row. The step that computes them draws behind each, and a draw counts if all
    drafted tokens before it equal what was drawn or forced there.

    Attributes:
        drafter: name of the drafter that proposed them.
        tokens: int32 [D].
        drawn: numbers of drafted tokens behind which the next one is drawn, ascending: 1 … D, but for those within
            text that a grammar forces.
        matchers: matcher at each of these places, not to be moved; empty without a grammar.
    """

    drafter: str
    tokens: Ints
    drawn: tuple[int, ...]
    matchers: tuple[Matcher, ...] = ()

    def cut(self, count: int) -> Draft:
        """The draft of the first `count` tokens."""
        if count >= len(self.tokens):
            return self
        drawn = tuple(place for place in self.drawn if place <= count)
        return Draft(self.drafter, self.tokens[:count], drawn, self.matchers[: len(drawn)])

    def accepted(self, matched: int) -> int:
        """Number of the first `matched` tokens that no grammar forces: each has saved a step."""
        return sum(place <= matched for place in self._guessed)

    @property
    def guessed(self) -> int:
        """Number of drafted tokens that no grammar forces."""
        return len(self._guessed)

    @property
    def _guessed(self) -> list[int]:
        """Places behind the tokens that no grammar forces: the first, and those behind a place where one is drawn."""
        return [place for place in (1, *(each + 1 for each in self.drawn)) if place <= len(self.tokens)]


def free_draft(drafter: str, proposed: Sequence[int]) -> Draft:
    """Draft of a row without a grammar."""
    return Draft(drafter, np.array(proposed, dtype=np.int32), tuple(range(1, len(proposed) + 1)))


def constrained_draft(drafter: str, proposed: Sequence[int], matcher: Matcher, room: int, *, jump: bool) -> Draft:
    """Draft of a row with a grammar: as much of a proposal as it allows, and the text that it forces.

    Args:
        drafter: name of the drafter.
        proposed: proposed tokens.
        matcher: copy of the row's matcher, which this moves.
        room: maximum number of tokens.
        jump: whether forced text is appended as a whole, so that nothing is drawn within it.
    """
    tokens, drawn, matchers = list[int](), list[int](), list[Matcher]()
    while len(tokens) < min(len(proposed), room) and tokens == list(proposed[: len(tokens)]):
        copied = matcher.copy()
        if copied is None or not allows(matcher, proposed[len(tokens)]) or not copied.accept(proposed[len(tokens)]):
            break
        matcher = copied
        tokens.append(proposed[len(tokens)])
        forced = matcher.forced() if jump and not matcher.finished else []
        if len(forced) > 1:
            for token in forced:
                matcher.accept(token)
            tokens += forced
        if matcher.finished or matcher.error or len(tokens) > room:
            break
        drawn.append(len(tokens))
        matchers.append(matcher)
    return Draft(drafter, np.array(tokens[:room], dtype=np.int32), tuple(drawn), tuple(matchers))


def allows(matcher: Matcher, token: int) -> bool:
    """False if a mask is known that forbids a token."""
    mask = matcher.cached_mask()
    return mask is None or bool(mask[token >> 5] >> (token & 31) & 1)
