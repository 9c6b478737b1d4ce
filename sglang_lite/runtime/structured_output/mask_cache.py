"""States of texts in a language: a mask that an engine made for one text holds for all in the same state.

An engine works out a mask for each request anew. In a batch of requests with one constraint, most of them are where
another one is or was: then the mask is known, and the engine need not even be told of the tokens in between.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Container, Sequence
from typing import TypeAlias

from sglang_lite.constraints.formal.automaton import DEAD, DONE, Automaton
from sglang_lite.constraints.formal.nodes import Language
from sglang_lite.protocol import ConstraintError
from sglang_lite.runtime.structured_output.base import Mask

# What may still come, by the automaton, and the bytes of a character that has only begun.
State: TypeAlias = "tuple[int, bytes]"

_MOST_STEPS = 50_000  # that are remembered of one language
_STEP_BYTES = 300  # that one takes
_PIECE = 256  # bytes of a long text, for which others wait
TRIAL = 1_000  # masks that were not known, until at least as many must have been


class LanguageStates:
    """The states of a language, found one by one as texts get there.

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
        self.known = self.unknown = 0  # masks that were asked for and there, and that were made
        self.forced: dict[tuple[State, int], list[int]] = {}  # by state and last token
        self._steps: dict[tuple[State, int], State | None] = {}
        self._lock = threading.Lock()  # of the automaton

    @property
    def size(self) -> int:
        """Memory in bytes, roughly, without that of the masks."""
        return self._automaton.size + _STEP_BYTES * (len(self._steps) + len(self.forced))

    @property
    def pays(self) -> bool:
        """Texts meet in the same states; else each goes its own way, and keeping track of them is in vain."""
        return self.unknown < TRIAL or self.known > 2 * self.unknown  # what was made is then asked for, too

    def after(self, state: State, token: int) -> State | None:
        """The state after a token; None: none, or it is not known."""
        key = state, token
        if key in self._steps:
            return self._steps[key]
        if len(self._steps) >= _MOST_STEPS:
            return None
        spelled = token not in self._special and token < len(self._token_bytes)
        found = self._steps[key] = self._moved(state, self._token_bytes[token]) if spelled else None
        return found

    def advance(self, state: State, text: bytes) -> State | None:
        """The state after a text; None: none, or it is not known."""
        at: State | None = state
        for start in range(0, len(text), _PIECE):
            if at is not None:
                at = self._moved(at, text[start : start + _PIECE])
        return at

    def _moved(self, state: State, data: bytes) -> State | None:
        at, begun = state
        data = begun + data
        try:
            text, rest = data.decode(), b""
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                return None
            text, rest = data[: error.start].decode(), data[error.start :]
        try:
            with self._lock:
                after = self._automaton.run(at, text)
        except (ConstraintError, RecursionError):  # too many states, or rules that begin with themselves
            return None
        return None if after == DEAD else (after, rest)

    @staticmethod
    def over(state: State) -> bool:
        """Only the end can come."""
        return state == (DONE, b"")


class MaskCache:
    """Bounds what the masks of many languages take, together: the oldest are dropped.

    Args:
        size: bytes.
    """

    def __init__(self, size: int) -> None:
        self._left = size
        # Weakly, as the masks are nothing beside what else a language takes, and go with it.
        self._kept: deque[tuple[weakref.ref[LanguageStates], State, int]] = deque()
        self._lock = threading.Lock()

    def keep(self, states: LanguageStates, state: State, mask: Mask) -> None:
        with self._lock:
            if state in states.masks:  # two threads have made it
                return
            states.unknown += 1
            self._left -= mask.nbytes
            self._kept.append((weakref.ref(states), state, mask.nbytes))
            states.masks[state] = mask
            while self._left < 0:
                of, old, size = self._kept.popleft()
                self._left += size
                if (owner := of()) is not None:
                    del owner.masks[old]
