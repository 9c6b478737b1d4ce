"""Parts of regexes that match no characters: anchors, lookahead, word boundaries.

Lookahead and boundaries restrict the text that follows, so a pattern is read from its end: the texts that may follow a
part are intersected with the assertion there. A boundary also depends on the character before it; the texts that may
follow are therefore kept twice, for a preceding word character and for any other one (or none).
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

MAX_UNROLLED = 50  # maximum count of a repeat that contains assertions


class Anchor:
    """Anchor such as `^` or `$`, until its context is known."""

    def __init__(self, at: int, *, at_start: bool) -> None:
        self.at, self.at_start = at, at_start


class Lookahead:
    """Assertion that the following text begins with a text of the tree, or does not if `negated`."""

    def __init__(self, at: int, tree: Tree, *, negated: bool) -> None:
        self.at, self.tree, self.negated = at, tree, negated


class Boundary:
    """Word boundary, or its absence if `negated`."""

    def __init__(self, at: int, *, negated: bool) -> None:
        self.at, self.negated = at, negated


Tree: TypeAlias = "Node | Anchor | Lookahead | Boundary"  # the parts of a node may be trees, too


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
    """Returns True if a tree contains a start anchor (`at_start`) or an end anchor, inside lookahead as well."""
    if isinstance(tree, Anchor):
        return tree.at_start == at_start
    return any(has_anchor(part, at_start=at_start) for part in parts_of(tree))


def has_assertion(tree: Tree) -> bool:
    """Returns True if a tree contains lookahead or word boundaries."""
    return isinstance(tree, Lookahead | Boundary) or any(map(has_assertion, parts_of(tree)))


def is_zero_width(tree: Tree) -> bool:
    return isinstance(tree, Anchor | Lookahead | Boundary)


class Edges(Protocol):
    """Function that replaces the anchors of a tree without assertions; see `edges` of the regex parser."""

    def __call__(self, tree: Tree, caret: Node, dollar: Node, *, starts: bool, ends: bool) -> Node: ...


class _Rest(NamedTuple):
    """Texts that may follow a position, by the character before it.

    Attributes:
        word: texts after a word character.
        other: texts after any other character, or at the start of the text.
    """

    word: Node
    other: Node


class Assertions:
    """Converter of trees with lookahead and boundaries to regular nodes.

    Args:
        edges: anchor replacement of the parser.
        fail: function that refuses the pattern, given a message and an offset in the pattern.
        word: word characters.
    """

    def __init__(self, edges: Edges, fail: Callable[[str, int], NoReturn], word: Ranges) -> None:
        self._edges, self._fail = edges, fail
        self._word, self._other = CharSet(word), CharSet(other_characters(word))

    def language(self, before: Node, tree: Tree, after: Node, caret: Node, dollar: Node) -> Node:
        """Texts that consist of a text of `before`, one of the tree and one of `after`."""
        rest = self._following(tree, caret, dollar, _Rest(after, after), starts=True, ends=True)
        found = self._preceded(before, rest).other  # the start of a text counts as a non-word character
        return _both(found, ANY_TEXT)

    def _following(self, tree: Tree, caret: Node, dollar: Node, rest: _Rest, *, starts: bool, ends: bool) -> _Rest:
        """Texts of the tree, each continued by a text of `rest`."""
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
                position_of_assertion(inner),
            )
        alone = most <= 1
        found = rest
        for count in reversed(range(most)):
            found = self._following(inner, caret, dollar, found, starts=starts and alone, ends=ends and alone)
            if count >= least:
                found = _Rest(alternation([rest.word, found.word]), alternation([rest.other, found.other]))
        return found

    def _ahead(self, look: Lookahead, caret: Node, *, starts: bool) -> _Rest:
        """Texts that satisfy a lookahead. Its end anchors hold only at the end of the text."""
        if not has_anchor(look.tree, at_start=False):
            return self._following(look.tree, caret, NOTHING, _Rest(ANY_TEXT, ANY_TEXT), starts=starts, ends=False)
        more = Repeat(ANY_CHAR, 1, None)
        each = [
            self._following(look.tree, caret, dollar, _Rest(after, after), starts=starts, ends=True)
            for dollar, after in ((EMPTY, EMPTY), (NOTHING, more))
        ]
        return _Rest(alternation(e.word for e in each), alternation(e.other for e in each))

    def _preceded(self, part: Node, rest: _Rest) -> _Rest:
        """Texts of a part without assertions, each continued by a text of `rest`."""
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
    """Intersection of two nodes, or NOTHING if it is empty."""
    found = intersection(a, b)
    return NOTHING if is_empty(found) else found


def position_of_assertion(tree: Tree) -> int:
    """Offset in the pattern of the first lookahead or boundary of a tree, which must contain one."""
    if isinstance(tree, Lookahead | Boundary):
        return tree.at
    return next(position_of_assertion(part) for part in parts_of(tree) if has_assertion(part))
