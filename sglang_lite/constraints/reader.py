"""Reads one of several texts from the beginning of free text, as the program that uses a model's
answer would: the longest one, in whole words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReadPosition:
    """Position of a reader after some bytes, while it is open what is read.

    Attributes:
        node: node of the reader's tree.
        since_text: number of bytes since the end of the longest text so far, or None if there is
            none.
        in_word: whether the last character is a letter or digit.
    """

    node: int
    since_text: int | None
    in_word: bool


class TextReader:
    """Reader of some texts.

    A text that ends in a letter or digit is only read where no other letter or digit follows: "no"
    isn't read from "nothing", but it is from "no-one". What counts as a letter: A to Z, a to z, and
    all characters from U+00C0 to U+053F.

    Args:
        texts: the texts, of which one may be empty.

    Attributes:
        start: position at the beginning.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._after: list[dict[int, int]] = [{}]
        self._ends: set[int] = set()
        for text in texts:
            node = 0
            for byte in text.encode():
                following = self._after[node]
                if byte not in following:
                    following[byte] = len(self._after)
                    self._after.append({})
                node = following[byte]
            self._ends.add(node)
        self.start = ReadPosition(0, None, in_word=False)

    def step(self, position: ReadPosition, byte: int) -> ReadPosition | None:
        """Returns the position after another byte, or None if no text continues with it."""
        node = self._after[position.node].get(byte)
        if node is None:
            return None
        since = self.count_bytes_since_text(position, byte)
        is_inside_character = 0x80 <= byte < 0xC0
        return ReadPosition(
            node,
            None if since is None else since + 1,
            in_word=position.in_word if is_inside_character else _begins_word_character(byte),
        )

    def count_bytes_since_text(self, position: ReadPosition, byte: int | None) -> int | None:
        """Returns how many bytes before a position the text ends that is read if a byte follows
        with which no text continues. Returns None if none is read.

        Args:
            position: the position.
            byte: byte that follows, or None at the end of the free text.
        """
        goes_on = byte is not None and position.in_word and _begins_word_character(byte)
        if position.node in self._ends and not goes_on:
            return 0
        return position.since_text


def _begins_word_character(byte: int) -> bool:
    """Returns whether a character that begins with a byte of UTF-8 is a letter or digit."""
    return (
        0x30 <= byte <= 0x39 or 0x41 <= byte <= 0x5A or 0x61 <= byte <= 0x7A or 0xC3 <= byte <= 0xD4
    )
