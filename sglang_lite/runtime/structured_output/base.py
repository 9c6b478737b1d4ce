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
TextState: TypeAlias = Any  # state of a text in its grammar, opaque outside the engine
# token mask: bit i, counted from the least significant bit of word 0, is token i
Mask = NDArray[np.int32]


class MaskMaker(Protocol):
    """Part of a grammar engine that computes token masks for its matchers."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    # matchers of the engine's own type
    def masks(self, matchers: Sequence[Any]) -> NDArray[np.int32]:
        """Computes the masks [N, words] of matchers. Can be called on any thread; mostly runs
        without the GIL.
        """
        ...


class TextSoFar(Protocol):
    """Text of an output so far, if a token outside the text may end it. Reports which part of the
    text is certain.

    Attributes:
        tokens: number of tokens that certainly lie entirely in the text.
        certain: the part of the text that can no longer change.
    """

    @property
    def tokens(self) -> int: ...

    @property
    def certain_text(self) -> str: ...

    def close(self, kept: int) -> None:
        """Ends the text: no more tokens follow, and those after the first `kept` ones don't belong
        to it.
        """
        ...


class Endings(Protocol):
    """Describes the positions in a text that follows a grammar, and which characters may come next
    at each. A position is identified by the grammar's state there.

    Attributes:
        start: state at the beginning of a text.
        size: approximate memory in bytes.
    """

    @property
    def size(self) -> int: ...

    @property
    def start(self) -> TextState: ...

    def after_text(self, text: str) -> Endings | None:
        """Returns the positions in texts that continue `text`, or None if the state after it is not
        known.
        """
        ...

    def advance_state(self, state: TextState, text: bytes) -> TextState | None:
        """Returns the state after a text, or None if the text is not allowed."""
        ...

    def characters(self, state: TextState) -> Iterable[tuple[str, TextState]]:
        """Yields characters that may come next, with the state after each. If the grammar does not
        distinguish several characters, it may yield only some of them.
        """
        ...


@dataclass(frozen=True)
class TextLengths:
    """Bounds on the number of tokens in a grammar's texts.

    Args:
        known: length in bytes, and so an upper bound in tokens, of one known text; None if none is
            known.
        most: upper bound for all texts; None if they are unlimited or the bound is unknown.
        search: function that returns `fewest`. It takes some milliseconds, or up to seconds, so it
            must not run on the event loop's thread.

    Attributes:
        known, most: the arguments of these names.
        fewest: lower bound for all texts; None if unknown. Usually some text has exactly this many.
            Exceptions: rules that masks enforce beyond a grammar (ruled_grammar.py), a grammar
            around a part (prefixed.py), quotes from long texts, and searches that take too much
            work.
    """

    known: int | None = None
    most: int | None = None
    search: Callable[[], int | None] = field(default=lambda: None, repr=False, compare=False)

    @cached_property
    def fewest(self) -> int | None:
        return self.search()


class Matcher(Protocol):
    """Position of one request in a grammar. After an error, a matcher stays failed and `error`
    gives the reason.

    Attributes:
        engine: computes the matcher's masks.
        parts: matchers whose masks are combined to this one's; usually only the matcher itself.
        lock_key: key of matchers that share a parser resource; their masks must not be computed
            concurrently.
        state_key: key of the grammar state; matchers with equal keys have equal masks.
        open_text: the text so far, if the last tokens may lie outside the text; None as long as all
            tokens belong to it.
        thinking: metadata about the output's thoughts, or None if the thoughts have no limits.
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
        """Returns the mask of the current position (bit i: token i may come next), or None if it
        must be computed.
        """
        ...

    def set_mask(self, mask: Mask) -> None:
        """Stores a mask that has been computed for the matcher."""
        ...

    def copy(self) -> Matcher | None:
        """Returns an independent matcher at the same position, or None if the engine can't copy
        one.
        """
        ...

    def accept(self, token: int) -> bool:
        """Advances by a token. Returns False if the grammar does not allow the token."""
        ...

    def accept_all(self, tokens: Sequence[int]) -> bool:
        """Advances by several tokens; only the last may end the text. Returns False if the grammar
        does not allow one of them.
        """
        ...

    def accept_text(self, text: bytes) -> bool:
        """Advances by a non-empty text in any tokenisation. Returns False if the text is not
        allowed or can't be spelled.
        """
        ...

    def find_forced_tokens(self) -> list[int]:
        """Returns the tokens that must come next, as the tokenizer encodes their text; empty if
        there is a choice.

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
    """Base of matchers that have no other parts and share no parser or masks. By default, masks are
    always cached, no text is forced, and copying is not possible.
    """

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

    def find_forced_tokens(self) -> list[int]:
        return []


class DelegatingMatcher:
    """Base of matchers that wrap another matcher and override parts of its behaviour.

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

    def find_forced_tokens(self) -> list[int]:
        return self._inner.find_forced_tokens()

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

    def as_combinable(self) -> CompiledGrammar:
        """Returns the same grammar with masks that can be intersected with another grammar's.

        These masks allow every token that continues with allowed text, not only the tokens that a
        tokenizer would choose. The first call may take as long as loading the grammar.
        """
        ...

    def endings(self) -> Endings | None:
        """Returns the positions in the grammar's texts, or None if they are not known."""
        ...

    def lengths(self, written: str = "") -> TextLengths:
        """Returns bounds on the number of tokens in the grammar's texts.

        Args:
            written: beginning of the text that already exists, whose tokens are not counted.
        """
        ...


class GrammarEngine(MaskMaker, Protocol):
    """Library that turns constraints into token masks.

    Compiling may take long or exhaust memory. So a worker process can `prepare` a constraint, after
    which `load_prepared` is quick.
    """

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Compiles a constraint. May take long, so it must never run on the event loop's thread.

        Raises:
            ConstraintError: the engine can't enforce the constraint in full.
        """
        ...

    def prepare(self, constraint: Constraint) -> PreparedGrammar:
        """Does the slow part of `compile`, usually in another process; the result is picklable.
        Raises the same errors as `compile`.
        """
        ...

    def load_prepared(self, prepared: PreparedGrammar) -> CompiledGrammar:
        """Loads a grammar that was prepared for the same vocabulary. Raises the same errors as
        `compile`.
        """
        ...


def next_mask(matcher: Matcher) -> Mask:
    """Returns the mask at a matcher's position, computing it in the calling thread if necessary."""
    # a loop, as a part's new mask may evict another part's
    while (mask := matcher.cached_mask()) is None:
        for part in matcher.parts:
            if part.cached_mask() is None:
                part.set_mask(part.engine.masks([part])[0])
    return mask


def masks_allow_tokens(grammar: CompiledGrammar, tokens: Sequence[int]) -> bool:
    """Returns True if the masks allow all tokens of a text in order, followed by its end.

    Raises:
        ConstraintError: the engine failed before the end of the text.
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
