"""What the runtime asks of a grammar engine, and how masks are asked for: one text's, or a batch's at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_lite.protocol import Constraint, ConstraintError

logger = logging.getLogger("sglang_lite")

Mask = NDArray[np.int32]  # words of a row, least significant bit first: bit i is token i


class FillsMasks(Protocol):
    """What fills the masks of its matchers."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    def fill(self, matchers: Sequence[Any], masks: NDArray[np.int32], rows: Sequence[int]) -> None:
        """`fill_mask` of each of these matchers into its row of `masks`, on an engine's own threads."""
        ...


class Matcher(Protocol):
    """One request's place in a grammar. After an error it stays failed; `error` says why."""

    @property
    def engine(self) -> FillsMasks: ...

    def fill_mask(self, mask: Mask) -> None:
        """Sets bit i of `mask` for every token that may come next, and clears the others."""
        ...

    def accept(self, token: int) -> bool:
        """Moves past `token`. False: the grammar does not allow it."""
        ...

    def advance(self, text: bytes) -> bool:
        """Moves past a text, which is not empty, whatever tokens spell it. False: the grammar does not allow it, or no
        tokens spell it."""
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
    """A constraint made ready for one vocabulary.

    Attributes:
        size: bytes it takes, roughly.
    """

    size: int

    def matcher(self) -> Matcher: ...

    def beside(self) -> CompiledGrammar:
        """The same grammar with masks that can be combined with another's: all tokens are allowed that go on with an
        allowed text. May take as long as loading it, the first time."""
        ...


class GrammarEngine(FillsMasks, Protocol):
    """A library that turns constraints into token masks.

    What it compiles may take long, or all memory: a worker can `prepare` what is then quickly `load`ed.
    """

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Raises ConstraintError for what the engine can't enforce in full. May take long: never on the loop."""
        ...

    def prepare(self, constraint: Constraint) -> Any:
        """What of `compile` may take long, in another process. The result can be pickled. Raises as `compile`."""
        ...

    def load(self, prepared: Any) -> CompiledGrammar:
        """The grammar of what was prepared for the same vocabulary. Raises as `compile`."""
        ...


def fill_masks(matchers: Sequence[Matcher], masks: NDArray[np.int32]) -> None:
    """Fills row i of `masks` (contiguous) for the i-th matcher: one call to each engine. A matcher whose engine fails
    is left without a token that may come next, which ends its request alone."""
    by_engine: dict[int, list[int]] = {}
    for row, matcher in enumerate(matchers):
        by_engine.setdefault(id(matcher.engine), []).append(row)
    for rows in by_engine.values():
        try:
            matchers[rows[0]].engine.fill([matchers[row] for row in rows], masks, rows)
        except Exception:  # a library's; which of the rows it was about is not said
            logger.exception("%s failed to fill masks", matchers[rows[0]].engine.name)
            for row in rows:
                try:
                    matchers[row].fill_mask(masks[row])
                except Exception:  # this one's
                    masks[row] = 0


def generates(grammar: CompiledGrammar, tokens: Sequence[int]) -> bool:
    """The masks allow every token of a text, one after the other, and then the end.

    Raises:
        ConstraintError: the engine gave up on the way.
    """
    matcher = grammar.matcher()
    engine = matcher.engine
    mask = np.zeros((engine.vocab_size + 31) // 32, np.int32)
    for token in tokens:
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
