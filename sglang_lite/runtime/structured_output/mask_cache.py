"""Masks by language state: a mask computed for one text holds for all texts in the same state.

An engine computes a mask anew for each request. In a batch of requests with one constraint, most requests are in a
state that another one has visited: its mask is known, and the engine need not even process the tokens in between.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Container, Sequence
from functools import cached_property
from typing import TypeAlias

from sglang_lite.constraints.formal.automaton import Automaton
from sglang_lite.constraints.formal.charsets import LAST
from sglang_lite.constraints.formal.nodes import Language
from sglang_lite.constraints.formal.shortest import UNKNOWN, Shortest
from sglang_lite.constraints.formal.terms import DEAD, DONE
from sglang_lite.protocol import ConstraintError
from sglang_lite.runtime.structured_output.base import Mask
from sglang_lite.runtime.structured_output.fewest_tokens import FewestTokens

# State of the automaton, and the bytes of a character that is not complete yet.
State: TypeAlias = "tuple[int, bytes]"

_MAX_STEPS = 50_000  # most transitions that are cached for one language
_STEP_BYTES = 300  # memory of a cached transition
_PIECE = 256  # bytes of a long text that are run under the lock at once
TRIAL = 1_000  # cache misses before the hit rate decides whether states are tracked


class LanguageStates:
    """States of a language, discovered as texts reach them.

    Args:
        language: language of the texts.
        token_bytes: bytes of each token.
        special: tokens that have no text.

    Attributes:
        token_bytes: the argument of this name.
    """

    def __init__(self, language: Language, token_bytes: Sequence[bytes], special: Container[int]) -> None:
        self._language = language
        self._automaton = Automaton(language.rules[language.start], rules=language.rules)
        self.token_bytes, self._special = token_bytes, special
        self.start: State = (self._automaton.start, b"")
        self.masks: dict[State, Mask] = {}
        self.hits = self.misses = 0  # lookups that found a mask, and masks that were computed
        self.forced: dict[tuple[State, int], list[int]] = {}  # forced tokens by state and last token
        self._steps: dict[tuple[State, int], State | None] = {}
        self._completion_tokens: dict[State, float] = {}
        self._fewest: dict[State, list[int] | None] = {}
        self._lock = threading.Lock()  # guards the automaton

    @property
    def size(self) -> int:
        """Approximate memory in bytes, without the masks."""
        return self._automaton.size + _STEP_BYTES * (len(self._steps) + len(self.forced))

    @property
    def worth_tracking(self) -> bool:
        """True if texts reach the same states often enough for tracking to pay."""
        return self.misses < TRIAL or self.hits > 2 * self.misses  # each computed mask is looked up once itself

    def after(self, state: State, token: int) -> State | None:
        """State after a token, or None if the state is unknown or the token is not allowed."""
        key = state, token
        if key in self._steps:
            return self._steps[key]
        if len(self._steps) >= _MAX_STEPS:
            return None
        spelled = token not in self._special and token < len(self.token_bytes)
        after = self._steps[key] = self._run(state, self.token_bytes[token]) if spelled else None
        return after

    def after_drawn(self, state: State, token: int) -> State | None:
        """State after a token that a mask has allowed, also if no more transitions are kept; None if the token has no
        text, or the state is unknown."""
        if (state, token) in self._steps or len(self._steps) < _MAX_STEPS:
            return self.after(state, token)
        has_text = token not in self._special and token < len(self.token_bytes)
        return self._run(state, self.token_bytes[token]) if has_text else None

    def advance(self, state: State, text: bytes) -> State | None:
        """State after a text, or None if the state is unknown or the text is not allowed."""
        at: State | None = state
        for start in range(0, len(text), _PIECE):
            if at is not None:
                at = self._run(at, text[start : start + _PIECE])
        return at

    def _run(self, state: State, data: bytes) -> State | None:
        at, partial = state
        data = partial + data
        try:
            text, rest = data.decode(), b""
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                return None
            text, rest = data[: error.start].decode(), data[error.start :]
        try:
            with self._lock:
                after = self._automaton.run(at, text)
        except (ConstraintError, RecursionError):  # too many states, or left-recursive rules
            return None
        return None if after == DEAD else (after, rest)

    # ---------------------------------------------------------------------------------------------- endings

    @cached_property
    def _shortest(self) -> Shortest:
        return Shortest(self._automaton, self._language.rules)

    def completion_tokens(self, state: State, count: Callable[[str], int]) -> float:
        """About the number of tokens of `completion`, quickly; infinite if there is none.

        Args:
            state: state of the text.
            count: function that returns the number of tokens of a text; the same at each call.
        """
        found = self._completion_tokens.get(state)
        if found is None:
            with self._lock:
                try:
                    at, rest = self._whole(state)
                    found = self._shortest.tokens(at, count) + len(rest)
                except (ConstraintError, RecursionError):  # as in _run
                    found = UNKNOWN
            self._completion_tokens[state] = found
        return found

    def completion(self, state: State) -> bytes | None:
        """Text of the fewest characters that completes the text so far, or None if none was found."""
        with self._lock:
            try:
                at, rest = self._whole(state)
                if self._shortest.length(at) == UNKNOWN:
                    return None
                return rest + self._shortest.text(at).encode()
            except (ConstraintError, RecursionError):  # as in _run
                return None

    def characters(self, state: State) -> list[tuple[str, State]]:
        """Characters that may come next at the end of a character, some of each kind, with the state after each; those
        before short endings first."""
        with self._lock:
            options = [(symbol, self._automaton.step(state[0], symbol)) for symbol in self._automaton.classes]
            options = [(symbol, after) for symbol, after in options if self._shortest.length(after) < UNKNOWN]
            options.sort(key=lambda option: self._shortest.length(option[1]))
            return [(char, (after, b"")) for symbol, after in options for char in self._shortest.characters(symbol)]

    def fewest_tokens(self, state: State) -> list[int] | None:
        """Tokens of a completion with the fewest tokens, or None if it is not found within the limit of work. Takes up
        to a second."""
        if state not in self._fewest:
            with self._lock:
                try:
                    self._fewest[state] = None if state[1] else self._search.search(state[0])
                except (ConstraintError, RecursionError):  # as in _run
                    self._fewest[state] = None
        return self._fewest[state]

    @cached_property
    def _search(self) -> FewestTokens:
        texts = [None if i in self._special else _text(each) for i, each in enumerate(self.token_bytes)]
        return FewestTokens(self._automaton, self._shortest, texts)

    def _whole(self, state: State) -> State:
        """State after the bytes that end the character which the text ends within, and these bytes."""
        at, partial = state
        if not partial:
            return state
        low, high = _code_points(partial)
        options = [
            (self._automaton.step(at, symbol), code) for code, symbol in self._automaton.classes_between(low, high)
        ]
        after, code = min(options, key=lambda option: self._shortest.length(option[0]))
        return after, chr(code).encode("utf-8", "replace")[len(partial) :]

    @staticmethod
    def is_final(state: State) -> bool:
        """True if only the end of the text is allowed next."""
        return state == (DONE, b"")


def _text(token: bytes) -> str | None:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return None


def _code_points(partial: bytes) -> tuple[int, int]:
    """First and last code point whose UTF-8 text begins with some bytes, which are not a whole character."""
    size = 2 if partial[0] < 0xE0 else 3 if partial[0] < 0xF0 else 4
    value = partial[0] & (0x7F >> size)
    for byte in partial[1:]:
        value = value << 6 | byte & 0x3F
    missing = 6 * (size - len(partial))
    return max(value << missing, (0x80, 0x800, 0x10000)[size - 2]), min(((value + 1) << missing) - 1, LAST)


class MaskCache:
    """Bounds the memory of the masks of many languages together; evicts the oldest masks.

    Args:
        size: limit in bytes.
    """

    def __init__(self, size: int) -> None:
        self._free = size
        # Weak references, so that a language and its masks are freed together.
        self._entries: deque[tuple[weakref.ref[LanguageStates], State, int]] = deque()
        self._lock = threading.Lock()

    def put(self, states: LanguageStates, state: State, mask: Mask) -> None:
        with self._lock:
            if state in states.masks:  # another thread has computed it, too
                return
            states.misses += 1
            self._free -= mask.nbytes
            self._entries.append((weakref.ref(states), state, mask.nbytes))
            states.masks[state] = mask
            while self._free < 0:
                of, old, size = self._entries.popleft()
                self._free += size
                if (owner := of()) is not None:
                    del owner.masks[old]
