"""Text of a program's branch: the prompt that it extends, the text that it has added, and the
grammar that is open in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from sglang_lite.program.nodes import Content, ImagePart, Text
from sglang_lite.program.play.branch import BranchText
from sglang_lite.protocol import Constraint, ConstraintError, SglError, Span
from sglang_lite.runtime.structured_output.base import CompiledGrammar
from sglang_lite.runtime.structured_output.prefixed import start_matcher_after_text
from sglang_lite.runtime.tokens.token_log import TokenLog


@dataclass(slots=True)
class OpenGrammar:
    """Grammar that is open in a branch, and the text written in it so far.

    Walking the text through the grammar is slow, so it must not happen on the loop's thread.

    Attributes:
        grammar: compiled grammar.
        constraint: constraint that it was compiled from.
        text: text since the grammar began.
        asked: True if text inside it was generated or selected; text written only by the program is
            not checked.
    """

    grammar: CompiledGrammar
    constraint: Constraint
    text: str
    asked: bool = False

    def allowed_choices(self, choices: Sequence[str]) -> list[str]:
        """Returns the choices that the grammar allows after the text. Raises ConstraintError if it
        allows none of them.
        """
        found = [choice for choice in choices if self._can_begin_with(self.text + choice)]
        if not found:
            raise ConstraintError(
                f"the grammar allows none of the choices here: {', '.join(map(repr, choices))}."
            )
        return found

    def check_grammar_complete(
        self, ended: Callable[[SglError | None], None]
    ) -> Callable[[], None]:
        """Checks whether the text completes the grammar. Returns a callable that calls `ended` with
        the result: an error, or None if the grammar is complete.
        """
        error: SglError | None = None
        try:
            if not start_matcher_after_text(self.grammar, self.text).complete:
                error = ConstraintError(
                    f"the grammar is not complete at its end, after {self.text[-80:]!r}."
                )
        except SglError as why:
            error = why
        return partial(ended, error)

    def _can_begin_with(self, text: str) -> bool:
        try:
            start_matcher_after_text(self.grammar, text)
        except ConstraintError:
            return False
        return True


class PreparedImage(ImagePart, frozen=True, eq=False):
    """Medium of a program, with its placeholders or the error that prevents them."""

    spans: tuple[Span, ...] = ()
    error: SglError | None = None


class TokenText(BranchText[Span]):
    """Text of a program's branch: token ids, followed by text that is not tokenised yet.

    Args:
        log: token log of the prompt.
        new: spans after the log that are not tokenised yet.
        grammar: grammar that the branch is in, used only by this branch; None outside a grammar.
    """

    __slots__ = ("grammar", "log", "new")

    def __init__(
        self, log: TokenLog, new: Sequence[Span] = (), grammar: OpenGrammar | None = None
    ) -> None:
        self.log = log
        self.new = list(new)
        self.grammar = grammar
        self.added = []

    def append(self, node: Content) -> None:
        """Appends the text of a node, or an image. Turns and scopes are the caller's
        responsibility.

        Raises:
            SglError: the image can't be read, or the model reads none.
        """
        if isinstance(node, Text):
            self.append_pieces((Span(node.text, node.ids, node.special),))
        elif isinstance(node, PreparedImage):
            if node.error is not None:
                raise node.error
            self.append_pieces(node.spans)

    def append_pieces(self, pieces: Sequence[Span]) -> None:
        """Appends spans; text without ids is tokenised when ids are needed."""
        for span in pieces:
            if not self.new and span.ids is not None and self.log.ready:
                self.log.append((span,))
            else:
                self.new.append(span)
        self.added += pieces
        if self.grammar is not None:
            self.grammar.text += "".join(span.text for span in pieces)

    def pop_new_spans(self) -> list[Span]:
        """Removes and returns the spans that are not in the log yet. The caller must append them to
        the log.
        """
        new = self.new
        self.new = []
        return new

    def copy_grammar(self) -> OpenGrammar | None:
        """Returns a copy of the branch's open grammar, or None if no grammar is open."""
        return None if self.grammar is None else replace(self.grammar)

    def mark(self) -> tuple[TokenText, int]:
        return self.fork(), len(self.added)

    def restore_position(self, mark: tuple[TokenText, int]) -> None:
        text = mark[0].fork()
        added = mark[1]
        self.log = text.log
        self.new = text.new
        self.grammar = text.grammar
        del self.added[added:]

    def fork(self) -> TokenText:
        return TokenText(self.log.copy(), self.new, self.copy_grammar())
