"""Longest of the shortest completions from all places of a language's texts, read off its rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sglang_lite.constraints.formal.nodes import (
    Alternation,
    CharSet,
    Concat,
    Intersection,
    LiteralText,
    Node,
    Ref,
    Repeat,
    Substring,
    references,
)

_REGULAR = 32  # characters for what is known of an intersection or complement only by its states


class LongestRest(NamedTuple):
    """Rest that a text may still need, wherever it stands.

    Attributes:
        length: most characters of a shortest completion; if rules nest, of each level.
        nests: whether rules contain themselves, so that each level that a text opens may add as much.
    """

    length: float
    nests: bool


def longest_rest(rules: Mapping[str, Node], start: str, lengths: Mapping[str, float]) -> LongestRest:
    """Finds about the longest rest of the texts of a rule: rests of intersections and complements are guessed.

    Args:
        rules: bodies of the rules by name.
        start: name of the rule.
        lengths: least number of characters of each rule's texts.
    """
    found: dict[str, float] = {}

    def of(node: Node) -> tuple[float, float]:
        """Least number of characters of a node's texts, and of the rest of one that has begun."""
        match node:
            case LiteralText(text):
                return len(text), len(text)
            case CharSet():
                return 1, 1
            case Ref(name):
                return lengths.get(name, 0), found.get(name, 0)  # 0 for a rule that is open
            case Concat(parts):
                least = rest = 0.0
                for part in reversed(parts):
                    needed, begun = of(part)
                    least, rest = least + needed, max(rest, begun + least)
                return least, rest
            case Alternation(options):
                each = [of(option) for option in options]
                return min((needed for needed, _ in each), default=0), max((begun for _, begun in each), default=0)
            case Repeat(inner, count, _):
                needed, begun = of(inner)
                return needed * count if count else 0, begun + (needed * (count - 1) if count > 1 else 0)
            case Intersection(parts):
                each = [of(part) for part in parts]
                return max(needed for needed, _ in each), sum(begun for _, begun in each) + _REGULAR
            case Substring():
                return 0, _REGULAR
        return 0, _REGULAR

    nests, opened = False, {start: iter(sorted(references(rules[start])))}
    while opened:  # without recursion: rules may be hundreds deep
        name, left = next(reversed(opened.items()))
        inner = next(left, None)
        if inner is None:
            found[name] = of(rules[name])[1]
            del opened[name]
        elif inner in opened:
            nests = True
        elif inner in rules and inner not in found:
            opened[inner] = iter(sorted(references(rules[inner])))
    return LongestRest(found[start], nests)
