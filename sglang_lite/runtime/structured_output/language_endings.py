"""Positions in the texts of a language, and what may come next at each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

from sglang_lite.constraints.formal.shortest_texts import plainest_characters
from sglang_lite.constraints.formal.terms import DEAD
from sglang_lite.protocol import ConstraintError
from sglang_lite.runtime.structured_output.language_states import PIECE, LanguageStates, State

# A state of the language, and the `LanguageStates` that it belongs to. A text that grows slowly may
# still use a `LanguageStates` that has been replaced.
Place: TypeAlias = "tuple[State, LanguageStates | None]"

# stands for the start of the current states, which may not exist before a text advances
_START: Place = ((-1, b""), None)


class RenewedStates:
    """States of a language. They are created on first use, and replaced once there are too many.
    Thread-safe.

    Args:
        make_states: function that returns the states, or None if there are too many.
    """

    def __init__(self, make_states: Callable[[], LanguageStates | None]) -> None:
        self._make_states = make_states
        self._made: LanguageStates | None = None
        self._asked = False
        self._making = threading.Lock()

    @property
    def size(self) -> int:
        """Approximate memory in bytes."""
        return 0 if self._made is None else self._made.size

    def current_states(self) -> LanguageStates | None:
        """Returns the states, or None if the language starts with too many. If texts have since
        added too many, replaces them by new ones.
        """
        made = self._made
        # taking a lock would add a tenth to the time of a token
        if made is not None and not made.automaton.is_full:
            return made
        if made is not None or not self._asked:
            with self._making:
                before = self._made
                states = (
                    before.renew_if_full()
                    if before is not None
                    else None
                    if self._asked
                    else self._make_states()
                )
                if states is not None:
                    self._made = states
                self._asked = True  # last, as other threads read it without the lock
        return self._made


@dataclass(frozen=True, slots=True)
class LanguageEndings:
    """`Endings` of a formal language, computed from its automaton.

    Args:
        states: states of the automaton.
        start: position at which texts begin.
    """

    states: RenewedStates
    start: Place = _START

    @property
    def size(self) -> int:
        return self.states.size

    def after_text(self, text: str) -> LanguageEndings | None:
        state = self.advance_state(self.start, text.encode("utf-8", "surrogatepass"))
        return None if state is None else replace(self, start=state)

    def resolve_place(self, place: Place) -> tuple[LanguageStates, State] | None:
        """Returns the current states of the language, and the state among them that corresponds to
        a place. Returns None if there are too many states.
        """
        made = self.states.current_states()
        if made is None:
            return None
        state, states = place
        if states is None:
            return made, made.start
        return made, state if states is made else made.translate_old_state(state, states)

    def place_after_token(self, state: Place, token: int) -> Place | None:
        """Returns the place after a token, or None if the token is not allowed."""
        found = self.resolve_place(state)
        after = None if found is None else found[0].state_after_sampled_token(found[1], token)
        return None if after is None or found is None else (after, found[0])

    def advance_state(self, state: Place, text: bytes) -> Place | None:
        place: Place | None = state
        # in pieces, as a long text may need too many states
        for start in range(0, len(text) or 1, PIECE):
            found = None if place is None else self.resolve_place(place)
            at = (
                None
                if found is None
                else found[0].state_after_text(found[1], text[start : start + PIECE])
            )
            place = None if at is None or found is None else (at, found[0])
        return place

    def characters(self, state: Place) -> Iterable[tuple[str, Place]]:
        found = self.resolve_place(state)
        if found is None:
            return []
        states, (at, _) = found
        automaton = states.automaton
        try:
            with states.lock:
                options = [(symbol, automaton.step(at, symbol)) for symbol in automaton.classes]
        except (ConstraintError, RecursionError):  # too many states, or left-recursive rules
            return []
        return [
            (char, ((after, b""), states))
            for symbol, after in options
            if after != DEAD
            for char in plainest_characters(automaton.class_characters(symbol).ranges)
        ]
