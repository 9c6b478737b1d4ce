"""Endings of JSON texts that obey the rules that no grammar can express (ruled_grammar.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sglang_lite.runtime.structured_output.base import Endings, TextState
from sglang_lite.runtime.structured_output.json_text import JsonText

_CHARACTERS = re.compile(rb"[\x80-\xBF]+|[^\x80-\xBF][\x80-\xBF]*")  # the first may be the end of one
_MAX_REPAIRS = 200  # characters that differ from what is shortest


def obeying(endings: Endings, state: TextState, text: JsonText) -> bytes | None:
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


def _repair(endings: Endings, state: TextState, text: JsonText) -> tuple[bytes, TextState, JsonText] | None:
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


def _others(endings: Endings, state: TextState, text: JsonText) -> Iterator[tuple[bytes, TextState]]:
    """Texts that may follow, with their states: names that have to come first, then characters, the best first."""
    for name in text.missing:
        after = endings.advance(state, name)
        if after is not None:
            yield name, after
    for char, after in endings.characters(state):
        yield char.encode(), after
