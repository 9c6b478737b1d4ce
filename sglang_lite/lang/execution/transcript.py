"""Transcript of a branch: its text, with the tokens of generated parts, and the same text as
messages for chat APIs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from sglang_lite.lang.concurrency.variables import TextLog
from sglang_lite.program.nodes import GrammarBegin, GrammarEnd, ImagePart, Text, TurnBegin, TurnEnd
from sglang_lite.protocol import Media, Message, Prompt, Span
from sglang_lite.protocol.prompt import is_placeholder

if TYPE_CHECKING:
    from sglang_lite.constraints.byte_matcher import ByteMatcher


@dataclass(frozen=True, slots=True)
class Reasoned:
    """Generated text that includes reasoning. Messages and variables contain only its `answer`."""

    spans: tuple[Span, ...]
    answer: str

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)


Piece: TypeAlias = str | Span | Media | Reasoned
# Number of pieces, number of finished turns, the open turn, and number of earlier texts.
EndPosition: TypeAlias = tuple[int, int, tuple[str, int] | None, int]


@dataclass(frozen=True, slots=True)
class FinishedText:
    """Text of a branch at a point where no turn is open.

    Attributes:
        pieces: pieces of the text.
        messages: turns of the text.
        turn_ends: for each turn, index of the first piece after its content.
        suffixes: for each turn, the text that the template adds after it; None if unknown.
    """

    pieces: Sequence[Piece]
    messages: Sequence[Message]
    turn_ends: Sequence[int]
    suffixes: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class TranscriptPosition:
    """Position in a transcript to roll back to: the lists that the transcript writes to, and how
    many items they have.
    """

    pieces: int
    messages: int
    turn: tuple[str, int] | None
    matcher: ByteMatcher | None
    lists: tuple[list[Piece], list[Message], list[int]]
    earlier: tuple[FinishedText, ...]


class Transcript:
    """Text of a branch. Owned by the thread that plays the branch.

    Attributes:
        pieces: pieces of the text, in order.
        messages: finished turns.
        turn_ends: for each finished turn, index of the first piece after its content.
        earlier: earlier texts, each of which was replaced with a shorter one.
        log: text log written as the text grows, or None if no stream is read.
        matcher: matcher of the open grammar, or None if no grammar is open.
        turn: role of the open turn, and index of its first piece; None if no turn is open.
        mixed: whether some pieces may be something other than plain text.
        has_images: whether some pieces may be images.
        start: index of the first piece after the fork.
        forks: number of finished turns at each fork on the path to this branch.
    """

    __slots__ = (
        "_cached_pieces", "_chars_since_user_turn", "_counted_messages", "_joined_pieces",
        "_joined_text", "_span_cache", "_user_turns", "earlier", "forks", "has_images", "log",
        "matcher", "messages", "mixed", "pieces", "start", "turn", "turn_ends",
    )  # fmt: skip

    def __init__(self, log: TextLog | None = None) -> None:
        self.pieces: list[Piece] = []
        self.messages: list[Message] = []
        self.turn_ends: list[int] = []
        self.earlier: tuple[FinishedText, ...] = ()
        self.log = log
        self.turn: tuple[str, int] | None = None
        self.matcher: ByteMatcher | None = None
        self._span_cache: list[Span] = []  # cached spans …
        self._cached_pieces = 0  # … and the number of pieces that they cover
        self._joined_text = ""  # text of the first pieces …
        self._joined_pieces = 0  # … and the number of these pieces
        # for each user turn after the first message: characters since the previous one, and the
        # number of messages before it
        self._user_turns: list[tuple[int, int]] = []
        self._chars_since_user_turn = 0  # characters since the last user turn …
        self._counted_messages = 0  # … in this many messages from the beginning
        self.mixed = self.has_images = False
        self.start = 0
        self.forks: tuple[int, ...] = ()

    # -------------------------------------------------------------------------------------- writing

    def append_text(self, node: Text) -> None:
        """Appends text written by the program. Raises ConstraintError if the open grammar does not
        allow it.
        """
        text = node.text
        if not text:
            return
        if self.matcher is not None:
            self.matcher.push(text)
        if node.special and node.ids is None:
            self.pieces.append(text)
        else:
            self.pieces.append(Span(text, node.ids, node.special))
            self.mixed = True
        if self.log is not None:
            self.log.append(text)

    def append_choice(self, text: str) -> None:
        """Appends a chosen text. Inside a turn, control tokens in it count as plain text."""
        self.append_text(Text(text, special=self.turn is None))

    def append_answer(self, pieces: Sequence[Piece]) -> EndPosition:
        """Appends pieces that a backend generated. Does not log them, because they were logged as
        they arrived. Returns the position after them.
        """
        start = len(self.pieces)
        self.pieces += pieces
        self.mixed = True
        if self.matcher is not None:
            self.matcher.push(self.collect_text(start))
        return len(self.pieces), len(self.messages), self.turn, len(self.earlier)

    def append_from_join(self, pieces: Sequence[Piece]) -> None:
        """Appends pieces of joined branches and logs their text."""
        start = len(self.pieces)
        self.append_answer(pieces)
        self.has_images = self.has_images or Media in map(type, pieces)
        if self.log is not None:
            self.log.append(self.collect_text(start))

    def append_image(self, node: ImagePart) -> None:
        """Appends an image and its placeholder text."""
        self.pieces += (node.image, Span(node.text, ()))
        self.mixed = self.has_images = True
        if self.log is not None:
            self.log.append(node.text)

    def begin_turn(self, node: TurnBegin) -> None:
        self.turn = node.role, len(self.pieces)

    def end_turn(self, node: TurnEnd) -> None:
        assert self.turn is not None
        role, start = self.turn
        self.messages.append(Message(role, _message_content(self.pieces[start:])))
        self.turn_ends.append(len(self.pieces))
        self.turn = None

    def begin_grammar(self, node: GrammarBegin) -> None:
        from sglang_lite.constraints.byte_matcher import ByteMatcher

        self.matcher = ByteMatcher(node.constraint)

    def end_grammar(self, node: GrammarEnd) -> None:
        """Closes the grammar. Raises ConstraintError if its text is incomplete."""
        walk = self.matcher
        self.matcher = None
        if walk is not None:
            walk.check_complete()

    def restore_text(
        self,
        text: FinishedText,
        turn: tuple[str, int] | None,
        earlier: tuple[FinishedText, ...] = (),
    ) -> None:
        """Restores the text of an earlier run.

        Args:
            turn: role of the open turn, and index of its first piece; None if no turn is open.
            earlier: value of the attribute `earlier`.
        """
        self._begin_with(text)
        self.turn = turn
        self.earlier = earlier

    def replace_text(self, text: FinishedText, replaced: FinishedText | None) -> None:
        """Replaces the whole text while no turn is open. Later text follows the new one. The text
        log is not changed.

        Args:
            replaced: the text so far, to be kept in `earlier`; None to keep nothing.
        """
        if replaced is not None:
            self.earlier = (*self.earlier, replaced)
        self._begin_with(text)
        self.start = len(self.pieces)
        self.forks = ()

    def _begin_with(self, text: FinishedText) -> None:
        self.pieces = list(text.pieces)
        self.messages = list(text.messages)
        self.turn_ends = list(text.turn_ends)
        self._refresh_caches()

    def _refresh_caches(self) -> None:
        """Recomputes the cached facts about the pieces. Called after pieces were removed or
        replaced.
        """
        self._span_cache = []
        self._cached_pieces = 0
        self._joined_text = ""
        self._joined_pieces = 0
        self._user_turns = []
        self._chars_since_user_turn = 0
        self._counted_messages = 0
        self.mixed, self.has_images = (
            not {str}.issuperset(map(type, self.pieces)),
            Media in map(type, self.pieces),
        )

    # --------------------------------------------------------------------------------------- places

    def fork_from(self, parent: Transcript) -> None:
        """Copies the parent's transcript into this empty one, which continues from here."""
        self.pieces = list(parent.pieces)
        self.messages = list(parent.messages)
        self.turn_ends = list(parent.turn_ends)
        self.earlier = parent.earlier
        self.turn = parent.turn
        self.matcher = parent.matcher and parent.matcher.copy()
        self.mixed = parent.mixed
        self.has_images = parent.has_images
        self.start, self.forks = len(self.pieces), (*parent.forks, len(self.messages))
        if self.log is not None:
            self.log.append(self.collect_text())

    def position(self) -> TranscriptPosition:
        return TranscriptPosition(
            len(self.pieces),
            len(self.messages),
            self.turn,
            self.matcher and self.matcher.copy(),
            (self.pieces, self.messages, self.turn_ends),
            self.earlier,
        )

    def rewind_to(self, position: TranscriptPosition) -> None:
        self.turn = position.turn
        self.matcher = position.matcher and position.matcher.copy()
        self.earlier = position.earlier
        self.pieces, self.messages, self.turn_ends = position.lists
        del self.pieces[position.pieces :]
        del self.messages[position.messages :], self.turn_ends[position.messages :]
        self._refresh_caches()

    # -------------------------------------------------------------------------------------- reading

    @property
    def end_position(self) -> EndPosition:
        """Position after the last piece."""
        return len(self.pieces), len(self.messages), self.turn, len(self.earlier)

    @property
    def role(self) -> str | None:
        """Role of the open turn, or None if no turn is open."""
        return self.turn[0] if self.turn is not None else None

    @property
    def added(self) -> list[Piece]:
        """Pieces that were added since the branch was forked."""
        return self.pieces[self.start :]

    @property
    def images(self) -> tuple[Media, ...]:
        return (
            tuple([piece for piece in self.pieces if type(piece) is Media])
            if self.has_images
            else ()
        )

    @property
    def turn_images(self) -> tuple[Media, ...]:
        """Images of the open turn; all images if the text has no turns."""
        if self.turn is None:
            return () if self.messages else self.images
        return tuple([piece for piece in self.pieces[self.turn[1] :] if type(piece) is Media])

    @property
    def fork_position(self) -> int | None:
        """Number of characters of text that the branch had when it was forked, or None if it was
        not forked.
        """
        return len(self.collect_text()) - len(self.collect_text(self.start)) if self.forks else None

    def collect_text(self, start: int = 0) -> str:
        """Returns the text from the piece with index `start` on, without images."""
        if start:
            return text_without_images(self.pieces[start:])
        if self._joined_pieces < len(self.pieces):
            self._joined_text += text_without_images(self.pieces[self._joined_pieces :])
            self._joined_pieces = len(self.pieces)
        return self._joined_text

    def text_so_far(self) -> str:
        """Returns the text without using the cache, so that any thread may call it: the cache belongs
        to the thread that executes the branch.
        """
        return text_without_images(self.pieces)

    def prompt(self, *, same_model: bool = True) -> Prompt:
        """Builds the prompt that a backend continues.

        Args:
            same_model: whether the token ids are those of the backend's model. If not, they are
                left out.
        """
        spans = (
            self._prompt_spans(same_model)
            if self.mixed
            else (Span("".join(map(str, self.pieces))),)
        )
        if self.turn is None and not self.messages:
            return Prompt(spans, images=self.images if self.has_images else ())
        role, start = self.turn or (None, len(self.pieces))
        return Prompt(
            spans,
            tuple(self.messages),
            role,
            self.collect_text(start),
            self.images,
            self._shared_message_counts(),
        )

    def _shared_message_counts(self) -> tuple[int, ...]:
        """Returns how many leading messages other prompts probably share with this one: several
        numbers, best first. First come the numbers of messages before each fork, latest fork first.
        Then come the numbers before each user turn, sorted by the amount of text since the previous
        user turn.

        The last turn usually belongs to a single prompt.
        """
        for message in self.messages[self._counted_messages :]:
            if self._counted_messages and message.role == "user":
                self._user_turns.append((self._chars_since_user_turn, self._counted_messages))
                self._chars_since_user_turn = 0
            self._chars_since_user_turn += len(message.text)
            self._counted_messages += 1
        before = [count for _, count in sorted(self._user_turns, reverse=True)]
        return tuple(dict.fromkeys(count for count in (*reversed(self.forks), *before) if count))

    def _prompt_spans(self, same_model: bool) -> tuple[Span, ...]:
        self._span_cache += pieces_to_spans(self.pieces[self._cached_pieces :])
        self._cached_pieces = len(self.pieces)
        if same_model:
            return tuple(self._span_cache)
        return tuple(
            [
                s if is_placeholder(s) else Span(s.text, special=s.special and s.ids is None)
                for s in self._span_cache
            ]
        )


def text_without_images(pieces: Sequence[Piece]) -> str:
    """Returns the text of pieces, without images."""
    return "".join(
        [
            piece if isinstance(piece, str) else "" if isinstance(piece, Media) else piece.text
            for piece in pieces
        ]
    )


def pieces_to_spans(pieces: Sequence[Piece]) -> Iterator[Span]:
    """Yields the text of pieces as spans of a prompt, without images."""
    for piece in pieces:
        if isinstance(piece, str):
            yield Span(piece)
        elif not isinstance(piece, Media):
            yield from (piece,) if isinstance(piece, Span) else piece.spans


def pieces_to_nodes(pieces: Sequence[Piece]) -> Iterator[Text | ImagePart]:
    """Yields pieces as nodes of a program. An image stands before its placeholder."""
    image = None
    for piece in pieces:
        if isinstance(piece, Media):
            image = piece
        elif image is not None:
            assert isinstance(piece, Span)
            yield ImagePart(image, piece.text)
            image = None
        else:
            yield from (Text(s.text, s.ids, s.special) for s in pieces_to_spans((piece,)))


def _message_content(pieces: Sequence[Piece]) -> tuple[str | Media, ...]:
    """Returns the content of a finished turn. Adjacent texts are joined, and only the answer of a
    generation with reasoning is included.
    """
    content: list[str | Media] = []
    for kind, group in itertools.groupby(pieces, key=lambda p: isinstance(p, Media)):
        if kind:
            content += [p for p in group if isinstance(p, Media)]
        else:
            texts = [
                p if isinstance(p, str) else p.answer if isinstance(p, Reasoned) else p.text  # type: ignore[union-attr] # images are in the other branch
                for p in group
            ]
            content.append("".join(texts))
    if content and isinstance(content[0], str):
        content[0] = content[0].lstrip()
    return tuple(content)
