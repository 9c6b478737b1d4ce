"""Constraints through llguidance, which gets our grammars (constraints/) and compiles them in milliseconds."""

from __future__ import annotations

import io
import pickle
import threading
import time
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any  # the library has no types

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray

from sglang_lite.constraints import byte_matcher
from sglang_lite.constraints.formal import nodes
from sglang_lite.constraints.formal.lengths import longest_forced
from sglang_lite.constraints.formal.nodes import Language
from sglang_lite.constraints.language import language_of
from sglang_lite.constraints.memo import BoundedCache, allocated, size_of
from sglang_lite.protocol import Constraint, ConstraintError
from sglang_lite.protocol.anything import Foreign
from sglang_lite.runtime.structured_output.base import Mask
from sglang_lite.runtime.structured_output.mask_cache import LanguageStates, MaskCache
from sglang_lite.runtime.structured_output.unique_names import EndingTokens, byte_tokens

if TYPE_CHECKING:
    from sglang_lite.runtime.tokens.tokenizer import Tokenizer

_BYTES = 100_000  # of a parser, and more for each character: where it was not measured

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
_ENOUGH = 4  # matchers of a line before there is another, and before masks are shared from then on
_LONG = 10_000  # characters: a longer text that is forced would be written out on the loop's thread, for milliseconds
_NO_FORCING = '%llguidance {"no_forcing": true}\n'
_MASK_BYTES = 96 << 20  # of kept masks
LANGUAGE_BYTES = 64 << 20  # of states that are told apart
_LARGEST = 30_000  # characters of a grammar whose states are told apart: a step may look at all its alternatives


@dataclass(frozen=True, slots=True)
class Prepared:
    """A grammar as llguidance loads it.

    Attributes:
        text: the grammar in llguidance's notation.
        language: the language that it describes; pickled where it comes from another process, as most are never looked
            at, and making its objects would hold up the loop.
        parser_bytes: that a parser of it was seen to take; 0: not known.
    """

    text: str
    language: Language | bytes
    parser_bytes: int = 0


class LlguidanceMatcher:
    """A parser of llguidance, and the state of the language that its text is in.

    Args:
        engine: whose it is.
        inner: its parser.
        line: of parsers that share a lexer.
        first: the mask of the start.
        states: of the language, where others share them.
    """

    number = None

    def __init__(
        self, engine: LlguidanceEngine, inner: Foreign, line: object, first: Mask, states: LanguageStates | None
    ) -> None:
        self.engine, self._inner, self.line = engine, inner, line
        self._kept: Mask | None = first
        self.states, self.state = states, None if states is None else states.start
        self._late: list[int] = []  # tokens that the parser was not told yet
        self._last = -1

    @property
    def inner(self) -> Foreign:
        """The parser, which knows all tokens."""
        if self._late:
            self._inner.consume_tokens(self._late)
            self._late = []
        return self._inner

    @property
    def parts(self) -> tuple[LlguidanceMatcher]:
        return (self,)

    @property
    def place(self) -> Hashable:
        return id(self) if self.states is None or self.state is None else (id(self.states), self.state)

    def known(self) -> Mask | None:
        mask = self._mask()
        if mask is not None and self.states is not None:
            self.states.known += 1
        return mask

    def _mask(self) -> Mask | None:
        if self.states is None or self.state is None:
            return self._kept
        return self.states.masks.get(self.state)

    def learn(self, mask: Mask) -> None:
        if not mask.any() or self._inner.is_error():  # its own failure, which others in its place need not share
            self.state = None
        if self.states is None or self.state is None:
            self._kept = mask
        else:
            self.engine.kept.keep(self.states, self.state, mask)

    def accept(self, token: int) -> bool:
        known, self._kept, self._last = self._mask(), None, token
        if self.states is not None and self.state is not None:
            self.state = self.states.after(self.state, token) if self.states.pays else None
            if self.state is not None and known is not None and known[token >> 5] >> (token & 31) & 1:
                self._late.append(token)
                return True
        return bool(self.inner.consume_token(token))

    def advance(self, text: bytes) -> bool:
        self._kept = None
        tokens = self.engine.spell(text)
        if tokens is None or not self.inner.consume_tokens(tokens):
            return False
        self._last = tokens[-1]
        if self.states is not None and self.state is not None:
            self.state = self.states.advance(self.state, text)
        return True

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
        if self._late and self.state is not None and not LanguageStates.over(self.state):
            return False
        return bool(self.inner.is_stopped()) and not self.inner.is_error()

    @property
    def error(self) -> str:
        return byte_matcher.reason(self.inner)


class LlguidanceGrammar:
    """A grammar with its first mask, made once for all requests: it takes longest, and they may come at the same time.

    Copies of a parser share its lexer, behind a lock. So that threads don't wait for each other there are several
    lines of copies, each with a lexer of its own, made when there are matchers enough for them.

    Args:
        engine: that compiled it.
        prepared: what it was compiled from.
        start: its parser.
        lines: at most so many.
    """

    def __init__(self, engine: LlguidanceEngine, prepared: Prepared, start: Foreign, lines: int) -> None:
        self._engine, self._prepared, self._lines = engine, prepared, lines
        parser = prepared.parser_bytes or _BYTES + byte_matcher.PARSER_BYTES * len(prepared.text)
        self.size = lines * parser + size_of(prepared.language)
        self._starts = [(object(), start)]  # the lines, and their parsers
        self._used: list[weakref.WeakSet[LlguidanceMatcher]] = [weakref.WeakSet()]  # matchers of each line
        self._shared = False  # there were matchers enough
        self._combinable: LlguidanceGrammar | None = None
        self._making = threading.Lock()
        self._first = np.zeros((engine.vocab_size + 31) // 32, np.int32)
        start.unsafe_compute_mask_ptr(self._first.ctypes.data, self._first.nbytes)
        if start.is_error():
            raise byte_matcher.refusal(start)

    def matcher(self) -> LlguidanceMatcher:
        with self._making:
            line = min(range(len(self._starts)), key=lambda i: len(self._used[i]))
            crowded = len(self._used[line]) >= _ENOUGH
            if crowded and len(self._starts) < self._lines:
                line = len(self._starts)
                self._starts.append((object(), self._engine.parser(self._prepared.text)))
                self._used.append(weakref.WeakSet())
            self._shared = self._shared or crowded
            states = self._engine.states(self._prepared, self._first) if self._shared else None
            of, parser = self._starts[line]
            matcher = LlguidanceMatcher(self._engine, parser.deep_copy(), of, self._first, states)
            self._used[line].add(matcher)
            return matcher

    def combinable(self) -> LlguidanceGrammar:
        """The grammar without forced tokens: a forced text allows only the tokens that a tokenizer cuts it into."""
        if self._combinable is None:
            self._combinable = self._engine.load(_unforced(self._prepared))
        return self._combinable


class LlguidanceEngine:
    """llguidance for one tokenizer.

    Args:
        tokenizer: the model's; None for a token per byte, whatever the model.
        vocab_size: the model's, padding included; None: the tokenizer's.
        eos_ids: tokens that may end a complete text.
        threads: that make masks at a time.
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
        self._local = threading.local()
        self.kept = MaskCache(_MASK_BYTES)
        self._languages = BoundedCache(LANGUAGE_BYTES)  # their states, or None, by their grammars' text

    @cached_property
    def ending_tokens(self) -> EndingTokens:
        return byte_tokens() if self._token_bytes is None else EndingTokens(self._token_bytes, self._special)

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
        """The grammar's text, which has been compiled and has made a mask: the fuel of the engine bounds both."""
        prepared = _prepared(constraint)
        before = allocated()
        loaded = self.load(prepared)
        taken = allocated() - before  # nothing else runs in a worker
        del loaded
        return replace(prepared, language=pickle.dumps(prepared.language, protocol=5), parser_bytes=max(taken, 0))

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
        return byte_matcher.start(text, self._tokenizer)

    def states(self, prepared: Prepared, first: Mask) -> LanguageStates | None:
        """The states of a grammar's language, for as long as there is room; None where they can't be told.

        Args:
            first: the mask of the start.
        """
        known = self._languages.get(prepared.text)
        states = self._found_states(prepared) if known is None else known[0]
        if known is None and states is not None:
            states.masks[states.start] = first
        # Each time, as it grows.
        self._languages.put(prepared.text, states, len(prepared.text) + (0 if states is None else states.size))
        return states

    def _found_states(self, prepared: Prepared) -> LanguageStates | None:
        if self._token_bytes is None or len(prepared.text) > _LARGEST:
            return None
        try:
            return LanguageStates(_unpacked(prepared.language), self._token_bytes, self._special)
        except (ConstraintError, RecursionError, pickle.UnpicklingError):
            return None

    def masks(self, matchers: Sequence[LlguidanceMatcher]) -> NDArray[np.int32]:
        if not hasattr(self._local, "executor"):
            self._local.executor = LLExecutor(1)  # a matcher's own call would keep Python's lock
        masks = np.empty((len(matchers), (self.vocab_size + 31) // 32), np.int32)
        parsers = [(matcher.inner, row) for row, matcher in enumerate(matchers)]
        self._local.executor.unsafe_compute_mask_ptr(parsers, masks.ctypes.data, masks.shape[1] * 4, len(masks))
        return masks


def _prepared(constraint: Constraint) -> Prepared:
    language = language_of(constraint)
    found = Prepared(byte_matcher.grammar_text(constraint), language)
    return _unforced(found) if longest_forced(language) > _LONG else found


def _unpacked(language: Language | bytes) -> Language:
    if not isinstance(language, bytes):
        return language
    unpacked: Language = _NodesUnpickler(io.BytesIO(language)).load()
    return unpacked


class _NodesUnpickler(pickle.Unpickler):
    """Unpickler of languages and nothing else: they may come from a file."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(nodes, name, None) if module == nodes.__name__ else None
        if not (isinstance(found, type) and is_dataclass(found)):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a language")
        return found


def _unforced(prepared: Prepared) -> Prepared:
    """The same with a choice of tokens where there is none of characters."""
    if prepared.text.startswith(_NO_FORCING):
        return prepared
    return Prepared(_NO_FORCING + prepared.text, prepared.language)
