"""Transcript of a branch: its text with the tokens that are final, and the same as messages for chat APIs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from sglang_lite.lang.concurrency.variables import TextLog
from sglang_lite.program.nodes import GrammarBegin, GrammarEnd, ImagePart, Text, TurnBegin, TurnEnd
from sglang_lite.protocol import Image, Message, Prompt, Span

if TYPE_CHECKING:
    from sglang_lite.constraints.byte_matcher import ByteMatcher


@dataclass(frozen=True, slots=True)
class Reasoned:
    """Generation with reasoning, of which the user sees only a part: `answer` is its text in messages and variables."""

    spans: tuple[Span, ...]
    answer: str

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)


Piece: TypeAlias = str | Span | Image | Reasoned
# Numbers of pieces and finished turns, and the open turn.
EndPosition: TypeAlias = tuple[int, int, tuple[str, int] | None]


@dataclass(frozen=True, slots=True)
class TranscriptPosition:
    """Position in a transcript, for rolling back."""

    pieces: int
    messages: int
    turn: tuple[str, int] | None
    matcher: ByteMatcher | None


class Transcript:
    """Text of a branch. Owned by the thread that plays the branch.

    Attributes:
        pieces: pieces of the text, in order.
        messages: finished turns.
        log: text log that is written while the text grows, or None if no stream is read.
        matcher: matcher of the open grammar, or None if no grammar is open.
    """

    __slots__ = (
        "_cached_pieces", "_forks", "_images", "_mixed", "_span_cache", "_start", "_turn", "log", "matcher", "messages",
        "pieces",
    )  # fmt: skip

    def __init__(self, log: TextLog | None = None) -> None:
        self.pieces: list[Piece] = []
        self.messages: list[Message] = []
        self.log = log
        self._turn: tuple[str, int] | None = None  # role of the open turn, and index of its first piece
        self.matcher: ByteMatcher | None = None
        self._span_cache: list[Span] = []  # cached spans …
        self._cached_pieces = 0  # … and the number of pieces that they cover
        self._mixed = self._images = False  # some pieces may be other than plain text; images
        self._start = 0  # index of the first piece after the fork
        self._forks: tuple[int, ...] = ()  # number of finished turns at each fork

    # ------------------------------------------------------------------------------------------ writing

    def append_text(self, node: Text) -> None:
        """Appends text of the program. Raises ConstraintError if the open grammar does not allow the text."""
        text = node.text
        if not text:
            return
        if self.matcher is not None:
            self.matcher.push(text)
        if node.special and node.ids is None:
            self.pieces.append(text)
        else:
            self.pieces.append(Span(text, node.ids, node.special))
            self._mixed = True
        if self.log is not None:
            self.log.append(text)

    def append_choice(self, text: str) -> None:
        """Appends a chosen text. Inside a turn, special tokens written in it are plain text."""
        self.append_text(Text(text, special=self._turn is None))

    def append_generated(self, pieces: Sequence[Piece]) -> EndPosition:
        """Appends pieces that a backend has generated; they were logged while they came. Returns the position behind
        them."""
        start = len(self.pieces)
        self.pieces += pieces
        self._mixed = True
        if self.matcher is not None:
            self.matcher.push(self.text(start))
        return len(self.pieces), len(self.messages), self._turn

    def append_joined(self, pieces: Sequence[Piece]) -> None:
        """Appends pieces of joined branches, and logs their text."""
        start = len(self.pieces)
        self.append_generated(pieces)
        self._images = self._images or Image in map(type, pieces)
        if self.log is not None:
            self.log.append(self.text(start))

    def append_image(self, node: ImagePart) -> None:
        """Appends an image and its placeholder text."""
        self.pieces.append(node.image)
        self._mixed = self._images = True
        self.append_text(Text(node.text))

    def begin_turn(self, node: TurnBegin) -> None:
        self._turn = node.role, len(self.pieces)

    def end_turn(self, node: TurnEnd) -> None:
        assert self._turn is not None
        role, start = self._turn
        self.messages.append(Message(role, _content(self.pieces[start:])))
        self._turn = None

    def begin_grammar(self, node: GrammarBegin) -> None:
        from sglang_lite.constraints.byte_matcher import ByteMatcher

        self.matcher = ByteMatcher(node.constraint)

    def end_grammar(self, node: GrammarEnd) -> None:
        """Closes the grammar. Raises ConstraintError if its text is not complete."""
        walk, self.matcher = self.matcher, None
        if walk is not None:
            walk.end()

    def restore(self, pieces: Sequence[Piece], messages: Sequence[Message], turn: tuple[str, int] | None) -> None:
        """Takes over the text of an earlier run.

        Args:
            turn: role of the open turn, and index of its first piece; None if no turn is open.
        """
        self.pieces, self.messages, self._turn = list(pieces), list(messages), turn
        self._refresh_caches()

    def _refresh_caches(self) -> None:
        """Recomputes the cached facts about the pieces, after pieces were removed or replaced."""
        self._span_cache, self._cached_pieces = [], 0
        self._mixed, self._images = not {str}.issuperset(map(type, self.pieces)), Image in map(type, self.pieces)

    # ------------------------------------------------------------------------------------------ places

    def fork(self, other: Transcript) -> None:
        """Initialises an empty transcript as a copy that continues from here."""
        other.init_fork(
            list(self.pieces), list(self.messages), self._turn, self.matcher and self.matcher.copy(),
            (*self._forks, len(self.messages)), mixed=self._mixed, images=self._images,
        )  # fmt: skip
        if self.log is not None and other.log is not None:
            other.log.append(self.text())

    def init_fork(
        self, pieces: list[Piece], messages: list[Message], turn: tuple[str, int] | None, matcher: ByteMatcher | None,
        forks: tuple[int, ...], *, mixed: bool, images: bool,
    ) -> None:  # fmt: skip
        """Initialises a fork with the parent's content. The lists become its own.

        Args:
            turn: role of the open turn, and index of its first piece; None if no turn is open.
            matcher: copy of the open grammar's matcher, or None.
            forks: number of finished turns at each fork on the way here.
            mixed: whether some pieces may be other than plain text.
            images: whether some pieces may be images.
        """
        self.pieces, self.messages, self._turn, self.matcher = pieces, messages, turn, matcher
        self._start, self._forks, self._mixed, self._images = len(pieces), forks, mixed, images

    def position(self) -> TranscriptPosition:
        return TranscriptPosition(
            len(self.pieces), len(self.messages), self._turn, self.matcher and self.matcher.copy()
        )

    def go_back(self, position: TranscriptPosition) -> None:
        self._turn, self.matcher = position.turn, position.matcher and position.matcher.copy()
        del self.pieces[position.pieces :], self.messages[position.messages :]
        self._refresh_caches()

    # ------------------------------------------------------------------------------------------ reading

    @property
    def end_position(self) -> EndPosition:
        """Position behind the last piece."""
        return len(self.pieces), len(self.messages), self._turn

    @property
    def turn(self) -> tuple[str, int] | None:
        """Role of the open turn and index of its first piece, or None if no turn is open."""
        return self._turn

    @property
    def role(self) -> str | None:
        """Role of the open turn, or None if no turn is open."""
        return self._turn[0] if self._turn is not None else None

    @property
    def added(self) -> list[Piece]:
        """Pieces that were added since the branch was forked."""
        return self.pieces[self._start :]

    @property
    def images(self) -> tuple[Image, ...]:
        return tuple([piece for piece in self.pieces if type(piece) is Image]) if self._images else ()

    @property
    def turn_images(self) -> tuple[Image, ...]:
        """Images of the open turn; all images if the text has no turns."""
        if self._turn is None:
            return () if self.messages else self.images
        return tuple([piece for piece in self.pieces[self._turn[1] :] if type(piece) is Image])

    @property
    def fork_position(self) -> int | None:
        """Length in characters of the text that the branch was forked with, or None if the branch was not forked."""
        return len(self.text()) - len(self.text(self._start)) if self._forks else None

    def text(self, start: int = 0) -> str:
        """Text from the piece with index `start` on, without images."""
        return "".join([p if isinstance(p, str) else p.text for p in self.pieces[start:] if not isinstance(p, Image)])

    def prompt(self, *, same_model: bool = True) -> Prompt:
        """Prompt that a backend continues.

        Args:
            same_model: whether the token ids fit the backend's model; if False, they are left out.
        """
        spans = self._spans(same_model) if self._mixed else (Span("".join(map(str, self.pieces))),)
        if self._turn is None and not self.messages:
            return Prompt(spans, images=self.images if self._images else ())
        role, start = self._turn or (None, len(self.pieces))
        return Prompt(spans, tuple(self.messages), role, self.text(start), self.images, self._shared())

    def _shared(self) -> tuple[int, ...]:
        """Numbers of leading messages that other prompts probably share, best first: those at forks, the last fork
        first; then those before turns of the user, longest preceding text first. (The last turn usually belongs to one
        prompt alone.)"""
        found, length = list[tuple[int, int]](), 0
        for count, message in enumerate(self.messages):
            if count and message.role == "user":
                found.append((length, count))
                length = 0
            length += sum(len(part) for part in message.content if isinstance(part, str))
        before = [count for _, count in sorted(found, reverse=True)]
        return tuple(dict.fromkeys(count for count in (*reversed(self._forks), *before) if count))

    def _spans(self, same_model: bool) -> tuple[Span, ...]:
        for piece in self.pieces[self._cached_pieces :]:
            if isinstance(piece, str):
                self._span_cache.append(Span(piece))
            elif not isinstance(piece, Image):
                self._span_cache += (piece,) if isinstance(piece, Span) else piece.spans
        self._cached_pieces = len(self.pieces)
        if same_model:
            return tuple(self._span_cache)
        return tuple([Span(s.text, special=s.special and s.ids is None) for s in self._span_cache])


def _content(pieces: Sequence[Piece]) -> tuple[str | Image, ...]:
    """Content of a finished turn: adjacent texts joined; of reasoned generations only the answer."""
    content: list[str | Image] = []
    for kind, group in itertools.groupby(pieces, key=lambda p: isinstance(p, Image)):
        if kind:
            content += [p for p in group if isinstance(p, Image)]
        else:
            texts = [p if isinstance(p, str) else p.answer if isinstance(p, Reasoned) else p.text for p in group]  # type: ignore[union-attr] # images are in the other branch
            content.append("".join(texts))
    if content and isinstance(content[0], str):
        content[0] = content[0].lstrip()
    return tuple(content)
