"""Finds the smallest number of tokens that can spell a text of a language, from its rules and the
vocabulary.

The text of a rule may begin and end within a token (token_rests.py describes such places). For each
rule and each place at which its text may begin, the search computes a number for each place at
which the text may end: the fewest tokens that end before it. These numbers are the least solution
of a system of equations, which the search approaches from above. So a rule may contain anything,
even itself, and no automaton of the whole language is needed. The search leaves out places that
need more than a certain number of tokens, and raises this number until it finds a text.

Source: Y. Bar-Hillel, M. Perles, E. Shamir, On formal properties of simple phrase structure
grammars, 1961: the intersection of a grammar with an automaton. Here, the automaton is that of the
vocabulary, and counts replace truth values.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from itertools import count

from sglang_lite.constraints.formal.automaton import Automaton, cached_automaton
from sglang_lite.constraints.formal.charsets import Ranges, union
from sglang_lite.constraints.formal.nodes import (
    ANY_TEXT,
    Alternation,
    CharSet,
    Complement,
    Concat,
    Intersection,
    Language,
    LiteralText,
    Node,
    Ref,
    Repeat,
    Substring,
    intersection,
    map_children,
    substrings,
)
from sglang_lite.constraints.formal.terms import State as Term
from sglang_lite.protocol import ConstraintError
from sglang_lite.runtime.structured_output.least_ends import LeastEnds
from sglang_lite.runtime.structured_output.token_rests import Costs, Rests, TokenRests, Written
from sglang_lite.runtime.structured_output.utf8 import byte_ranges

MAX_WORK = 40_000  # steps by a byte or a node, about half a second
# Quotes from a source with more characters are replaced by a simpler language that contains them.
_LONG = 2_000
_DEPTH = 30  # nesting depth of open rules, above which a rule is queued
_MANY = 1 << 30  # more tokens than any text has

_Key = tuple[str, Rests]  # a rule, and the place at which its text begins


def fewest_tokens(
    rules: Mapping[str, Node],
    start: str,
    tokens: TokenRests,
    ending: bytes | None = None,
    written: bytes = b"",
) -> int | None:
    """Returns the fewest tokens that spell a text of a rule, or None if it has no text. If the
    search takes too much work, returns a lower bound instead.

    Args:
        rules: bodies of the rules by name.
        start: name of the rule.
        tokens: places within the vocabulary's tokens.
        ending: one possible continuation of `written`; None if none is known.
        written: beginning of the text that already exists, which needs no tokens.
    """
    tokens.drop_if_large()
    known = None if ending is None else tokens.fewest_tokens_to_spell(ending)
    search = _Search(rules, tokens, LeastEnds(rules, tokens))
    most = least = search.least_tokens_bound(start) if not written else 0
    while known is None or most < known:
        try:
            found = search.search_fewest_tokens(start, written, most)
        except (_TooMuchWorkError, ConstraintError, RecursionError):
            return least
        if found is not None:
            return found
        if not search.left_out:
            return known
        least = most + 1
        most += max(1, most // 8)
        if most > _MANY:
            break
    return known


class _TooMuchWorkError(Exception):
    """A search takes too much work."""


class _Search:
    def __init__(self, rules: Mapping[str, Node], tokens: TokenRests, ends: LeastEnds) -> None:
        self._rules = rules
        self._tokens = tokens
        self._ends = ends
        self._left = MAX_WORK
        self._start = tokens.start
        self._found: dict[_Key, Costs] = {}
        self._most: dict[_Key, int] = {}  # tokens up to which `_found` is known or being computed
        self._users: dict[_Key, dict[_Key, None]] = {}
        self._to_do: dict[_Key, None] = {}
        self._open: list[_Key] = []
        # whether anything was left out because it exceeded the number of tokens
        self.left_out = False

    def least_tokens_bound(self, start: str) -> int:
        """Returns a lower bound on the tokens of any text of a rule."""
        return self._ends.ends_within_rule(start) + 1 if self._ends.ends_within_rule(start) else 0

    def search_fewest_tokens(self, start: str, written: bytes, most: int) -> int | None:
        """Returns the fewest tokens that spell a text of a rule, or None if no text has at most
        `most`.
        """
        place = Written(self._tokens, written) if written else self._start
        self._costs_after_rule(start, place, most)
        while self._to_do:
            self._open_rule(self._to_do.popitem()[0])
        found = self._found[start, place].get(self._start)
        return None if found is None or found > most else found

    # ---------------------------------------------------------------------------------------- rules

    def _costs_after_rule(self, name: str, place: Rests, most: int) -> Costs:
        """Returns the places that may follow a rule's texts, each with its cost. The cost is the
        fewest tokens known so far to have ended before the place.
        """
        key = name, place
        if self._open:
            self._users.setdefault(key, {})[self._open[-1]] = None
        known = self._most.get(key)
        if known is None or known < most:
            self._most[key] = most
            self._found.setdefault(key, {})
            if len(self._open) < _DEPTH and key not in self._open:
                self._open_rule(key)
            else:
                self._to_do[key] = None
        return self._found[key]

    def _open_rule(self, key: _Key) -> None:
        name, place = key
        self._to_do.pop(key, None)
        self._open.append(key)
        after = self._costs_after_node(self._rules[name], {place: 0}, self._most[key])
        self._open.pop()
        if after != self._found[key]:
            self._found[key] = after
            self._to_do.update(self._users.get(key, {}))

    # ---------------------------------------------------------------------------------------- nodes

    def _costs_after_node(self, node: Node, costs: Costs, most: int) -> Costs:
        """Returns the places that may follow a node's texts, each with its cost. The cost is the
        fewest tokens that have ended before the place.

        Args:
            node: the node.
            costs: for each place at which the node's text may begin, number of tokens that have
                ended before the place.
            most: number of tokens above which places are dropped.
        """
        if not costs:
            return costs
        match node:
            case LiteralText(text):
                for byte in text.encode():
                    costs = self._step_over_byte(costs, byte, byte, most)
                return costs
            case CharSet(ranges):
                return self._step_over_character(costs, ranges, most)
            case Ref(name):
                costs = self._drop_too_expensive(costs, most - self._ends.ends_within_rule(name))
                return self._keep_cheapest(
                    [
                        (after, cost + more)
                        for place, cost in costs.items()
                        for after, more in self._costs_after_rule(name, place, most - cost).items()
                    ],
                    most,
                )
            case Concat(parts):
                return self._costs_after_concat(parts, costs, most)
            case Alternation(options):
                return self._keep_cheapest(
                    [
                        each
                        for option in options
                        for each in self._costs_after_node(option, costs, most).items()
                    ],
                    most,
                )
            case Repeat(inner, least, greatest):
                return self._costs_after_repeat(inner, least, greatest, costs, most)
        if any(len(each.text) > _LONG for each in substrings(Language("", {"": node}))):
            return self._costs_after_node(_relax_long_sources(node), costs, most)
        states = cached_automaton(node)
        found = [
            each
            for place, cost in costs.items()
            for each in self._costs_after_automaton(states, place, cost, most)
        ]
        return self._keep_cheapest(found, most)

    def _costs_after_concat(self, parts: Sequence[Node], costs: Costs, most: int) -> Costs:
        ends = [self._ends.ends_within_node(part) for part in parts]
        left = sum(ends)
        if left:
            costs = self._drop_too_expensive(costs, most - left)
        for part, own in zip(parts, ends):
            left -= own
            costs = self._costs_after_node(part, costs, most - left)
            if not costs:
                break
        return costs

    def _drop_too_expensive(self, costs: Costs, most: int) -> Costs:
        """Drops places that can't lead to a text of at most `most` tokens. Places in text that
        already exists are kept.
        """
        start = self._start
        found = {
            place: cost
            for place, cost in costs.items()
            if not place.price or cost + (place is not start) <= most
        }
        if len(found) < len(costs):
            self.left_out = True
        return found

    def _step_over_byte(
        self, costs: Costs, low: int, high: int, most: int, *, leave: bool = False
    ) -> Costs:
        """Returns the places that follow one more byte, with their costs. The byte may be any from
        `low` to `high`.
        """
        found: list[tuple[Rests, int]] = []
        self._spend_work(len(costs))
        for place, cost in costs.items():
            after, ends = place.leave(low, high) if leave else place.step_byte(low, high)
            if after is not None:
                found.append((after, cost))
            if ends:
                found.append((self._start, cost + place.price))
        return self._keep_cheapest(found, most)

    def _step_over_character(self, costs: Costs, ranges: Ranges, most: int) -> Costs:
        found: list[tuple[Rests, int]] = []
        for sequence in byte_ranges(ranges):
            after = costs
            for low, high in sequence:
                after = self._step_over_byte(after, low, high, most)
                if not after:
                    break
            found += after.items()
        return self._keep_cheapest(found, most)

    def _keep_cheapest(self, costs: Iterable[tuple[Rests, int]], most: int) -> Costs:
        """Keeps the lowest cost of each place. Drops a place within a token if finishing the token
        can't save enough tokens compared with starting a new one here.
        """
        found: Costs = {}
        for place, cost in costs:
            if cost < found.get(place, _MANY):
                found[place] = cost
        if not found:
            return found
        found = self._drop_too_expensive(found, most)
        start = found.get(self._start)
        if start is None or len(found) == 1:
            return found
        return {
            place: cost
            for place, cost in found.items()
            if not place.worth or cost < start + place.worth - 1 or place is self._start
        }

    def _spend_work(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise _TooMuchWorkError

    # -------------------------------------------------------------------------------------- repeats

    def _costs_after_repeat(
        self, inner: Node, least: int, greatest: int | None, costs: Costs, most: int
    ) -> Costs:
        own = self._ends.ends_within_node(inner)
        for i in range(least):
            costs = self._costs_after_node(inner, costs, most - own * (least - 1 - i))
            if not costs:
                return costs
        if greatest is None:
            return self._costs_after_star(inner, costs, most)
        found = costs
        new = costs
        for _ in range(least, greatest):
            new = self._costs_after_node(inner, new, most)
            both = self._keep_cheapest([*found.items(), *new.items()], most)
            new = {
                each: cost
                for each, cost in new.items()
                if both.get(each) == cost < found.get(each, _MANY)
            }
            found = both
            if not new:
                break
        return found

    def _costs_after_star(self, inner: Node, costs: Costs, most: int) -> Costs:
        options = inner.options if isinstance(inner, Alternation) else (inner,)
        ranges = union(
            pair for option in options if isinstance(option, CharSet) for pair in option.ranges
        )
        others = [option for option in options if not isinstance(option, CharSet)]
        seen: Costs = {}
        found: list[tuple[Rests, int]] = []
        number = count()
        queue = [(cost, next(number), place) for place, cost in costs.items()]
        heapq.heapify(queue)
        while queue:
            cost, _, place = heapq.heappop(queue)
            start = seen.get(self._start, _MANY)
            if seen.get(place, _MANY) <= cost or (place.worth and cost >= start + place.worth - 1):
                continue
            self._spend_work(1)
            seen[place] = cost
            after = (
                self._step_over_character_run(place, cost, ranges, most)
                if ranges
                else {place: cost}
            )
            found += after.items()
            new = [(each, more) for each, more in after.items() if more > cost]
            for option in others:
                new += self._costs_after_node(option, after, most).items()
            for each, more in new:
                if seen.get(each, _MANY) > more:
                    heapq.heappush(queue, (more, next(number), each))
        return self._keep_cheapest(found, most)

    def _step_over_character_run(self, place: Rests, cost: int, ranges: Ranges, most: int) -> Costs:
        """Returns the places that follow a run of any number of characters of a set, with their
        costs. At most one token ends during the run, possibly in the middle of a character.
        """
        after, ends = place.run(ranges)
        found: list[tuple[Rests, int]] = [] if after is None else [(after, cost)]
        if place is self._start:  # a text may end here, but not at `after`
            found.append((place, cost))
        elif ends:
            found.append((self._start, cost + place.price))
        for sequence in byte_ranges(ranges):
            if after is not None and len(sequence) > 1:
                costs = self._step_over_byte({after: cost}, *sequence[0], most, leave=True)
                for low, high in sequence[1:]:
                    costs = self._step_over_byte(costs, low, high, most)
                found += [(each, more) for each, more in costs.items() if more > cost]
        return self._keep_cheapest(found, most)

    def _costs_after_automaton(
        self, states: Automaton, place: Rests, cost: int, most: int
    ) -> list[tuple[Rests, int]]:
        """Returns the places after the texts of an automaton, with their costs."""
        known: dict[Term, Costs] = {states.start: {place: cost}}
        found: list[tuple[Rests, int]] = []
        to_do: dict[Term, Costs] = {states.start: {place: cost}}
        while to_do:
            state = next(iter(to_do))
            costs = to_do.pop(state)
            ways = self._tokens.transitions_from(states, state)
            self._spend_work(len(ways) + len(costs))
            for after, ranges in ways:
                if after == state:
                    costs = self._costs_after_star(CharSet(ranges), costs, most)
            if states.accepting(state):
                found += costs.items()
            for after, ranges in ways:
                if after == state:
                    continue
                before = known.get(after, {})
                both = self._keep_cheapest(
                    [*before.items(), *self._step_over_character(costs, ranges, most).items()], most
                )
                new = {each: more for each, more in both.items() if more < before.get(each, _MANY)}
                if new:
                    known[after] = both
                    to_do[after] = self._keep_cheapest(
                        [*to_do.get(after, {}).items(), *new.items()], most
                    )
        return found


def _relax_long_sources(node: Node) -> Node:
    """Replaces quotes from long sources in a node by simpler languages. The result allows all texts
    of the node, and more.
    """
    match node:
        case Substring(text, _, superset) if len(text) > _LONG:
            return ANY_TEXT if superset is None else superset
        case Intersection(parts):
            first, *others = map(_relax_long_sources, parts)
            for each in others:
                first = intersection(first, each)
            return first
        case Complement() if any(
            len(each.text) > _LONG for each in substrings(Language("", {"": node}))
        ):
            return ANY_TEXT
    return map_children(node, _relax_long_sources)
