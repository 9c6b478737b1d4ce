"""Constraints through llguidance, which gets our grammars (constraints/) and compiles them in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from sglang_lite.constraints.compose import language_of
from sglang_lite.constraints.lexing import lexed
from sglang_lite.constraints.to_lark import to_lark
from sglang_lite.protocol import Constraint, ConstraintError
from sglang_lite.runtime.grammar.base import Mask

if TYPE_CHECKING:
    from sglang_lite.runtime.tokens.tokenizer import Tokenizer

# Larger than its own: large schemas need it. Lexemes are not worked out beforehand, as that spends the fuel of the
# first steps without saying so (1.9.1: a text of {1,5000} & [^ ]+ is then refused).
_LIMITS = LLParserLimits(
    max_items_in_row=50_000,
    initial_lexer_fuel=20_000_000,
    step_lexer_fuel=2_000_000,
    step_max_items=500_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
_BYTES, _BYTES_PER_CHARACTER = 100_000, 50


class LlguidanceMatcher:
    def __init__(self, engine: LlguidanceEngine, inner: Any, first: Mask) -> None:
        self.engine, self.inner = engine, inner
        self.kept: Mask | None = first  # the mask of where it is now, where that is known

    def fill_mask(self, mask: Mask) -> None:
        if self.kept is not None:
            mask[:] = self.kept
        else:
            self.inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def accept(self, token: int) -> bool:
        self.kept = None
        return bool(self.inner.consume_token(token))

    def forced(self) -> list[int]:
        return list(self.inner.compute_ff_tokens())

    @property
    def complete(self) -> bool:
        return bool(self.inner.is_accepting())

    @property
    def finished(self) -> bool:
        return bool(self.inner.is_stopped()) and not self.inner.is_error()

    @property
    def error(self) -> str:
        return str(self.inner.get_error())


class LlguidanceGrammar:
    """Its first mask is made here, once for all requests: it takes longest, and they may all come at the same time."""

    def __init__(self, engine: LlguidanceEngine, start: Any, size: int) -> None:
        self._engine, self._start, self.size = engine, start, size
        self._first = np.zeros((engine.vocab_size + 31) // 32, np.int32)
        start.unsafe_compute_mask_ptr(self._first.ctypes.data, self._first.nbytes)
        if start.is_error():
            raise ConstraintError(f"llguidance: {_first_line(start.get_error())}")

    def matcher(self) -> LlguidanceMatcher:
        return LlguidanceMatcher(self._engine, self._start.deep_copy(), self._first)


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
        self._tokenizer = LLTokenizer(source, n_vocab=vocab_size, eos_token=list(eos_ids) or None)
        self.vocab_size: int = self._tokenizer.vocab_size
        self._threads = threads
        self._executor: Any = None

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        tokens: list[int] = self._tokenizer.tokenize_bytes(text.encode())
        return tokens

    def compile(self, constraint: Constraint) -> LlguidanceGrammar:
        return self.load(_text(constraint))

    def prepare(self, constraint: Constraint) -> str:
        """Its text, which has been compiled and has made a mask: the fuel of the engine bounds both."""
        text = _text(constraint)
        self.load(text)
        return text

    def load(self, prepared: str) -> LlguidanceGrammar:
        grammar = LLMatcher.grammar_from_lark(prepared)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise ConstraintError(f"llguidance: {_first_line(matcher.get_error())}")
        return LlguidanceGrammar(self, matcher, _BYTES + _BYTES_PER_CHARACTER * len(prepared))

    def fill(self, matchers: Sequence[LlguidanceMatcher], masks: NDArray[np.int32], rows: Sequence[int]) -> None:
        if self._executor is None:
            self._executor = LLExecutor(self._threads)
        pairs = []
        for matcher, row in zip(matchers, rows):
            if matcher.kept is None:
                pairs.append((matcher.inner, row))
            else:
                masks[row] = matcher.kept
        if pairs:
            self._executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, masks.shape[1] * 4, len(masks))


def _text(constraint: Constraint) -> str:
    return to_lark(lexed(language_of(constraint)))


def _first_line(message: str) -> str:
    return next((line.strip() for line in message.splitlines() if line.strip()), "refused without a reason")
