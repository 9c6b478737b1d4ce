"""Stop strings and stop patterns, matched against text that arrives in pieces of any size."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from functools import lru_cache

import regex

from sglang_lite.protocol import ParameterError

MAX_PATTERN_BYTES = 256
MAX_REPEATS = 100_000
# Time limit for matching all patterns on one piece, in CPU time of the thread, so that no pattern
# fails only because the machine is busy. Only catastrophic backtracking reaches it.
_SECONDS = 0.1


class StopMatcher:
    """Cuts a growing text at the first stop, and holds back only text that may still become part of
    a match.

    A text ends at its shortest prefix that contains a stop string or a non-empty match of a
    pattern. For `$` and similar anchors, the end of the prefix is the end of the text. Among the
    matches in that prefix, the one that begins first counts. So the result does not depend on how
    the text is cut into pieces.

    Args:
        stops: non-empty stop strings.
        patterns: stop patterns by source, compiled by the `regex` package, which can report partial
            matches.

    Attributes:
        matched: stop string that matched, or source of the pattern that matched; None before a
            match.
        matched_text: text of the match.
    """

    def __init__(
        self, stops: tuple[str, ...], patterns: Mapping[str, regex.Pattern[str]] | None = None
    ) -> None:
        self._stops = stops
        self._patterns = patterns or {}
        self._firsts = frozenset(stop[0] for stop in stops)
        # the whole text if there are patterns, which may look behind; otherwise the part held back
        self._text = ""
        self._pending = 0  # offset of the part that is held back
        self.matched: str | None = None
        self.matched_text = ""

    def append_unmatched(self, piece: str) -> str:
        """Appends a piece in which no match may begin, and returns it. Must not be called after
        `push`.
        """
        if self._patterns:
            self._text += piece
            self._pending = len(self._text)
        return piece

    def push(self, piece: str) -> str:
        """Appends a piece, and returns the text that is now certain to belong to the result. Drops
        text after a match.

        Raises:
            ParameterError: a pattern takes too long.
        """
        if self.matched is not None:
            return ""
        if not self._patterns and not self._text and self._firsts.isdisjoint(piece):
            return piece  # common case: no stop can begin in the piece
        old_length = len(self._text)
        self._text += piece
        deadline = time.thread_time() + _SECONDS
        match = self._find_first_match(old_length, deadline)
        if match is not None:
            _, start, end, self.matched = match
            self.matched_text = self._text[start:end]
            until = start
        else:
            partial = [partial_match_start(self._text, self._pending, stop) for stop in self._stops]
            until = min(
                [*partial, *(self._partial_start(p, deadline) for p in self._patterns.values())]
            )
        certain = self._text[self._pending : until]
        self._pending = until
        if not self._patterns:
            self._text = self._text[until:]
            self._pending = 0
        return certain

    def flush(self) -> str:
        """Returns the text that is still held back at the end of the generation."""
        rest = self._text[self._pending :]
        self._pending = len(self._text)
        return rest

    def _find_first_match(
        self, old_length: int, deadline: float
    ) -> tuple[int, int, int, str] | None:
        """Returns the first match in the shortest prefix that contains one and is longer than
        `old_length`. The result is (end of the prefix, start of the match, end of the match, stop
        string or pattern source), or None if there is no match.
        """
        text = self._text
        found = [
            (at + len(s), at, at + len(s), s)
            for s in self._stops
            if (at := text.find(s, self._pending)) >= 0
        ]
        first = min(found, default=None)
        for end in range(old_length + 1, (first[0] if first else len(text)) + 1):
            spans = [
                (self._find_nonempty_match(p, end, deadline), source)
                for source, p in self._patterns.items()
            ]
            matches = [(end, *span, source) for span, source in spans if span is not None]
            if matches:
                return min([*matches, first] if first and first[0] == end else matches)
        return first

    def _find_nonempty_match(
        self, pattern: regex.Pattern[str], end: int, deadline: float
    ) -> tuple[int, int] | None:
        start = self._pending
        while match := self._search_until(pattern, start, end, deadline):
            if match.end() > match.start():
                return match.start(), match.end()
            start = match.end() + 1
            if start > end:
                break
        return None

    def _partial_start(self, pattern: regex.Pattern[str], deadline: float) -> int:
        """Returns where in the text an incomplete match may begin, which further text could
        complete. Returns the length of the text if there is no such place. The text must not
        contain a complete match.
        """
        match = self._search_until(pattern, self._pending, len(self._text), deadline, partial=True)
        if match is None:
            return len(self._text)
        # an empty match may hide partial ones
        return match.start() if match.partial else self._pending

    def _search_until(
        self,
        pattern: regex.Pattern[str],
        start: int,
        end: int,
        deadline: float,
        *,
        partial: bool = False,
    ) -> regex.Match[str] | None:
        seconds = max(deadline - time.thread_time(), 1e-6)
        try:
            # `pos` rather than a slice, because patterns may look behind it.
            return pattern.search(self._text, start, end, partial=partial, timeout=seconds)
        except TimeoutError:
            raise ParameterError(
                "stop_regex",
                f"{pattern.pattern!r} took longer than {_SECONDS} s.",
                hint="Avoid repeats inside repeats, as in (a+)+.",
            ) from None


def partial_match_start(text: str, start: int, stop: str) -> int:
    """Returns the first position at or after `start` where the rest of `text` is a prefix of
    `stop`, or the length of `text`.
    """
    at = text.find(stop[0], start)
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return at if at >= 0 else len(text)


@lru_cache(maxsize=256)
def compile_stop_pattern(pattern: str) -> regex.Pattern[str]:
    """Compiles a pattern in the syntax of Python's `re` with the `regex` package, which can find
    partial matches. Syntax with an additional meaning in `regex`, such as fuzzy matches in braces,
    keeps its meaning in `re` or is rejected.
    """
    if (size := len(pattern.encode())) > MAX_PATTERN_BYTES:
        raise ParameterError(
            "stop_regex", f"a pattern of {size:,} bytes, the limit is {MAX_PATTERN_BYTES}."
        )
    counts = (
        max(map(int, re.findall(r"\d+", braces)))
        for braces in re.findall(r"\{\d*,?\d+,?\}", pattern)
    )
    # repeats are unrolled, which takes memory
    if (repeats := math.prod(count or 1 for count in counts)) > MAX_REPEATS:
        raise ParameterError(
            "stop_regex", f"{pattern!r} repeats {repeats:,} times, the limit is {MAX_REPEATS:,}."
        )
    try:
        re.compile(pattern)
        return regex.compile(_BRACE.sub(lambda m: m[0] if len(m[0]) > 1 else r"\{", pattern))
    except (re.error, regex.error, OverflowError, RecursionError, Warning) as error:
        raise ParameterError(
            "stop_regex", f"{pattern!r} is no regular expression: {error}."
        ) from None


# An escape, or a brace that does not open a repeat.
_BRACE = re.compile(r"(?s)\\N\{[^}]*\}|\\.|\{(?!\d*,?\d*\}|,?\})")
