"""What the runtime asks of a grammar engine, and how a text is walked through its masks."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_lite.protocol import Constraint, ConstraintError


class Matcher(Protocol):
    """One request's place in a grammar. After an error it stays failed; `error` says why."""

    def fill_mask(self, mask: NDArray[np.int32]) -> None:
        """Sets bit i of `mask` (int32 words, least significant bit first) for every token that may come next."""
        ...

    def accept(self, token: int) -> bool:
        """Moves past `token`. False: the grammar does not allow it."""
        ...

    def forced(self) -> list[int]:
        """The tokens that must come next, spelled as the tokenizer spells their text. The last ones are held back while
        what follows might merge with them. Empty where there is a choice."""
        ...

    @property
    def complete(self) -> bool:
        """The text so far is in the language."""
        ...

    @property
    def finished(self) -> bool:
        """It is, and nothing can follow but the end."""
        ...

    @property
    def error(self) -> str: ...


class CompiledGrammar(Protocol):
    """A constraint made ready for one vocabulary."""

    def matcher(self) -> Matcher: ...


class GrammarEngine(Protocol):
    """A library that turns constraints into token masks."""

    name: str
    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        ...

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Raises ConstraintError for what the engine can't enforce in full. May take long: never on the loop."""
        ...


def generates(engine: GrammarEngine, grammar: CompiledGrammar, text: str) -> bool:
    """The masks allow every token of the text, one after the other, and then the end.

    Raises:
        ConstraintError: the engine gave up on the way.
    """
    matcher = grammar.matcher()
    mask = np.zeros((engine.vocab_size + 31) // 32, np.int32)
    for token in engine.encode(text):
        if matcher.finished:
            return False
        matcher.fill_mask(mask)
        if matcher.error:
            raise ConstraintError(f"{engine.name}: {matcher.error}")
        allowed = bool(mask[token // 32] >> (token % 32) & 1)
        if allowed != matcher.accept(token):
            raise ConstraintError(f"{engine.name}: a mask and its matcher disagree.")
        if not allowed:
            return False
    return matcher.complete
