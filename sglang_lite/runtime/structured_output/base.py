"""The interface of grammar engines, as the runtime sees them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sglang_lite.protocol import Constraint, ConstraintError

PreparedGrammar: TypeAlias = Any  # each engine's own; can be pickled
Mask = NDArray[np.int32]  # words of a row, least significant bit first: bit i is token i


class MaskMaker(Protocol):
    """The part of an engine that makes masks of its matchers."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    def masks(self, matchers: Sequence[Any]) -> NDArray[np.int32]:  # its own matchers, of its own type
        """The masks of matchers [N, words]: on any thread, and for the most part without Python's lock."""
        ...


class NumberSoFar(Protocol):
    """The number that a text begins with.

    Attributes:
        tokens: how many of the text's tokens lie in it, so far as that is certain.
    """

    @property
    def tokens(self) -> int: ...

    def take(self) -> str:
        """The text of the number that has become certain since the last call."""
        ...

    def close(self) -> None:
        """Ends the text: no more tokens come."""
        ...


class Matcher(Protocol):
    """Place of one request in a grammar. After an error it stays failed; `error` says why.

    Attributes:
        parts: the matchers whose masks make up its own: itself, for most.
        line: masks of matchers of one line can't be made at the same time.
        place: matchers in the same place have the same mask.
        number: its text, which ends before the token that ends it; None for what is not a number.
    """

    @property
    def engine(self) -> MaskMaker: ...

    @property
    def parts(self) -> Sequence[Matcher]: ...

    @property
    def line(self) -> Hashable: ...

    @property
    def place(self) -> Hashable: ...

    @property
    def number(self) -> NumberSoFar | None: ...

    def known(self) -> Mask | None:
        """The mask of the current place: bit i is set for every token i that may come next. None: it has to be made."""
        ...

    def learn(self, mask: Mask) -> None:
        """Takes the mask that was made for it."""
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
        """The text so far is in the language, and nothing can follow but the end."""
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

    def combinable(self) -> CompiledGrammar:
        """The same grammar with masks that can be combined with another's: all tokens are allowed that continue with an
        allowed text. May take as long as loading it, the first time."""
        ...


class GrammarEngine(MaskMaker, Protocol):
    """A library that turns constraints into token masks.

    What it compiles may take long, or all memory: a worker can `prepare` what is then quickly `load`ed.
    """

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Raises ConstraintError for what the engine can't enforce in full. May take long: never on the loop."""
        ...

    def prepare(self, constraint: Constraint) -> PreparedGrammar:
        """The slow part of `compile`, for another process. The result can be pickled. Raises as `compile`."""
        ...

    def load(self, prepared: PreparedGrammar) -> CompiledGrammar:
        """The grammar of what was prepared for the same vocabulary. Raises as `compile`."""
        ...


def next_mask(matcher: Matcher) -> Mask:
    """The mask of where a matcher is, made at once."""
    while (mask := matcher.known()) is None:  # what is learned may push another part's out of what is kept
        for part in matcher.parts:
            if part.known() is None:
                part.learn(part.engine.masks([part])[0])
    return mask


def generates(grammar: CompiledGrammar, tokens: Sequence[int]) -> bool:
    """The masks allow every token of a text, one after the other, and then the end.

    Raises:
        ConstraintError: the engine gave up on the way.
    """
    matcher = grammar.matcher()
    engine = matcher.engine
    for token in tokens:
        if matcher.finished:
            return False
        mask = next_mask(matcher)
        if matcher.error:
            raise ConstraintError(f"{engine.name}: {matcher.error}")
        allowed = bool(mask[token // 32] >> (token % 32) & 1)
        if allowed != matcher.accept(token):
            why = matcher.error or "a mask and its matcher disagree."
            raise ConstraintError(f"{engine.name}: {why}")
        if not allowed:
            return False
    return matcher.complete
