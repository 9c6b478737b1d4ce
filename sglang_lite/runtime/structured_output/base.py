"""Interface between the runtime and grammar engines."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sglang_lite.protocol import Constraint, ConstraintError

PreparedGrammar: TypeAlias = Any  # engine-specific and picklable
TextState: TypeAlias = Any  # state of a text in its grammar, of a kind that only the engine knows
Mask = NDArray[np.int32]  # token mask: bit i, counted from the least significant bit of word 0, is token i


class MaskMaker(Protocol):
    """Part of a grammar engine that computes token masks for its matchers."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    def masks(self, matchers: Sequence[Any]) -> NDArray[np.int32]:  # matchers of the engine's own type
        """Computes the masks [N, words] of matchers. Callable on any thread; mostly runs without the GIL."""
        ...


class TextSoFar(Protocol):
    """Text that a token outside it may end, at the beginning of what a model writes.

    Attributes:
        tokens: how many of the tokens certainly lie in the text as a whole.
        certain: the part of the text that is certain so far.
    """

    @property
    def tokens(self) -> int: ...

    @property
    def certain(self) -> str: ...

    def close(self, kept: int) -> None:
        """Ends the text: no more tokens follow, and only the first `kept` ones may belong to it."""
        ...


class Endings(Protocol):
    """Places in the texts of a grammar, by the state that a text is in.

    Attributes:
        start: state in which the texts begin.
        size: approximate memory in bytes.
    """

    @property
    def size(self) -> int: ...

    @property
    def start(self) -> TextState: ...

    def after_text(self, text: str) -> Endings | None:
        """Places behind `text`, or None if its state is not known."""
        ...

    def advance(self, state: TextState, text: bytes) -> TextState | None:
        """State after a text, or None if it is not allowed."""
        ...

    def characters(self, state: TextState) -> Iterable[tuple[str, TextState]]:
        """Characters that may come next, some of each kind, with the state after each."""
        ...


@dataclass(frozen=True)
class TextLengths:
    """Bounds of the number of tokens of a grammar's texts.

    Args:
        known: bytes of a text that is known, so as many tokens at most; None if none is known.
        most: number of tokens that no text has more of; None if there is no limit, or none is known.
        search: function that returns `fewest`. It takes some milliseconds, or up to seconds, so it must not run on the
            event loop's thread.

    Attributes:
        known, most: the arguments of these names.
        fewest: number that no text has less of; None if it is not known. Mostly a text has so few: but for rules that
            masks enforce beyond a grammar (ruled_grammar.py), a grammar around a part (prefixed.py), quotes of long
            texts, and searches that take too much work.
    """

    known: int | None = None
    most: int | None = None
    search: Callable[[], int | None] = field(default=lambda: None, repr=False, compare=False)

    @cached_property
    def fewest(self) -> int | None:
        return self.search()


class Matcher(Protocol):
    """Position of one request in a grammar. After an error a matcher stays failed, and `error` has the reason.

    Attributes:
        engine: maker of the matcher's masks.
        parts: matchers whose masks are combined to this one's; usually only the matcher itself.
        lock_key: key of matchers that share a parser resource; their masks must not be computed concurrently.
        state_key: key of the grammar state; matchers with equal keys have equal masks.
        open_text: text that ends before the token that ends it; None as long as all tokens belong to the text.
        thinking: what the output's metadata says about its thoughts, or None if these have no limits.
    """

    @property
    def engine(self) -> MaskMaker: ...

    @property
    def parts(self) -> Sequence[Matcher]: ...

    @property
    def lock_key(self) -> Hashable: ...

    @property
    def state_key(self) -> Hashable: ...

    @property
    def open_text(self) -> TextSoFar | None: ...

    @property
    def thinking(self) -> dict[str, object] | None: ...

    def cached_mask(self) -> Mask | None:
        """Returns the mask of the current position (bit i: token i may come next), or None if it must be computed."""
        ...

    def set_mask(self, mask: Mask) -> None:
        """Stores a mask that has been computed for the matcher."""
        ...

    def copy(self) -> Matcher | None:
        """Returns a matcher at the same position that moves by itself, or None if the engine can't copy one."""
        ...

    def accept(self, token: int) -> bool:
        """Advances by a token. Returns False if the grammar does not allow the token."""
        ...

    def accept_all(self, tokens: Sequence[int]) -> bool:
        """Advances by tokens, of which only the last may end the text. Returns False if the grammar does not allow
        one."""
        ...

    def advance(self, text: bytes) -> bool:
        """Advances by a non-empty text in any tokenisation. Returns False if the text is not allowed or can't be
        spelled."""
        ...

    def forced(self) -> list[int]:
        """Returns the tokens that must come next, as the tokenizer encodes their text; empty if there is a choice.

        The last tokens are held back while following text might merge with them.
        """
        ...

    @property
    def complete(self) -> bool:
        """True if the text so far is in the language."""
        ...

    @property
    def finished(self) -> bool:
        """True if the text so far is in the language and can't be continued."""
        ...

    @property
    def error(self) -> str: ...


class LoneMatcher:
    """Base of matchers that are their only part and share no parser and no masks. By default, masks are always cached,
    no text is forced, and they can't be copied."""

    open_text: TextSoFar | None = None
    thinking: dict[str, object] | None = None

    @property
    def parts(self) -> tuple[Self]:
        return (self,)

    @property
    def lock_key(self) -> Hashable:
        return id(self)

    state_key = lock_key

    def set_mask(self, mask: Mask) -> None:
        raise AssertionError("its masks are always cached")

    def copy(self) -> Self | None:
        return None

    def accept(self, token: int) -> bool:
        raise NotImplementedError

    def accept_all(self, tokens: Sequence[int]) -> bool:
        return all(map(self.accept, tokens))

    def forced(self) -> list[int]:
        return []


class DelegatingMatcher:
    """Base of matchers that differ from an inner one in what they define.

    Args:
        inner: the inner matcher.
    """

    def __init__(self, inner: Matcher) -> None:
        self._inner = inner

    @property
    def engine(self) -> MaskMaker:
        return self._inner.engine

    @property
    def parts(self) -> Sequence[Matcher]:
        return self._inner.parts

    @property
    def lock_key(self) -> Hashable:
        return self._inner.lock_key

    @property
    def state_key(self) -> Hashable:
        return id(self)

    @property
    def open_text(self) -> TextSoFar | None:
        return self._inner.open_text

    @property
    def thinking(self) -> dict[str, object] | None:
        return self._inner.thinking

    def set_mask(self, mask: Mask) -> None:
        self._inner.set_mask(mask)

    def accept(self, token: int) -> bool:
        return self._inner.accept(token)

    def accept_all(self, tokens: Sequence[int]) -> bool:
        return all(map(self.accept, tokens))

    def forced(self) -> list[int]:
        return self._inner.forced()

    @property
    def complete(self) -> bool:
        return self._inner.complete

    @property
    def finished(self) -> bool:
        return self._inner.finished

    @property
    def error(self) -> str:
        return self._inner.error


class CompiledGrammar(Protocol):
    """Constraint compiled for one vocabulary.

    Attributes:
        size: approximate memory in bytes, which may grow as texts are written.
        sources: texts that parts of its texts are copied from.
    """

    @property
    def size(self) -> int: ...

    @property
    def sources(self) -> Sequence[str]: ...

    def matcher(self) -> Matcher: ...

    def combinable(self) -> CompiledGrammar:
        """Returns the same grammar with masks that can be intersected with another grammar's.

        These masks allow every token that continues with allowed text, not only the tokens that a tokenizer would
        choose. The first call may take as long as loading the grammar.
        """
        ...

    def endings(self) -> Endings | None:
        """Returns the places in the grammar's texts, or None if they are not known."""
        ...

    def lengths(self, written: str = "") -> TextLengths:
        """Returns bounds of the numbers of tokens of its texts.

        Args:
            written: beginning of the texts that is there already, and does not count.
        """
        ...


class GrammarEngine(MaskMaker, Protocol):
    """Library that turns constraints into token masks.

    Compiling may take long or exhaust memory, so a worker process can `prepare` a constraint, and `load` is then quick.
    """

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Compiles a constraint. May take long, so it must never run on the event loop's thread.

        Raises:
            ConstraintError: the engine can't enforce the constraint in full.
        """
        ...

    def prepare(self, constraint: Constraint) -> PreparedGrammar:
        """Does the slow part of `compile`, usually in another process; the result is picklable. Raises as `compile`."""
        ...

    def load(self, prepared: PreparedGrammar) -> CompiledGrammar:
        """Loads a grammar that was prepared for the same vocabulary. Raises as `compile`."""
        ...


def next_mask(matcher: Matcher) -> Mask:
    """Returns the mask at a matcher's position, computing it in the calling thread if necessary."""
    while (mask := matcher.cached_mask()) is None:  # a loop, as a part's new mask may evict another part's
        for part in matcher.parts:
            if part.cached_mask() is None:
                part.set_mask(part.engine.masks([part])[0])
    return mask


def masks_allow(grammar: CompiledGrammar, tokens: Sequence[int]) -> bool:
    """Returns True if the masks allow all tokens of a text in order, and then the end.

    Raises:
        ConstraintError: the engine failed on the way.
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
            reason = matcher.error or "a mask and its matcher disagree."
            raise ConstraintError(f"{engine.name}: {reason}")
        if not allowed:
            return False
    return matcher.complete
