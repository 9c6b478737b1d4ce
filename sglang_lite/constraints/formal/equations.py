"""Least solutions of right-linear equations, as regular nodes.

A state is a set of terms that the rest of a text must satisfy together. Its steps are the
partial derivatives of these terms. A term from which no rule can be reached becomes part of the
solution unchanged. Only the repeating part of a language is rewritten, by eliminating its
states.

Source: V. Antimirov, Partial derivatives of regular expressions, TCS 155(2), 1996.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping
from functools import cache, reduce
from itertools import product
from typing import TypeAlias, TypeVar

from sglang_lite.constraints.formal import charsets
from sglang_lite.constraints.formal.automaton import Automaton
from sglang_lite.constraints.formal.nodes import (
    ANY_TEXT,
    EMPTY,
    NOTHING,
    CharSet,
    Node,
    Ref,
    alternation,
    complement,
    concat,
    intersection,
    repeat,
)
from sglang_lite.constraints.formal.terms import DEAD, DONE, State, automaton_too_large_error

MAX_POINTS = 200
MAX_SIZE = 4_000_000  # bytes of an edge's node

# name of a rule, terms to be satisfied together, or the end
Point: TypeAlias = "str | frozenset[State] | None"
P = TypeVar("P", bound=Hashable)


def solve_rules(rules: Mapping[str, Node]) -> dict[str, Node]:
    """Solves equations: returns the least solution of each rule as a node without these rules.

    Args:
        rules: bodies by name. A reference to a rule may only stand at the end of a
            concatenation, in options of alternations and in intersections with regular nodes.
            Characters must precede it.

    Raises:
        ConstraintError: the solution has too many states or is too large.
    """
    equations = _Equations(rules)
    edges: dict[tuple[Point, Point], Node] = {}
    queue: list[Point] = list(rules)
    for point in queue:
        if len(queue) > MAX_POINTS:
            raise automaton_too_large_error(f"{MAX_POINTS} states in a repeat")
        for after, text in equations.steps(point):
            if after is not None and after not in queue:
                queue.append(after)
            edges[point, after] = alternation([edges.get((point, after), NOTHING), text])
    eliminate_points(edges, [point for point in queue if point not in rules])
    return {name: edges.get((name, None), NOTHING) for name in rules}


@cache
def build_multiples_node(divisor: int) -> Node:
    """Returns the node for the texts of `Multiple`. The node has many equal parts. If all of them
    are written out, the node is exponentially long.
    """
    characters: dict[tuple[int, int], list[str]] = {}
    for remainder in range(divisor):
        characters.setdefault((remainder, remainder), []).append(".")
        for digit in range(10):
            characters.setdefault((remainder, (10 * remainder + digit) % divisor), []).append(
                str(digit)
            )
    edges: dict[tuple[int, int], Node] = {(-1, 0): EMPTY, (0, divisor): EMPTY}
    edges |= {key: CharSet(charsets.singles("".join(each))) for key, each in characters.items()}
    eliminate_points(edges, range(divisor), limited=False)
    return edges[-1, divisor]


def eliminate_points(
    edges: dict[tuple[P, P], Node], points: Collection[P], *, limited: bool = True
) -> None:
    """Removes points of an automaton one by one, the points on the fewest paths first. Each path
    through a removed point becomes an edge.

    Args:
        edges: texts by their first and last point; changed in place.
        points: points to remove, neither a start nor the end.
        limited: whether texts that become too large raise an error.

    Raises:
        ConstraintError: the texts become too large.
    """
    left = set(points)
    while left:
        degrees = Counter(a for a, b in edges if a != b), Counter(b for a, b in edges if a != b)
        point = min(left, key=lambda each: degrees[0][each] * degrees[1][each])
        left.remove(point)
        into = {a: edges.pop((a, point)) for a, b in list(edges) if b == point != a}
        out = {b: edges.pop((point, b)) for a, b in list(edges) if a == point != b}
        again = repeat(edges.pop((point, point), NOTHING), 0, None)
        for (a, before), (b, after) in product(into.items(), out.items()):
            edges[a, b] = alternation([edges.get((a, b), NOTHING), concat(before, again, after)])
            if limited and edges[a, b].size > MAX_SIZE:
                raise automaton_too_large_error(f"{MAX_SIZE:,} bytes")


class _Equations:
    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._rules = rules
        self._automaton = Automaton(*rules.values(), ANY_TEXT, rules=rules)
        self._any = frozenset((self._automaton.starts[-1],))
        self._refers: dict[State, bool] = {}
        self._nodes: dict[State, Node] = {}

    def steps(self, point: Point) -> Iterator[tuple[Point, Node]]:
        """Yields the successors of a point, each with the texts that lead there. The end is a
        successor if no rule can follow.
        """
        assert point is not None, "the end leads nowhere"
        if isinstance(point, str):
            for option in self._options(self._automaton.rule(point)):
                yield (
                    (option, EMPTY)
                    if self._may_lead_to_rules(*option)
                    else (None, self._intersect_states(option))
                )
            return
        characters: dict[frozenset[State], list[tuple[int, int]]] = {}
        for symbol in self._automaton.classes:
            each = [self._options(self._automaton.step(state, symbol)) for state in point]
            for option in dict.fromkeys(
                frozenset().union(*some) - self._any for some in product(*each)
            ):
                characters.setdefault(option, []).extend(
                    self._automaton.class_characters(symbol).ranges
                )
        for option, ranges in characters.items():
            one = CharSet(charsets.union(ranges))
            yield (
                (option, one)
                if self._may_lead_to_rules(*option)
                else (None, concat(one, self._intersect_states(option)))
            )

    def _intersect_states(self, option: frozenset[State]) -> Node:
        nodes: list[Node] = [ANY_TEXT, *map(self._cached_state_node, sorted(option))]
        return reduce(intersection, nodes)

    def _options(self, state: State) -> list[frozenset[State]]:
        """Splits a state that may refer to rules into alternatives, each of which is a set of terms
        that must be satisfied together.
        """
        kind, *rest = self._automaton.term_of_state(state)
        if state == DEAD:
            return []
        if not self._may_lead_to_rules(state):
            return [frozenset((state,))]
        if kind == "ref":
            return self._options(self._automaton.rule(rest[0]))
        if kind == "|":
            return [option for each in rest for option in self._options(each)]
        if kind == "&":
            return [frozenset().union(*some) for some in product(*map(self._options, rest))]
        # If the first part of a concatenation may be empty, the steps of the second part are also
        # steps of the concatenation.
        ends = self._options(rest[1]) if self._automaton.accepting(rest[0]) else []
        return [
            frozenset((state,)),
            *(option for option in ends if not self._may_lead_to_rules(*option)),
        ]

    def _may_lead_to_rules(self, *states: State) -> bool:
        """Returns True if one of the rules being solved can follow one of the states."""
        for state in states:
            if state not in self._refers:
                kind, *rest = self._automaton.term_of_state(state)
                below = rest if kind in ("|", "&", ".") else ()
                self._refers[state] = (
                    rest[0] in self._rules if kind == "ref" else self._may_lead_to_rules(*below)
                )
        return any(self._refers[state] for state in states)

    def _cached_state_node(self, state: State) -> Node:
        if state not in self._nodes:
            self._nodes[state] = self._node_of_term(state)
        return self._nodes[state]

    def _node_of_term(self, state: State) -> Node:
        """Converts a term to a node."""
        if state == DONE:
            return EMPTY
        kind, *rest = self._automaton.term_of_state(state)
        match kind:
            case "set":
                classes = [c for c in self._automaton.classes if rest[0] >> c & 1]
                return CharSet(
                    charsets.union(
                        r for c in classes for r in self._automaton.class_characters(c).ranges
                    )
                )
            case "ref":
                return Ref(rest[0])
            case ".":
                return concat(*map(self._cached_state_node, rest))
            case "|":
                return alternation(map(self._cached_state_node, rest))
            case "&":
                return reduce(intersection, map(self._cached_state_node, rest))
            case "~":
                return complement(self._cached_state_node(rest[0]))
            case "{":
                return repeat(self._cached_state_node(rest[0]), *rest[1:])
        raise AssertionError(f"a repeat has no {kind}")
