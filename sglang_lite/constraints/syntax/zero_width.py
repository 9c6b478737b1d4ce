"""Parts of regexes that match no characters: anchors, lookahead, word boundaries.

Lookahead and boundaries say something of the text that follows, so that a pattern is read from its end: the texts that
may follow a part are intersected with what is demanded there. A boundary also asks for the character before; the texts
that may follow are therefore kept twice, for a word character before them and for another one (or none).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, NoReturn, Protocol, TypeAlias

from sglang_lite.constraints.formal.automaton import accepts, is_empty
from sglang_lite.constraints.formal.charsets import Ranges
from sglang_lite.constraints.formal.charsets import complement as other_characters
from sglang_lite.constraints.formal.nodes import (
    ANY_CHAR,
    ANY_TEXT,
    EMPTY,
    NOTHING,
    Alternation,
    CharSet,
    Concat,
    Node,
    Repeat,
    alternation,
    complement,
    concat,
    intersection,
    optional,
)

MAX_UNROLLED = 50  # rounds of a repeat with lookahead in it


class Anchor:
    """`^`, `$` and the like, until it is known what stands around it."""

    def __init__(self, at: int, *, at_start: bool) -> None:
        self.at, self.at_start = at, at_start


class Lookahead:
    """Demand that the text after it begins with the tree, or does not if `negated`."""

    def __init__(self, at: int, tree: Tree, *, negated: bool) -> None:
        self.at, self.tree, self.negated = at, tree, negated


class Boundary:
    """Edge of a word; if `negated`, no edge of a word."""

    def __init__(self, at: int, *, negated: bool) -> None:
        self.at, self.negated = at, negated


Tree: TypeAlias = "Node | Anchor | Lookahead | Boundary"  # in which a node's parts may be such, too


def parts_of(tree: Tree) -> tuple[Tree, ...]:
    match tree:
        case Concat(parts) | Alternation(parts):
            return parts
        case Repeat(inner):
            return (inner,)
        case Lookahead():
            return (tree.tree,)
    return ()


def has_anchor(tree: Tree, *, at_start: bool) -> bool:
    """Tells whether a tree has an anchor, outside of lookahead at least for starts."""
    if isinstance(tree, Anchor):
        return tree.at_start == at_start
    return any(has_anchor(part, at_start=at_start) for part in parts_of(tree))


def has_assertion(tree: Tree) -> bool:
    """Tells whether a tree has lookahead or boundaries."""
    return isinstance(tree, Lookahead | Boundary) or any(map(has_assertion, parts_of(tree)))


def is_zero_width(tree: Tree) -> bool:
    return isinstance(tree, Anchor | Lookahead | Boundary)


class Edges(Protocol):
    """Replacement of the anchors of a tree without assertions, as the parser's `edges`."""

    def __call__(self, tree: Tree, caret: Node, dollar: Node, *, starts: bool, ends: bool) -> Node: ...


class _Rest(NamedTuple):
    """The texts that may follow a place, by the character before it."""

    word: Node
    other: Node


class Assertions:
    """Reader of trees with lookahead and boundaries.

    Args:
        edges: of the parser.
        fail: refuses the pattern with a message and a place in it.
        word: the characters of words.
    """

    def __init__(self, edges: Edges, fail: Callable[[str, int], NoReturn], word: Ranges) -> None:
        self._edges, self._fail = edges, fail
        self._word, self._other = CharSet(word), CharSet(other_characters(word))

    def language(self, before: Node, tree: Tree, after: Node, caret: Node, dollar: Node) -> Node:
        """The texts that are made of one before, one of the tree and one after."""
        rest = self._following(tree, caret, dollar, _Rest(after, after), starts=True, ends=True)
        found = self._preceded(before, rest).other  # at the start of a text there is no word
        return _both(found, ANY_TEXT)

    def _following(self, tree: Tree, caret: Node, dollar: Node, rest: _Rest, *, starts: bool, ends: bool) -> _Rest:
        """The texts of the tree with what may follow it."""
        if not has_assertion(tree):
            return self._preceded(self._edges(tree, caret, dollar, starts=starts, ends=ends), rest)
        match tree:
            case Boundary():
                begins, no = concat(self._word, ANY_TEXT), optional(concat(self._other, ANY_TEXT))
                after_word, after_other = (begins, no) if tree.negated else (no, begins)
                return _Rest(_both(rest.word, after_word), _both(rest.other, after_other))
            case Lookahead():
                ahead = self._ahead(tree, caret, starts=starts)
                return _Rest(*map(_both, rest, map(complement, ahead) if tree.negated else ahead))
            case Alternation(options):
                each = [self._following(o, caret, dollar, rest, starts=starts, ends=ends) for o in options]
                return _Rest(alternation(e.word for e in each), alternation(e.other for e in each))
            case Concat(parts):
                solid = [i for i, part in enumerate(parts) if not is_zero_width(part)]
                first, last = (solid[0], solid[-1]) if solid else (len(parts), -1)
                for i in reversed(range(len(parts))):
                    at_start, at_end = starts and i <= first, ends and i >= last
                    rest = self._following(parts[i], caret, dollar, rest, starts=at_start, ends=at_end)
                return rest
            case Repeat(inner, least, most):
                return self._rounds(inner, least, most, caret, dollar, rest, starts=starts, ends=ends)
        raise AssertionError("nothing else has an assertion in it")

    def _rounds(
        self,
        inner: Node,
        least: int,
        most: int | None,
        caret: Node,
        dollar: Node,
        rest: _Rest,
        *,
        starts: bool,
        ends: bool,
    ) -> _Rest:
        if most is None or most > MAX_UNROLLED:
            self._fail(
                f"lookahead and word boundaries can't be repeated more than {MAX_UNROLLED} times",
                place_of_assertion(inner),
            )
        alone = most <= 1
        found = rest
        for count in reversed(range(most)):
            found = self._following(inner, caret, dollar, found, starts=starts and alone, ends=ends and alone)
            if count >= least:
                found = _Rest(alternation([rest.word, found.word]), alternation([rest.other, found.other]))
        return found

    def _ahead(self, look: Lookahead, caret: Node, *, starts: bool) -> _Rest:
        """The texts that begin as a lookahead demands; with an end anchor in it those that also end so."""
        if not has_anchor(look.tree, at_start=False):
            return self._following(look.tree, caret, NOTHING, _Rest(ANY_TEXT, ANY_TEXT), starts=starts, ends=False)
        more = Repeat(ANY_CHAR, 1, None)
        each = [
            self._following(look.tree, caret, dollar, _Rest(after, after), starts=starts, ends=True)
            for dollar, after in ((EMPTY, EMPTY), (NOTHING, more))
        ]
        return _Rest(alternation(e.word for e in each), alternation(e.other for e in each))

    def _preceded(self, part: Node, rest: _Rest) -> _Rest:
        """The texts of a part with what may follow it."""
        if rest.word == rest.other:
            found = concat(part, rest.word)
            return _Rest(found, found)
        word, other = (_both(part, concat(ANY_TEXT, last)) for last in (self._word, self._other))
        empty = accepts(part, "")
        if not empty and NOTHING in (word, other):
            word, other = (part if word != NOTHING else NOTHING), (part if other != NOTHING else NOTHING)
        found = alternation([concat(word, rest.word), concat(other, rest.other)])
        if not empty:
            return _Rest(found, found)
        return _Rest(alternation([found, rest.word]), alternation([found, rest.other]))


def _both(a: Node, b: Node) -> Node:
    """Intersection of two nodes; NOTHING where it is empty."""
    found = intersection(a, b)
    return NOTHING if is_empty(found) else found


def place_of_assertion(tree: Tree) -> int:
    """Place of the first assertion in a tree that has one."""
    if isinstance(tree, Lookahead | Boundary):
        return tree.at
    return next(place_of_assertion(part) for part in parts_of(tree) if has_assertion(part))
