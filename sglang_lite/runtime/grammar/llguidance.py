"""Constraints through llguidance, which gets our grammars (constraints/) and compiles them in milliseconds."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from sglang_lite.constraints.compose import language_of
from sglang_lite.constraints.lexing import lexed
from sglang_lite.constraints.to_lark import to_lark
from sglang_lite.protocol import Constraint, ConstraintError

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


class LlguidanceMatcher:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill_mask(self, mask: NDArray[np.int32]) -> None:
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def accept(self, token: int) -> bool:
        return bool(self._matcher.consume_token(token))

    def forced(self) -> list[int]:
        return list(self._matcher.compute_ff_tokens())

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_accepting())

    @property
    def finished(self) -> bool:
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def error(self) -> str:
        return str(self._matcher.get_error())


class LlguidanceGrammar:
    def __init__(self, start: Any) -> None:
        self._start = start

    def matcher(self) -> LlguidanceMatcher:
        return LlguidanceMatcher(self._start.deep_copy())


class LlguidanceEngine:
    """
    Args:
        tokenizer: the model's; None for a token per byte, whatever the model.
        vocab_size: the model's, padding included; None: the tokenizer's.
        eos_ids: tokens that may end a complete text.
        cache_size: compiled grammars kept.
    """

    name = "llguidance"

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int | None = None,
        eos_ids: Sequence[int] = (),
        cache_size: int = 1024,
    ) -> None:
        source = "byte" if tokenizer is None else tokenizer.backend.to_str()
        self._tokenizer = LLTokenizer(source, n_vocab=vocab_size, eos_token=list(eos_ids) or None)
        self.vocab_size: int = self._tokenizer.vocab_size
        self._cache: OrderedDict[Constraint, LlguidanceGrammar] = OrderedDict()
        self._cache_size = cache_size
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        tokens: list[int] = self._tokenizer.tokenize_bytes(text.encode())
        return tokens

    def compile(self, constraint: Constraint) -> LlguidanceGrammar:
        with self._lock:
            if constraint in self._cache:
                self._cache.move_to_end(constraint)
                return self._cache[constraint]
        grammar = LLMatcher.grammar_from_lark(to_lark(lexed(language_of(constraint))))
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise ConstraintError(f"llguidance: {_first_line(matcher.get_error())}")
        compiled = LlguidanceGrammar(matcher)
        with self._lock:
            self._cache[constraint] = compiled
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return compiled


def _first_line(message: str) -> str:
    return next((line.strip() for line in message.splitlines() if line.strip()), "refused without a reason")
