"""Enforces constraints with llguidance, which compiles our grammars (constraints/) in milliseconds."""

from __future__ import annotations

import json
import pickle
import re
import threading
import time
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING  # the library has no types

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray

from sglang_lite.constraints import byte_matcher
from sglang_lite.constraints.formal import nodes
from sglang_lite.constraints.formal.lengths import most_bytes
from sglang_lite.constraints.formal.nodes import Language, substrings
from sglang_lite.constraints.formal.shortest_texts import ShortestTexts
from sglang_lite.constraints.json_schema.any_strings import widen_quotes_to_strings
from sglang_lite.constraints.kinds import language_for_constraint
from sglang_lite.constraints.memo import BoundedCache, estimate_bytes, native_bytes
from sglang_lite.protocol import Constraint, ConstraintError
from sglang_lite.protocol.anything import Foreign
from sglang_lite.runtime.structured_output.base import LoneMatcher, Mask, TextLengths
from sglang_lite.runtime.structured_output.ending_tokens import EndingTokens, byte_token_index
from sglang_lite.runtime.structured_output.fewest_tokens import fewest_tokens
from sglang_lite.runtime.structured_output.language_endings import LanguageEndings, RenewedStates
from sglang_lite.runtime.structured_output.language_states import LanguageStates
from sglang_lite.runtime.structured_output.mask_cache import MaskCache
from sglang_lite.runtime.structured_output.own_classes import unpickle_trusted
from sglang_lite.runtime.structured_output.quotes import QuoteGrammar, QuoteTokens
from sglang_lite.runtime.structured_output.token_rests import TokenRests
from sglang_lite.runtime.structured_output.vocabulary import find_mark_tokens, hide_special_tokens

if TYPE_CHECKING:
    from sglang_lite.runtime.tokens.tokenizer import Tokenizer

# assumed base memory of an unmeasured parser, in addition to a share per character
_BYTES = 100_000

# Sets of tokens that are allowed or rejected together: inside a string with a length limit, tokens
# that fit in the remaining characters. llguidance's defaults are 10 and 30, so most of a short
# string would be walked token by token.
_IN_STRING = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_IN_STRING}{{1,{n}}}" for n in (1, 2, 3, 4, 5, 6, 8, 10, 14, 30)),
    f"{_IN_STRING}+",
]

# A grammar that takes longer to compile has one lexer shared by all threads.
_QUICK = 0.02  # seconds of compilation
_ENOUGH = 4  # texts of a lexer before another lexer is added and masks are shared
# A lexer of substrings grows by at most `_SEEN_BYTES` with each token that it sees for the first
# time. In total, it grows by at most `_SOURCE_BYTES` for each character of the sources in the
# grammar's text.
_SEEN_BYTES = 16_000
_SOURCE_BYTES = 1_300
MAX_GROWN = 256 << 20  # bytes by which a lexer may grow before it is replaced
_MASK_BYTES = 96 << 20  # limit of cached masks
LANGUAGE_BYTES = 64 << 20  # limit of cached language states
_MAX_LENGTHS = 100  # beginnings of a grammar's texts for which the lengths are cached
# most characters of a grammar whose states are tracked, as a step may try all its alternatives
_LARGEST = 30_000
LONG_SOURCES = 20_000  # characters of documents, above which llguidance does not compile them


@dataclass(frozen=True, slots=True)
class Prepared:
    """Grammar in the form that llguidance loads.

    Attributes:
        text: grammar in llguidance's notation.
        language: language that the grammar describes. Pickled if it comes from another process,
            since most are never needed and unpickling them would block the loop.
        shortest: shortest text of the language, or None if none is known.
        sources: documents from which quotes in the language's texts are copied.
        strings: same grammar, except that any string may stand for a quote. Set if the sources are
            long; `text` is then empty.
        parser_bytes: measured memory of a parser, or 0 if unknown.
    """

    text: str
    language: Language | bytes
    shortest: str | None
    sources: tuple[str, ...] = ()
    strings: Prepared | None = None
    parser_bytes: int = 0


class _Text:
    """Identity of a text that is being written. A matcher and its copies share it."""


@dataclass(slots=True, eq=False)
class _Lexer:
    """Lexer that parsers share under a lock.

    Attributes:
        start: parser at the start of a text; the other parsers are copies of it.
        is_shared: whether new texts share it; otherwise it belongs to a single text.
        texts: texts whose parsers share the lexer.
        tokens: number of tokens that the parsers have consumed.
        is_renewed: whether its replacement is being created.
    """

    start: Foreign
    is_shared: bool = True
    texts: weakref.WeakSet[_Text] = field(default_factory=weakref.WeakSet)
    tokens: int = 0
    is_renewed: bool = False


class LlguidanceMatcher(LoneMatcher):
    """Matcher that parses a text with llguidance and tracks the text's state in the language.

    If computing a mask takes too much work, the lexer fails permanently, for all texts that share
    it. Such a text then starts over with a lexer of its own. The constraint is rejected as too much
    work only if that lexer fails, too.

    Args:
        grammar: grammar that made the matcher.
        lexer: lexer of its parser.
        first: mask at the start of a text.
        states: shared states of the language, or None if they are not tracked.
    """

    def __init__(
        self, grammar: LlguidanceGrammar, lexer: _Lexer, first: Mask, states: LanguageStates | None
    ) -> None:
        self.engine = grammar.engine
        self._grammar = grammar
        self._inner = lexer.start
        self._lexer = lexer
        # whether other matchers use the same parser, so that none of them may advance it
        self._shares = True
        self._text = _Text()
        lexer.texts.add(self._text)
        self._mask: Mask | None = first
        self.states = states
        self.state = None if states is None else states.start
        self._consumed: list[int] = []  # tokens that the parser has consumed
        self._unconsumed: list[int] = []  # accepted tokens that the parser has not consumed yet
        self._forced: list[int] = []  # tokens that the parser has reported to be forced next
        self._last = -1

    @property
    def inner(self) -> Foreign:
        """The matcher's own parser, after it has consumed all accepted tokens."""
        if self._shares:
            self._inner = self._inner.deep_copy()
            self._shares = False
        if self._unconsumed:
            self._inner.consume_tokens(self._unconsumed)
            self._lexer.tokens += len(self._unconsumed)
            self._consumed += self._unconsumed
            self._unconsumed = []
        return self._inner

    def _consume(self, tokens: list[int]) -> bool:
        """Consumes tokens with the parser, retrying with its own lexer if the shared one fails.
        Returns False if the grammar does not allow the tokens.
        """
        while not _try_to_consume(self.inner, tokens):
            if not self._restart_with_own_lexer():
                return False
        self._lexer.tokens += len(tokens)
        self._consumed += tokens
        return True

    def _restart_with_own_lexer(self) -> bool:
        """Replaces a shared lexer that has failed with one that only this text uses. All tokens so
        far are marked to be consumed again. Returns False if the lexer has not failed or is already
        the text's own. Must not be called while a mask is being computed, because it changes
        `lock_key`.
        """
        if not byte_matcher.is_lexer_error(self._inner) or not self._lexer.is_shared:
            return False
        self._lexer = self._grammar.replace_lexer(self._lexer)
        self._inner = self._lexer.start
        self._shares = True
        self._unconsumed = [*self._consumed, *self._unconsumed]
        self._consumed = []
        return True

    @property
    def lock_key(self) -> Hashable:
        return self._lexer

    @property
    def state_key(self) -> Hashable:
        return (
            id(self) if self.states is None or self.state is None else (id(self.states), self.state)
        )

    def cached_mask(self) -> Mask | None:
        if self.states is None or self.state is None:
            return self._mask
        mask = self.states.masks.get(self.state)
        if mask is not None:
            self.states.hits += 1
        return mask

    def set_mask(self, mask: Mask) -> None:
        if self._inner.is_error():  # its mask would allow the end of the sequence
            if self._restart_with_own_lexer():
                return
            mask = np.zeros_like(mask)
        if self.states is None or self.state is None:
            self._mask = mask
        elif not mask.any():  # matchers in the same state need not share this failure
            self._mask = mask
            self.state = None
        else:
            self.engine.mask_cache.cache_mask(self.states, self.state, mask)

    def copy(self) -> LlguidanceMatcher:
        self._shares = True
        copied = object.__new__(LlguidanceMatcher)
        vars(copied).update(
            vars(self), _consumed=self._consumed.copy(), _unconsumed=self._unconsumed.copy()
        )
        return copied

    def accept(self, token: int) -> bool:
        self._mask = None
        self._last = token
        is_forced = bool(self._forced) and self._forced[0] == token
        if self._forced:
            self._forced = self._forced[1:] if is_forced else []
        if self.states is not None and self.state is not None:
            mask = self.states.masks.get(self.state)
            self.state = (
                self.states.state_after_token(self.state, token)
                if self.states.is_worth_tracking
                else None
            )
            allowed = is_forced or (mask is not None and mask[token >> 5] >> (token & 31) & 1)
            if allowed and self.state is not None:
                self._unconsumed.append(token)
                return True
        return self._consume([token])

    def accept_all(self, tokens: Sequence[int]) -> bool:
        forced = self._forced[: len(tokens)] == tokens
        state = self.state
        if (
            forced
            and self.states is not None
            and state is not None
            and self.states.is_worth_tracking
        ):
            state = self.states.state_after_tokens(state, tokens)
            if state is not None:
                self._mask = None
                self._last = tokens[-1]
                self.state = state
                self._forced = self._forced[len(tokens) :]
                self._unconsumed += tokens
                return True
        return all(map(self.accept, tokens))

    def accept_text(self, text: bytes) -> bool:
        self._mask = None
        self._forced = []
        tokens = self.engine.spell(text)
        if tokens is None or not self._consume(tokens):
            return False
        self._last = tokens[-1]
        if self.states is not None and self.state is not None:
            self.state = self.states.state_after_text(self.state, text)
        return True

    def find_forced_tokens(self) -> list[int]:
        if self.states is None or self.state is None:
            return self.engine.replace_spelled_marks(list(self.inner.compute_ff_tokens()))
        key = self.state, self._last
        if key not in self.states.forced:
            self.states.forced[key] = self.engine.replace_spelled_marks(
                list(self.inner.compute_ff_tokens())
            )
        self._forced = self.states.forced[key]
        return self._forced

    @property
    def complete(self) -> bool:
        return bool(self.inner.is_accepting())

    @property
    def finished(self) -> bool:
        if self._unconsumed and self.states is not None and self.state is not None:
            return self.states.is_final(self.state)
        return bool(self.inner.is_stopped()) and not self.inner.is_error()

    @property
    def error(self) -> str:
        return byte_matcher.explain_matcher_error(
            self._inner
        )  # unconsumed tokens are known to be allowed


def _try_to_consume(parser: Foreign, tokens: list[int]) -> bool:
    """Returns True if a parser consumes the tokens without failing. A parser that has failed would
    only accept the end of the sequence.
    """
    # After a text that can't continue, `consume_tokens` would reject the end of the sequence.
    done = parser.consume_token(tokens[0]) if len(tokens) == 1 else parser.consume_tokens(tokens)
    return bool(done) and not parser.is_error()


class LlguidanceGrammar:
    """Compiled grammar. Computes its first mask, the slowest one, once for all requests.

    Copies of a parser share its lexer under a lock. To let threads run in parallel, several groups
    of copies with separate lexers are created as the number of matchers grows. A lexer for quotes
    from long texts remembers everything it has seen, so one that has grown too large is replaced by
    a new one and freed with its last matcher.

    Args:
        engine: engine that compiled the grammar.
        prepared: prepared form of the grammar.
        start: parser at the start of a text.
        max_lexers: largest number of lexers.

    Attributes:
        engine: the argument.
    """

    def __init__(
        self, engine: LlguidanceEngine, prepared: Prepared, start: Foreign, max_lexers: int
    ) -> None:
        self.engine = engine
        self._prepared = prepared
        self._max_lexers = max_lexers
        parser = prepared.parser_bytes or _BYTES + byte_matcher.PARSER_BYTES * len(prepared.text)
        self._size = max_lexers * parser + estimate_bytes(prepared.language)
        self._most_grown = _SOURCE_BYTES * byte_matcher.count_substring_source_characters(
            prepared.text
        )
        self._lexers = [_Lexer(start)]
        self._shared = engine.tracked  # True once enough matchers existed for sharing masks
        self._combinable: LlguidanceGrammar | None = None
        self._lengths: dict[str, TextLengths] = {}
        self._making = threading.Lock()
        self._first = np.zeros((engine.vocab_size + 31) // 32, np.int32)
        start.unsafe_compute_mask_ptr(self._first.ctypes.data, self._first.nbytes)
        if start.is_error():
            raise byte_matcher.matcher_error(start)
        self._endings = engine.build_endings(prepared, self._first)

    @property
    def size(self) -> int:
        """Approximate memory in bytes, which grows as texts reach more states."""
        grown = sum(map(self._estimate_lexer_growth, self._lexers))
        return self._size + grown + (0 if self._endings is None else self._endings.size)

    @property
    def sources(self) -> tuple[str, ...]:
        return self._prepared.sources

    def _estimate_lexer_growth(self, lexer: _Lexer) -> int:
        """Returns an upper bound on the bytes by which a lexer has grown."""
        return min(_SEEN_BYTES * lexer.tokens, self._most_grown)

    def matcher(self) -> LlguidanceMatcher:
        with self._making:
            lexer = min(self._lexers, key=lambda each: len(each.texts))
            crowded = len(lexer.texts) >= _ENOUGH
            if crowded and len(self._lexers) < self._max_lexers:
                lexer = self._new_lexer()
                self._lexers.append(lexer)
            if self._estimate_lexer_growth(lexer) > MAX_GROWN and not lexer.is_renewed:
                lexer.is_renewed = True
                threading.Thread(
                    target=self._replace_grown_lexer,
                    args=(lexer,),
                    name="sglang_lite-lexer",
                    daemon=True,
                ).start()
            self._shared = self._shared or crowded
            states = self.engine.states(self._prepared, self._first) if self._shared else None
            return LlguidanceMatcher(self, lexer, self._first, states)

    def _replace_grown_lexer(self, lexer: _Lexer) -> None:
        new = self._new_lexer()  # takes half a second for a document of 100,000 tokens
        with self._making:
            if lexer in self._lexers:
                self._lexers[self._lexers.index(lexer)] = new

    def _new_lexer(self, *, is_shared: bool = True) -> _Lexer:
        return _Lexer(self.engine.new_parser(self._prepared.text), is_shared)

    def replace_lexer(self, failed: _Lexer) -> _Lexer:
        """Replaces a failed lexer for future texts. Returns a separate lexer for the text that was
        using the failed one.
        """
        with self._making:
            if failed in self._lexers:
                self._lexers[self._lexers.index(failed)] = self._new_lexer()
        return self._new_lexer(is_shared=False)

    def as_combinable(self) -> LlguidanceGrammar:
        """Returns the grammar with forced tokens turned off. Where only one text is possible,
        forcing would allow only the tokenizer's own split of that text.
        """
        if self._combinable is None:
            self._combinable = self.engine.load_grammar_text(_without_forced_tokens(self._prepared))
        return self._combinable

    def endings(self) -> LanguageEndings | None:
        return self._endings

    def lengths(self, written: str = "") -> TextLengths:
        found = self._lengths.get(written)
        if found is None:
            found = self.engine.bound_lengths(self._prepared, written)
            if len(self._lengths) < _MAX_LENGTHS:
                self._lengths[written] = found
        return found


class LlguidanceEngine:
    """Grammar engine that uses llguidance, for one tokenizer.

    Args:
        tokenizer: tokenizer of the model, or None for one token per byte.
        vocab_size: number of the model's tokens, padding included, or None for the tokenizer's.
        eos_ids: tokens that may end a complete text.
        threads: number of threads that compute masks concurrently.
        tracked: whether the states of all texts are tracked, or only those of grammars with many
            concurrent texts.

    Attributes:
        tracked: the argument.
    """

    name = "llguidance"

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int | None = None,
        eos_ids: Sequence[int] = (),
        threads: int = 1,
        *,
        tracked: bool = False,
    ) -> None:
        self.tracked = tracked
        # 150,000 tokens take 0.3 s
        given = None if tokenizer is None else json.loads(tokenizer.backend.to_str())
        self._marks = {} if given is None else find_mark_tokens(given)
        source = "byte" if given is None else hide_special_tokens(given)
        self._at_mark = re.compile(
            b"|".join(map(re.escape, sorted(self._marks, key=len, reverse=True)))
        )
        self._tokenizer = LLTokenizer(
            source, n_vocab=vocab_size, eos_token=list(eos_ids) or None, slices=_SLICES
        )
        self.vocab_size: int = self._tokenizer.vocab_size
        self._token_bytes = None if tokenizer is None else tokenizer.token_bytes
        self._special = frozenset(eos_ids) | (tokenizer.special_ids if tokenizer else frozenset())
        self._threads = threads
        self._local = threading.local()
        self.mask_cache = MaskCache(_MASK_BYTES)
        self._measuring = threading.Lock()
        # grammar text -> states of its language, or None
        self._languages = BoundedCache(LANGUAGE_BYTES)

    @cached_property
    def token_rests(self) -> TokenRests:
        """`TokenRests` of the vocabulary. Must be used by one thread at a time."""
        return TokenRests(self._token_bytes or (), self._special)

    @cached_property
    def ending_tokens(self) -> EndingTokens:
        return (
            byte_token_index()
            if self._token_bytes is None
            else EndingTokens(self._token_bytes, self._special)
        )

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text."""
        return self._tokenize_with_marks(text.encode())

    def replace_spelled_marks(self, tokens: list[int]) -> list[int]:
        """Replaces tokens that spell out a mark, such as `</think>`, by the mark's single token."""
        if not self._marks or len(tokens) < 2:
            return tokens
        text = self._tokenizer.decode_bytes(tokens)
        return self._tokenize_with_marks(text) if self._at_mark.search(text) else tokens

    def _tokenize_with_marks(self, text: bytes) -> list[int]:
        """Tokenises a text like the model's tokenizer, which encodes each mark as a single token."""
        found: list[int] = []
        at = 0
        for mark in self._at_mark.finditer(text) if self._marks else ():
            found += [
                *self._tokenizer.tokenize_bytes(text[at : mark.start()]),
                self._marks[mark[0]],
            ]
            at = mark.end()
        return [*found, *self._tokenizer.tokenize_bytes(text[at:])]

    def spell(self, text: bytes) -> list[int] | None:
        """Returns tokens that spell these bytes, or None if no tokens do."""
        tokens = self._tokenize_with_marks(text)
        return tokens if self._tokenizer.decode_bytes(tokens) == text else None

    @cached_property
    def quote_tokens(self) -> QuoteTokens:
        return QuoteTokens(self._token_bytes or (), self._special, self.vocab_size)

    def compile(self, constraint: Constraint) -> LlguidanceGrammar | QuoteGrammar:
        return self.load_prepared(_prepare_constraint(constraint))

    def prepare(self, constraint: Constraint) -> Prepared:
        """Prepares a constraint, then compiles it and computes a mask as a test. The engine's work
        limit ("fuel") applies to both.
        """
        return self._record_parser_size(_prepare_constraint(constraint))

    def _record_parser_size(self, prepared: Prepared) -> Prepared:
        pickled = replace(prepared, language=pickle.dumps(prepared.language, protocol=5))
        if prepared.strings is not None:
            return replace(pickled, strings=self._record_parser_size(prepared.strings))
        before = native_bytes()
        loaded = self.load_grammar_text(prepared)
        grown = native_bytes() - before  # accurate, as nothing else runs in a worker
        del loaded
        return replace(pickled, parser_bytes=max(grown, 0))

    def load_prepared(self, prepared: Prepared) -> LlguidanceGrammar | QuoteGrammar:
        if prepared.strings is None:
            return self.load_grammar_text(prepared)
        endings = self.build_endings(prepared)
        if endings is None or endings.states.current_states() is None:
            return self.load_grammar_text(_prepare_language(_load_language(prepared.language)))
        strings = self.load_grammar_text(prepared.strings)
        return QuoteGrammar(strings, self, endings, self.quote_tokens, prepared.sources)

    def load_grammar_text(self, prepared: Prepared) -> LlguidanceGrammar:
        """Loads a grammar from its `text` and ignores `strings`. Raises the same errors as
        `load_prepared`.
        """
        began = time.perf_counter()
        start = self.new_parser(prepared.text)
        quick = time.perf_counter() - began < _QUICK
        return LlguidanceGrammar(
            self, prepared, start, 2 * self._threads if quick and self._threads > 1 else 1
        )

    def new_parser(self, text: str) -> LLMatcher:
        """Returns a new parser of a grammar.

        Raises:
            ConstraintError: llguidance rejects the grammar.
        """
        return byte_matcher.start(text, self._tokenizer)

    def states(self, prepared: Prepared, first: Mask) -> LanguageStates | None:
        """Returns the states of a grammar's language, cached within a memory limit, or None if they
        can't be tracked.

        Args:
            prepared: prepared form of the grammar.
            first: mask at the start of a text.
        """
        cached = self._languages.find_entry(prepared.text)
        states = cached[0] if cached is not None else None
        if cached is None and len(prepared.text) <= _LARGEST:
            states = self.new_language_states(prepared)
        if cached is None and states is not None:
            states.masks[states.start] = first
        # Stored again at each call, as the size grows.
        self._languages.put_entry(
            prepared.text, states, len(prepared.text) + (0 if states is None else states.size)
        )
        return states

    def build_endings(
        self, prepared: Prepared, first: Mask | None = None
    ) -> LanguageEndings | None:
        """Creates the `LanguageEndings` of a grammar, which identify positions in its texts.
        Returns None if the model's tokens have no text.

        Args:
            prepared: prepared form of the grammar.
            first: mask at the start of a text, if the states used for masks may be shared; None to
                use separate states.
        """
        if self._token_bytes is None:
            return None

        def make_states() -> LanguageStates | None:
            return (
                None if first is None else self.states(prepared, first)
            ) or self.new_language_states(prepared)

        return LanguageEndings(RenewedStates(make_states))

    def bound_lengths(self, prepared: Prepared, written: str) -> TextLengths:
        """Returns bounds on the number of tokens in a grammar's texts, as in
        `CompiledGrammar.lengths`.
        """
        if self._token_bytes is None:
            return TextLengths()
        try:
            language = _load_language(prepared.language)
        except pickle.UnpicklingError:
            return TextLengths()
        before = written.encode("utf-8", "surrogatepass")
        shortest = None if prepared.shortest is None else prepared.shortest.encode()
        rest = (
            None if shortest is None or not shortest.startswith(before) else shortest[len(before) :]
        )

        def search() -> int | None:
            with self._measuring:  # `token_rests` is not thread-safe
                return fewest_tokens(language.rules, language.start, self.token_rests, rest, before)

        most = most_bytes(language.rules, language.start)
        known = None if rest is None else len(rest)
        return TextLengths(known, None if most is None else max(most - len(before), 0), search)

    def new_language_states(self, prepared: Prepared) -> LanguageStates | None:
        """Returns new states of a grammar's language, or None if there are too many."""
        if self._token_bytes is None:
            return None
        try:
            return LanguageStates(
                _load_language(prepared.language), self._token_bytes, self._special
            )
        except (ConstraintError, RecursionError, pickle.UnpicklingError):
            return None

    def masks(self, matchers: Sequence[LlguidanceMatcher]) -> NDArray[np.int32]:
        if not hasattr(self._local, "executor"):
            self._local.executor = LLExecutor(1)  # a matcher's own method would hold the GIL
        masks = np.empty((len(matchers), (self.vocab_size + 31) // 32), np.int32)
        parsers = [(matcher.inner, row) for row, matcher in enumerate(matchers)]
        self._local.executor.unsafe_compute_mask_ptr(
            parsers, masks.ctypes.data, masks.shape[1] * 4, len(masks)
        )
        return masks


def _prepare_constraint(constraint: Constraint) -> Prepared:
    language = language_for_constraint(constraint)
    strings = None
    if (
        language.size > LONG_SOURCES
        and sum(len(each.text) for each in substrings(language)) > LONG_SOURCES
    ):
        strings = widen_quotes_to_strings(language)
    return _prepare_language(language, None if strings is None else _prepare_language(strings))


def _prepare_language(language: Language, strings: Prepared | None = None) -> Prepared:
    shortest = ShortestTexts(language.rules)
    text = (
        ""
        if strings is not None
        else byte_matcher.write_llguidance_grammar(language, shortest.longest_forced)
    )
    copies = strings is not None or byte_matcher.count_substring_source_characters(text)
    sources = tuple(sorted(each.text for each in substrings(language))) if copies else ()
    least = shortest.find_shortest_text(language.start)
    return Prepared(text, language, least, sources, strings)


def _load_language(language: Language | bytes) -> Language:
    if not isinstance(language, bytes):
        return language
    found: Language = unpickle_trusted(language, nodes)
    return found


def _without_forced_tokens(prepared: Prepared) -> Prepared:
    """Returns the grammar with forced tokens turned off. Where only one text is possible, all
    tokens that spell it are then allowed.
    """
    if prepared.text.startswith(byte_matcher.NO_FORCING):
        return prepared
    return replace(prepared, text=byte_matcher.NO_FORCING + prepared.text)
