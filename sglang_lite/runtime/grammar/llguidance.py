"""Constraints through llguidance, which gets our grammars (constraints/) and compiles them in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLExecutor, LLTokenizer
from numpy.typing import NDArray

from sglang_lite.constraints import walk
from sglang_lite.protocol import Constraint
from sglang_lite.runtime.grammar.base import Mask

if TYPE_CHECKING:
    from sglang_lite.runtime.tokens.tokenizer import Tokenizer

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

    def advance(self, text: bytes) -> bool:
        self.kept = None
        tokens = self.engine.spell(text)
        return tokens is not None and bool(self.inner.consume_tokens(tokens))

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

    def __init__(self, engine: LlguidanceEngine, text: str) -> None:
        self._engine, self._text, self.size = engine, text, _BYTES + _BYTES_PER_CHARACTER * len(text)
        self._beside: LlguidanceGrammar | None = None
        start = self._start = walk.start(text, engine.tokenizer)
        self._first = np.zeros((engine.vocab_size + 31) // 32, np.int32)
        start.unsafe_compute_mask_ptr(self._first.ctypes.data, self._first.nbytes)
        if start.is_error():
            raise walk.refusal(start)

    def matcher(self) -> LlguidanceMatcher:
        return LlguidanceMatcher(self._engine, self._start.deep_copy(), self._first)

    def beside(self) -> LlguidanceGrammar:
        """Where a text is forced, it would allow only the tokens that a tokenizer cuts that text into."""
        if self._beside is None:
            self._beside = LlguidanceGrammar(self._engine, '%llguidance {"no_forcing": true}\n' + self._text)
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
        self.tokenizer = LLTokenizer(source, n_vocab=vocab_size, eos_token=list(eos_ids) or None)
        self.vocab_size: int = self.tokenizer.vocab_size
        self._threads = threads
        self._executor: Any = None

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        return self.tokenizer.tokenize_bytes(text.encode())  # type: ignore[no-any-return] # it has no types

    def spell(self, text: bytes) -> list[int] | None:
        """Tokens that have these bytes; None where there are none for some."""
        tokens: list[int] = self.tokenizer.tokenize_bytes(text)
        return tokens if self.tokenizer.decode_bytes(tokens) == text else None

    def compile(self, constraint: Constraint) -> LlguidanceGrammar:
        return self.load(walk.grammar_text(constraint))

    def prepare(self, constraint: Constraint) -> str:
        """Its text, which has been compiled and has made a mask: the fuel of the engine bounds both."""
        text = walk.grammar_text(constraint)
        self.load(text)
        return text

    def load(self, prepared: str) -> LlguidanceGrammar:
        return LlguidanceGrammar(self, prepared)

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
