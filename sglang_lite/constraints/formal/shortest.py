"""Shortest texts that lead from the states of an automaton to acceptance.

The length is read off the structure of a state's term, without a step of the automaton; only intersections and
complements need a search, whose work is limited.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from string import ascii_lowercase, ascii_uppercase, digits

from sglang_lite.constraints.formal.automaton import Automaton, Symbol
from sglang_lite.constraints.formal.nodes import (
    Alternation,
    CharSet,
    Concat,
    LiteralText,
    Node,
    Ref,
    Repeat,
    children,
)
from sglang_lite.constraints.formal.terms import DEAD, State

_MAX_EXPANDED = 300  # states expanded by one search
_PREFERRED = [ord(char) for char in ascii_lowercase + digits + ascii_uppercase]
_SOME = 4  # characters of a class to choose from
UNKNOWN = math.inf


class Shortest:
    """Shortest completions of the texts of a context-free language.

    Args:
        automaton: automaton of the start rule, made with `rules`.
        rules: bodies of the rules by name.
    """

    def __init__(self, automaton: Automaton, rules: Mapping[str, Node]) -> None:
        self._automaton = automaton
        self._lengths: dict[State, float] = {}
        self._tokens: dict[State, float] = {}
        self._found: dict[State, str | None] = {}  # results of searches
        self._characters: dict[Symbol, str] = {}
        self._rules: dict[str, float] = dict.fromkeys(rules, UNKNOWN)
        self._solve(rules)

    def length(self, state: State) -> float:
        """Least number of characters from a state to acceptance; infinite if there is none, or none was found."""
        known = self._lengths.get(state)
        if known is None:
            known = self._lengths[state] = self._length(state)
        return known

    def text(self, state: State) -> str:
        """Text of that length. Must be asked for only where the length is finite."""
        parts: list[str] = []
        while not self._automaton.accepting(state):
            kind, *rest = self._automaton.term(state)
            if kind == ".":
                parts.append(self.text(rest[0]))
                state = rest[1]
            elif kind == "|":
                state = min(rest, key=self.length)
            elif kind == "ref":
                state = self._automaton.rule(rest[0])
            else:
                parts.append(self._plain_text(state, kind, rest))
                break
        return "".join(parts)

    def tokens(self, state: State, count: Callable[[str], int]) -> float:
        """Number of tokens of `text`, if its parts are spelled one by one; infinite if there is no text.

        Args:
            state: state of the automaton.
            count: function that returns the number of tokens of a text; the same at each call.
        """
        known = self._tokens.get(state)
        if known is None:
            known = UNKNOWN if self.length(state) == UNKNOWN else self._count(state, count)
            self._tokens[state] = known
        return known

    def _count(self, state: State, count: Callable[[str], int]) -> float:
        total, literal = 0.0, ""
        while not self._automaton.accepting(state):
            kind, *rest = self._automaton.term(state)
            if kind == "set" or (kind == "." and self._automaton.term(rest[0])[0] == "set"):
                mask = rest[0] if kind == "set" else self._automaton.term(rest[0])[1]
                literal += self._first(mask)
            elif kind == "|":
                state = min(rest, key=self.length)
                continue
            elif kind == "ref":
                state = self._automaton.rule(rest[0])
                continue
            else:
                total += count(literal) if literal else 0
                literal = ""
                total += self.tokens(rest[0], count) if kind == "." else self._count_part(state, kind, rest, count)
            if kind != ".":
                break
            state = rest[1]
            if not literal and (known := self._tokens.get(state)) is not None:
                return total + known
        return total + (count(literal) if literal else 0)

    def _count_part(self, state: State, kind: str, rest: list[int], count: Callable[[str], int]) -> float:
        return self.tokens(rest[0], count) * rest[1] if kind == "{" else count(self._plain_text(state, kind, rest))

    def _plain_text(self, state: State, kind: str, rest: list[int]) -> str:
        if kind == "set":
            return self._first(rest[0])
        if kind == "{":
            return self.text(rest[0]) * rest[1]
        found = self._search(state)
        assert found is not None
        return found

    def _length(self, state: State) -> float:
        total = 0.0
        while not self._automaton.accepting(state):
            kind, *rest = self._automaton.term(state)
            if kind != ".":
                return total + self._plain_length(state, kind, rest)
            total += self.length(rest[0])
            state = rest[1]
            if (known := self._lengths.get(state)) is not None:
                return total + known
        return total

    def _plain_length(self, state: State, kind: str, rest: list[int]) -> float:
        match kind:
            case "set":
                return 1
            case "ref":
                return self._rules.get(str(rest[0]), UNKNOWN)
            case "|":
                return min(map(self.length, rest), default=UNKNOWN)
            case "{":
                return self.length(rest[0]) * rest[1]
        found = self._search(state)
        return UNKNOWN if found is None else len(found)

    def _search(self, state: State) -> str | None:
        """Shortest text from an intersection or complement, or None if none was found within the limit of work."""
        if state not in self._found:
            self._found[state] = self._searched(state)
        return self._found[state]

    def _searched(self, start: State) -> str | None:
        """Best-first search (A*) by characters."""
        automaton = self._automaton
        before: dict[State, tuple[State, Symbol]] = {}
        steps: dict[State, int] = {start: 0}
        queue: list[tuple[float, State]] = [(self._bound(start), start)]
        expanded = set[State]()
        while queue and len(expanded) < _MAX_EXPANDED:
            _, state = heapq.heappop(queue)
            if automaton.accepting(state):
                path: list[str] = []
                at = state
                while at != start:
                    at, symbol = before[at]
                    path.append(self._character(symbol))
                return "".join(reversed(path))
            if state in expanded:
                continue
            expanded.add(state)
            for symbol in automaton.classes:
                after = automaton.step(state, symbol)
                if after != DEAD and steps[state] + 1 < steps.get(after, UNKNOWN):
                    steps[after], before[after] = steps[state] + 1, (state, symbol)
                    heapq.heappush(queue, (steps[after] + self._bound(after), after))
        return None

    def _bound(self, state: State) -> float:
        """Lower bound of the length, without a search."""
        if self._automaton.accepting(state):
            return 0
        kind, *rest = self._automaton.term(state)
        match kind:
            case ".":
                return self._bound(rest[0]) + self._bound(rest[1])
            case "|":
                return min(map(self._bound, rest), default=UNKNOWN)
            case "&":
                return max(map(self._bound, rest))
            case "{":
                return self._bound(rest[0]) * int(rest[1])
        return 1

    def characters(self, symbol: Symbol) -> str:
        """Some characters of a class: plain ones if it has any."""
        if symbol not in self._characters:
            ranges = self._automaton.class_characters(symbol).ranges
            plain = [chr(code) for code in _PREFERRED if any(low <= code <= high for low, high in ranges)]
            self._characters[symbol] = "".join(plain[:_SOME]) or chr(ranges[0][0])
        return self._characters[symbol]

    def _first(self, mask: int) -> str:
        """Character of the first class in a mask."""
        return self._character((mask & -mask).bit_length() - 1)

    def _character(self, symbol: Symbol) -> str:
        return self.characters(symbol)[0]

    def _solve(self, rules: Mapping[str, Node]) -> None:
        """Finds the least length of each rule's texts: the least fixed point, from above. One round finds it for all
        rules whose references are found before them, and is enough without recursion."""
        used = {name: _references(body) & rules.keys() for name, body in rules.items()}
        users: dict[str, list[str]] = {name: [] for name in rules}
        order = _used_first(used)
        number = {name: i for i, name in enumerate(order)}
        for name in order:
            self._rules[name] = self._least(rules[name])
            for each in used[name]:
                users[each].append(name)
        changed = [name for name in order if any(number[each] >= number[name] for each in used[name])]
        while changed:
            shorter = [name for name in changed if self._least(rules[name]) < self._rules[name]]
            self._rules |= {name: self._least(rules[name]) for name in shorter}
            changed = list(dict.fromkeys(user for name in shorter for user in users[name]))
        self._lengths.clear()  # which may depend on a rule that has become shorter

    def _least(self, node: Node) -> float:
        """Least length of a node's texts, by what is known of the rules."""
        match node:
            case LiteralText(text):
                return len(text)
            case CharSet(ranges):
                return 1 if ranges else UNKNOWN
            case Ref(name):
                return self._rules.get(name, UNKNOWN)
            case Concat(parts):
                return sum(map(self._least, parts))
            case Alternation(options):
                return min(map(self._least, options), default=UNKNOWN)
            case Repeat(inner, least, _):
                return least * self._least(inner) if least else 0
        return self.length(self._automaton.state(node))


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


def _references(body: Node) -> set[str]:
    found: set[str] = set()
    stack = [body]
    while stack:
        node = stack.pop()
        if isinstance(node, Ref):
            found.add(node.name)
        stack += children(node)
    return found
