"""Short completions of the texts of a language, by state: their lengths, and searches for them."""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from sglang_lite.constraints.formal.charsets import LAST
from sglang_lite.constraints.formal.shortest import Shortest
from sglang_lite.constraints.formal.shortest_search import UNKNOWN
from sglang_lite.constraints.formal.shortest_texts import LongestRest
from sglang_lite.protocol import ConstraintError
from sglang_lite.runtime.structured_output.base import Growth
from sglang_lite.runtime.structured_output.fewest_tokens import FewestTokens
from sglang_lite.runtime.structured_output.language_states import PIECE, LanguageStates, State
from sglang_lite.runtime.structured_output.token_steps import TokenSteps
from sglang_lite.runtime.structured_output.token_texts import TokenTexts, whole_text

# A state of the language, and which states it is one of: a text that goes on slowly may be in older ones than others.
Place: TypeAlias = "tuple[State, LanguageStates | None]"

_START: Place = ((-1, b""), None)  # the states' own start, which need not be known before a text goes on
_CHARACTER = 4  # tokens of a character that began within the text
_LARGEST = 1_000_000  # tokens, instead of infinitely many
_SPARE = 1.5  # share of tokens by which completions may be longer than the shortest text lets expect
_READ = 5_000  # bytes that states should last for: if they do not, nothing is searched for by tokens any more
_MAX_EXPANDED = 40  # states from which one search tries all tokens
_TOLERANCE = 2  # tokens by which a count may be too high


class LanguageCompletions:
    """Short completions from the states of a language, cached by state.

    Args:
        states: states of the language.
        lengths: least number of characters of each rule's texts.
        texts: texts of the tokens.
        searches: whether searches are worth their many states.
    """

    def __init__(
        self, states: LanguageStates, lengths: Mapping[str, float], texts: TokenTexts, *, searches: bool = True
    ) -> None:
        self._states, self._lengths, self._searches = states, lengths, searches
        # Made here, as a search may run on the loop's thread: arrays of 150,000 tokens take 0.2 s, once an engine.
        self._spelling, self._arrays = texts.spelling, texts.arrays
        self._shortest = Shortest(states.automaton, lengths)
        self._counts: dict[State, float] = {}
        self._best: dict[State, list[int] | None] = {}  # completions of the fewest tokens that are known
        self._failed: dict[State, int] = {}  # largest number of tokens in which a search has found no completion
        self._fewest: dict[State, int | None] = {}

    @cached_property
    def _token_steps(self) -> TokenSteps:
        return TokenSteps(self._states.automaton, self._shortest, self._arrays)

    def count(self, state: State) -> float:
        """Number of tokens of a known completion, quickly; infinite if there is none."""
        found = self._counts.get(state)
        if found is None:
            with self._states.lock:
                found = self._count(state)
        return found

    def _count(self, state: State) -> float:
        found = self._counts.get(state)
        if found is None:
            try:
                at, rest = self._whole(state)
                found = self._shortest.tokens(at, self._length) + (self._spelling.count(rest) or 0)
            except (ConstraintError, RecursionError):  # too many states, or left-recursive rules
                found = UNKNOWN
            self._counts[state] = found
        return found

    def _length(self, text: str) -> float:
        count = self._spelling.count(text.encode())
        return UNKNOWN if count is None else count

    def within(self, state: State, limit: int) -> list[int] | None:
        """Tokens of a completion of at most `limit` tokens, or None if none is found. Takes some milliseconds in states
        that are new."""
        with self._states.lock:
            try:
                best = self._best_known(state)
                if best is not None and len(best) <= limit:
                    return best
                if state[1] or not self._searches or self._failed.get(state, -1) >= limit:
                    return None
                found = self._searched(state, limit)
            except (ConstraintError, RecursionError):  # as in `count`
                return None
            if found is None:
                self._failed[state] = limit
            return found

    def _best_known(self, state: State) -> list[int] | None:
        if state not in self._best:
            text = self._text(state)
            self._learn(state, None if text is None else self._spelling.tokens(text))
        return self._best[state]

    def _learn(self, state: State, tokens: list[int] | None) -> None:
        self._best[state] = tokens
        self._counts[state] = min(self._count(state), UNKNOWN if tokens is None else len(tokens))

    def _searched(self, start: State, limit: int) -> list[int] | None:
        """Best-first search by whole tokens."""
        counts, before = {start: 0}, dict[State, tuple[State, int]]()
        queue = [(self._count(start), start)]
        for _ in range(_MAX_EXPANDED):
            if not queue:
                break
            _, state = heapq.heappop(queue)
            count = counts[state] + 1
            for term, token in self._token_steps.after(state[0]):
                after = term, b""
                if count >= counts.get(after, UNKNOWN):
                    continue
                counts[after], before[after] = count, (state, token)
                total = count + self._count(after)
                if total <= limit and (rest := self._best_known(after)) is not None and count + len(rest) <= limit:
                    return self._learn_path(start, after, before, rest)
                if total <= limit + _TOLERANCE:
                    heapq.heappush(queue, (total, after))
        return None

    def _learn_path(
        self, start: State, end: State, before: Mapping[State, tuple[State, int]], tokens: list[int]
    ) -> list[int]:
        """Keeps the completion of each state of a path. Returns that of its start."""
        while end != start:
            end, token = before[end]
            tokens = [token, *tokens]
            known = self._best_known(end)
            if known is None or len(tokens) < len(known):
                self._learn(end, tokens)
        return tokens

    def text(self, state: State) -> bytes | None:
        """Text of the fewest characters that completes the text so far, or None if none was found."""
        with self._states.lock:
            try:
                return self._text(state)
            except (ConstraintError, RecursionError):  # as in `count`
                return None

    def _text(self, state: State) -> bytes | None:
        at, rest = self._whole(state)
        return None if self._shortest.length(at) == UNKNOWN else rest + self._shortest.text(at).encode()

    def characters(self, state: State) -> list[tuple[str, State]]:
        """Characters that may come next at the end of a character, some of each kind, with the state after each; those
        before short endings first."""
        with self._states.lock:
            automaton = self._states.automaton
            options = [(symbol, automaton.step(state[0], symbol)) for symbol in automaton.classes]
            options = [(symbol, after) for symbol, after in options if self._shortest.length(after) < UNKNOWN]
            options.sort(key=lambda option: self._shortest.length(option[1]))
            return [(char, (after, b"")) for symbol, after in options for char in self._shortest.characters(symbol)]

    def fewest(self, state: State) -> int | None:
        """Number of tokens that no completion has less of, or None if it is not found within the limit of work. Takes
        up to a second."""
        if state not in self._fewest:
            with self._states.lock:
                try:
                    found = None if state[1] else self._search.search(state[0])
                    best = self._best_known(state)
                    if found is not None and (best is None or len(found) < len(best)):
                        self._learn(state, found)
                except (ConstraintError, RecursionError):  # as in `count`
                    found = None
            best = self._best.get(state)
            self._fewest[state] = None if found is None or best is None else len(best)
        return self._fewest[state]

    @cached_property
    def _search(self) -> FewestTokens:
        states = self._states
        texts = [None if i in states.special else whole_text(each) for i, each in enumerate(states.token_bytes)]
        return FewestTokens(states.automaton, self._lengths, texts)

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
        rest: longest of the shortest completions.
        texts: texts of the tokens.

    Attributes:
        token_bytes, shortest: the arguments of these names.
    """

    def __init__(
        self,
        make_states: Callable[[], LanguageStates | None],
        token_bytes: Sequence[bytes],
        shortest: bytes | None,
        lengths: Mapping[str, float],
        rest: LongestRest,
        texts: TokenTexts,
    ) -> None:
        self.token_bytes, self.shortest = token_bytes, shortest
        self._make_states, self._lengths, self._texts = make_states, lengths, texts
        self._rest = rest
        self._made: tuple[LanguageStates, LanguageCompletions] | None = None
        self._asked = False
        self._making = threading.Lock()

    @property
    def size(self) -> int:
        """Approximate memory in bytes."""
        return 0 if self._made is None else self._made[0].size

    @cached_property
    def growth(self) -> Growth:
        """Length that completions may grow to, in tokens as long as those of the shortest text are on average."""
        tokens = None if self.shortest is None else self.spell(self.shortest)
        ratio = (1 + len(tokens)) / (1 + len(self.shortest)) if tokens is not None and self.shortest is not None else 1
        tokens_of_rest = min(_SPARE * ratio * self._rest.length, _LARGEST) + _CHARACTER
        return Growth(math.ceil(tokens_of_rest), nests=self._rest.nests)

    def made(self) -> tuple[LanguageStates, LanguageCompletions] | None:
        """The states and the completions from them, or None if there are too many states at once. If texts have led to
        too many, new states take their place."""
        made = self._made
        if made is not None and not made[0].automaton.full:  # a lock would take a tenth of a look at a token
            return made
        if made is not None or not self._asked:
            with self._making:
                self._make()
        return self._made

    def _make(self) -> None:
        before = None if self._made is None else self._made[0]
        states = before.renewed() if before is not None else None if self._asked else self._make_states()
        if states is not None and states is not before:
            searches = before is None or before.read >= _READ
            self._made = states, LanguageCompletions(states, self._lengths, self._texts, searches=searches)
        self._asked = True  # last, as others look at it without the lock

    @cached_property
    def fewest(self) -> int | None:
        """Number of tokens of the text with the fewest, or None if it is not found. Takes up to a second."""
        made = self.made()
        return None if made is None else made[1].fewest(made[0].start)

    def spell(self, text: bytes) -> list[int] | None:
        return self._texts.spelling.tokens(text)


@dataclass(frozen=True, slots=True)
class LanguageEndings:
    """Endings by the states of a language.

    Args:
        language: the language.
        start: state in which the texts begin.
    """

    language: CompletedLanguage
    start: Place = _START

    @property
    def size(self) -> int:
        return self.language.size

    @property
    def growth(self) -> Growth:
        return self.language.growth

    def after_text(self, text: str) -> LanguageEndings | None:
        state = self.advance(self.start, text.encode("utf-8", "surrogatepass"))
        return None if state is None else replace(self, start=state)

    def known(self, place: Place) -> tuple[LanguageStates, LanguageCompletions, State] | None:
        """The states and completions, and the state there; None if there are too many."""
        made = self.language.made()
        if made is None:
            return None
        state, states = place
        if states is None:
            return (*made, made[0].start)
        return (*made, state if states is made[0] else made[0].adopt(state, states))

    def after(self, state: Place, token: int) -> Place | None:
        found = self.known(state)
        after = None if found is None else found[0].after_drawn(found[2], token)
        return None if after is None or found is None else (after, found[0])

    def text_of(self, token: int) -> bytes:
        return self.language.token_bytes[token]

    def count(self, state: Place) -> float:
        if state == _START:
            spelled = None if self.language.shortest is None else self.spell(self.language.shortest)
            return UNKNOWN if spelled is None else len(spelled)
        found = self.known(state)
        return UNKNOWN if found is None else found[1].count(found[2])

    def text(self, state: Place) -> bytes | None:
        if state == _START:
            return self.language.shortest
        found = self.known(state)
        return None if found is None else found[1].text(found[2])

    def advance(self, state: Place, text: bytes) -> Place | None:
        place: Place | None = state
        for start in range(0, len(text) or 1, PIECE):  # in pieces, as a long text may need too many states
            found = None if place is None else self.known(place)
            at = None if found is None else found[0].advance(found[2], text[start : start + PIECE])
            place = None if at is None or found is None else (at, found[0])
        return place

    def characters(self, state: Place) -> Iterable[tuple[str, Place]]:
        found = self.known(state)
        return [] if found is None else [(char, (at, found[0])) for char, at in found[1].characters(found[2])]

    def spell(self, text: bytes) -> list[int] | None:
        return self.language.spell(text)

    def within(self, state: Place, limit: int) -> list[int] | None:
        if state == _START and self.count(state) <= limit:
            return None if self.language.shortest is None else self.spell(self.language.shortest)
        found = self.known(state)
        return None if found is None else found[1].within(found[2], limit)

    def fewest(self, state: Place) -> int | None:
        if state == _START:
            return self.language.fewest
        found = self.known(state)
        return None if found is None else found[1].fewest(found[2])
