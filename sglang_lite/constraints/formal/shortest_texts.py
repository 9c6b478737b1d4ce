"""Shortest texts of a context-free language, found from its rules without an automaton of the whole
language.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import islice
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from sglang_lite.constraints.formal.automaton import accepts, cached_automaton
from sglang_lite.constraints.formal.charsets import Ranges
from sglang_lite.constraints.formal.nodes import (
    Alternation,
    CharSet,
    Complement,
    Concat,
    Intersection,
    LiteralText,
    Node,
    Ref,
    Repeat,
    Substring,
    references,
)
from sglang_lite.constraints.formal.shortest_search import UNKNOWN, search_shortest
from sglang_lite.constraints.memo import memoize
from sglang_lite.protocol import ConstraintError

_PLAIN = [(ord(first), ord(last)) for first, last in ("az", "09", "AZ")]
_SOME = 4  # characters of a set to choose from
_TRIED = 50  # maximum number of a source's pieces that are tried
_LONGEST = 100_000  # maximum length in characters of a text that is written out

_Parts: TypeAlias = "str | tuple[_Parts, ...]"


class _Found(NamedTuple):
    """Facts about the texts of a node.

    Attributes:
        length: least number of characters; infinite if there is no text or none was found.
        forced: least number of literal characters in a text. A reference to a rule counts as
            1.
        most_forced: maximum of `forced` over the node's parts. A reference to a rule counts
            as 1.
        parts: a shortest text, in parts that other texts may share. It may be long.
    """

    length: float
    forced: int
    most_forced: int
    parts: _Parts = ""

    @property
    def text(self) -> str | None:
        """The text, or None if none was found or it has more than 100,000 characters."""
        return _join_text_parts(self.parts) if self.length <= _LONGEST else None

    def as_single_reference(self) -> _Found:
        return _Found(self.length, 1, 1, self.parts)


_NOT_FOUND = _Found(UNKNOWN, 1, 1)


class ShortestTexts:
    """Shortest texts of the rules of a language.

    Args:
        rules: bodies of the rules by name, the start first.

    Attributes:
        longest_forced: upper bound for the length in characters of the longest forced text, where
            the language leaves no choice of characters.
    """

    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._found = dict.fromkeys(rules, _NOT_FOUND)
        self.longest_forced = 0
        self._solve(rules)

    @property
    def lengths(self) -> dict[str, float]:
        """Least number of characters of each rule's texts, infinite if there is no text or none was
        found.
        """
        return {name: found.length for name, found in self._found.items()}

    def find_shortest_text(self, name: str) -> str | None:
        """Returns the shortest text of a rule, or None if there is none, none was found, or it has
        more than 100,000 characters.
        """
        return self._found[name].text

    def _solve(self, rules: Mapping[str, Node]) -> None:
        """Finds the shortest texts by iteration, starting from infinite lengths. Rules are
        processed after the rules they refer to, as far as possible. A language without recursion
        therefore needs only one round.
        """
        found = self._found
        used = {name: references(body) & rules.keys() for name, body in rules.items()}
        order = _sort_by_dependency(used)
        done = set[str]()
        nested = list[str]()
        for name in order:
            own = _analyse_node(rules[name], found, {})
            found[name] = own.as_single_reference()
            self.longest_forced = max(self.longest_forced, own.most_forced)
            if not used[name] <= done:
                nested.append(name)
            done.add(name)
        users: dict[str, list[str]] = {name: [] for name in rules}
        for name in order:
            for each in used[name]:
                users[each].append(name)
        changed = nested
        while changed:
            now = {
                name: _analyse_node(rules[name], found, {}).as_single_reference()
                for name in changed
            }
            shorter = {name: new for name, new in now.items() if new.length < found[name].length}
            found |= shorter
            changed = list(dict.fromkeys(user for name in shorter for user in users[name]))


def _analyse_node(node: Node, rules: Mapping[str, _Found], known: dict[int, _Found]) -> _Found:
    """Returns the facts about a node.

    Args:
        node: the node.
        rules: facts about the rules by name; empty inside a regular node.
        known: facts found earlier, by the identity of their nodes. A node may be part of many
            others.
    """
    if isinstance(node, LiteralText):
        length = len(node.text)
        return _Found(length, length, length, node.text)
    if isinstance(node, Ref):
        return rules.get(node.name, _NOT_FOUND)
    if rules and not node.has_refs:
        return _analyse_regular_node(node)
    found = known.get(id(node))
    if found is None:
        found = known[id(node)] = _analyse_by_parts(node, rules, known)
    return found


@memoize  # many schemas share the same strings and numbers
def _analyse_regular_node(node: Node) -> _Found:
    return _analyse_by_parts(node, {}, {})


def _analyse_concat(parts: list[_Found]) -> _Found:
    length = 0.0
    forced = 0
    most_forced = 0
    for least, literal, most, _ in parts:
        length += least
        forced += literal
        if most > most_forced:
            most_forced = most
    texts: _Parts = tuple([part.parts for part in parts]) if length else ""
    return _Found(length, forced, max(forced, most_forced), texts)


def _analyse_by_parts(node: Node, rules: Mapping[str, _Found], known: dict[int, _Found]) -> _Found:
    match node:
        case Concat(parts):
            return _analyse_concat([_analyse_node(part, rules, known) for part in parts])
        case CharSet(ranges):
            single = int(len(ranges) == 1 and ranges[0][0] == ranges[0][1])
            return (
                _Found(1, single, single, plainest_characters(ranges)[0]) if ranges else _NOT_FOUND
            )
        case Alternation(options):
            return _analyse_alternation([_analyse_node(option, rules, known) for option in options])
        case Repeat(inner, least, _):
            return _analyse_repeat(_analyse_node(inner, rules, known), least)
        case Intersection(parts):
            return _analyse_intersection(
                node,
                {
                    part: _analyse_node(part, rules, known)
                    for part in parts
                    if not isinstance(part, Complement)
                },
            )
        case Complement():
            return _analyse_text(_search_shortest_text(node), 0, 0)
    return _Found(0, 0, 0)  # of a substring


def _analyse_alternation(options: list[_Found]) -> _Found:
    shortest = min(options, key=itemgetter(0))
    forced = min([each.forced for each in options])
    return _Found(
        shortest.length, forced, max([each.most_forced for each in options]), shortest.parts
    )


def _analyse_repeat(each: _Found, least: int) -> _Found:
    length = each.length * least if least else 0
    parts: _Parts = (each.parts,) * least if 0 < length <= _LONGEST else ""
    return _Found(length, each.forced * least, max(each.forced * least, each.most_forced), parts)


def _analyse_intersection(node: Intersection, found: Mapping[Node, _Found]) -> _Found:
    """Returns the facts about an intersection. `found` has the facts about each part that is not a
    complement.
    """
    text = None
    if found:  # the shortest text of one part is often in all of them
        longest = max(found, key=lambda part: found[part].length)
        text = found[longest].text
        if text is not None and not all(
            part is longest or _satisfies_part(part, text) for part in node.parts
        ):
            text = None
    if text is None:
        text = _try_copying_pieces(node)
    each = found.values()
    return _analyse_text(
        _search_shortest_text(node) if text is None else text,
        max((one.forced for one in each), default=0),
        max((one.most_forced for one in each), default=0),
    )


def _analyse_text(text: str | None, forced: int, most_forced: int) -> _Found:
    return _Found(UNKNOWN if text is None else len(text), forced, most_forced, text or "")


def _search_shortest_text(node: Intersection | Complement) -> str | None:
    """Searches for the shortest text of an intersection or complement. Returns None if none is
    found within the work limit.
    """
    try:
        at = cached_automaton(node)
        path = search_shortest(at, at.start)
    except ConstraintError:  # too many states
        return None
    return (
        None
        if path is None
        else "".join(plainest_characters(at.class_characters(symbol).ranges)[0] for symbol in path)
    )


def _try_copying_pieces(node: Intersection) -> str | None:
    """Tries to find a short text of an intersection that copies at most one piece of a source.
    Returns None if none of the first pieces fits. A search would go through the whole source.
    """
    for part in node.parts:
        match part:
            case Concat((LiteralText(before), Substring(text, cuts), LiteralText(after))):
                pieces = (text[i] for i in range(len(text)) if cuts[i] and cuts[i + 1])
                for piece in ("", *islice(pieces, _TRIED)):
                    found = f"{before}{piece}{after}"
                    if all(other is part or _satisfies_part(other, found) for other in node.parts):
                        return found
    return None


def _satisfies_part(node: Node, text: str) -> bool:
    return not accepts(node.node, text) if isinstance(node, Complement) else accepts(node, text)


@lru_cache(maxsize=1024)
def plainest_characters(ranges: Ranges) -> str:
    """Returns some characters of a set, plain ones if it has any."""
    plain = (
        code
        for first, last in _PLAIN
        for low, high in ranges
        for code in range(max(low, first), min(high, last) + 1)
    )
    return "".join(map(chr, islice(plain, _SOME))) or chr(ranges[0][0])


def _join_text_parts(parts: _Parts) -> str:
    found: list[str] = []
    stack = [parts]
    while stack:
        each = stack.pop()
        if isinstance(each, str):
            found.append(each)
        else:
            stack += reversed(each)
    return "".join(found)


def _sort_by_dependency(used: Mapping[str, set[str]]) -> list[str]:
    """Sorts names so that each comes after those that it uses, as far as that is possible."""
    order: list[str] = []
    opened = set[str]()
    for start in used:
        stack = [] if start in opened else [start]
        while stack:
            name = stack[-1]
            if name not in opened:
                opened.add(name)
                stack += used[name] - opened
            else:
                stack.pop()
                order.append(name)
    return list(dict.fromkeys(order))
