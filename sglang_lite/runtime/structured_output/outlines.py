"""Enforces regular constraints with outlines-core, as a cross-check of the other engines. The
library's index holds the tokens that are allowed in each state.

Its automata (0.2.14) lose text that may follow a possible end. So the end of the sequence is made
part of the text, spelled as NUL, which then must not occur elsewhere in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from outlines_core import Guide, Index
from outlines_core import Vocabulary as Tokens

from sglang_lite.constraints.emit.regex import to_rust_regex
from sglang_lite.constraints.formal.automaton import is_empty
from sglang_lite.constraints.formal.grammars import inline_all_rules
from sglang_lite.constraints.formal.nodes import (
    ANY_TEXT,
    concat,
    has_no_set_operations,
    intersection,
    literal,
)
from sglang_lite.constraints.kinds import language_for_constraint
from sglang_lite.protocol import Constraint, ConstraintError
from sglang_lite.protocol.anything import Foreign
from sglang_lite.runtime.structured_output.base import LoneMatcher, Mask, TextLengths
from sglang_lite.runtime.structured_output.vocabulary import Vocabulary

_END = b"\0"


class OutlinesMatcher(LoneMatcher):
    def __init__(self, engine: OutlinesEngine, index: Foreign) -> None:
        self.engine = engine
        self.error = ""
        self._guide = Guide(index)
        self._ended = False
        self._refresh_completion()

    def cached_mask(self) -> Mask:
        """Returns the mask. It is always available, since the index holds the tokens of each state."""
        # The library's own end-of-sequence token comes after the model's tokens, and may need
        # another word.
        mask = np.zeros(self.engine.vocab_size // 32 + 1, dtype=self.engine.not_eos.dtype)
        if not self._ended:
            self._guide.write_mask_into(mask.ctypes.data, mask.size, 4)
        return mask[: self.engine.not_eos.size]

    def accept(self, token: int) -> bool:
        return self._advance_guide([token], f"token {token}")

    def accept_text(self, text: bytes) -> bool:
        return self._advance_guide(self.engine.spell(text), "the text before it")

    def _advance_guide(self, tokens: list[int], what: str) -> bool:
        if self.error or self._ended or not tokens or not self._guide.accepts_tokens(tokens):
            self.error = self.error or f"outlines does not allow {what}"
            return False
        for token in tokens:
            self._guide.advance(token, False)
        self._ended = tokens[-1] in self.engine.eos_ids
        self._refresh_completion()
        return True

    def _refresh_completion(self) -> None:
        self._complete = self._ended or self._guide.accepts_tokens([self.engine.eos_ids[0]])
        self._finished = self._ended
        if self._complete and not self._ended:
            self._finished = not (self.cached_mask() & self.engine.not_eos).any()

    @property
    def complete(self) -> bool:
        return not self.error and self._complete

    @property
    def finished(self) -> bool:
        return not self.error and self._finished


class OutlinesGrammar:
    sources = ()  # the engine rejects them

    def __init__(self, engine: OutlinesEngine, index: Foreign, size: int) -> None:
        self._engine = engine
        self._index = index
        self.size = size

    def matcher(self) -> OutlinesMatcher:
        return OutlinesMatcher(self._engine, self._index)

    def as_combinable(self) -> OutlinesGrammar:
        return self

    def lengths(self, written: str = "") -> TextLengths:
        """Returns no bounds, since the prepared grammar does not contain the language."""
        return TextLengths()

    def endings(self) -> None:
        """Returns None, since the engine's states do not correspond to states of the language."""


class OutlinesEngine:
    """Grammar engine that uses outlines-core, for one vocabulary.

    Args:
        vocabulary: vocabulary of the model.
    """

    name = "outlines"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocab_size = vocabulary.size
        self.eos_ids = vocabulary.eos_ids
        self.not_eos = ~vocabulary.eos_mask()
        ids: dict[bytes, list[int]] = {}
        for i, token in enumerate(vocabulary.tokens):
            if token and _END not in token and i not in vocabulary.eos_ids:
                ids.setdefault(token, []).append(i)
        self._ids = ids
        self._longest = max(map(len, ids), default=0)
        # The library's own end-of-sequence token gets an id that no other token has.
        self._tokens = Tokens(vocabulary.size, {**ids, _END: list(vocabulary.eos_ids)})

    def compile(self, constraint: Constraint) -> OutlinesGrammar:
        return self.load_prepared(self.prepare(constraint))

    def prepare(self, constraint: Constraint) -> bytes:
        node = inline_all_rules(language_for_constraint(constraint))
        if node is None or not has_no_set_operations(node):
            raise ConstraintError(
                "outlines: only plain regular expressions and choices can be enforced.",
                hint='Use constraint_backend="auto".',
            )
        if not is_empty(intersection(node, concat(ANY_TEXT, literal("\0"), ANY_TEXT))):
            raise ConstraintError(
                "outlines: a text may have a NUL character in it, with which this engine marks the end.",
                hint='Exclude it ([^\\0] is not .), or use constraint_backend="auto".',
            )
        try:
            index = Index(f"(?:{to_rust_regex(node)})\\x00", self._tokens)
        except ValueError as error:
            raise ConstraintError(f"outlines: {error}") from error
        packed: bytes = index.__reduce__()[1][0]
        return packed

    def load_prepared(self, prepared: bytes) -> OutlinesGrammar:
        return OutlinesGrammar(self, Index.from_binary(prepared), 2 * len(prepared))

    def spell(self, text: bytes) -> list[int]:
        """Returns tokens that spell the text, each as long as possible, or an empty list if none
        do.
        """
        tokens = list[int]()
        at = 0
        while at < len(text):
            ends = range(min(at + self._longest, len(text)), at, -1)
            end = next((end for end in ends if text[at:end] in self._ids), None)
            if end is None:
                return []
            tokens.append(self._ids[text[at:end]][0])
            at = end
        return tokens

    def masks(self, matchers: Sequence[OutlinesMatcher]) -> NDArray[np.int32]:
        return np.stack([matcher.cached_mask() for matcher in matchers])
