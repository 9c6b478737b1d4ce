"""Constraints through llguidance, which gets our grammars (constraints/) and compiles them in milliseconds."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray

from sglang_lite.constraints import walk
from sglang_lite.constraints.compose import language_of
from sglang_lite.constraints.nodes import Language
from sglang_lite.protocol import Constraint, ConstraintError
from sglang_lite.runtime.grammar.base import Mask
from sglang_lite.runtime.grammar.states import KeptMasks, State, States

if TYPE_CHECKING:
    from sglang_lite.runtime.tokens.tokenizer import Tokenizer

_BYTES, _BYTES_PER_CHARACTER = 100_000, 50

# Sets of tokens that are allowed or refused as a whole: inside a string of at most n characters those within what is
# left. llguidance's own are 10 and 30, so that most of a short string is walked token by token.
_IN_STRING = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_IN_STRING}{{1,{n}}}" for n in (1, 2, 3, 4, 5, 6, 8, 10, 14, 30)),
    f"{_IN_STRING}+",
]

# A grammar that takes longer to compile has one lexer for all threads.
_QUICK = 0.02  # seconds
_ENOUGH = 4  # matchers of a line before there is another, and before what masks they have is shared
_MASK_BYTES = 96 << 20  # of kept masks
_LARGEST = 30_000  # characters of a grammar whose states are told apart: a step may look at all its alternatives


@dataclass(frozen=True, slots=True)
class Prepared:
    """
    Attributes:
        text: of the grammar, for llguidance.
        language: that it says.
    """

    text: str
    language: Language


class LlguidanceMatcher:
    """
    Args:
        engine: whose it is.
        inner: its parser.
        line: of parsers that share a lexer.
        first: the mask of the start.
        states: of the language, where others share them.
    """

    def __init__(self, engine: LlguidanceEngine, inner: Any, line: int, first: Mask, states: States | None) -> None:
        self.engine, self._inner, self.line = engine, inner, line
        self._first: Mask | None = first
        self.states, self.state = states, None if states is None else states.start
        self._late: list[int] = []  # tokens that the parser was not told yet
        self._last = -1

    @property
    def inner(self) -> Any:
        """The parser, which knows all tokens."""
        if self._late:
            self._inner.consume_tokens(self._late)
            self._late = []
        return self._inner

    @property
    def known(self) -> Mask | None:
        """The mask of where it is now, where that is known."""
        if self.states is None or self.state is None:
            return self._first
        return self.states.masks.get(self.state)

    def fill_mask(self, mask: Mask) -> None:
        known = self.known
        if known is not None:
            mask[:] = known
        else:
            self.inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def accept(self, token: int) -> bool:
        known, self._first, self._last = self.known, None, token
        if self.states is not None and self.state is not None:
            self.state = self.states.after(self.state, token) if self.states.pays else None
            if self.state is not None and known is not None and known[token >> 5] >> (token & 31) & 1:
                self._late.append(token)
                return True
        return bool(self.inner.consume_token(token))

    def advance(self, text: bytes) -> bool:
        self._first = self.state = None  # states are for the loop's thread, and this need not be it
        tokens = self.engine.spell(text)
        return tokens is not None and bool(self.inner.consume_tokens(tokens))

    def forced(self) -> list[int]:
        if self.states is None or self.state is None:
            return list(self.inner.compute_ff_tokens())
        key = self.state, self._last
        if key not in self.states.forced:
            self.states.forced[key] = list(self.inner.compute_ff_tokens())
        return self.states.forced[key]

    @property
    def complete(self) -> bool:
        return bool(self.inner.is_accepting())

    @property
    def finished(self) -> bool:
        if self._late and self.state is not None and not States.over(self.state):
            return False
        return bool(self.inner.is_stopped()) and not self.inner.is_error()

    @property
    def error(self) -> str:
        return str(self.inner.get_error())


class LlguidanceGrammar:
    """Its first mask is made here, once for all requests: it takes longest, and they may all come at the same time.

    Copies of a parser share its lexer, behind a lock. So that threads don't wait for each other there are several
    lines of copies, each with a lexer of its own, made when there are matchers enough for them.

    Args:
        engine: that compiled it.
        prepared: what it was compiled from.
        start: its parser.
        lines: at most so many.
    """

    def __init__(self, engine: LlguidanceEngine, prepared: Prepared, start: Any, lines: int) -> None:
        self._engine, self._prepared, self._lines = engine, prepared, lines
        self.size = lines * (_BYTES + _BYTES_PER_CHARACTER * len(prepared.text))
        self._starts = [start]
        self._used: list[weakref.WeakSet[LlguidanceMatcher]] = [weakref.WeakSet()]  # matchers of each line
        self._states: States | None = None
        self._beside: LlguidanceGrammar | None = None
        self._making = threading.Lock()
        self._first = np.zeros((engine.vocab_size + 31) // 32, np.int32)
        start.unsafe_compute_mask_ptr(self._first.ctypes.data, self._first.nbytes)
        if start.is_error():
            raise walk.refusal(start)

    def matcher(self) -> LlguidanceMatcher:
        with self._making:
            line = min(range(len(self._starts)), key=lambda i: len(self._used[i]))
            shared = len(self._used[line]) >= _ENOUGH
            if shared and len(self._starts) < self._lines:
                line = len(self._starts)
                self._starts.append(self._engine.parser(self._prepared.text))
                self._used.append(weakref.WeakSet())
            if shared and self._states is None:
                self._states = self._engine.states(self._prepared)
                if self._states is not None:
                    self._states.masks[self._states.start] = self._first
            matcher = LlguidanceMatcher(
                self._engine, self._starts[line].deep_copy(), line, self._first, self._states if shared else None
            )
            self._used[line].add(matcher)
            return matcher

    def beside(self) -> LlguidanceGrammar:
        """Where a text is forced, it would allow only the tokens that a tokenizer cuts that text into."""
        if self._beside is None:
            text = '%llguidance {"no_forcing": true}\n' + self._prepared.text
            self._beside = self._engine.load(Prepared(text, self._prepared.language))
        return self._beside


class LlguidanceEngine:
    """
    Args:
        tokenizer: the model's; None for a token per byte, whatever the model.
        vocab_size: the model's, padding included; None: the tokenizer's.
        eos_ids: tokens that may end a complete text.
        threads: that fill a batch's masks.
    """

    name = "llguidance"

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int | None = None,
        eos_ids: Sequence[int] = (),
        threads: int = 1,
    ) -> None:
        source = "byte" if tokenizer is None else tokenizer.backend.to_str()
        self._tokenizer = LLTokenizer(source, n_vocab=vocab_size, eos_token=list(eos_ids) or None, slices=_SLICES)
        self.vocab_size: int = self._tokenizer.vocab_size
        self._token_bytes = None if tokenizer is None else tokenizer.token_bytes
        self._special = frozenset(eos_ids) | (tokenizer.special_ids if tokenizer else frozenset())
        self._threads = threads
        self._executor: Any = None
        self._kept = KeptMasks(_MASK_BYTES)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        return self._tokenizer.tokenize_bytes(text.encode())  # type: ignore[no-any-return] # it has no types

    def spell(self, text: bytes) -> list[int] | None:
        """Tokens that have these bytes; None where there are none for some."""
        tokens: list[int] = self._tokenizer.tokenize_bytes(text)
        return tokens if self._tokenizer.decode_bytes(tokens) == text else None

    def compile(self, constraint: Constraint) -> LlguidanceGrammar:
        return self.load(_prepared(constraint))

    def prepare(self, constraint: Constraint) -> Prepared:
        """Its text, which has been compiled and has made a mask: the fuel of the engine bounds both."""
        prepared = _prepared(constraint)
        self.load(prepared)
        return prepared

    def load(self, prepared: Prepared) -> LlguidanceGrammar:
        began = time.perf_counter()
        start = self.parser(prepared.text)
        quick = time.perf_counter() - began < _QUICK
        return LlguidanceGrammar(self, prepared, start, 2 * self._threads if quick and self._threads > 1 else 1)

    def parser(self, text: str) -> LLMatcher:
        """A new parser of a grammar.

        Raises:
            ConstraintError: llguidance refuses it.
        """
        return walk.start(text, self._tokenizer)

    def states(self, prepared: Prepared) -> States | None:
        """The states of a grammar's language; None where they can't be told."""
        if self._token_bytes is None or len(prepared.text) > _LARGEST:
            return None
        try:
            return States(prepared.language, self._token_bytes, self._special)
        except (ConstraintError, RecursionError):
            return None

    def fill(self, matchers: Sequence[LlguidanceMatcher], masks: NDArray[np.int32], rows: Sequence[int]) -> None:
        if self._executor is None:
            self._executor = LLExecutor(self._threads)
        lines: dict[int, list[tuple[LLMatcher, int]]] = {}
        same: dict[tuple[int, State], list[int]] = {}  # rows that are in the same state
        new: list[tuple[States, State, list[int]]] = []
        for matcher, row in zip(matchers, rows):
            known = matcher.known
            if known is not None:
                masks[row] = known
                if matcher.states is not None:
                    matcher.states.known += 1
                continue
            if matcher.states is not None and matcher.state is not None:
                alike = same.setdefault((id(matcher.states), matcher.state), [])
                alike.append(row)
                if len(alike) > 1:
                    continue
                matcher.states.unknown += 1
                new.append((matcher.states, matcher.state, alike))
            lines.setdefault(matcher.line, []).append((matcher.inner, row))
        pairs = [pair for line in lines.values() for pair in line]  # a line's side by side: one thread takes them
        if pairs:
            self._executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, masks.shape[1] * 4, len(masks))
        for states, state, (first, *others) in new:
            self._kept.keep(states, state, masks[first].copy())
            masks[others] = masks[first]


def _prepared(constraint: Constraint) -> Prepared:
    return Prepared(walk.grammar_text(constraint), language_of(constraint))
