"""What the runtime asks of a grammar engine."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_lite.protocol import Constraint


class Matcher(Protocol):
    """One request's place in a grammar. After an error it stays failed; `error` says why."""

    def fill_mask(self, mask: NDArray[np.int32]) -> None:
        """Sets bit i of `mask` (int32 words, least significant bit first) for every token that may come next."""
        ...

    def accept(self, token: int) -> bool:
        """Moves past `token`. False: the grammar does not allow it."""
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

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Raises ConstraintError for what the engine can't enforce in full. May take long: never on the loop."""
        ...
