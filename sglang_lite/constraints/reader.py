"""Finds the text of a language that free text begins with: the longest one that does not end inside
a word. A program that uses a model's answer would read the same text.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

from sglang_lite.constraints.formal.automaton import Automaton
from sglang_lite.constraints.formal.nodes import Language
from sglang_lite.constraints.formal.terms import DEAD

_MAX_STEPS = 500_000  # maximum number of steps that a reader stores


class ByteLanguage(Protocol):
    """Language whose texts are followed byte by byte, in UTF-8.

    Attributes:
        start: state before the first byte.
        is_full: True if the language has stored so many states that it should be rebuilt.
    """

    @property
    def start(self) -> Hashable: ...

    @property
    def is_full(self) -> bool: ...

    def step(self, state: Any, byte: int) -> Hashable | None:  # each language has its own states
        """Returns the state after another byte, or None if no text continues with it."""

    def is_text(self, state: Any) -> bool:  # each language has its own states
        """Returns True if the bytes that lead to a state form a text of the language."""


class TextTree:
    """Language that consists of the given texts, stored as a prefix tree.

    Args:
        texts: the texts; one of them may be empty.
    """

    is_full = False

    def __init__(self, texts: Sequence[str]) -> None:
        self.start = 0
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

    def step(self, state: int, byte: int) -> int | None:
        return self._after[state].get(byte)

    def is_text(self, state: int) -> bool:
        return state in self._ends


class LanguageBytes:
    """Follows the texts of a language byte by byte. A state is a state of the automaton, together
    with the bytes of the character that is still incomplete.

    Args:
        language: the language.

    Raises:
        ConstraintError: the language's automaton is too large. Also raised by the methods.
        RecursionError: a rule refers to itself before any character.
    """

    def __init__(self, language: Language) -> None:
        self._machine = Automaton(language.rules[language.start], rules=language.rules)
        self.start = (self._machine.start, b"")

    @property
    def is_full(self) -> bool:
        return self._machine.is_full

    def step(self, state: tuple[int, bytes], byte: int) -> tuple[int, bytes] | None:
        at, partial = state
        partial += bytes((byte,))
        low, high = _code_points(partial)
        machine = self._machine
        for _, symbol in machine.classes_between(low, high) if low <= high else ():
            after = machine.step(at, symbol)
            if after != DEAD and machine.accepts_some_text(after):
                return (after, b"") if len(partial) == _length(partial[0]) else (at, partial)
        return None

    def is_text(self, state: tuple[int, bytes]) -> bool:
        at, partial = state
        return not partial and self._machine.accepting(at)


class AfterText:
    """Language whose texts are a given text followed by a text of another language.

    Args:
        before: the given text.
        language: the other language.
    """

    def __init__(self, before: bytes, language: ByteLanguage) -> None:
        self._before = before
        self._language = language
        self.start: Hashable = self._state_after(0)

    @property
    def is_full(self) -> bool:
        return self._language.is_full

    def _state_after(self, count: int) -> Hashable:
        """Returns the state after the first `count` bytes of the given text."""
        return ("before", count) if count < len(self._before) else ("in", self._language.start)

    # the other language has its own states
    def step(self, state: tuple[str, Any], byte: int) -> Hashable | None:
        kind, at = state
        if kind == "before":
            return self._state_after(at + 1) if self._before[at] == byte else None
        after = self._language.step(at, byte)
        return None if after is None else ("in", after)

    # the other language has its own states
    def is_text(self, state: tuple[str, Any]) -> bool:
        kind, at = state
        return kind == "in" and self._language.is_text(at)


class TextReader:
    """Reads the text of a language that free text begins with, byte by byte. A position is an index
    into `_known`, which stores what is known about the bytes so far.

    A text that ends in a letter or digit is read only if no other letter or digit follows: "no" is
    read from "no-one", but not from "nothing". Letters are A to Z, a to z, and all characters from
    U+00C0 to U+053F.

    Args:
        language: the language.

    Attributes:
        start: position at the beginning.
    """

    def __init__(self, language: ByteLanguage) -> None:
        self._language = language
        self._known: list[_Known] = []
        self._numbers: dict[_Known, int] = {}
        self._steps: dict[tuple[int, int], int | None] = {}
        self.start = self._number(_Known(language.start, None, in_word=False))

    @property
    def is_full(self) -> bool:
        """True if a new reader should replace this one, because it has stored too many steps."""
        return len(self._steps) > _MAX_STEPS or self._language.is_full

    def step(self, position: int, byte: int) -> int | None:
        """Returns the position after another byte, or None if no text continues with it."""
        key = position, byte
        if key not in self._steps:
            self._steps[key] = self._find_step(position, byte)
        return self._steps[key]

    def _find_step(self, position: int, byte: int) -> int | None:
        before = self._known[position]
        state = self._language.step(before.state, byte)
        if state is None:
            return None
        since = self.count_bytes_since_text(position, byte)
        is_inside_character = 0x80 <= byte < 0xC0
        return self._number(
            _Known(
                state,
                None if since is None else since + 1,
                in_word=before.in_word if is_inside_character else _begins_word_character(byte),
            )
        )

    def count_bytes_since_text(self, position: int, byte: int | None) -> int | None:
        """Returns the number of bytes between the end of the longest text read so far and a
        position, given that no text continues with the byte that follows. Returns None if no text
        is read.

        Args:
            position: the position.
            byte: byte that follows, or None at the end of the free text.
        """
        known = self._known[position]
        goes_on = byte is not None and known.in_word and _begins_word_character(byte)
        if self._language.is_text(known.state) and not goes_on:
            return 0
        return known.since_text

    def count_open_bytes(self, position: int) -> int:
        """Returns how many of the last bytes before a position may turn out to lie after the text
        that is read. If a text is read, all earlier bytes belong to it.
        """
        return self._known[position].since_text or 0

    def _number(self, known: _Known) -> int:
        found = self._numbers.setdefault(known, len(self._known))
        if found == len(self._known):
            self._known.append(known)
        return found


class _Known(NamedTuple):
    """What is known about the bytes read so far.

    Attributes:
        state: state of the language.
        since_text: number of bytes since the end of the longest text so far, or None if there is
            none.
        in_word: whether the last character is a letter or digit.
    """

    state: Hashable
    since_text: int | None
    in_word: bool


def _begins_word_character(byte: int) -> bool:
    """Returns True if a character whose first UTF-8 byte is `byte` counts as a letter or digit."""
    return (
        0x30 <= byte <= 0x39 or 0x41 <= byte <= 0x5A or 0x61 <= byte <= 0x7A or 0xC3 <= byte <= 0xD4
    )


def _length(first: int) -> int:
    """Returns the number of bytes of a UTF-8 character that begins with a byte, or 0 if no
    character does.
    """
    if first < 0x80:
        return 1
    if 0xC2 <= first <= 0xF4:
        return 2 + (first >= 0xE0) + (first >= 0xF0)
    return 0


def _code_points(partial: bytes) -> tuple[int, int]:
    """Returns the first and the last code point of the characters whose UTF-8 form begins with some
    bytes. If there are no such characters, the first code point is greater than the last one.
    """
    length = _length(partial[0])
    if not length or any(not 0x80 <= byte < 0xC0 for byte in partial[1:]):
        return 1, 0
    code = partial[0] & (0x7F if length == 1 else 0x7F >> length)
    for byte in partial[1:]:
        code = code << 6 | byte & 0x3F
    missing = 6 * (length - len(partial))
    shortest = (0, 0x80, 0x800, 0x10000)[length - 1]  # smaller code points have fewer bytes
    low, high = code << missing, (code + 1 << missing) - 1
    return max(low, shortest), min(high, sys.maxunicode)
