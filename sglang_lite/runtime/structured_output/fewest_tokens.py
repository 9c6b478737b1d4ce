"""Fewest tokens that complete a text of a language: a search over the states of the language by whole tokens."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from sglang_lite.constraints.formal.automaton import Automaton, renewed
from sglang_lite.constraints.formal.shortest import Shortest
from sglang_lite.constraints.formal.shortest_search import UNKNOWN
from sglang_lite.constraints.formal.terms import DEAD
from sglang_lite.constraints.formal.terms import State as Term

_MAX_STEPS = 300_000  # steps of the automaton that one search takes, about half a second
_TOKEN = ""  # key of the token that ends in a node of a trie

_Trie: TypeAlias = dict[Any, Any]  # by character class, and `_TOKEN`


class FewestTokens:
    """Search for endings of the fewest tokens, as bytes of whole characters.

    Args:
        automaton: automaton of the language. Searches add no states to it.
        lengths: least number of characters of each rule's texts.
        texts: text of each token that has whole characters, by id.
    """

    def __init__(self, automaton: Automaton, lengths: Mapping[str, float], texts: Sequence[str | None]) -> None:
        self._automaton, self._lengths = automaton, lengths
        self._longest = max((len(text) for text in texts if text), default=1)
        self._trie = self._made(texts)

    def _made(self, texts: Sequence[str | None]) -> _Trie:
        root: _Trie = {}
        classes: dict[str, Any] = {}
        for token, text in enumerate(texts):
            if not text:
                continue
            node = root
            for char in text:
                if char not in classes:
                    classes[char] = self._automaton.class_of(char)
                node = node.setdefault(classes[char], {})
            node.setdefault(_TOKEN, token)
        return root

    def search(self, start: Term) -> list[int] | None:
        """Tokens of a completion with the fewest tokens, or None if the search takes too much work."""
        automaton = renewed(self._automaton)
        start = automaton.adopt(start, self._automaton)
        shortest = Shortest(automaton, self._lengths)

        def bound(state: Term) -> float:
            length = shortest.length(state)
            return 0 if length == UNKNOWN else math.ceil(length / self._longest)

        before: dict[Term, tuple[Term, int]] = {}
        counts: dict[Term, int] = {start: 0}
        queue: list[tuple[float, Term]] = [(bound(start), start)]
        expanded, steps = set[Term](), 0
        while queue and steps < _MAX_STEPS:
            _, state = heapq.heappop(queue)
            if automaton.accepting(state):
                path = list[int]()
                while state != start:
                    state, token = before[state]
                    path.append(token)
                return path[::-1]
            if state in expanded:
                continue
            expanded.add(state)
            nodes = [(self._trie, state)]
            while nodes:
                node, at = nodes.pop()
                for symbol, child in node.items():
                    if symbol is _TOKEN:
                        continue
                    steps += 1
                    after = automaton.step(at, symbol)
                    if after == DEAD:
                        continue
                    nodes.append((child, after))
                    if _TOKEN in child and counts[state] + 1 < counts.get(after, math.inf):
                        counts[after], before[after] = counts[state] + 1, (state, child[_TOKEN])
                        heapq.heappush(queue, (counts[after] + bound(after), after))
        return None
