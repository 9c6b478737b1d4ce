"""Searches an automaton for a shortest text that a state accepts, if the node's structure does not
determine it.
"""

from __future__ import annotations

import heapq
import math

from sglang_lite.constraints.formal.automaton import Automaton, Symbol
from sglang_lite.constraints.formal.terms import DEAD, State

MAX_EXPANDED = 300  # maximum number of states that one search expands
UNKNOWN = math.inf  # length if no text is known


def search_shortest(
    automaton: Automaton, start: State, most: int = MAX_EXPANDED
) -> list[Symbol] | None:
    """Searches for a shortest text that a state accepts, and returns its character classes. Returns
    None if none was found after expanding `most` states. The search is best-first (A*).
    """
    before: dict[State, tuple[State, Symbol]] = {}
    steps: dict[State, int] = {start: 0}
    queue: list[tuple[float, State]] = [(_least_length(automaton, start), start)]
    expanded = set[State]()
    while queue and len(expanded) < most:
        _, state = heapq.heappop(queue)
        if automaton.accepting(state):
            path: list[Symbol] = []
            at = state
            while at != start:
                at, symbol = before[at]
                path.append(symbol)
            return path[::-1]
        if state in expanded:
            continue
        expanded.add(state)
        for symbol in automaton.classes:
            after = automaton.step(state, symbol)
            if after != DEAD and steps[state] + 1 < steps.get(after, UNKNOWN):
                steps[after] = steps[state] + 1
                before[after] = (state, symbol)
                heapq.heappush(queue, (steps[after] + _least_length(automaton, after), after))
    return None


def _least_length(automaton: Automaton, state: State) -> float:
    """Returns a lower bound for the remaining length."""
    if automaton.accepting(state):
        return 0
    kind, *rest = automaton.term_of_state(state)
    match kind:
        case ".":
            return _least_length(automaton, rest[0]) + _least_length(automaton, rest[1])
        case "|":
            return min((_least_length(automaton, each) for each in rest), default=UNKNOWN)
        case "&":
            return max(_least_length(automaton, each) for each in rest)
        case "{":
            return _least_length(automaton, rest[0]) * int(rest[1])
    return 1
