"""Short completions of the texts of a language, by state: their lengths, and searches for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sglang_lite.constraints.formal.charsets import LAST
from sglang_lite.constraints.formal.shortest import Shortest
from sglang_lite.constraints.formal.shortest_search import UNKNOWN
from sglang_lite.protocol import ConstraintError
from sglang_lite.runtime.structured_output.fewest_tokens import FewestTokens
from sglang_lite.runtime.structured_output.language_states import LanguageStates, State

_MAX_SPELLED = 10_000  # completions whose tokens are cached
_START: State = (-1, b"")  # the states' own start, which need not be known before a text goes on


class LanguageCompletions:
    """Short completions from the states of a language, cached by state.

    Args:
        states: states of the language.
        lengths: least number of characters of each rule's texts.
        spell: function that returns tokens that spell a text, or None if no tokens do; the same at each call.
    """

    def __init__(
        self, states: LanguageStates, lengths: Mapping[str, float], spell: Callable[[bytes], list[int] | None]
    ) -> None:
        self._states, self._spell = states, spell
        self._shortest = Shortest(states.automaton, lengths)
        self._counts: dict[State, float] = {}
        self._fewest: dict[State, list[int] | None] = {}

    def count(self, state: State) -> float:
        """About the number of tokens of `text`, quickly; infinite if there is none."""
        found = self._counts.get(state)
        if found is None:
            with self._states.lock:
                try:
                    at, rest = self._whole(state)
                    found = self._shortest.tokens(at, self._length) + len(rest)
                except (ConstraintError, RecursionError):  # too many states, or left-recursive rules
                    found = UNKNOWN
            self._counts[state] = found
        return found

    def _length(self, text: str) -> int:
        return len(self._spell(text.encode()) or text.encode())

    def text(self, state: State) -> bytes | None:
        """Text of the fewest characters that completes the text so far, or None if none was found."""
        with self._states.lock:
            try:
                at, rest = self._whole(state)
                if self._shortest.length(at) == UNKNOWN:
                    return None
                return rest + self._shortest.text(at).encode()
            except (ConstraintError, RecursionError):  # as in `count`
                return None

    def characters(self, state: State) -> list[tuple[str, State]]:
        """Characters that may come next at the end of a character, some of each kind, with the state after each; those
        before short endings first."""
        automaton = self._states.automaton
        with self._states.lock:
            options = [(symbol, automaton.step(state[0], symbol)) for symbol in automaton.classes]
            options = [(symbol, after) for symbol, after in options if self._shortest.length(after) < UNKNOWN]
            options.sort(key=lambda option: self._shortest.length(option[1]))
            return [(char, (after, b"")) for symbol, after in options for char in self._shortest.characters(symbol)]

    def fewest(self, state: State) -> list[int] | None:
        """Tokens of a completion with the fewest tokens, or None if it is not found within the limit of work. Takes up
        to a second."""
        if state not in self._fewest:
            with self._states.lock:
                try:
                    self._fewest[state] = None if state[1] else self._search.search(state[0])
                except (ConstraintError, RecursionError):  # as in `count`
                    self._fewest[state] = None
        return self._fewest[state]

    @cached_property
    def _search(self) -> FewestTokens:
        states = self._states
        texts = [None if i in states.special else _text(each) for i, each in enumerate(states.token_bytes)]
        return FewestTokens(states.automaton, self._shortest, texts)

    def _whole(self, state: State) -> State:
        """State after the bytes that end the character which the text ends within, and these bytes."""
        at, partial = state
        if not partial:
            return state
        automaton = self._states.automaton
        low, high = _code_points(partial)
        options = [(automaton.step(at, symbol), code) for code, symbol in automaton.classes_between(low, high)]
        after, code = min(options, key=lambda option: self._shortest.length(option[0]))
        return after, chr(code).encode("utf-8", "replace")[len(partial) :]


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


class CompletedLanguage:
    """Language whose states are made when the completion of a text that has begun is asked for: that takes long, and
    most texts end before. Thread-safe.

    Args:
        make_states: function that returns the states, or None if there are too many.
        token_bytes: bytes of each token.
        shortest: shortest text, or None if none is known.
        lengths: least number of characters of each rule's texts.
        spell: function that returns tokens that spell a text, or None if no tokens do.

    Attributes:
        token_bytes, shortest: the arguments of these names.
    """

    def __init__(
        self,
        make_states: Callable[[], LanguageStates | None],
        token_bytes: Sequence[bytes],
        shortest: bytes | None,
        lengths: Mapping[str, float],
        spell: Callable[[bytes], list[int] | None],
    ) -> None:
        self.token_bytes, self.shortest = token_bytes, shortest
        self._make_states, self._lengths, self._spell = make_states, lengths, spell
        self._spelled: dict[bytes, list[int] | None] = {}
        self._made: tuple[LanguageStates, LanguageCompletions] | None = None
        self._asked = False
        self._making = threading.Lock()

    @property
    def size(self) -> int:
        """Approximate memory in bytes."""
        return 0 if self._made is None else self._made[0].size

    def made(self) -> tuple[LanguageStates, LanguageCompletions] | None:
        """The states and the completions from them, or None if there are too many states."""
        with self._making:
            if not self._asked:
                states = self._make_states()
                if states is not None:
                    self._made = states, LanguageCompletions(states, self._lengths, self.spell)
                self._asked = True
        return self._made

    def spell(self, text: bytes) -> list[int] | None:
        if text not in self._spelled:
            if len(self._spelled) >= _MAX_SPELLED:
                self._spelled.clear()
            self._spelled[text] = self._spell(text) if text else []
        return self._spelled[text]


@dataclass(frozen=True, slots=True)
class LanguageEndings:
    """Endings by the states of a language.

    Args:
        language: the language.
        start: state in which the texts begin.
    """

    language: CompletedLanguage
    start: State = _START

    @property
    def size(self) -> int:
        return self.language.size

    def after_text(self, text: str) -> LanguageEndings | None:
        state = self.advance(self.start, text.encode("utf-8", "surrogatepass"))
        return None if state is None else replace(self, start=state)

    def after(self, state: State, token: int) -> State | None:
        found = self.language.made()
        return None if found is None else found[0].after_drawn(_known(found[0], state), token)

    def text_of(self, token: int) -> bytes:
        return self.language.token_bytes[token]

    def count(self, state: State) -> float:
        if state == _START:
            spelled = None if self.language.shortest is None else self.spell(self.language.shortest)
            return UNKNOWN if spelled is None else len(spelled)
        found = self.language.made()
        return UNKNOWN if found is None else found[1].count(state)

    def text(self, state: State) -> bytes | None:
        if state == _START:
            return self.language.shortest
        found = self.language.made()
        return None if found is None else found[1].text(state)

    def advance(self, state: State, text: bytes) -> State | None:
        found = self.language.made()
        return None if found is None else found[0].advance(_known(found[0], state), text)

    def characters(self, state: State) -> Iterable[tuple[str, State]]:
        found = self.language.made()
        return [] if found is None else found[1].characters(_known(found[0], state))

    def spell(self, text: bytes) -> list[int] | None:
        return self.language.spell(text)

    def fewest(self, state: State) -> tuple[int, list[int]] | None:
        made = self.language.made()
        found = None if made is None else made[1].fewest(_known(made[0], state))
        if found is None:
            return None
        # Masks may allow only the tokenizer's own split, which may have more tokens.
        spelled = self.spell(b"".join(map(self.text_of, found)))
        return None if spelled is None else (len(found), spelled)


def _known(states: LanguageStates, state: State) -> State:
    return states.start if state == _START else state
