"""Divides a context-free language into lexemes that may be read greedily, for engines with a lexer
(llguidance).

The regular parts of rules become lexemes, as large as possible. Then all positions of the
grammar are visited, as far as a finite automaton can distinguish them (a rule may return
to any position that uses it). Suppose a lexeme can end where another lexeme, possible at
the same position, could continue with the next character. Greedy reading would then lose
texts, so the larger of the two is split into its parts, down to characters, whose lexemes
can't collide. Splitting costs speed, never correctness.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain, groupby, product

from sglang_lite.constraints.formal import charsets
from sglang_lite.constraints.formal.automaton import (
    Automaton,
    accepts,
    decide_emptiness,
    useful_states,
)
from sglang_lite.constraints.formal.charsets import Ranges
from sglang_lite.constraints.formal.grammars import referring_rules
from sglang_lite.constraints.formal.nodes import (
    ANY_CHAR,
    EMPTY,
    NOTHING,
    Alternation,
    CharSet,
    Complement,
    Concat,
    Language,
    LiteralText,
    Multiple,
    Node,
    Ref,
    Repeat,
    Substring,
    alternation,
    children,
    concat,
    intersection,
    map_children,
    optional,
    references,
    repeat,
)
from sglang_lite.constraints.formal.terms import DEAD, State
from sglang_lite.constraints.memo import memoize
from sglang_lite.protocol import ConstraintError

MAX_INLINED = 20_000  # characters and sets in a lexeme
MAX_HEIGHT = 20  # nesting depth of a lexeme
MAX_POSITIONS = 300  # distinct sets of positions
MAX_PAIRS = 5_000  # pairs of states of two lexemes
MAX_WORK = 2_000_000  # total of positions, pairs of symbols, and transitions of automata

_Position = tuple[str, State]
_DIGITS = charsets.singles("0123456789")
_NUMBER_CONTINUATIONS = charsets.singles("0123456789.eE")


def split_into_lexemes(language: Language) -> Language:
    """Divides a language into lexemes: each rule of the result is a lexeme or consists of
    references only.

    Raises:
        ConstraintError: the language is too complex or nested too deeply.
    """
    if language.start in language.sealed or not language.rules[language.start].has_refs:
        return language
    try:
        return _split_until_unambiguous(_inline_regular_rules(language))
    except RecursionError as error:
        raise ConstraintError("the constraint is nested too deeply.") from error


def _split_until_unambiguous(language: Language) -> Language:
    to_split: set[Node] = set()
    remaining = MAX_WORK
    while True:
        lexing = _Lexing(language, to_split)
        larger = {
            name: node for name, node in lexing.nodes.items() if not isinstance(node, CharSet)
        }
        if not larger and not language.sealed:  # lexemes of single characters don't collide
            return lexing.language
        positions = _Positions(lexing, remaining)
        try:
            collisions = positions.find_collisions() if remaining else lexing.symbols
            remaining = positions.remaining
        except _TooMany:
            collisions = lexing.symbols
            remaining = 0
        if not collisions:
            return lexing.language
        together = {larger[name] for name in collisions & larger.keys()}
        if together and collisions <= lexing.nodes.keys():
            to_split |= together
        else:  # collision with a schema's value, whose lexemes are safe only among themselves
            language = _inline_regular_rules(Language(language.start, language.rules))


class _TooMany(Exception):  # noqa: N818 # never leaves this module
    """Raised if the grammar has more positions, or needs more work, than the limits allow."""


def _inline_regular_rules(language: Language) -> Language:
    """Returns the language with its regular rules inlined. Rules that would exceed the limits for
    the size and depth of a lexeme stay rules.
    """
    uses = {name: references(body) for name, body in language.rules.items()}
    referring = referring_rules(uses)
    inlined: dict[str, Node] = {}
    queue = list(uses)
    for name in queue:
        if name not in inlined and name not in language.sealed and uses[name] <= inlined.keys():
            node = _substitute_rules(language.rules[name], inlined)
            size, height = _count_size_and_depth(node)
            if size <= MAX_INLINED and height <= MAX_HEIGHT:
                inlined[name] = node
                queue += referring[name]
    below = _with_dependencies(language, language.sealed)
    rules = {
        name: body if name in below else _substitute_rules(body, inlined)
        for name, body in language.rules.items()
    }
    reachable = _with_dependencies(Language(language.start, rules), {language.start})
    return Language(language.start, {name: rules[name] for name in reachable}, language.sealed)


def _substitute_rules(node: Node, rules: Mapping[str, Node]) -> Node:
    """Replaces references in a node by the bodies of their rules."""
    return (
        rules.get(node.name, node)
        if isinstance(node, Ref)
        else map_children(node, partial(_substitute_rules, rules=rules))
    )


def _count_size_and_depth(node: Node) -> tuple[int, int]:
    """Returns the number of characters and sets in a node, and its depth."""
    if isinstance(node, LiteralText):
        return len(node.text), 1
    below = [_count_size_and_depth(child) for child in children(node)]
    return 1 + sum(size for size, _ in below), 1 + max((height for _, height in below), default=0)


def _with_dependencies(language: Language, names: Iterable[str]) -> dict[str, None]:
    """Returns the names of some rules and of all rules that they need, directly or indirectly. The
    result is a dict used as an ordered set.
    """
    found = dict.fromkeys(names)
    for name in (queue := list(found)):
        for each in sorted(references(language.rules[name])):
            if each not in found:
                found[each] = None
                queue.append(each)
    return found


class _Lexing:
    """Language divided into lexemes.

    Args:
        language: language whose regular rules are inlined.
        to_split: lexemes to split into their parts.

    Attributes:
        language: the divided language. A rule is a lexeme or consists of references only, except
            for sealed rules and the rules below them.
        nodes: nodes that became lexemes, by the lexeme's name.
        lexemes: `nodes` without the empty text, by name.
        symbols: names of lexemes and sealed rules.
        sealed_rules: names of the sealed rules and of all rules below them.
    """

    def __init__(self, language: Language, to_split: set[Node]) -> None:
        self._to_split = to_split
        self._names: dict[Node, str] = {}
        self._rules: dict[str, Node] = {}
        below = _with_dependencies(language, language.sealed)
        for name, body in language.rules.items():
            self._rules[name] = body if name in below else self._split_structure(body)
        self.nodes = {name: node for node, name in self._names.items()}
        self.lexemes = {name: _without_empty_text(node) for name, node in self.nodes.items()}
        self.symbols = {*self.lexemes, *language.sealed}
        self.sealed_rules = below
        self.language = Language(language.start, {**self._rules, **self.lexemes}, language.sealed)

    def _split_structure(self, node: Node) -> Node:
        if not node.has_refs:
            return self._lexeme_or_parts(node)
        match node:
            case Concat(parts):
                groups = groupby(parts, key=lambda part: part.has_refs)
                return concat(
                    *chain.from_iterable(
                        map(self._split_structure, group)
                        if structured
                        else [self._lexeme_or_parts(concat(*group))]
                        for structured, group in groups
                    )
                )
            case Alternation(options):
                regular = alternation(option for option in options if not option.has_refs)
                others = [self._split_structure(option) for option in options if option.has_refs]
                return alternation([self._lexeme_or_parts(regular), *others])
            case Repeat(inner, least, most):
                return Repeat(self._split_structure(inner), least, most)
        return node

    def _lexeme_or_parts(self, node: Node) -> Node:
        """Returns a reference to the lexeme of a regular part, or the structure of its parts if it
        is to be split.
        """
        if node in (EMPTY, NOTHING):
            return node
        if node in self._to_split:
            return self._split_regular_node(node)
        if node not in self._names:
            self._names[node] = f"lexeme {len(self._names)}"
        return optional(Ref(self._names[node])) if accepts(node, "") else Ref(self._names[node])

    def _split_regular_node(self, node: Node) -> Node:
        match node:
            case LiteralText(text):
                return concat(
                    *(self._lexeme_or_parts(CharSet(((ord(char), ord(char)),))) for char in text)
                )
            case Concat(parts):
                return concat(*map(self._lexeme_or_parts, parts))
            case Alternation(options):
                return alternation(map(self._lexeme_or_parts, options))
            case Repeat(inner, least, most):
                return repeat(self._lexeme_or_parts(inner), least, most)
        return self._add_automaton_rules(node)

    def _add_automaton_rules(self, node: Node) -> Node:
        """Adds a rule for each state of a node's automaton and returns a reference to the start
        state's rule.
        """
        found = Automaton(node)
        prefix = f"state of {len(self._rules)}."
        states = useful_states(found, found.start)
        for state, after in states.items():
            steps = (
                concat(self._lexeme_or_parts(found.class_characters(symbol)), Ref(f"{prefix}{to}"))
                for symbol, to in after.items()
            )
            self._rules[f"{prefix}{state}"] = alternation(
                [*steps, *([EMPTY] if found.accepting(state) else [])]
            )
        return Ref(f"{prefix}{found.start}") if found.start in states else NOTHING


def _without_empty_text(node: Node) -> Node:
    """Returns a regular node without the empty text."""
    match node:
        case Repeat(inner, 0, most) if not accepts(inner, ""):
            return Repeat(inner, 1, most)
        case Alternation(options):
            return alternation(map(_without_empty_text, options))
        case Concat(()):
            return NOTHING
    return intersection(node, Repeat(ANY_CHAR, 1, None)) if accepts(node, "") else node


class _Positions:
    """Visits the positions of a divided language, to find lexemes that greedy reading would get
    wrong.

    Args:
        lexing: divided language.
        remaining: maximum amount of work.

    Attributes:
        remaining: amount of work left.
    """

    def __init__(self, lexing: _Lexing, remaining: int) -> None:
        self._lexing = lexing
        self.remaining = remaining
        self._rules = [
            name
            for name in lexing.language.rules
            if name not in lexing.lexemes and name not in lexing.sealed_rules
        ]
        self._automaton = Automaton(*(lexing.language.rules[name] for name in self._rules))
        self._starts = dict(zip(self._rules, self._automaton.starts))
        self._empty = self._rules_that_may_be_empty()
        self._returns = self._positions_after_rules()
        self._firsts = {name: self._first_characters(name) for name in lexing.symbols}
        self._overlaps: dict[tuple[str, str], bool] = {}
        self._moves: dict[_Position, set[_Position]] = {}

    def find_collisions(self) -> set[str]:
        """Returns the names of the symbols that greedy reading would get wrong."""
        start = self._close_over_empty_moves(
            {(self._lexing.language.start, self._starts[self._lexing.language.start])}
        )
        seen = {start}
        found: set[str] = set()
        checked: set[tuple[str, str, Ranges]] = set()
        for positions in (queue := [start]):
            if len(seen) > MAX_POSITIONS:
                raise _TooMany
            after = {
                name: self._close_over_empty_moves(reached)
                for name, reached in self._positions_after_symbols(positions).items()
            }
            self._spend(len(after) ** 2)
            following = {name: self._next_characters(reached) for name, reached in after.items()}
            for name, other in product(after, after):
                key = name, other, following[name]
                if key not in checked:
                    checked.add(key)
                    if self._is_ambiguous_after(*key):
                        found |= self._choose_to_split(name, other)
            for name in after:
                together = frozenset().union(
                    *(after[other] for other in after if self._may_share_text(name, other))
                )
                self._spend(len(together))
                if together not in seen:
                    seen.add(together)
                    queue.append(together)
        return found

    # ------------------------------------------------------------------------------------ positions

    def _close_over_empty_moves(self, positions: Iterable[_Position]) -> frozenset[_Position]:
        """Returns the given positions, and all positions that can be reached from them without
        reading a character.
        """
        found = set(positions)
        queue = list(found)
        for position in queue:
            more = self._find_epsilon_moves(position) - found
            found |= more
            queue += more
        self._spend(len(found))
        return frozenset(found)

    def _spend(self, work: int) -> None:
        self.remaining -= work
        if self.remaining < 0:
            raise _TooMany

    def _find_epsilon_moves(self, position: _Position) -> set[_Position]:
        """Returns the positions reachable without reading: into rules, past rules that may be
        empty, and back from a rule that may end.
        """
        if position not in self._moves:
            rule, state = position
            moves = set(self._returns[rule]) if self._automaton.accepting(state) else set()
            for name in self._automaton.next_rule_names(state) & self._starts.keys():
                moves.add((name, self._starts[name]))
                if name in self._empty:
                    moves.add((rule, self._automaton.step(state, name)))
            self._moves[position] = moves
        return self._moves[position]

    def _symbols(self, positions: Iterable[_Position]) -> list[str]:
        names = set().union(*(self._automaton.next_rule_names(state) for _, state in positions))
        return sorted(names & self._lexing.symbols)

    def _positions_after_symbols(self, positions: Iterable[_Position]) -> dict[str, set[_Position]]:
        """Returns, for each symbol that may come next, the positions after it."""
        found: dict[str, set[_Position]] = {name: set() for name in self._symbols(positions)}
        for rule, state in positions:
            for name in self._automaton.next_rule_names(state) & found.keys():
                if (after := self._automaton.step(state, name)) != DEAD:
                    found[name].add((rule, after))
        return found

    def _next_characters(self, positions: Iterable[_Position]) -> Ranges:
        return charsets.union(
            chain.from_iterable(self._firsts[name] for name in self._symbols(positions))
        )

    def _rules_that_may_be_empty(self) -> set[str]:
        referring: dict[str, list[str]] = {name: [] for name in self._rules}
        for rule in self._rules:
            for name in references(self._lexing.language.rules[rule]) & referring.keys():
                referring[name].append(rule)
        empty: set[str] = set()
        queue = self._rules[::-1]
        for name in queue:
            if name not in empty and self._may_end(self._starts[name], empty):
                empty.add(name)
                queue += referring[name]
        return empty

    def _may_end(self, state: State, empty: set[str]) -> bool:
        seen = [state]
        for each in seen:
            if self._automaton.accepting(each):
                return True
            steps = (
                self._automaton.step(each, name)
                for name in self._automaton.next_rule_names(each) & empty
            )
            seen += [step for step in dict.fromkeys(steps) if step not in seen]
        return False

    def _positions_after_rules(self) -> dict[str, list[_Position]]:
        returns: dict[str, list[_Position]] = {name: [] for name in self._rules}
        for rule in self._rules:
            seen = {self._starts[rule]: None}
            for state in (queue := list(seen)):
                for name in sorted(self._automaton.next_rule_names(state)):
                    step = self._automaton.step(state, name)
                    if name in returns:
                        returns[name].append((rule, step))
                    if step not in seen:
                        seen[step] = None
                        queue.append(step)
        return returns

    # -------------------------------------------------------------------------------------- symbols

    def _first_characters(self, symbol: str) -> Ranges:
        """Returns the characters that a symbol's texts may begin with."""
        rules = self._lexing.language.rules
        found: list[tuple[int, int]] = []
        for name in (queue := [symbol]):
            automaton = Automaton(rules[name])
            for each in automaton.classes:
                if automaton.step(automaton.start, each) != DEAD:
                    found += automaton.class_characters(each).ranges
            queue += sorted(automaton.next_rule_names(automaton.start) - set(queue))
        return charsets.union(found)

    def _may_share_text(self, name: str, other: str) -> bool:
        """Returns True if two symbols may have a text in common."""
        key = min(name, other), max(name, other)
        if key not in self._overlaps:
            lexemes = self._lexing.lexemes
            if name == other or not charsets.intersection(self._firsts[name], self._firsts[other]):
                self._overlaps[key] = name == other
            elif name in lexemes and other in lexemes:
                self._overlaps[key], work = _share_a_text(lexemes[name], lexemes[other])
                self._spend(work)
            else:
                self._overlaps[key] = True
        return self._overlaps[key]

    def _choose_to_split(self, name: str, other: str) -> set[str]:
        """Chooses which of two colliding lexemes to split. It is the larger one, because most
        collisions come from an overly large lexeme that contains the other one as a part.
        """
        nodes = self._lexing.nodes
        if name not in nodes or other not in nodes:
            return {name, other}
        sizes = {each: _count_size_and_depth(nodes[each])[0] for each in (name, other)}
        return {each for each, size in sizes.items() if size == max(sizes.values())}

    def _is_ambiguous_after(self, name: str, other: str, following: Ranges) -> bool:
        """Returns True if greedy reading could extend a text of `name` to a text of `other`,
        although the next character may also follow `name`.
        """
        lexemes = self._lexing.lexemes
        if name not in lexemes and other not in lexemes:
            return bool(charsets.intersection(self._firsts[name], _DIGITS)) and bool(
                charsets.intersection(following, _NUMBER_CONTINUATIONS)
            )
        if not charsets.intersection(self._firsts[name], self._firsts[other]):
            return False
        if name not in lexemes or other not in lexemes:
            return True
        continues, work = _can_continue(lexemes[name], lexemes[other], following)
        self._spend(work)
        return continues


def _share_a_text(lexeme: Node, other: Node) -> tuple[bool, int]:
    """Returns whether two lexemes have a text in common, and the work spent on the decision."""
    if isinstance(lexeme, LiteralText) and isinstance(other, LiteralText):
        return lexeme == other, 1
    empty, work = decide_emptiness(intersection(lexeme, other))
    return not empty, work


@memoize  # most pairs are checked again after a few lexemes have been split
def _can_continue(lexeme: Node, other: Node, following: Ranges) -> tuple[bool, int]:
    """Returns True if a text of `lexeme` can be extended to a text of `other`, and the next
    character is in `following`. Also returns the work spent on the decision.
    """
    if not following:
        return False, 1
    # such as the names of many tools
    if isinstance(lexeme, LiteralText) and isinstance(other, LiteralText):
        rest = other.text[len(lexeme.text) :] if other.text.startswith(lexeme.text) else ""
        return bool(rest and charsets.intersection(following, charsets.singles(rest[0]))), 1
    # fewer states; a negative answer for these is conclusive
    wide = _relax_counts(lexeme)
    other_wide = _relax_counts(other)
    continues, work = _pair_can_continue(wide, other_wide, following)
    if not continues or (wide, other_wide) == (lexeme, other):
        return continues, work
    continues, more = _pair_can_continue(lexeme, other, following)
    return continues, work + more


def _relax_counts(node: Node) -> Node:
    """Returns a superset of a regular node's texts with fewer states: repeated parts may repeat any
    number of times.
    """
    match node:
        case Complement():  # widening the inside would narrow the complement
            return node
        case Multiple():
            return Repeat(CharSet(charsets.singles("0123456789.")), 0, None)
        case Substring(text):
            return Repeat(CharSet(charsets.singles("".join(set(text)))), 0, None)
        case Repeat(inner, least, most):
            counted = least > 1 or (most is not None and most > 1)
            return Repeat(_relax_counts(inner), min(least, 1), None if counted else most)
    return map_children(node, _relax_counts)


def _pair_can_continue(lexeme: Node, other: Node, following: Ranges) -> tuple[bool, int]:
    both = Automaton(lexeme, other, CharSet(following))
    first, second, next_one = both.starts
    seen = {(first, second)}
    for a, b in (queue := [(first, second)]):
        if len(seen) > MAX_PAIRS:
            return True, both.work
        for symbol in both.classes:
            pair = both.step(a, symbol), both.step(b, symbol)
            if both.accepting(a) and pair[1] != DEAD and both.step(next_one, symbol) != DEAD:
                return True, both.work
            if DEAD not in pair and pair not in seen:
                seen.add(pair)
                queue.append(pair)
    return False, both.work
