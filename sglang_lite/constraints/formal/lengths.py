"""Lengths of the texts of nodes, and restriction to a range of lengths without an intersection,
which is expensive for engines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from sglang_lite.constraints.formal.nodes import (
    NOTHING,
    Alternation,
    CharSet,
    Concat,
    Intersection,
    LiteralText,
    Node,
    Ref,
    Repeat,
    Substring,
    alternation,
    concat,
    fold_node,
    repeat,
)
from sglang_lite.constraints.memo import memoize

# characters of a shortest text, more than is ever generated; engines expand forced text
MAX_MIN_LENGTH = 100_000

_ROUNDS = 30  # rounds in which the lengths of recursive rules may converge

# minimum and maximum length in characters; None for no upper limit
Lengths = tuple[int, int | None]


@memoize
def lengths(node: Node) -> Lengths:
    """Returns a lower and an upper bound for the lengths of a node's texts. Between the bounds,
    there may be lengths without a text.
    """
    return fold_node(node, _length_bounds)


def _length_bounds(node: Node, parts: list[Lengths]) -> Lengths:
    """Returns the bounds for a node's texts, given those of its parts."""
    match node:
        case CharSet():
            return 1, 1
        case LiteralText(text):
            return len(text), len(text)
        case Substring(text):
            return 0, len(text)
        case Concat():
            return sum([low for low, _ in parts]), _combine_upper_bounds(parts, sum)
        case Alternation():
            return min([low for low, _ in parts]), _combine_upper_bounds(parts, max)
        case Repeat(_, least, most):
            low, high = parts[0]
            return (
                low * least,
                0 if high == 0 else None if high is None or most is None else high * most,
            )
        case Intersection():
            highs = [high for _, high in parts if high is not None]
            return max([low for low, _ in parts]), min(highs, default=None)
    return 0, None


def _combine_upper_bounds(each: list[Lengths], of: Callable[[list[int]], int]) -> int | None:
    highs = [high for _, high in each if high is not None]
    return of(highs) if len(highs) == len(each) else None


def limit_length(node: Node, least: int, most: int | None) -> Node | None:
    """Restricts a node to texts of `least` to `most` characters. Returns None if the restriction
    needs an intersection.
    """
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
            parts = [limit_length(option, least, most) for option in options]
            return (
                None if None in parts else alternation(part for part in parts if part is not None)
            )
        case Concat(parts):
            fixed = [
                lengths(part)[0] if lengths(part)[0] == lengths(part)[1] else None for part in parts
            ]
            if fixed.count(None) != 1:
                return None
            i = fixed.index(None)
            rest = sum(length for length in fixed if length is not None)
            part = limit_length(
                parts[i], max(0, least - rest), None if most is None else most - rest
            )
            return None if part is None else concat(*parts[:i], part, *parts[i + 1 :])
    return None


def most_bytes(rules: Mapping[str, Node], start: str) -> int | None:
    """Returns an upper bound for the bytes in a text of a rule, or None if no bound is known.

    Args:
        rules: bodies of the rules by name, each of which has a text.
        start: name of the rule.
    """
    found = dict.fromkeys(rules, 0.0)
    names = list(rules)[::-1]  # most rules now come after the rules that they use
    growing = names
    for _ in range(_ROUNDS):  # starts from 0 and only increases
        growing = _update_growing_rules(rules, names, found)
        if not growing:
            break
    while growing:  # treats rules that would converge later as unbounded, too
        found |= dict.fromkeys(growing, math.inf)
        growing = _update_growing_rules(rules, names, found)
    return None if found[start] == math.inf else int(found[start])


def _update_growing_rules(
    rules: Mapping[str, Node], names: list[str], found: dict[str, float]
) -> list[str]:
    """Updates the maximum lengths and returns the names of the rules whose maximum increased."""
    grown = []
    for name in names:
        most = fold_node(rules[name], lambda node, parts: _max_node_bytes(node, parts, found))
        if most > found[name]:
            found[name] = most
            grown.append(name)
    return grown


def _max_node_bytes(node: Node, parts: list[float], rules: Mapping[str, float]) -> float:
    match node:
        case CharSet(ranges):
            return len(chr(ranges[-1][1]).encode()) if ranges else 0
        case LiteralText(text) | Substring(text):
            return len(text.encode())
        case Ref(name):
            return rules[name]
        case Concat():
            return sum(parts)
        case Alternation():
            return max(parts, default=0)
        case Intersection():
            return min(parts)
        case Repeat(_, _, most):
            return 0 if not parts[0] or most == 0 else math.inf if most is None else parts[0] * most
    return math.inf
