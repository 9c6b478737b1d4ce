"""Deterministic automata of regular nodes, built state by state from Brzozowski derivatives.

A state is the language of possible continuations. Names of rules are symbols like
characters, so the body of a context-free grammar's rule also has an automaton
(earley.py). The number of states is limited; larger automata raise an error.

Source: S. Owens, J. Reppy, A. Turon, Regular-expression derivatives re-examined, JFP
19(2), 2009.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Set
from copy import copy
from functools import partial
from itertools import compress
from typing import TypeAlias

from sglang_lite.constraints.formal.charsets import LAST, SURROGATES, has_surrogates
from sglang_lite.constraints.formal.nodes import (
    ANY_CHAR,
    ANY_TEXT,
    Alternation,
    CharSet,
    Complement,
    Concat,
    Intersection,
    LiteralText,
    Multiple,
    Node,
    Ref,
    Repeat,
    Substring,
    children,
    fold_node,
    literal_texts,
)
from sglang_lite.constraints.formal.terms import (
    DEAD,
    DONE,
    State,
    Term,
    Terms,
    automaton_too_large_error,
)
from sglang_lite.constraints.memo import memoize

MAX_TRANSITIONS = 100_000
_MAX_IN_DEPTH = 5_000  # moves of the depth-first search, which precedes the breadth-first one
_MAX_STACKED = 100_000  # states of a context-free language, one per stack of open rules

Symbol: TypeAlias = "int | str"  # number of a character class, or name of a rule

_NO_CLASS = -1  # class of surrogates


class Automaton:
    """Automata of one or more nodes, with shared states.

    Args:
        *nodes: regular nodes, or bodies of rules.
        rules: bodies of rules by name. If given, the automaton follows references into the rules,
            and has one state for each stack of open rules. Left recursion then raises
            RecursionError.

    Attributes:
        classes: numbers of the character classes, surrogates excluded.
        sources: Substring nodes for which states have been built.
        starts: start state of each node.
    """

    def __init__(self, *nodes: Node, rules: Mapping[str, Node] | None = None) -> None:
        self._rules = rules or {}
        self._empty_rules = _nullable_rules(self._rules)
        self._bounds, self._class_of, self._masks = _partition_characters(
            [*nodes, *self._rules.values()]
        )
        every = self._masks[ANY_CHAR]
        self.classes = [c for c in range(every.bit_length()) if every >> c & 1]
        surrogates = bisect_right(self._bounds, SURROGATES[0]) - 1
        self._class_of[surrogates] = _NO_CLASS
        self.sources: list[Substring] = []
        self._reset_states()
        self.starts = [
            self._terms.build_written_state(partial(fold_node, node, self._state)) for node in nodes
        ]

    def _reset_states(self) -> None:
        """Resets the automaton to one without states."""
        self._terms = Terms(self._masks[ANY_CHAR], *([_MAX_STACKED] if self._rules else ()))
        self._steps: dict[tuple[State, Symbol], State] = {}
        self._rule_states: dict[str, State] = {}
        # all transitions of states in sources, by state
        self._source_steps: dict[State, dict[Symbol, State]] = {}
        self._offsets = 0  # total number of text indexes in these states
        self._references: dict[State, frozenset[str]] = {}
        self._nonempty: dict[State, bool] = {}

    def forget_states(self) -> None:
        """Forgets all states except the starts."""
        before = copy(self)
        self._reset_states()
        self.starts = [self.translate_state_from(start, before) for start in before.starts]

    def translate_state_from(self, state: State, source: Automaton) -> State:
        """Returns the state of this automaton that accepts the same texts as `state` of `source`.
        This automaton must be a copy of `source`.
        """
        return self._terms.build_written_state(partial(_copy_term, self._terms, state, source))

    @property
    def start(self) -> State:
        """Start state of the first node."""
        return self.starts[0]

    @property
    def work(self) -> int:
        """Work done so far: number of states and transitions."""
        return len(self._terms) + len(self._steps)

    @property
    def is_full(self) -> bool:
        """True if more than half of the allowed states or transitions are used."""
        return (
            2 * self._terms.derived_count > self._terms.most
            or 2 * len(self._steps) > MAX_TRANSITIONS
        )

    @property
    def size(self) -> int:
        """Approximate memory in bytes."""
        return 300 * len(self._terms) + 200 * len(self._steps) + 40 * self._offsets

    def class_of(self, char: str) -> Symbol:
        return self._class_of[bisect_right(self._bounds, ord(char)) - 1]

    def class_characters(self, symbol: Symbol) -> CharSet:
        """Returns the characters of a class."""
        ends = [*self._bounds[1:], LAST + 1]
        pieces = [
            (low, end - 1) for low, end, c in zip(self._bounds, ends, self._class_of) if c == symbol
        ]
        return CharSet(tuple(pieces))

    def classes_between(self, low: int, high: int) -> list[tuple[int, Symbol]]:
        """Returns the character classes that occur from code point `low` to `high`, each after the
        first code point of the class in this range.
        """
        first = bisect_right(self._bounds, low) - 1
        last = bisect_right(self._bounds, high)
        found: dict[Symbol, int] = {}
        for stretch in range(first, last):
            found.setdefault(self._class_of[stretch], max(self._bounds[stretch], low))
        return [(code, symbol) for symbol, code in found.items()]

    def term_of_state(self, state: State) -> Term:
        """Returns the term of a state (terms.py)."""
        return self._terms[state]

    def accepting(self, state: State) -> bool:
        return self._terms.nullable[state]

    def step(self, state: State, symbol: Symbol) -> State:
        """Returns the state after a symbol."""
        after = self._steps.get((state, symbol))
        if after is None:
            if len(self._steps) >= MAX_TRANSITIONS:
                raise automaton_too_large_error(f"{MAX_TRANSITIONS:,} transitions")
            after = self._steps[state, symbol] = (
                DEAD if symbol == _NO_CLASS else self._derive(state, symbol)
            )
        return after

    def run(self, state: State, text: str) -> State:
        """Returns the state after a text."""
        for char in text:
            state = self.step(state, self.class_of(char))
        return state

    def reachable_transitions(self, state: State) -> dict[State, dict[Symbol, State]]:
        """Returns the states that can be reached from a state, each with its transitions on
        character classes. Transitions to DEAD are left out.
        """
        found: dict[State, dict[Symbol, State]] = {state: {}}
        for each in (queue := [state]):
            for symbol in self.classes:
                after = self.step(each, symbol)
                if after != DEAD:
                    found[each][symbol] = after
                    if after not in found:
                        found[after] = {}
                        queue.append(after)
        return found

    def accepts_some_text(self, state: State) -> bool:
        """Returns True if a state accepts at least one text. References to rules are not followed."""
        if state not in self._nonempty:
            if _finds_text_depth_first(self, state, self._nonempty):
                return True
            seen = {state}
            for each in (queue := [state]):
                if self._terms.nullable[each] or self._nonempty.get(each):
                    self._nonempty[state] = True
                    break
                for symbol in self.classes:
                    after = self.step(each, symbol)
                    if after not in seen:
                        seen.add(after)
                        queue.append(after)
            else:
                self._nonempty |= dict.fromkeys(seen, False)
        return self._nonempty[state]

    def next_rule_names(self, state: State) -> frozenset[str]:
        """Returns the names of the rules that may come next."""
        if state not in self._references:
            self._references[state] = self._next_rules(state)
        return self._references[state]

    def _next_rules(self, state: State) -> frozenset[str]:
        kind, *rest = self._terms[state]
        match kind:
            case "ref":
                return frozenset(rest)
            case ".":
                head = self.next_rule_names(rest[0])
                return (
                    head | self.next_rule_names(rest[1]) if self._terms.nullable[rest[0]] else head
                )
            case "|" | "&" | "~":
                return frozenset().union(*map(self.next_rule_names, rest))
            case "{":
                return self.next_rule_names(rest[0])
        return frozenset()

    def rule(self, name: str) -> State:
        """Returns the state at the start of a rule's body."""
        if name not in self._rule_states:
            self._rule_states[name] = self._terms.build_written_state(
                partial(fold_node, self._rules[name], self._state)
            )
        return self._rule_states[name]

    # ---------------------------------------------------------------------------------- derivatives

    def _state(self, node: Node, parts: list[State]) -> State:
        """Returns the state that accepts a node's texts, given the states of its parts."""
        terms = self._terms
        match node:
            case CharSet():
                return terms.characters(self._masks[node])
            case LiteralText(text):
                state = DONE
                for char in reversed(text):
                    state = terms.concat(
                        terms.characters(
                            1 << self._class_of[bisect_right(self._bounds, ord(char)) - 1]
                        ),
                        state,
                    )
                return state
            case Substring(_, cuts):
                if node not in self.sources:
                    self.sources.append(node)
                return self._state_in_source(
                    self.sources.index(node), list(compress(range(len(cuts)), cuts))
                )
            case Multiple(divisor):
                return terms.intern_term("multiple", divisor, 0, nullable=True)
            case Ref(name):
                return terms.intern_term("ref", name, nullable=name in self._empty_rules)
            case Concat():
                state = DONE
                for part in reversed(parts):
                    state = terms.concat(part, state)
                return state
            case Alternation():
                return terms.union(parts)
            case Repeat(_, least, most):
                return terms.repeat(parts[0], least, most)
            case Intersection():
                return terms.intersect(parts)
            case Complement():
                return terms.complement(parts[0])

    def _state_in_source(self, source: int, offsets: list[int]) -> State:
        """Returns the state for substrings of a source. A substring begins at one of the given
        indexes and ends where a piece may end.
        """
        found = self.sources[source]
        # with a superset, the state must stay recognisable as the source's end
        if found.superset is None and offsets == [len(found.text)]:
            return DONE
        self._offsets += len(offsets)
        nullable = any(found.cuts[i] for i in offsets)
        return self._terms.intern_term("source", source, tuple(offsets), nullable=nullable)

    def _step_in_source(self, state: State, symbol: Symbol) -> State:
        steps = self._source_steps.get(state)
        if steps is None:
            _, source, offsets = self._terms[state]
            text = self.sources[source].text
            after = dict[str, list[int]]()
            for i in offsets:
                if i < len(text):
                    after.setdefault(text[i], []).append(i + 1)
            steps = {
                self.class_of(char): self._state_in_source(source, each)
                for char, each in after.items()
            }
            self._source_steps[state] = steps
        return steps.get(symbol, DEAD)

    def _derive(self, state: State, symbol: Symbol) -> State:
        terms = self._terms
        kind, *rest = terms[state]
        match kind:
            case "source":
                return self._step_in_source(state, symbol)
            case "multiple":
                digit = next(
                    (each for each in range(10) if self.class_of(str(each)) == symbol), None
                )
                if digit is None:
                    return state if symbol == self.class_of(".") else DEAD
                after = (10 * rest[1] + digit) % rest[0]
                return terms.intern_term("multiple", rest[0], after, nullable=after == 0)
            case "set":
                return DONE if isinstance(symbol, int) and rest[0] >> symbol & 1 else DEAD
            case "ref":
                if isinstance(symbol, int) and rest[0] in self._rules:
                    return self.step(self.rule(rest[0]), symbol)
                return DONE if rest[0] == symbol else DEAD
            case ".":
                options = []
                while True:  # passes through the leading parts that may be empty
                    head, tail = rest
                    options.append(terms.concat(self.step(head, symbol), tail))
                    if not terms.nullable[head]:
                        break
                    kind, *rest = terms[tail]
                    if kind != ".":
                        options.append(self.step(tail, symbol))
                        break
                return terms.union(options)
            case "|":
                return terms.union([self.step(each, symbol) for each in rest])
            case "&":
                return terms.intersect([self.step(each, symbol) for each in rest])
            # a complement contains only texts of characters, so no rule can follow
            case "~" if isinstance(symbol, int):
                return terms.complement(self.step(rest[0], symbol))
            case "{":
                inner, least, most = rest
                further = terms.repeat(inner, max(least - 1, 0), None if most is None else most - 1)
                return terms.concat(self.step(inner, symbol), further)
        return DEAD


def copy_without_states(before: Automaton) -> Automaton:
    """Returns a copy of an automaton that has only its start states. `translate_state_from`
    converts states of the original to states of the copy.
    """
    new = copy(before)
    new.forget_states()
    return new


def _copy_term(terms: Terms, state: State, source: Automaton) -> State:
    """Copies a state's term into another table and returns its state there."""
    found = {DEAD: DEAD, DONE: DONE}
    open_states = [state]
    while open_states:  # iterative, because texts may be long
        kind, *rest = source.term_of_state(open_states[-1])
        inner = rest if kind in ("|", "&", ".") else rest[:1] if kind in ("~", "{") else []
        if missing := [each for each in inner if each not in found]:
            open_states += missing
            continue
        operands = [found[each] for each in inner]
        if kind in ("|", "&"):
            operands.sort()
        at = open_states.pop()
        found[at] = terms.intern_term(
            kind, *operands, *rest[len(inner) :], nullable=source.accepting(at)
        )
    return found[state]


def useful_states(machine: Automaton, state: State) -> dict[State, dict[Symbol, State]]:
    """Returns the reachable states that accept some text, with the transitions among them."""
    found = machine.reachable_transitions(state)
    before: dict[State, list[State]] = {each: [] for each in found}
    for each, after in found.items():
        for to in after.values():
            before[to].append(each)
    useful = {each for each in found if machine.accepting(each)}
    for each in (queue := list(useful)):
        queue += (earlier := [e for e in before[each] if e not in useful])
        useful.update(earlier)
    return {
        each: {symbol: to for symbol, to in after.items() if to in useful}
        for each, after in found.items()
        if each in useful
    }


def shortest_path_from(machine: Automaton, state: State) -> list[int]:
    """Returns the character classes of a shortest text that a state accepts. The state must accept
    some text.
    """
    paths: dict[State, list[int]] = {state: []}
    for each in (queue := [state]):
        if machine.accepting(each):
            return paths[each]
        for symbol in machine.classes:
            after = machine.step(each, symbol)
            if after != DEAD and after not in paths:
                paths[after] = [*paths[each], symbol]
                queue.append(after)
    raise AssertionError("no text is accepted from here")


def matches_empty_text(node: Node, empty_rules: Set[str] = frozenset()) -> bool:
    """Returns True if a node matches the empty text.

    Args:
        node: regular node, or body of a rule.
        empty_rules: names of rules that match the empty text.
    """
    # uses less of the stack than a generator
    below = partial(matches_empty_text, empty_rules=empty_rules)
    match node:
        case Ref(name):
            return name in empty_rules
        case Concat(parts) | Intersection(parts):
            return all(map(below, parts))
        case Alternation(options):
            return any(map(below, options))
        case Repeat(inner, least, _):
            return least == 0 or below(inner)
        case Complement(inner):
            return not below(inner)
        case Substring() | Multiple():
            return True
    return False


def _nullable_rules(rules: Mapping[str, Node]) -> set[str]:
    """Returns the names of the rules that match the empty text."""
    empty: set[str] = set()
    while more := {
        name
        for name, body in rules.items()
        if name not in empty and matches_empty_text(body, empty)
    }:
        empty |= more
    return empty


def _partition_characters(nodes: Iterable[Node]) -> tuple[list[int], list[int], dict[CharSet, int]]:
    """Divides characters into classes, so that each set in the nodes contains a class completely or
    not at all. Each character of a literal is its own class. Returns the first code point of each
    stretch, the class of each stretch, and the classes of each set as a bit mask.
    """
    sets: dict[CharSet, int] = {ANY_CHAR: 0}
    chars = set[str]()
    seen = set[int]()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if isinstance(node, LiteralText | Substring):
            chars.update(node.text)
        elif isinstance(node, Multiple):
            chars.update("0123456789.")
        elif isinstance(node, CharSet):
            sets[node] = 0
        elif id(node) not in seen:
            seen.add(id(node))
            stack += children(node)
    ranges = [(low, high + 1) for each in sets for low, high in each.ranges]
    ranges += [(ord(char), ord(char) + 1) for char in chars]
    bounds = sorted({0, *(bound for pair in ranges for bound in pair)} - {LAST + 1})
    stretch_at = {bound: i for i, bound in enumerate([*bounds, LAST + 1])}
    members: list[tuple[int, ...]] = [()] * len(bounds)
    for i, each in enumerate(sets):
        for low, high in each.ranges:
            for stretch in range(stretch_at[low], stretch_at[high + 1]):
                members[stretch] += (i,)
    for char in chars:
        members[stretch_at[ord(char)]] += (-1 - ord(char),)  # unlike the number of any set
    numbers: dict[tuple[int, ...], int] = {}
    class_of = [numbers.setdefault(each, len(numbers)) for each in members]
    masks = [0] * len(sets)
    for member, number in numbers.items():
        for i in member:
            if i >= 0:
                masks[i] |= 1 << number
    return bounds, class_of, dict(zip(sets, masks))


@memoize
def cached_automaton(node: Node) -> Automaton:
    """Returns the automaton of a regular node, cached."""
    return Automaton(node)


@memoize
def _option_texts(options: tuple[Node, ...]) -> frozenset[str] | None:
    texts = literal_texts(Alternation(options))
    return None if texts is None else frozenset(texts)


def accepts(node: Node, text: str) -> bool:
    """Returns True if a text is in a regular language."""
    if isinstance(node, LiteralText):
        return text == node.text
    if node == ANY_TEXT:
        return text.isascii() or not has_surrogates(text)
    if isinstance(node, Substring):
        return node.find(text) is not None
    if isinstance(node, Intersection):
        return all(accepts(part, text) for part in node.parts)
    if isinstance(node, Alternation):
        if (texts := _option_texts(node.options)) is not None:
            return text in texts
        if any(isinstance(option, Substring) for option in node.options):
            return any(accepts(option, text) for option in node.options)
    found = cached_automaton(node)
    return found.accepting(found.run(found.start, text))


def shortest(node: Node) -> str:
    """Returns the shortest text of a regular language, which must not be empty."""
    found = cached_automaton(node)
    return "".join(
        chr(found.class_characters(symbol).ranges[0][0])
        for symbol in shortest_path_from(found, found.start)
    )


def is_empty(node: Node) -> bool:
    """Returns True if a regular language is empty."""
    return decide_emptiness(node)[0]


def _guess_accepted_texts(node: Node) -> Iterator[str]:
    """Yields a few texts that a node may accept: beginnings of the texts whose substrings the node
    allows. Trying them first may save the search of a large automaton.
    """
    match node:
        case Intersection(parts) | Alternation(parts):
            for part in parts:
                yield from _guess_accepted_texts(part)
        case Substring():
            yield from node.sample_beginnings


@memoize
def decide_emptiness(node: Node) -> tuple[bool, int]:
    """Returns whether a regular language is empty, and the work spent on the decision."""
    if any(accepts(node, text) for text in _guess_accepted_texts(node)):
        return False, 1
    found = Automaton(node)
    return not found.accepts_some_text(found.start), found.work


def _finds_text_depth_first(
    automaton: Automaton, state: State, nonempty: dict[State, bool]
) -> bool:
    """Returns True if a short depth-first search finds an accepting state. It is fast if texts have
    a minimum length. A breadth-first search would then visit all shorter texts first.

    Args:
        nonempty: for each state already decided, whether it accepts some text. The states on the
            path are added.
    """
    seen = {state}
    path = [(state, iter(automaton.classes))]
    for _ in range(_MAX_IN_DEPTH):
        if not path or automaton.is_full:
            return False
        each, symbols = path[-1]
        if automaton.accepting(each) or nonempty.get(each):
            nonempty |= dict.fromkeys((passed for passed, _ in path), True)
            return True
        for symbol in symbols:
            after = automaton.step(each, symbol)
            if after != DEAD and after not in seen and nonempty.get(after, True):
                seen.add(after)
                path.append((after, iter(automaton.classes)))
                break
        else:
            path.pop()
    return False
