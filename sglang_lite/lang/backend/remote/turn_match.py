"""Reading of several generations out of one answer: the program's constants and stops are matched against its text.
Pure functions.

Visible characters must be equal; layout need not be, as models and APIs change it:
- blanks: more or fewer of them, and blank lines, before a constant with visible characters; and within it between words
  and before punctuation. A constant of blanks alone is matched exactly.
- lines: a constant that begins a line may have a list marker before it, and stand some lines further down; lines
  that the program has no place for are dropped, as a stop and the next constant would have prevented them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from sglang_lite.text.stop import StopMatcher

_BLANKS = r"[^\S\n]*"  # blanks other than line ends
_MARK = rf"(?:(?:[-*+•]|[0-9]{{1,2}}[.)]){_BLANKS})?"  # list marker
_SKIPPED = 2  # maximum number of non-blank lines before a line that begins with a constant


@dataclass(frozen=True, slots=True)
class TurnHole:
    """Generation in a turn, as far as reading an answer is concerned.

    Attributes:
        stops: strings that end the value.
        max_tokens: maximum number of tokens of the value, or None for no limit.
        fits: returns True if a text satisfies the constraint, which ends the value before the next constant; None if it
            has no constraint.
    """

    stops: tuple[str, ...] = ()
    max_tokens: int | None = None
    fits: Callable[[str], bool] | None = None


TurnPiece: TypeAlias = str | TurnHole


@dataclass(frozen=True, slots=True)
class UnstoppedAnswer:
    """Answer that was not stopped at the end of its first generation.

    Attributes:
        text: whole text of the answer.
        ended: True if the model ended the answer, False if a limit cut it.
        count: number of its tokens.
        tokens: texts of its tokens, as far as they are known.
    """

    text: str
    ended: bool
    count: int
    tokens: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnValue:
    """Text of one generation, found in an answer.

    Attributes:
        matched: stop string that ended the value, or None.
        cut: True if the limit on its tokens ended the value.
    """

    text: str
    matched: str | None = None
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """Values found in an answer.

    Attributes:
        values: values of the first holes, up to the first one that was not found.
        unused_tokens: number of the answer's tokens that are in no value and no constant, estimated by their share of
            the characters.
    """

    values: tuple[TurnValue, ...]
    unused_tokens: int


def read(answer: UnstoppedAnswer, pieces: Sequence[TurnPiece]) -> Reading:
    """Reads the pieces of a turn, from the first on, out of an answer.

    The first constant may stand some lines further down, too. A generation ends at its first stop string, or with the
    answer if the model has ended that. Blanks alone are not a value.
    """
    text, values = answer.text, list[TurnValue]()
    start_of_turn = at = 0
    for index, piece in enumerate(pieces):
        if isinstance(piece, TurnHole):
            ends = itertools.takewhile(lambda p: isinstance(p, str), pieces[index + 1 :])
            found = _value(piece, "".join(map(str, ends)), answer, at)
            if found is None:
                break
            value, at = found
            values.append(value)
            if value.cut:
                break
        else:
            span = _after(piece, text, at, values) if index else _first(piece, text)
            if span is None:
                break
            start, at = span
            start_of_turn = start_of_turn if index else start
    return Reading(tuple(values), _unused(answer, at - start_of_turn if values else 0))


def _first(constant: str, text: str) -> tuple[int, int] | None:
    """Span of the constant that begins a turn, or None if it is not found."""
    return _line(constant, text, 0) if constant.strip() else (0, 0)


def _after(constant: str, text: str, at: int, values: Sequence[TurnValue]) -> tuple[int, int] | None:
    """Span of a constant behind a value or another constant, or None if it is not found. The constant may begin with
    the stop string that ended the value, or behind it."""
    pattern = _pattern(constant)
    stop = values[-1].matched if values else None
    for start in (at, at + len(stop or "")):
        match = pattern.match(text, start)
        if match is not None:
            return match.span()
    words = constant.lstrip()
    return _line(words, text, at) if words and "\n" in constant[: -len(words)] else None


def _line(constant: str, text: str, at: int) -> tuple[int, int] | None:
    """Span of a line's beginning that matches a constant, at most `_SKIPPED` non-blank lines below `at`; None if not
    found."""
    match = _line_pattern(constant).search(text, at)
    if match is None:
        return None
    between = text[at : match.start()].split("\n")
    return match.span() if sum(map(bool, map(str.strip, between))) <= _SKIPPED else None


@lru_cache(maxsize=1024)
def _pattern(constant: str) -> re.Pattern[str]:
    return re.compile(r"\s*" + _words(constant) if constant.strip() else re.escape(constant))


@lru_cache(maxsize=1024)
def _line_pattern(constant: str) -> re.Pattern[str]:
    return re.compile(rf"^{_BLANKS}{_MARK}{_words(constant)}", re.MULTILINE)


def _words(constant: str) -> str:
    """Pattern of a constant, from its first visible character on. Line ends at its end must match in number: the next
    line may be an empty value."""
    behind = constant[len(constant.rstrip()) :]
    ends = (_BLANKS + r"\n") * behind.count("\n") + _BLANKS * bool(behind)
    words = [re.findall(r"\w+|[^\w\s]+", word) for word in constant.split()]
    return r"\s+".join(_BLANKS.join(map(re.escape, word)) for word in words) + ends


def _value(hole: TurnHole, behind: str, answer: UnstoppedAnswer, at: int) -> tuple[TurnValue, int] | None:
    """Value that begins at `at`, and its end; None if no value is there, or its end is unknown.

    Args:
        behind: constant behind the value.
    """
    if hole.fits is not None:
        return _constrained(hole, hole.fits, behind, answer.text, at)
    stops = StopMatcher(hole.stops)
    text = stops.push(answer.text[at:])
    text += stops.flush() if stops.matched is None else ""
    length = _limited(hole, answer, at, at + len(text))
    if length is None or not text[:length].strip():
        return None
    if length < len(text):
        return TurnValue(text[:length], cut=True), at + length
    if stops.matched is None and not answer.ended:
        return None
    return TurnValue(text, stops.matched), at + len(text)


def _constrained(
    hole: TurnHole, fits: Callable[[str], bool], behind: str, text: str, at: int
) -> tuple[TurnValue, int] | None:
    """Shortest text before the constant `behind` that satisfies the constraint, if need be without the blanks around
    it."""
    ends = [match.start() for match in _pattern(behind).finditer(text, at)] if behind.strip() else []
    for end in [*ends, len(text)]:
        for value in dict.fromkeys((text[at:end], text[at:end].strip())):
            short = hole.max_tokens is None or len(value.encode()) <= hole.max_tokens  # a token has a byte
            if short and value.strip() and fits(value):
                return TurnValue(value), end
    return None


def _limited(hole: TurnHole, answer: UnstoppedAnswer, start: int, end: int) -> int | None:
    """Number of characters that the limit on tokens leaves of a text, or None if that is unknown."""
    length, limit = end - start, hole.max_tokens
    if limit is None or answer.count <= limit or len(answer.text[start:end].encode()) <= limit:  # a token has a byte
        return length
    if "".join(answer.tokens) != answer.text:
        return None
    # Ends of the tokens in the text.
    ends = [each for each in itertools.accumulate(map(len, answer.tokens)) if each > start]
    return length if len(ends) < limit else min(length, ends[limit - 1] - start)


def _unused(answer: UnstoppedAnswer, used: int) -> int:
    """Number of an answer's tokens outside the `used` characters."""
    length = len(answer.text)
    return round(answer.count * (length - used) / length) if length else answer.count


def unrepeated(begun: str, text: str) -> str:
    """Text that a model has added to a begun turn, without leading lines that repeat the turn."""
    lines = begun.strip().split("\n")
    start = len(text) - len(text.lstrip())
    for first in range(len(lines)):
        repeated = "\n".join(lines[first:]).strip()
        if repeated and text.startswith(repeated, start):
            rest = text[start + len(repeated) :]
            if not (
                repeated[-1].isalnum() and rest[:1].isalnum()
            ):  # if not, the lines were the beginning of another word
                return rest
    return text
