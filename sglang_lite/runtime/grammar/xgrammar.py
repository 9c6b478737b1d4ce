"""Constraints through xgrammar, which gets our grammars (constraints/): never a user's schema or regex, of which it
drops parts without a word."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xgrammar
from numpy.typing import NDArray

from sglang_lite.constraints.compose import language_of
from sglang_lite.constraints.to_gbnf import to_gbnf
from sglang_lite.protocol import Constraint, ConstraintError
from sglang_lite.runtime.grammar.base import Mask
from sglang_lite.runtime.grammar.vocabulary import Vocabulary


class XgrammarMatcher:
    """Where the text may end, the mask is made at once and kept: only it tells whether anything else can come."""

    def __init__(self, engine: XgrammarEngine, inner: Any, first: Mask) -> None:
        self.engine, self.inner = engine, inner
        self.error = ""
        self.kept: Mask | None = first  # the mask of where it is now, where that is known
        self._finished = False

    def fill_mask(self, mask: Mask) -> None:
        if self.kept is not None:
            mask[:] = self.kept
        else:
            self.inner.fill_next_token_bitmask(mask.reshape(1, -1), 0)

    def accept(self, token: int) -> bool:
        return self._moved(not self.inner.is_terminated() and self.inner.accept_token(token), f"token {token}")

    def advance(self, text: bytes) -> bool:
        return self._moved(not self.inner.is_terminated() and self.inner.accept_string(text), "the text before it")

    def _moved(self, accepted: bool, what: str) -> bool:
        if self.error or not accepted:
            self.error = self.error or f"xgrammar does not allow {what}"
            return False
        self._look()
        return True

    def _look(self) -> None:
        self.kept, self._finished = None, False
        if self.inner.is_terminated():
            self.kept, self._finished = np.zeros_like(self.engine.not_eos), True
        elif self.inner.is_completed():
            mask = np.empty_like(self.engine.not_eos)
            self.inner.fill_next_token_bitmask(mask.reshape(1, -1), 0)
            self.kept, self._finished = mask, not (mask & self.engine.not_eos).any()

    def forced(self) -> list[int]:
        if self.engine.spell is None or self.error or self.inner.is_terminated():
            return []
        # The last one might merge with what follows.
        return self.engine.spell(self.inner.find_jump_forward_string())[:-1]

    @property
    def complete(self) -> bool:
        return not self.error and bool(self.inner.is_completed())

    @property
    def finished(self) -> bool:
        return not self.error and self._finished


class XgrammarGrammar:
    def __init__(self, engine: XgrammarEngine, compiled: Any) -> None:
        self._engine = engine
        self.size: int = compiled.memory_size_bytes
        self._start = xgrammar.GrammarMatcher(compiled)
        self._first = np.zeros_like(engine.not_eos)
        self._start.fill_next_token_bitmask(self._first.reshape(1, -1), 0)

    def matcher(self) -> XgrammarMatcher:
        return XgrammarMatcher(self._engine, self._start.fork(), self._first)

    def beside(self) -> XgrammarGrammar:
        return self


class XgrammarEngine:
    """
    Args:
        vocabulary: the model's.
        threads: that fill a batch's masks.
        spell: the tokens of a text that goes on from another; None: nothing is forced.
    """

    name = "xgrammar"

    def __init__(
        self, vocabulary: Vocabulary, threads: int = 1, spell: Callable[[str], list[int]] | None = None
    ) -> None:
        self.spell = spell
        self.vocab_size = vocabulary.size
        self.not_eos = ~vocabulary.eos_mask()
        self._info = xgrammar.TokenizerInfo(
            list(vocabulary.tokens),
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=list(vocabulary.eos_ids),
        )
        # One thread, as others of this process compute; our cache is in front of it.
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=threads)

    def compile(self, constraint: Constraint) -> XgrammarGrammar:
        return XgrammarGrammar(self, self._compiled(constraint))

    def prepare(self, constraint: Constraint) -> str:
        return str(self._compiled(constraint).serialize_json())

    def load(self, prepared: str) -> XgrammarGrammar:
        return XgrammarGrammar(self, xgrammar.CompiledGrammar.deserialize_json(prepared, self._info))

    def _compiled(self, constraint: Constraint) -> Any:
        text = to_gbnf(language_of(constraint))
        try:
            return self._compiler.compile_grammar(xgrammar.Grammar.from_ebnf(text))
        except RuntimeError as error:
            if "bad_alloc" in str(error):  # the limit of memory, which is no fault of the grammar
                raise
            raise ConstraintError(f"xgrammar: {error}") from error

    def fill(self, matchers: Sequence[XgrammarMatcher], masks: NDArray[np.int32], rows: Sequence[int]) -> None:
        left: list[tuple[int, Any]] = []
        for matcher, row in zip(matchers, rows):
            if matcher.kept is None:
                left.append((row, matcher.inner))
            else:
                masks[row] = matcher.kept
        if left:
            self._batch.batch_fill_next_token_bitmask([each for _, each in left], masks, [row for row, _ in left])
