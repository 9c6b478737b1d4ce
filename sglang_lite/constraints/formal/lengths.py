"""Lengths of the texts of regular nodes, and cuts to a length without an intersection, which engines pay for."""

from __future__ import annotations

from collections.abc import Callable

from sglang_lite.constraints.formal.nodes import (
    NOTHING,
    Alternation,
    CharSet,
    Concat,
    Intersection,
    Language,
    Node,
    Ref,
    Repeat,
    Text,
    alternation,
    concat,
    repeat,
)

MAX_LEAST = 100_000  # characters of a shortest text: more than anyone generates, and engines write out what is forced

Lengths = tuple[int, int | None]  # from … to, None for without end


def lengths(node: Node) -> Lengths:
    """The shortest and the longest that a text may be; there may be none of these lengths."""
    match node:
        case CharSet():
            return 1, 1
        case Text(text):
            return len(text), len(text)
        case Concat(parts):
            each = [lengths(part) for part in parts]
            return sum([low for low, _ in each]), _highest(each, sum)
        case Alternation(options):
            # Of which there may be thousands.
            each = [(len(o.text), len(o.text)) if isinstance(o, Text) else lengths(o) for o in options]
            return min([low for low, _ in each]), _highest(each, max)
        case Repeat(inner, least, most):
            low, high = lengths(inner)
            return low * least, 0 if high == 0 else None if high is None or most is None else high * most
        case Intersection(parts):
            each = [lengths(part) for part in parts]
            highs = [high for _, high in each if high is not None]
            return max(low for low, _ in each), min(highs, default=None)
    return 0, None


def _highest(each: list[Lengths], of: Callable[[list[int]], int]) -> int | None:
    highs = [high for _, high in each if high is not None]
    return of(highs) if len(highs) == len(each) else None


def longest_forced(language: Language) -> int:
    """Characters of the longest text that the language may leave no choice about. References count as one."""
    longest = 0

    def least(node: Node) -> int:
        """Characters of a text of the node that are no choice among characters."""
        nonlocal longest
        match node:
            case Text(text):
                found = len(text)
            case Ref():
                found = 1
            case Concat(parts):
                found = sum(map(least, parts))
            case Alternation(options):
                found = min([len(o.text) if isinstance(o, Text) else least(o) for o in options])
                longest = max([longest, *(len(o.text) for o in options if isinstance(o, Text))])
            case Repeat(inner, count, _):
                found = least(inner) * count
            case _:
                found = 0
        longest = max(longest, found)
        return found

    for rule in language.rules.values():
        least(rule)
    return longest


def limited(node: Node, least: int, most: int | None) -> Node | None:
    """The texts of a node that are from `least` to `most` long; None where it takes an intersection to say so."""
    low, high = lengths(node)
    if low >= least and (most is None or (high is not None and high <= most)):
        return node
    if (most is not None and low > most) or (high is not None and high < least):
        return NOTHING
    match node:
        case Repeat(inner, fewest, utmost) if lengths(inner) == (1, 1):
            more = utmost if most is None else most if utmost is None else min(utmost, most)
            return repeat(inner, max(fewest, least), more)
        case Alternation(options):
            parts = [limited(option, least, most) for option in options]
            return None if None in parts else alternation(part for part in parts if part is not None)
        case Concat(parts):
            fixed = [lengths(part)[0] if lengths(part)[0] == lengths(part)[1] else None for part in parts]
            if fixed.count(None) != 1:
                return None
            i, rest = fixed.index(None), sum(length for length in fixed if length is not None)
            part = limited(parts[i], max(0, least - rest), None if most is None else most - rest)
            return None if part is None else concat(*parts[:i], part, *parts[i + 1 :])
    return None
