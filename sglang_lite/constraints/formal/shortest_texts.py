"""Shortest texts of a context-free language, found from its rules without an automaton of the whole."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import NamedTuple, TypeAlias

from sglang_lite.constraints.formal.automaton import accepts, automaton
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
    references,
)
from sglang_lite.constraints.formal.shortest_search import UNKNOWN, searched
from sglang_lite.constraints.memo import memoized
from sglang_lite.protocol import ConstraintError

_PLAIN = [(ord(first), ord(last)) for first, last in ("az", "09", "AZ")]
_SOME = 4  # characters of a set to choose from
_LONGEST = 100_000  # characters of a text that is written out

_Parts: TypeAlias = "str | tuple[_Parts, ...]"


class _Found(NamedTuple):
    """Text that may be long: its length, and its parts, which other texts share."""

    length: float
    parts: _Parts = ""


_NOT_FOUND = _Found(UNKNOWN)


class ShortestTexts:
    """Shortest texts of the rules of a language.

    Args:
        rules: bodies of the rules by name.
    """

    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._found = dict.fromkeys(rules, _NOT_FOUND)
        self._solve(rules)

    @property
    def lengths(self) -> dict[str, float]:
        """Least number of characters of each rule's texts; infinite if there is none, or none was found."""
        return {name: found.length for name, found in self._found.items()}

    def text(self, name: str) -> str | None:
        """Shortest text of a rule, or None if there is none, none was found, or it has more than 100,000 characters."""
        found = self._found[name]
        return _written(found.parts) if found.length <= _LONGEST else None

    def _solve(self, rules: Mapping[str, Node]) -> None:
        """Finds the texts: the least fixed point, from above. One round finds it for all rules whose references are
        found before them, and is enough without recursion."""
        used = {name: references(body) & rules.keys() for name, body in rules.items()}
        users: dict[str, list[str]] = {name: [] for name in rules}
        order = _used_first(used)
        number = {name: i for i, name in enumerate(order)}
        for name in order:
            self._found[name] = self._of(rules[name])
            for each in used[name]:
                users[each].append(name)
        changed = [name for name in order if any(number[each] >= number[name] for each in used[name])]
        while changed:
            now = {name: self._of(rules[name]) for name in changed}
            shorter = {name: found for name, found in now.items() if found.length < self._found[name].length}
            self._found |= shorter
            changed = list(dict.fromkeys(user for name in shorter for user in users[name]))

    def _of(self, node: Node) -> _Found:
        """Shortest text of a node, by what is known of the rules."""
        match node:
            case LiteralText(text):
                return _Found(len(text), text)
            case CharSet(ranges):
                return _Found(1, preferred(ranges)[0]) if ranges else _NOT_FOUND
            case Ref(name):
                return self._found.get(name, _NOT_FOUND)
            case Concat(parts):
                found = [self._of(part) for part in parts]
                return _Found(sum([each.length for each in found]), tuple([each.parts for each in found]))
            case Alternation(options):
                return min(map(self._of, options), key=lambda each: each.length, default=_NOT_FOUND)
            case Repeat(_, 0, _):
                return _Found(0)
            case Repeat(inner, least, _):
                one = self._of(inner)
                return _Found(least * one.length, (one.parts,) * least if least * one.length <= _LONGEST else "")
            case Intersection() | Complement():
                found_text = _of_regular(node)
                return _NOT_FOUND if found_text is None else _Found(len(found_text), found_text)
        return _Found(0)  # of a substring


@memoized
def _of_regular(node: Intersection | Complement) -> str | None:
    """Shortest text of an intersection or complement, or None if none was found within the limit of work."""
    if isinstance(node, Intersection):  # often the shortest text of one part is in all
        found = {part: ShortestTexts({"": part}) for part in node.parts if not isinstance(part, Complement)}
        longest = max(found, key=lambda part: found[part].lengths[""], default=None)
        text = None if longest is None else found[longest].text("")
        if text is not None and all(part is longest or _is_in(part, text) for part in node.parts):
            return text
    try:
        at = automaton(node)
        path = searched(at, at.start)
    except ConstraintError:  # too many states
        return None
    return None if path is None else "".join(preferred(at.class_characters(symbol).ranges)[0] for symbol in path)


def _is_in(node: Node, text: str) -> bool:
    return not accepts(node.node, text) if isinstance(node, Complement) else accepts(node, text)


def preferred(ranges: Ranges) -> str:
    """Some characters of a set: plain ones if it has any."""
    plain = (
        code for first, last in _PLAIN for low, high in ranges for code in range(max(low, first), min(high, last) + 1)
    )
    return "".join(map(chr, islice(plain, _SOME))) or chr(ranges[0][0])


def _written(parts: _Parts) -> str:
    found: list[str] = []
    stack = [parts]
    while stack:
        each = stack.pop()
        if isinstance(each, str):
            found.append(each)
        else:
            stack += reversed(each)
    return "".join(found)


def _used_first(used: Mapping[str, set[str]]) -> list[str]:
    """Names in an order in which each comes behind those that it uses, as far as there is one."""
    order: dict[str, None] = {}
    opened = set[str]()
    stack = [(name, False) for name in used]
    while stack:
        name, is_done = stack.pop()
        if is_done:
            order[name] = None
        elif name not in opened:
            opened.add(name)
            stack.append((name, True))
            stack += [(each, False) for each in used[name]]
    return list(order)
