"""The parts of regexes that match no characters: anchors, lookahead, lookbehind of one character,
word boundaries.

Lookahead restricts the text that follows, so a pattern is read from its end: the texts
that may follow a part are intersected with the assertion there. Assertions that look back
depend on the preceding character, so the texts that may follow are kept for each class of
preceding characters that the pattern distinguishes. For an unbounded repeat, these texts
are the solution of equations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, TypeAlias

from sglang_lite.constraints.formal import charsets
from sglang_lite.constraints.formal.automaton import accepts, is_empty
from sglang_lite.constraints.formal.charsets import Ranges
from sglang_lite.constraints.formal.equations import solve_rules
from sglang_lite.constraints.formal.nodes import (
    ANY_TEXT,
    EMPTY,
    NOTHING,
    Alternation,
    CharSet,
    Concat,
    Node,
    Ref,
    Repeat,
    alternation,
    complement,
    concat,
    intersection,
    optional,
)
from sglang_lite.protocol import ConstraintError

MAX_UNROLLED = 50  # maximum count of a repeat that contains assertions


@dataclass(frozen=True)
class Behind:
    """Assertion that the preceding character is one of `before`, such as `^` or lookbehind. If
    `at_start` is True, the assertion also holds at the start of the text.
    """

    at: int
    before: Ranges
    at_start: bool

    @property
    def requires_text_start(self) -> bool:
        return self.at_start and not self.before


@dataclass(frozen=True)
class Ahead:
    """Assertion that the whole following text is one of `rest`, such as `$`."""

    at: int
    rest: Node


@dataclass(frozen=True)
class Lookahead:
    """Assertion that the following text begins with a text of the tree. If `negated`, asserts that
    it does not.
    """

    at: int
    tree: Tree
    negated: bool


Tree: TypeAlias = "Node | Behind | Ahead | Lookahead"  # the parts of a node may also be trees


def boundary(at: int, word: Ranges, *, negated: bool) -> Tree:
    """Returns an assertion for a word boundary. If `negated`, asserts that there is none."""
    other = charsets.complement(word)
    begins = concat(CharSet(word), ANY_TEXT)
    no = optional(concat(CharSet(other), ANY_TEXT))
    after_word, after_other = (begins, no) if negated else (no, begins)
    sides = (
        (Behind(at, word, False), Ahead(at, after_word)),
        (Behind(at, other, True), Ahead(at, after_other)),
    )
    return Alternation(tuple(map(Concat, sides)))  # type: ignore[arg-type]  # the parts are trees


def lookbehind(at: int, tree: Tree, *, negated: bool, mixed: bool) -> Behind | None:
    """Returns the assertion for a lookbehind, or None if it is not supported. Each alternative must
    be a single character or an assertion about the preceding text. Both kinds may occur together
    only if `mixed` is True.
    """
    options: tuple[Tree, ...] = tree.options if isinstance(tree, Alternation) else (tree,)
    found = [each for option in options if (each := _make_lookbehind(at, option)) is not None]
    if len(found) < len(options) or (
        not mixed and len({isinstance(option, CharSet) for option in options}) > 1
    ):
        return None
    before = charsets.union(r for each in found for r in each.before)
    at_start = any(each.at_start for each in found)
    return (
        Behind(at, charsets.complement(before), not at_start)
        if negated
        else Behind(at, before, at_start)
    )


def _make_lookbehind(at: int, tree: Tree) -> Behind | None:
    match tree:
        case CharSet(ranges):
            return Behind(at, ranges, False)
        case Concat(()):
            return Behind(at, charsets.ALL, True)
        case Behind():
            return tree
    return None


def parts_of(tree: Tree) -> tuple[Tree, ...]:
    match tree:
        case Concat(parts) | Alternation(parts):
            return parts
        case Repeat(inner):
            return (inner,)
        case Lookahead():
            return (tree.tree,)
    return ()


def iterate_assertions(tree: Tree) -> Iterable[Behind | Ahead | Lookahead]:
    """Yields the assertions of a tree in the pattern's order, including those in lookahead."""
    if isinstance(tree, Behind | Ahead | Lookahead):
        yield tree
    for part in parts_of(tree):
        yield from iterate_assertions(part)


def has_assertion(tree: Tree) -> bool:
    return next(iter(iterate_assertions(tree)), None) is not None


class _Context(NamedTuple):
    """What precedes a position.

    Attributes:
        last: class of the character before it, or -1 at the start of the text.
        fresh: number of enclosing repeats whose current round has read no character yet.
    """

    last: int
    fresh: int


_Rest: TypeAlias = dict[_Context, Node]  # texts that may follow a position, by what precedes it
_START = _Context(-1, 0)


class Assertions:
    """Converts a tree with assertions to a regular node.

    Args:
        fail: function that raises the error for a pattern, given a message and an offset in
            it.
    """

    def __init__(self, fail: Callable[[str, int], NoReturn]) -> None:
        self._fail = fail
        self._classes: list[Ranges] = []
        self._names = 0

    def language(self, before: Node, tree: Tree, after: Node) -> Node:
        """Returns a node for the texts that match the tree between two other nodes: a text of
        `before`, one of the tree, then one of `after`.
        """
        self._classes = _partition_into_classes(
            each.before for each in iterate_assertions(tree) if isinstance(each, Behind)
        )
        contexts = [_START, *(_Context(i, 0) for i in range(len(self._classes)))]
        rest = self._prepend_tree(tree, dict.fromkeys(contexts, after))
        return _nonempty_intersection(self._prepend_part(before, rest)[_START], ANY_TEXT)

    def _prepend_tree(self, tree: Tree, rest: _Rest) -> _Rest:
        """Prepends the texts of the tree to `rest`: each is continued by a text of `rest`."""
        match tree:
            case Behind():
                return {
                    context: text if self._holds_in_context(tree, context) else NOTHING
                    for context, text in rest.items()
                }
            case Ahead():
                return {
                    context: _nonempty_intersection(text, tree.rest)
                    for context, text in rest.items()
                }
            case Lookahead():
                ahead = self._prepend_tree(tree.tree, dict.fromkeys(rest, ANY_TEXT))
                return {
                    context: _nonempty_intersection(
                        text, complement(ahead[context]) if tree.negated else ahead[context]
                    )
                    for context, text in rest.items()
                }
        if not has_assertion(tree):
            return self._prepend_part(tree, rest)
        match tree:
            case Alternation(options):
                return _unite_by_context(*(self._prepend_tree(option, rest) for option in options))
            case Concat(parts):
                for part in reversed(parts):
                    rest = self._prepend_tree(part, rest)
                return rest
            case Repeat(inner, least, most):
                return self._expand_repetition(inner, least, most, rest)
        raise AssertionError("nothing else has an assertion in it")

    def _holds_in_context(self, assertion: Behind, context: _Context) -> bool:
        if context.last < 0:
            return assertion.at_start
        return bool(charsets.intersection(self._classes[context.last], assertion.before))

    def _expand_repetition(self, inner: Node, least: int, most: int | None, rest: _Rest) -> _Rest:
        if max(least, most or 0) > MAX_UNROLLED:
            problem = f"assertions can't be repeated a given number of times above {MAX_UNROLLED}"
            self._fail(problem, next(iter(iterate_assertions(inner))).at)
        found = self._loop(inner, rest) if most is None else rest
        for count in reversed(range(least if most is None else most)):
            found = self._prepend_tree(inner, found)
            if count >= least:
                found = _unite_by_context(rest, found)
        return found

    def _loop(self, inner: Node, rest: _Rest) -> _Rest:
        """Prepends the texts of an unbounded repeat to `rest`: each is continued by a text of
        `rest`. Every round reads at least one character.
        """
        names = {context: f"repeat {self._names + i}" for i, context in enumerate(rest)}
        self._names += len(names)
        again: _Rest = {
            _Context(i, 0): Ref(names[_Context(i, 0)]) for i in range(len(self._classes))
        }
        again |= {_Context(last, fresh + 1): NOTHING for last, fresh in rest}
        found = self._prepend_tree(inner, again)
        rules = {
            names[context]: alternation([text, found[_Context(context.last, context.fresh + 1)]])
            for context, text in rest.items()
        }
        try:
            texts = solve_rules(rules)
        except ConstraintError as error:
            self._fail(
                f"this can't be repeated: {error.message}", next(iter(iterate_assertions(inner))).at
            )
        return {context: texts[name] for context, name in names.items()}

    def _prepend_part(self, part: Node, rest: _Rest) -> _Rest:
        """Prepends the texts of a part without assertions to `rest`: each is continued by a text of
        `rest`.
        """
        groups: dict[Node, list[Ranges]] = {}
        for i, ranges in enumerate(self._classes):
            groups.setdefault(rest[_Context(i, 0)], []).append(ranges)
        if len(groups) == 1 and set(rest.values()) == groups.keys():
            return {context: concat(part, text) for context, text in rest.items()}
        empty = accepts(part, "")
        read = {
            text: _nonempty_intersection(
                part,
                concat(ANY_TEXT, CharSet(charsets.union(r for ranges in last for r in ranges))),
            )
            for text, last in groups.items()
        }
        if not empty and len(ends := [text for text, some in read.items() if some != NOTHING]) == 1:
            read = {ends[0]: part}
        found = alternation(concat(some, text) for text, some in read.items())
        return {
            context: alternation([found, text]) if empty else found
            for context, text in rest.items()
        }


def _partition_into_classes(sets: Iterable[Ranges]) -> list[Ranges]:
    """Partitions the characters into classes that no set distinguishes."""
    found = [charsets.ALL]
    for each in dict.fromkeys(sets):
        halves = (
            (charsets.intersection(some, each), charsets.difference(some, each)) for some in found
        )
        found = [half for both in halves for half in both if half]
    return found


def _unite_by_context(*rests: _Rest) -> _Rest:
    return {context: alternation(rest[context] for rest in rests) for context in rests[0]}


def _nonempty_intersection(a: Node, b: Node) -> Node:
    """Returns the intersection of two nodes, or NOTHING if it is empty. An intersection that refers
    to rules is returned without checking whether it is empty.
    """
    found = EMPTY if a == EMPTY and accepts(b, "") else intersection(a, b)
    return NOTHING if not found.has_refs and is_empty(found) else found
