"""Shortest texts that lead from the states of an automaton to acceptance.

The length is read off the structure of a state's term, without a step of the automaton; only intersections and
complements need a search, whose work is limited.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sglang_lite.constraints.formal.automaton import Automaton, Symbol
from sglang_lite.constraints.formal.shortest_search import MAX_EXPANDED, UNKNOWN, searched
from sglang_lite.constraints.formal.shortest_texts import preferred
from sglang_lite.constraints.formal.terms import State

_MIN_EXPANDED = 10  # states that a search may expand at least


class Shortest:
    """Shortest completions of the texts of a context-free language.

    Args:
        automaton: automaton of the start rule, made with the rules.
        rules: least number of characters of each rule's texts (`ShortestTexts.lengths`).
    """

    def __init__(self, automaton: Automaton, rules: Mapping[str, float]) -> None:
        self._automaton, self._rules = automaton, rules
        self._lengths: dict[State, float] = {}
        self._tokens: dict[State, float] = {}
        self._found: dict[State, str | None] = {}  # results of searches
        self._most = MAX_EXPANDED  # states that the next search may expand: fewer where many have failed
        self._characters: dict[Symbol, str] = {}
        self._firsts: dict[int, str] = {}  # by mask of classes

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

    def tokens(self, state: State, count: Callable[[str], float]) -> float:
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

    def _count(self, state: State, count: Callable[[str], float]) -> float:
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

    def _count_part(self, state: State, kind: str, rest: list[int], count: Callable[[str], float]) -> float:
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

    def _searched(self, state: State) -> str | None:
        kind, *parts = self._automaton.term(state)
        if kind == "&":  # often the shortest text of one part is in all
            lengths = {part: self.length(part) for part in parts if self._automaton.term(part)[0] != "~"}
            longest = max(lengths, key=lengths.__getitem__, default=None)
            if longest is not None and lengths[longest] < UNKNOWN:
                text = self.text(longest)
                if self._automaton.accepting(self._automaton.run(state, text)):
                    return text
        path = searched(self._automaton, state, self._most)
        if path is None:
            self._most = max(self._most // 2, _MIN_EXPANDED)
            return None
        self._most = min(self._most * 2, MAX_EXPANDED)
        return "".join(map(self._character, path))

    def characters(self, symbol: Symbol) -> str:
        """Some characters of a class: plain ones if it has any."""
        if symbol not in self._characters:
            self._characters[symbol] = preferred(self._automaton.class_characters(symbol).ranges)
        return self._characters[symbol]

    def _first(self, mask: int) -> str:
        """Character of a mask's classes: the one that a set of all their characters would have (`preferred`)."""
        if mask not in self._firsts:
            symbols = [symbol for symbol in self._automaton.classes if mask >> symbol & 1]
            ranges = [each for symbol in symbols for each in self._automaton.class_characters(symbol).ranges]
            self._firsts[mask] = preferred(tuple(sorted(ranges)))[0]
        return self._firsts[mask]

    def _character(self, symbol: Symbol) -> str:
        return self.characters(symbol)[0]
