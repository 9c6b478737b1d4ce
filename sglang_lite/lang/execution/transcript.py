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
    """A generation of which the user sees only a part: `answer` is what messages and variables show of it."""

    spans: tuple[Span, ...]
    answer: str

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)


Piece: TypeAlias = str | Span | Image | Reasoned
Behind: TypeAlias = tuple[int, int, tuple[str, int] | None]  # counts of pieces and finished turns, and the open turn


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a transcript to come back to."""

    pieces: int
    messages: int
    turn: tuple[str, int] | None
    walk: ByteMatcher | None


class Transcript:
    """The text of a branch. It belongs to whoever plays the branch: one thread at a time.

    Attributes:
        pieces: of the text.
        messages: the finished turns.
        log: gets the text while it grows; None: nobody reads a stream.
        walk: the matcher of the open grammar; None: none is open.
    """

    __slots__ = (
        "_forks", "_images", "_known", "_mixed", "_start", "_told", "_turn", "log", "messages", "pieces", "walk",
    )  # fmt: skip

    def __init__(self, log: TextLog | None = None) -> None:
        self.pieces: list[Piece] = []
        self.messages: list[Message] = []
        self.log = log
        self._turn: tuple[str, int] | None = None  # the open turn's role and where its text starts
        self.walk: ByteMatcher | None = None
        self._known: list[Span] = []  # spans of the first pieces …
        self._told = 0  # … and of how many
        self._mixed = self._images = False  # there may be pieces that are no plain text; images
        self._start = 0  # where the branch was forked
        self._forks: tuple[int, ...] = ()  # finished turns at forks

    # ------------------------------------------------------------------------------------------ writing

    def write(self, node: Text) -> None:
        """Appends text of the program. Raises ConstraintError: the open grammar does not allow it."""
        text = node.text
        if not text:
            return
        if self.walk is not None:
            self.walk.push(text)
        if node.special and node.ids is None:
            self.pieces.append(text)
        else:
            self.pieces.append(Span(text, node.ids, node.special))
            self._mixed = True
        if self.log is not None:
            self.log.append(text)

    def choose(self, text: str) -> None:
        """Appends what was chosen. In a turn it names no special tokens."""
        self.write(Text(text, special=self._turn is None))

    def append(self, pieces: Sequence[Piece]) -> Behind:
        """Appends what a backend has generated: its text was logged while it came. Returns the place behind it."""
        start = len(self.pieces)
        self.pieces += pieces
        self._mixed = True
        if self.walk is not None:
            self.walk.push(self.text(start))
        return len(self.pieces), len(self.messages), self._turn

    def take(self, pieces: Sequence[Piece]) -> None:
        """Appends what other branches have added."""
        start = len(self.pieces)
        self.append(pieces)
        self._images = self._images or Image in map(type, pieces)
        if self.log is not None:
            self.log.append(self.text(start))

    def show(self, node: ImagePart) -> None:
        """Appends an image."""
        self.pieces.append(node.image)
        self._mixed = self._images = True
        self.write(Text(node.text))

    def begin_turn(self, node: TurnBegin) -> None:
        self._turn = node.role, len(self.pieces)

    def end_turn(self, node: TurnEnd) -> None:
        assert self._turn is not None
        role, start = self._turn
        self.messages.append(Message(role, _content(self.pieces[start:])))
        self._turn = None

    def begin_grammar(self, node: GrammarBegin) -> None:
        from sglang_lite.constraints.byte_matcher import ByteMatcher

        self.walk = ByteMatcher(node.constraint)

    def end_grammar(self, node: GrammarEnd) -> None:
        """Raises ConstraintError: the text of the grammar is not complete."""
        walk, self.walk = self.walk, None
        if walk is not None:
            walk.end()

    def restore(self, pieces: Sequence[Piece], messages: Sequence[Message], turn: tuple[str, int] | None) -> None:
        """Takes over what an earlier run has said.

        Args:
            turn: role of the open turn, and the piece that it begins with.
        """
        self.pieces, self.messages, self._turn = list(pieces), list(messages), turn
        self._look()

    def _look(self) -> None:
        """Sees what kinds of pieces there are, where others were taken away."""
        self._known, self._told = [], 0
        self._mixed, self._images = not {str}.issuperset(map(type, self.pieces)), Image in map(type, self.pieces)

    # ------------------------------------------------------------------------------------------ places

    def fork(self, other: Transcript) -> None:
        """Lets another one, which has nothing yet, continue from here."""
        other.begin(
            list(self.pieces), list(self.messages), self._turn, self.walk and self.walk.copy(),
            (*self._forks, len(self.messages)), mixed=self._mixed, images=self._images,
        )  # fmt: skip
        if self.log is not None and other.log is not None:
            other.log.append(self.text())

    def begin(
        self, pieces: list[Piece], messages: list[Message], turn: tuple[str, int] | None, walk: ByteMatcher | None,
        forks: tuple[int, ...], *, mixed: bool, images: bool,
    ) -> None:  # fmt: skip
        """Begins a fork behind what is there, which is its own from now on.

        Args:
            turn: role of the open turn, and the piece that it begins with.
            walk: the matcher of the open grammar, for this branch alone.
            forks: finished turns at each fork that led here.
            mixed: there may be pieces that are no plain text.
            images: there may be images.
        """
        self.pieces, self.messages, self._turn, self.walk = pieces, messages, turn, walk
        self._start, self._forks, self._mixed, self._images = len(pieces), forks, mixed, images

    def place(self) -> Place:
        return Place(len(self.pieces), len(self.messages), self._turn, self.walk and self.walk.copy())

    def go_back(self, place: Place) -> None:
        self._turn, self.walk = place.turn, place.walk and place.walk.copy()
        del self.pieces[place.pieces :], self.messages[place.messages :]
        self._look()

    # ------------------------------------------------------------------------------------------ reading

    @property
    def behind(self) -> Behind:
        """The place behind all that there is."""
        return len(self.pieces), len(self.messages), self._turn

    @property
    def turn(self) -> tuple[str, int] | None:
        """The open turn's role, and the piece that it begins with; None: none is open."""
        return self._turn

    @property
    def role(self) -> str | None:
        """The open turn's role; None: none is open."""
        return self._turn[0] if self._turn is not None else None

    @property
    def added(self) -> list[Piece]:
        """Pieces that have come since the branch was forked."""
        return self.pieces[self._start :]

    @property
    def images(self) -> tuple[Image, ...]:
        return tuple([piece for piece in self.pieces if type(piece) is Image]) if self._images else ()

    @property
    def turn_images(self) -> tuple[Image, ...]:
        """Images of the open turn; of a text without turns, all of them."""
        if self._turn is None:
            return () if self.messages else self.images
        return tuple([piece for piece in self.pieces[self._turn[1] :] if type(piece) is Image])

    @property
    def fork_position(self) -> int | None:
        """Length of the text that the branch was forked from; None: it was not forked."""
        return len(self.text()) - len(self.text(self._start)) if self._forks else None

    def text(self, start: int = 0) -> str:
        """The text, from a piece on."""
        return "".join([p if isinstance(p, str) else p.text for p in self.pieces[start:] if not isinstance(p, Image)])

    def prompt(self, *, same_model: bool = True) -> Prompt:
        """The prompt that a backend continues. `same_model`: its token ids are those of the run's backend."""
        spans = self._spans(same_model) if self._mixed else (Span("".join(map(str, self.pieces))),)
        if self._turn is None and not self.messages:
            return Prompt(spans, images=self.images if self._images else ())
        role, start = self._turn or (None, len(self.pieces))
        return Prompt(spans, tuple(self.messages), role, self.text(start), self.images, self._shared())

    def _shared(self) -> tuple[int, ...]:
        """Numbers of messages that begin other prompts, too: at forks, the last first; before turns of the user, those
        behind the longest text first. (The last turn mostly is what one prompt is about.)"""
        found, length = list[tuple[int, int]](), 0
        for count, message in enumerate(self.messages):
            if count and message.role == "user":
                found.append((length, count))
                length = 0
            length += sum(len(part) for part in message.content if isinstance(part, str))
        before = [count for _, count in sorted(found, reverse=True)]
        return tuple(dict.fromkeys(count for count in (*reversed(self._forks), *before) if count))

    def _spans(self, same_model: bool) -> tuple[Span, ...]:
        for piece in self.pieces[self._told :]:
            if isinstance(piece, str):
                self._known.append(Span(piece))
            elif not isinstance(piece, Image):
                self._known += (piece,) if isinstance(piece, Span) else piece.spans
        self._told = len(self.pieces)
        if same_model:
            return tuple(self._known)
        return tuple([Span(s.text, special=s.special and s.ids is None) for s in self._known])


def _content(pieces: Sequence[Piece]) -> tuple[str | Image, ...]:
    """A finished turn's content: neighbouring texts joined; of reasoned answers only the answer."""
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
