"""Reading several generations out of one answer: constants and stops held against its text. Pure functions.

Characters that are seen must be the same; layout need not be, as models and APIs change it:
- blanks: more or fewer of them, and blank lines, before a constant that has anything else in it; in it, between words
  and before punctuation. A constant of blanks alone is matched as it is.
- lines: a constant that begins a line may have the mark of a list before it, and stand some lines further down; lines
  that the program has no place for are thrown away, as a stop and the next constant would have kept them from coming.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from sglang_lite.text.stop import StopMatcher

_BLANKS = r"[^\S\n]*"  # but for line ends
_MARK = rf"(?:(?:[-*+•]|[0-9]{{1,2}}[.)]){_BLANKS})?"  # of a list
_SKIPPED = 2  # lines with text before one that begins with a constant, at most


@dataclass(frozen=True, slots=True)
class Hole:
    """A generation in a turn, as far as an answer is concerned.

    Attributes:
        stops: strings that end it.
        max_tokens: of its text; None: no limit.
        fits: whether a text keeps its constraint, which ends it before the next constant; None: it has none.
    """

    stops: tuple[str, ...] = ()
    max_tokens: int | None = None
    fits: Callable[[str], bool] | None = None


Part: TypeAlias = str | Hole


@dataclass(frozen=True, slots=True)
class OverrunAnswer:
    """An answer that was not stopped where its first generation would have been.

    Attributes:
        text: of all of it.
        ended: the model ended it; else a limit did.
        count: its tokens.
        tokens: their texts, as far as they are known.
    """

    text: str
    ended: bool
    count: int
    tokens: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Value:
    """Text of a generation in an answer.

    Attributes:
        matched: the stop that ended it.
        cut: its limit on tokens did.
    """

    text: str
    matched: str | None = None
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """Values that an answer holds.

    Attributes:
        values: of the first holes, up to the first that is not there.
        thrown: tokens of the answer that are in no value and in no constant, by their share of the characters.
    """

    values: tuple[Value, ...]
    thrown: int


def read(answer: OverrunAnswer, parts: Sequence[Part]) -> Reading:
    """Reads a turn, from its first part on, out of an answer.

    The answer's beginning may stand some lines further down, too. A generation ends at its first stop, else with the
    answer, if the model has ended that. Blanks alone are no value.
    """
    text, values = answer.text, list[Value]()
    begun = at = 0
    for place, part in enumerate(parts):
        if isinstance(part, Hole):
            ends = itertools.takewhile(lambda p: isinstance(p, str), parts[place + 1 :])
            found = _value(part, "".join(map(str, ends)), answer, at)
            if found is None:
                break
            value, at = found
            values.append(value)
            if value.cut:
                break
        else:
            stood = _after(part, text, at, values) if place else _first(part, text)
            if stood is None:
                break
            start, at = stood
            begun = begun if place else start
    return Reading(tuple(values), _unused(answer, at - begun if values else 0))


def _first(constant: str, text: str) -> tuple[int, int] | None:
    """Place of the constant that begins a turn."""
    return _line(constant, text, 0) if constant.strip() else (0, 0)


def _after(constant: str, text: str, at: int, values: Sequence[Value]) -> tuple[int, int] | None:
    """Place of a constant that follows on another. The stop that ended the value there may begin it, or not."""
    pattern = _pattern(constant)
    stop = values[-1].matched if values else None
    for start in (at, at + len(stop or "")):
        match = pattern.match(text, start)
        if match is not None:
            return match.span()
    words = constant.lstrip()
    return _line(words, text, at) if words and "\n" in constant[: -len(words)] else None


def _line(constant: str, text: str, at: int) -> tuple[int, int] | None:
    """Place of a line that begins with a constant, not far behind another."""
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
    """Pattern of a constant from its first character that is seen on. Line ends at its end are counted: what is on the
    next line may be an empty value."""
    behind = constant[len(constant.rstrip()) :]
    ends = (_BLANKS + r"\n") * behind.count("\n") + _BLANKS * bool(behind)
    words = [re.findall(r"\w+|[^\w\s]+", word) for word in constant.split()]
    return r"\s+".join(_BLANKS.join(map(re.escape, word)) for word in words) + ends


def _value(hole: Hole, behind: str, answer: OverrunAnswer, at: int) -> tuple[Value, int] | None:
    """The value at a place, and where it ends; None: it is not there, or nobody knows where it ends.

    Args:
        behind: the constant after it.
    """
    if hole.fits is not None:
        return _constrained(hole, hole.fits, behind, answer.text, at)
    stops = StopMatcher(hole.stops)
    text = stops.push(answer.text[at:])
    text += stops.flush() if stops.matched is None else ""
    left = _limited(hole, answer, at, at + len(text))
    if left is None or not text[:left].strip():
        return None
    if left < len(text):
        return Value(text[:left], cut=True), at + left
    if stops.matched is None and not answer.ended:
        return None
    return Value(text, stops.matched), at + len(text)


def _constrained(hole: Hole, fits: Callable[[str], bool], behind: str, text: str, at: int) -> tuple[Value, int] | None:
    """The shortest text before the constant `behind` that keeps a constraint, without the blanks around it if need
    be."""
    ends = [match.start() for match in _pattern(behind).finditer(text, at)] if behind.strip() else []
    for end in [*ends, len(text)]:
        for value in dict.fromkeys((text[at:end], text[at:end].strip())):
            short = hole.max_tokens is None or len(value.encode()) <= hole.max_tokens  # a token has a byte
            if short and value.strip() and fits(value):
                return Value(value), end
    return None


def _limited(hole: Hole, answer: OverrunAnswer, start: int, end: int) -> int | None:
    """Number of a text's characters that the limit on its tokens leaves; None: nobody knows."""
    length, limit = end - start, hole.max_tokens
    if limit is None or answer.count <= limit or len(answer.text[start:end].encode()) <= limit:  # a token has a byte
        return length
    if "".join(answer.tokens) != answer.text:
        return None
    ends = [each for each in itertools.accumulate(map(len, answer.tokens)) if each > start]  # of the tokens in it
    return length if len(ends) < limit else min(length, ends[limit - 1] - start)


def _unused(answer: OverrunAnswer, used: int) -> int:
    """Tokens of an answer of which so many characters were used."""
    length = len(answer.text)
    return round(answer.count * (length - used) / length) if length else answer.count
