"""Endings of JSON texts that obey the rules that no grammar can express (ruled_grammar.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from sglang_lite.runtime.structured_output.base import Endings, Growth, TextState
from sglang_lite.runtime.structured_output.json_text import JsonText
from sglang_lite.runtime.structured_output.unique_names import UniqueNames

_CHARACTERS = re.compile(rb"[\x80-\xBF]+|[^\x80-\xBF][\x80-\xBF]*")  # the first may be the end of one
_MAX_REPAIRS = 200  # characters that differ from what is shortest
_MARGIN = 32  # tokens that an obeying completion may have more than were counted

Text: TypeAlias = JsonText | UniqueNames
State: TypeAlias = tuple[TextState, Text]  # state in the grammar, and the text so far, which is never changed


@dataclass(frozen=True)
class RuledEndings:
    """Endings of texts that obey their rules.

    Args:
        endings: endings of the texts' grammar.
        start: state in which the texts begin.
    """

    endings: Endings
    start: State

    @property
    def size(self) -> int:
        return self.endings.size

    @property
    def growth(self) -> Growth:
        inner = self.endings.growth
        return replace(inner, longest=inner.longest + self._margin)

    def after_text(self, text: str) -> RuledEndings | None:
        state = self.advance(self.start, text.encode("utf-8", "surrogatepass"))
        return None if state is None else replace(self, start=state)

    def after(self, state: State, token: int) -> State | None:
        after = self.endings.after(state[0], token)
        return None if after is None else (after, _written(state[1], self.endings.text_of(token)))

    def text_of(self, token: int) -> bytes:
        return self.endings.text_of(token)

    def advance(self, state: State, text: bytes) -> State | None:
        after = self.endings.advance(state[0], text)
        return None if after is None else (after, _written(state[1], text))

    def count(self, state: State) -> float:
        return self.endings.count(state[0]) + self._margin

    @cached_property
    def _margin(self) -> int:
        """Tokens that a completion may have more than the grammar's. Rules that make the first one longer may do so
        again."""
        first = self.text(self.start)
        tokens = None if first is None else self.spell(first)
        longer = 0 if tokens is None else len(tokens) - self.endings.count(self.start[0])
        return _MARGIN + 2 * max(0, int(longer))

    def text(self, state: State) -> bytes | None:
        return obeying(self.endings, *state)

    def within(self, state: State, limit: int) -> list[int] | None:
        text = self.text(state)
        tokens = None if text is None else self.spell(text)
        if tokens is None or len(tokens) <= limit:
            return tokens
        tokens = self.endings.within(state[0], limit)  # of more characters
        obeys = tokens is not None and state[1].copy().write(b"".join(map(self.text_of, tokens)))
        return tokens if obeys else None

    def characters(self, state: State) -> Iterator[tuple[str, State]]:
        for char, after in self.endings.characters(state[0]):
            text = state[1].copy()
            if text.write(char.encode()):
                yield char, (after, text)

    def spell(self, text: bytes) -> list[int] | None:
        return self.endings.spell(text)

    def fewest(self, state: State) -> int | None:
        return self.endings.fewest(state[0])


def _written(text: Text, more: bytes) -> Text:
    text = text.copy()
    text.write(more)
    return text


def obeying(endings: Endings, state: TextState, text: Text) -> bytes | None:
    """Short completion of a text that obeys its rules, or None if none was found.

    The shortest completion is followed as far as it obeys; then another character is taken. As each position leaves a
    name or an item that has not come, no character has to be taken back.

    Args:
        endings: endings of the text's grammar.
        state: state of the text.
        text: the text so far.
    """
    written = bytearray()
    for _ in range(_MAX_REPAIRS):
        shortest = endings.text(state)
        if shortest is None:
            return None
        if text.copy().write(shortest):
            return bytes(written + shortest)
        for char in _CHARACTERS.findall(shortest):
            following = text.copy()
            if not following.write(char):
                break
            after = endings.advance(state, char)
            assert after is not None
            text, state = following, after
            written += char
        taken = _repair(endings, state, text)
        if taken is None:
            return None
        piece, state, text = taken
        written += piece
    return None


def _repair(endings: Endings, state: TextState, text: Text) -> tuple[bytes, TextState, Text] | None:
    """Piece to write in place of a character that would not obey, with the state and the text after it; None if nothing
    obeys. Best is what the next character of a completion may follow: a digit more would not help a number that must
    not end its object."""
    second = None
    for piece, after in _others(endings, state, text):
        following = text.copy()
        if not following.write(piece):
            continue
        rest = endings.text(after)
        first = None if rest is None else _CHARACTERS.match(rest)
        if first is None or following.copy().write(first[0]):
            return piece, after, following
        second = second or (piece, after, following)
    return second


def _others(endings: Endings, state: TextState, text: Text) -> Iterator[tuple[bytes, TextState]]:
    """Texts that may follow, with their states: names that have to come first, then characters, the best first."""
    for name in text.missing:
        after = endings.advance(state, name)
        if after is not None:
            yield name, after
    for char, after in endings.characters(state):
        yield char.encode(), after
