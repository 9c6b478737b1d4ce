"""Where texts are in a language, so that what an engine says of one holds for all that are in the same place.

An engine works out a mask for each request anew. In a batch of requests with one constraint, most of them are where
another one is or was: then the mask is known, and the engine need not even be told of the tokens in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from typing import TypeAlias

from sglang_lite.constraints.automaton import DEAD, DONE, Automaton
from sglang_lite.constraints.nodes import Language
from sglang_lite.protocol import ConstraintError
from sglang_lite.runtime.grammar.base import Mask

# What may still come, by the automaton, and the bytes of a character that has only begun.
State: TypeAlias = "tuple[int, bytes]"

_MOST_STEPS = 50_000  # that are remembered of one language
_TRIAL = 1_000  # masks that were not known, until at least as many must have been


class States:
    """The states of a language, found one by one as texts get there. To be used on one thread.

    Args:
        language: whose states they are.
        token_bytes: what each token says.
        special: tokens that say nothing.
    """

    def __init__(self, language: Language, token_bytes: Sequence[bytes], special: Container[int]) -> None:
        self._automaton = Automaton(language.rules[language.start], rules=language.rules)
        self._token_bytes, self._special = token_bytes, special
        self.start: State = (self._automaton.start, b"")
        self.masks: dict[State, Mask] = {}
        self.known = self.unknown = 0  # masks that were asked for
        self.forced: dict[tuple[State, int], list[int]] = {}  # by state and last token
        self._steps: dict[tuple[State, int], State | None] = {}

    @property
    def pays(self) -> bool:
        """Texts meet in the same states; else each goes its own way, and keeping track of them is in vain."""
        return self.unknown < _TRIAL or self.known > self.unknown

    def after(self, state: State, token: int) -> State | None:
        """Where a token leads; None: nowhere, or it is not known."""
        key = state, token
        if key in self._steps:
            return self._steps[key]
        if len(self._steps) >= _MOST_STEPS:
            return None
        found = self._steps[key] = self._after(state, token)
        return found

    def _after(self, state: State, token: int) -> State | None:
        at, begun = state
        if token in self._special or token >= len(self._token_bytes):
            return None
        data = begun + self._token_bytes[token]
        try:
            text, rest = data.decode(), b""
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                return None
            text, rest = data[: error.start].decode(), data[error.start :]
        try:
            after = self._automaton.run(at, text)
        except (ConstraintError, RecursionError):  # too many states, or rules that begin with themselves
            return None
        return None if after == DEAD else (after, rest)

    @staticmethod
    def over(state: State) -> bool:
        """Only the end can come."""
        return state == (DONE, b"")


class KeptMasks:
    """Bounds what the masks of many languages take, together: the oldest are dropped.

    Args:
        size: bytes.
    """

    def __init__(self, size: int) -> None:
        self._left = size
        self._kept: deque[tuple[States, State]] = deque()

    def keep(self, states: States, state: State, mask: Mask) -> None:
        self._left -= mask.nbytes
        self._kept.append((states, state))
        states.masks[state] = mask
        while self._left < 0:
            owner, old = self._kept.popleft()
            self._left += owner.masks.pop(old).nbytes
