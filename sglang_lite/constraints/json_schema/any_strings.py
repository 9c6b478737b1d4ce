"""Widens languages of JSON so that any string may stand where a quote is required.

Engines are slow with the substrings of a long document and fast with arbitrary strings.
The code that tracks the generated text must then reject strings that are not quotes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

from sglang_lite.constraints.formal.automaton import Automaton
from sglang_lite.constraints.formal.copies import find_source_positions
from sglang_lite.constraints.formal.nodes import (
    ANY_TEXT,
    Alternation,
    Complement,
    Concat,
    Intersection,
    Language,
    Node,
    Substring,
    alternation,
    children,
    concat,
    map_children,
    references,
)
from sglang_lite.constraints.formal.terms import DEAD
from sglang_lite.constraints.json_schema.quotes import BLANK
from sglang_lite.constraints.json_schema.write_strings import character
from sglang_lite.protocol import ConstraintError

_COMPARED = 64  # maximum number of compared pairs of states of two alternatives


def widen_quotes_to_strings(language: Language) -> Language | None:
    """Widens a language so that each quote may be any string that begins with a non-blank
    character, as all quotes do.

    Returns None if a text could begin with a string that is no quote and still be in the
    widened language. This happens if a quote has other requirements, such as a number of
    words, or if a text need not have a quote in the same place.
    """
    try:
        rules = {name: _widen_quotes(body) for name, body in language.rules.items()}
        quoting = {name for name, body in rules.items() if body is not language.rules[name]}
        while more := {
            name
            for name, body in rules.items()
            if name not in quoting and references(body) & quoting
        }:
            quoting |= more
        apart = all(
            _are_distinct_before_quotes(each, language.rules)
            for name in quoting
            for each in _choices(rules[name], quoting)
        )
    except (_NarrowedError, ConstraintError, RecursionError):
        return None
    return Language(language.start, rules, language.sealed) if apart else None


class _NarrowedError(Exception):
    """Raised if a string must be a quote and also meet another requirement, such as a number of
    words.
    """


def _widen_quotes(node: Node) -> Node:
    match node:
        case Intersection((Concat((before, inner, after)), outside)) if outside == _non_quote_texts(
            before, after
        ):
            if (superset := _quote_superset(inner)) is not None:
                return Intersection((concat(before, superset, after), outside))
        case Substring():
            raise _NarrowedError
    below = children(node)
    found = [_widen_quotes(each) for each in below]
    if all(new is old for new, old in zip(found, below)):
        return node
    if isinstance(node, Intersection | Complement):
        raise _NarrowedError
    parts = iter(found)
    return map_children(node, lambda _: next(parts))


def _quote_superset(node: Node) -> Node | None:
    """Returns a simpler language that contains all texts of a quote, or None if the node is not a
    quote.
    """
    options = node.options if isinstance(node, Alternation) else (node,)
    found = {option.superset if isinstance(option, Substring) else None for option in options}
    return found.pop() if len(found) == 1 else None


def _non_quote_texts(before: Node, after: Node) -> Node:
    """Returns every text except empty strings and strings that begin with a blank, which are never
    quotes.
    """
    return Complement(
        alternation([concat(before, after), concat(before, character(BLANK), ANY_TEXT)])
    )


def _choices(body: Node, quoting: set[str]) -> Iterator[tuple[Node, ...]]:
    """Finds the alternations in a rule's body that can lead to a quote, and yields the options of
    each.
    """
    stack = [body]
    while stack:
        node = stack.pop()
        if isinstance(node, Alternation) and references(node) & quoting:
            yield node.options
        stack += [child for child in children(node) if child.has_refs]


def _are_distinct_before_quotes(options: tuple[Node, ...], rules: Mapping[str, Node]) -> bool:
    """Returns True if the text before a quote always determines the option that it belongs to."""
    automaton = Automaton(*options, rules=rules)
    pairs = list(combinations(automaton.starts, 2))
    seen = set(pairs)
    for pair in pairs:
        if len(seen) > _COMPARED or any(
            automaton.accepting(each) or find_source_positions(automaton, each) for each in pair
        ):
            return False
        for symbol in automaton.classes:
            after = automaton.step(pair[0], symbol), automaton.step(pair[1], symbol)
            if DEAD not in after and after not in seen:
                seen.add(after)
                pairs.append(after)
    return True
