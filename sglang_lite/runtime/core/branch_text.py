"""Text of a program's branch: its growing prompt, the text that the branch has added, and the grammar that it is in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from sglang_lite.protocol import ConstraintError, SglError, Span
from sglang_lite.runtime.structured_output.base import CompiledGrammar
from sglang_lite.runtime.structured_output.prefixed import matcher_after
from sglang_lite.runtime.tokens.token_log import TokenLog


@dataclass(slots=True)
class OpenGrammar:
    """A grammar that a branch is in, and the text written in it so far. Walking the text through the grammar takes
    long, so not on the loop's thread.

    Attributes:
        grammar: compiled grammar.
        text: text since the grammar began.
        asked: True if text inside it was generated or selected; text that was only written by the program is not
            checked.
    """

    grammar: CompiledGrammar
    text: str
    asked: bool = False

    def possible(self, choices: Sequence[str]) -> list[str]:
        """Choices that the grammar allows after the text. Raises ConstraintError if it allows none of them."""
        found = [choice for choice in choices if self._begins(self.text + choice)]
        if not found:
            raise ConstraintError(f"the grammar allows none of the choices here: {', '.join(map(repr, choices))}.")
        return found

    def end(self, ended: Callable[[SglError | None], None]) -> Callable[[], None]:
        """Checks that the text completes the grammar. Returns a call of `ended` with an error, or with None if the text
        is complete."""
        error: SglError | None = None
        try:
            if not matcher_after(self.grammar, self.text).complete:
                error = ConstraintError(f"the grammar is not complete at its end, after {self.text[-80:]!r}.")
        except SglError as why:
            error = why
        return partial(ended, error)

    def _begins(self, text: str) -> bool:
        try:
            matcher_after(self.grammar, text)
        except ConstraintError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class TextMark:
    """Position in a branch's text to roll back to."""

    log: TokenLog
    new: tuple[Span, ...]
    added: int
    grammar: OpenGrammar | None


class BranchText:
    """Text of a program's branch.

    Args:
        log: token log of the prompt.
        new: spans after the log that are not tokenised yet.
        grammar: grammar that the branch is in, used by this branch alone; None outside a grammar.

    Attributes:
        added: spans that the branch has added since its start.
    """

    def __init__(self, log: TokenLog, new: Sequence[Span], grammar: OpenGrammar | None) -> None:
        self.log, self.new, self.grammar = log, list(new), grammar
        self.added: list[Span] = []
        self._lengths: dict[int, int] = {}  # length of `added` after each node, by place

    def write(self, spans: Sequence[Span]) -> None:
        """Appends spans; text without ids is tokenised when ids are needed."""
        for span in spans:
            if not self.new and span.ids is not None and self.log.ready:
                self.log.append((span,))
            else:
                self.new.append(span)
        self.added += spans
        if self.grammar is not None:
            self.grammar.text += "".join(span.text for span in spans)

    def take_new(self) -> list[Span]:
        """Removes and returns the spans that are not in the log yet; the caller must append them to the log."""
        new, self.new = self.new, []
        return new

    def mark_played(self, place: int) -> None:
        """Records the length of the added text after the node at `place`."""
        self._lengths[place] = len(self.added)

    def added_before(self, end: int) -> list[Span]:
        """Spans that the first `end` nodes have added."""
        places = [place for place in self._lengths if place < end]
        return self.added[: self._lengths[max(places)]] if places else []

    def open_grammar(self) -> OpenGrammar | None:
        """Copy of the grammar that the branch is in, or None."""
        return None if self.grammar is None else replace(self.grammar)

    def tail(self) -> list[Span] | None:
        """Text after the last final token, or None if unknown."""
        if self.log.fixed and not any(span.ids for span in self.new):
            return [*self.log.open, *self.new]
        return None

    def mark(self) -> TextMark:
        return TextMark(self.log.copy(), tuple(self.new), len(self.added), self.open_grammar())

    def go_back(self, mark: TextMark) -> None:
        self.log, self.new = mark.log.copy(), list(mark.new)
        self.grammar = None if mark.grammar is None else replace(mark.grammar)
        del self.added[mark.added :]
        self._lengths = {at: length for at, length in self._lengths.items() if length <= mark.added}

    def fork(self) -> BranchText:
        """Text of a new branch that continues from here."""
        return BranchText(self.log.copy(), self.new, self.open_grammar())
