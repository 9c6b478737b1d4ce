"""What is read from the beginning of free text: the longest of some texts, in whole words. The
definition in plain Python, which shares no code with the reader.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import regex

_WORD = "0-9A-Za-z\u00c0-\u053f"


def longest_text(texts: Sequence[str], free: str) -> str | None:
    """The longest of some texts with which free text begins, None if it begins with none."""
    found = [
        text
        for text in texts
        if re.match(rf"{re.escape(text)}(?:(?<![{_WORD}])|(?![{_WORD}]))", free)
    ]
    return max(found, key=len, default=None)


def read_masses(
    texts: Sequence[str],
    tokens: Sequence[str],
    following: Callable[[tuple[int, ...]], Sequence[float]],
    least: float = 0.0,
) -> tuple[dict[str | None, float], float]:
    """Probability of what is read from a model's free text, over all sequences of tokens. Also
    returns the probability of those that were not followed.

    Args:
        texts: texts that are looked for.
        tokens: text of each token; an empty one ends the free text.
        following: probabilities of the next token after some tokens.
        least: probability of a sequence below which it is not followed.
    """
    masses: dict[str | None, float] = {}
    left = 0.0
    open_: list[tuple[tuple[int, ...], str, float]] = [((), "", 1.0)]
    while open_:
        ids, free, mass = open_.pop()
        if mass < least:
            left += mass
            continue
        for token, share in enumerate(following(ids)):
            longer = free + tokens[token]
            if tokens[token] and any(text.startswith(longer) for text in texts):
                open_.append(((*ids, token), longer, mass * share))
            else:
                read = longest_text(texts, longer)
                masses[read] = masses.get(read, 0.0) + mass * share
    return masses, left


def longest_match(pattern: str, free: str) -> str | None:
    """The longest text of a regex with which free text begins, None if it begins with none."""
    for end in range(len(free), -1, -1):
        cut = re.match(f"[{_WORD}]{{2}}", free[end - 1 : end + 1]) if end else None
        if cut is None and re.fullmatch(pattern, free[:end]):
            return free[:end]
    return None


def read_pattern_masses(
    pattern: str,
    tokens: Sequence[str],
    following: Callable[[tuple[int, ...]], Sequence[float]],
    least: float,
) -> tuple[dict[str | None, float], float]:
    """As `read_masses`, for the texts of a regex."""
    masses: dict[str | None, float] = {}
    left = 0.0
    open_: list[tuple[tuple[int, ...], str, float]] = [((), "", 1.0)]
    while open_:
        ids, free, mass = open_.pop()
        if mass < least:
            left += mass
            continue
        for token, share in enumerate(following(ids)):
            longer = free + tokens[token]
            if tokens[token] and regex.fullmatch(pattern, longer, partial=True):
                open_.append(((*ids, token), longer, mass * share))
            else:
                read = longest_match(pattern, longer)
                masses[read] = masses.get(read, 0.0) + mass * share
    return masses, left
