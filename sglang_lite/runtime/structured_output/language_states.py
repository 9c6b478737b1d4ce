"""States of a language, discovered as texts reach them. What is known about one text holds for all
texts in the same state.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Container, Sequence
from typing import TypeAlias

from sglang_lite.constraints.formal.automaton import Automaton, copy_without_states
from sglang_lite.constraints.formal.nodes import Language
from sglang_lite.constraints.formal.terms import DEAD
from sglang_lite.protocol import ConstraintError
from sglang_lite.runtime.structured_output.base import Mask

# State of the automaton, and the bytes of a character that is still incomplete.
State: TypeAlias = "tuple[int, bytes]"

# bytes that states must have read before they are renewed; if they are full earlier, then a single
# search has filled them
_MIN_READ = 100
_MAX_STEPS = 50_000  # most transitions that are cached for one language
_STEP_BYTES = 300  # memory of a cached transition
PIECE = 256  # bytes of a long text that are processed each time the lock is acquired
TRIAL = 1_000  # cache misses before the hit rate decides whether states are tracked


class LanguageStates:
    """States of a language, discovered as texts reach them.

    Args:
        language: language of the texts.
        token_bytes: bytes of each token.
        special: tokens that have no text.
        automaton: automaton of the language; None for a new one.

    Attributes:
        language, token_bytes, special: the arguments of these names.
        automaton: automaton of the language. Must be used under `lock`.
        read: number of text bytes that were processed without a cached transition.
        masks: known masks by state.
    """

    def __init__(
        self,
        language: Language,
        token_bytes: Sequence[bytes],
        special: Container[int],
        automaton: Automaton | None = None,
    ) -> None:
        self.language = language
        self.token_bytes = token_bytes
        self.special = special
        self.automaton = automaton or Automaton(
            language.rules[language.start], rules=language.rules
        )
        self.lock = threading.Lock()
        self.start: State = (self.automaton.start, b"")
        self.masks: dict[State, Mask] = {}
        self.hits = self.misses = 0  # lookups that found a mask, and masks that were computed
        # forced tokens by state and last token
        self.forced: dict[tuple[State, int], list[int]] = {}
        self._steps: dict[tuple[State, int], State | None] = {}
        self._final: dict[int, bool] = {}  # by states of the automaton
        self.read = 0

    @property
    def size(self) -> int:
        """Approximate memory in bytes, without the masks."""
        return self.automaton.size + _STEP_BYTES * (len(self._steps) + len(self.forced))

    def renew_if_full(self) -> LanguageStates:
        """Returns a new LanguageStates without states if this one has too many, otherwise this one."""
        if not self.automaton.is_full or self.read < _MIN_READ:
            return self
        with self.lock:
            return LanguageStates(
                self.language, self.token_bytes, self.special, copy_without_states(self.automaton)
            )

    def translate_old_state(self, state: State, before: LanguageStates) -> State:
        """Converts a state of `before` to the corresponding state of this object, which has
        replaced `before`.
        """
        with self.lock:
            return self.automaton.translate_state_from(state[0], before.automaton), state[1]

    @property
    def is_worth_tracking(self) -> bool:
        """True if texts reach the same states often enough for tracking to pay."""
        # after a mask has been computed, its own text looks it up once, which also counts as a hit
        return self.misses < TRIAL or self.hits > 2 * self.misses

    def state_after_token(self, state: State, token: int) -> State | None:
        """Returns the state after a token, or None if the state is unknown or the token is not
        allowed.
        """
        key = state, token
        if key in self._steps:
            return self._steps[key]
        if len(self._steps) >= _MAX_STEPS:
            return None
        spelled = token not in self.special and token < len(self.token_bytes)
        after = self._steps[key] = (
            self._advance_piece(state, self.token_bytes[token]) if spelled else None
        )
        return after

    def state_after_tokens(self, state: State, tokens: Sequence[int]) -> State | None:
        """Returns the state after several tokens, or None if the state is unknown or one of them is
        not allowed.
        """
        at: State | None = state
        for token in tokens:
            if at is not None:
                at = self.state_after_token(at, token)
        return at

    def state_after_sampled_token(self, state: State, token: int) -> State | None:
        """Returns the state after a token that a mask has allowed. Returns None if the token has no
        text or the state is unknown. Still works when the cache of transitions is full.
        """
        after = self._steps.get((state, token))
        if after is not None:
            return after
        if len(self._steps) < _MAX_STEPS:
            return self.state_after_token(state, token)
        has_text = token not in self.special and token < len(self.token_bytes)
        return self._advance_piece(state, self.token_bytes[token]) if has_text else None

    def state_after_text(self, state: State, text: bytes) -> State | None:
        """Returns the state after a text, or None if the state is unknown or the text is not
        allowed.
        """
        at: State | None = state
        for start in range(0, len(text), PIECE):
            if at is not None:
                at = self._advance_piece(at, text[start : start + PIECE])
        return at

    def _advance_piece(self, state: State, data: bytes) -> State | None:
        at, partial = state
        self.read += len(data)
        data = partial + data
        try:
            text = data.decode()
            rest = b""
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                return None
            text = data[: error.start].decode()
            rest = data[error.start :]
        try:
            with self.lock:
                after = self.automaton.run(at, text)
        except (ConstraintError, RecursionError):  # too many states, or left-recursive rules
            return None
        return None if after == DEAD else (after, rest)

    def is_final(self, state: State) -> bool:
        """Returns True if only the end of the text is allowed next."""
        at, partial = state
        if partial:
            return False
        if at not in self._final:
            self._final[at] = self._must_end_in_state(at)
        return self._final[at]

    def _must_end_in_state(self, at: int) -> bool:
        """Returns True if the text may end in a state of the automaton and no character may follow."""
        machine = self.automaton
        if not machine.accepting(at):
            return False
        try:
            with self.lock:
                return all(
                    machine.step(at, symbol) == DEAD
                    for _, symbol in machine.classes_between(0, sys.maxunicode)
                )
        except (ConstraintError, RecursionError):  # too many states, or left-recursive rules
            return False
