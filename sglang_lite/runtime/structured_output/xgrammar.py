"""Enforces constraints with xgrammar, which compiles our grammars (constraints/), never a user's
schema or regex.

xgrammar ignores parts of some schemas and regexes without notice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any  # the library has no types

import numpy as np
import xgrammar
from numpy.typing import NDArray

from sglang_lite.constraints.emit.gbnf import to_gbnf
from sglang_lite.constraints.kinds import language_for_constraint
from sglang_lite.protocol import Constraint, ConstraintError
from sglang_lite.protocol.anything import Foreign
from sglang_lite.runtime.structured_output.base import LoneMatcher, Mask, TextLengths
from sglang_lite.runtime.structured_output.vocabulary import Vocabulary

_LONGEST = 256  # most characters forced in one step, as all rows wait while they are tokenised


class XgrammarMatcher(LoneMatcher):
    """Matcher that uses xgrammar. Where the text may end, its mask is computed immediately, since
    only the mask shows whether more can follow.
    """

    def __init__(self, engine: XgrammarEngine, inner: Foreign, first: Mask) -> None:
        self.engine = engine
        self.inner = inner
        self.error = ""
        self._mask: Mask | None = first
        self._finished = False

    def cached_mask(self) -> Mask | None:
        return self._mask

    def set_mask(self, mask: Mask) -> None:
        self._mask = mask

    def copy(self) -> XgrammarMatcher:
        copied = copy(self)
        copied.inner = self.inner.fork()
        return copied

    def accept(self, token: int) -> bool:
        return self._update_if_accepted(
            not self.inner.is_terminated() and self.inner.accept_token(token), f"token {token}"
        )

    def accept_text(self, text: bytes) -> bool:
        return self._update_if_accepted(
            not self.inner.is_terminated() and self.inner.accept_string(text), "the text before it"
        )

    def _update_if_accepted(self, accepted: bool, what: str) -> bool:
        if self.error or not accepted:
            self.error = self.error or f"xgrammar does not allow {what}"
            return False
        self._refresh_termination()
        return True

    def _refresh_termination(self) -> None:
        self._mask = None
        self._finished = False
        if self.inner.is_terminated():
            self._mask = np.zeros_like(self.engine.not_eos)
            self._finished = True
        elif self.inner.is_completed():
            self._mask = self.engine.masks([self])[0]
            self._finished = not (self._mask & self.engine.not_eos).any()

    def find_forced_tokens(self) -> list[int]:
        if self.engine.spell is None or self.error or self.inner.is_terminated():
            return []
        try:
            forced = self.inner.find_jump_forward_string()
        except UnicodeDecodeError:  # the forced text starts or ends inside a character
            return []
        # the last one might merge with what follows
        return self.engine.spell(forced[:_LONGEST])[:-1]

    @property
    def complete(self) -> bool:
        return not self.error and bool(self.inner.is_completed())

    @property
    def finished(self) -> bool:
        return not self.error and self._finished


class XgrammarGrammar:
    sources = ()  # the engine rejects them

    def __init__(self, engine: XgrammarEngine, compiled: Foreign) -> None:
        self._engine = engine
        self.size: int = compiled.memory_size_bytes
        self._start = xgrammar.GrammarMatcher(compiled)
        self._first = np.zeros_like(engine.not_eos)
        self._start.fill_next_token_bitmask(self._first.reshape(1, -1), 0)

    def matcher(self) -> XgrammarMatcher:
        return XgrammarMatcher(self._engine, self._start.fork(), self._first)

    def as_combinable(self) -> XgrammarGrammar:
        return self

    def lengths(self, written: str = "") -> TextLengths:
        """Returns no bounds, since the prepared grammar does not contain the language."""
        return TextLengths()

    def endings(self) -> None:
        """Returns None, since the engine's states do not correspond to states of the language."""


class XgrammarEngine:
    """Grammar engine that uses xgrammar, for one vocabulary.

    Args:
        vocabulary: vocabulary of the model.
        spell: function that tokenises text that is not at the start, or None to force no tokens.
    """

    name = "xgrammar"

    def __init__(
        self, vocabulary: Vocabulary, spell: Callable[[str], list[int]] | None = None
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
        # One thread, as the process needs the other cores; no cache, as our `Compiler` has one.
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=1)

    def compile(self, constraint: Constraint) -> XgrammarGrammar:
        return XgrammarGrammar(self, self._compile_grammar(constraint))

    def prepare(self, constraint: Constraint) -> str:
        return str(self._compile_grammar(constraint).serialize_json())

    def load_prepared(self, prepared: str) -> XgrammarGrammar:
        return XgrammarGrammar(
            self, xgrammar.CompiledGrammar.deserialize_json(prepared, self._info)
        )

    def _compile_grammar(self, constraint: Constraint) -> Any:
        text = to_gbnf(language_for_constraint(constraint))
        try:
            return self._compiler.compile_grammar(xgrammar.Grammar.from_ebnf(text))
        except RuntimeError as error:
            if "bad_alloc" in str(error):  # out of memory, not an error in the grammar
                raise
            raise ConstraintError(f"xgrammar: {error}") from error

    def masks(self, matchers: Sequence[XgrammarMatcher]) -> NDArray[np.int32]:
        masks = np.empty((len(matchers), len(self.not_eos)), np.int32)
        self._batch.batch_fill_next_token_bitmask(
            [m.inner for m in matchers], masks, list(range(len(matchers)))
        )
        return masks
