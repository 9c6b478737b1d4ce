"""Nodes of languages: a small tree of character sets, regular operations and names of rules.

A tree without `Ref` is a regular language; `Language` gives the names their meaning and is context-free. Everything
that constrains output (regexes, schemas, grammars) becomes one `Language`, and engines are handed that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

from sglang_lite.constraints.formal import charsets
from sglang_lite.constraints.formal.charsets import Ranges
from sglang_lite.protocol import ConstraintError


class Facts(NamedTuple):
    """Facts of a node with all below it: its hash, whether it refers to rules, and its bytes, roughly."""

    hash: int
    refers: bool
    size: int


class _Known:
    """Node whose facts are worked out once: large ones are keys, and are asked again and again."""

    __slots__ = ("facts",)
    facts: Facts

    def __hash__(self) -> int:
        try:
            return self.facts.hash
        except AttributeError:
            return self._worked_out().hash

    @property
    def refers(self) -> bool:
        try:
            return self.facts.refers
        except AttributeError:
            return self._worked_out().refers

    @property
    def size(self) -> int:
        try:
            return self.facts.size
        except AttributeError:
            return self._worked_out().size

    def _worked_out(self) -> Facts:
        """Facts of a node, after those of what is below it: without recursion, however deep that is."""
        stack: list[Any] = [self]
        while stack:
            each = stack[-1]
            below = children(each)
            missing = [child for child in below if isinstance(child, _Known) and not hasattr(child, "facts")]
            if missing:
                stack += missing
                continue
            own: tuple[Any, ...] = each.ranges if isinstance(each, CharSet) else below
            if isinstance(each, Repeat):
                own = (each.node, each.least, each.most)
            size = 140 + (70 * len(own) if isinstance(each, CharSet) else sum([8 + child.size for child in below]))
            facts = Facts(hash((type(each), own)), any(child.refers for child in below), size)
            object.__setattr__(each, "facts", facts)
            stack.pop()
        return self.facts


@dataclass(frozen=True, slots=True)
class CharSet(_Known):
    """Any one character of `ranges`; no ranges match nothing."""

    ranges: Ranges
    __hash__ = _Known.__hash__


@dataclass(frozen=True, slots=True)
class Text:
    """Exactly `text`, which is not empty."""

    text: str
    refers: ClassVar[bool] = False

    @property
    def size(self) -> int:
        return 100 + len(self.text) * (1 if self.text.isascii() else 3)


@dataclass(frozen=True, slots=True)
class Concat(_Known):
    """A text of each of the parts, one after the other."""

    parts: tuple[Node, ...]
    __hash__ = _Known.__hash__


@dataclass(frozen=True, slots=True)
class Alternation(_Known):
    """A text of any of the options."""

    options: tuple[Node, ...]
    __hash__ = _Known.__hash__


@dataclass(frozen=True, slots=True)
class Repeat(_Known):
    """`least` to `most` texts of `node`, one after the other; None: without end."""

    node: Node
    least: int
    most: int | None
    __hash__ = _Known.__hash__


@dataclass(frozen=True, slots=True)
class Intersection(_Known):
    """Texts that are in all of them, which are regular."""

    parts: tuple[Node, ...]
    __hash__ = _Known.__hash__


@dataclass(frozen=True, slots=True)
class Complement(_Known):
    """Texts that are not in `node`, which is regular."""

    node: Node
    __hash__ = _Known.__hash__


@dataclass(frozen=True, slots=True)
class Ref:
    """Reference to the rule of this name."""

    name: str
    refers: ClassVar[bool] = True
    size: ClassVar[int] = 120


Node: TypeAlias = "CharSet | Text | Concat | Alternation | Repeat | Intersection | Complement | Ref"

MAX_COUNT = 1_000_000  # of repeats that are multiplied out

EMPTY = Concat(())
NOTHING = CharSet(())
ANY_CHAR = CharSet(charsets.ALL)
ANY_TEXT = Repeat(ANY_CHAR, 0, None)


@dataclass(frozen=True, slots=True)
class Language:
    """A context-free language.

    Attributes:
        start: the rule that the text is made by.
        rules: their bodies by name. In a body with references, each greatest part without one is one lexeme: where
            engines read lexemes greedily, emit/lexemes.py sees to it that this changes nothing.
        sealed: rules whose lexemes, and those of all rules below, end in the same way wherever they stand, so that
            greedy reading is exact among them (JSON values).
    """

    start: str
    rules: Mapping[str, Node]
    sealed: frozenset[str] = frozenset()


def literal(text: str) -> Node:
    """A node that matches exactly `text`.

    Raises:
        ConstraintError: it has half a character in it.
    """
    if not text.isascii() and charsets.has_surrogates(text):
        raise ConstraintError(f"{text!r} has a lone surrogate in it, which is no character.")
    return Text(text) if text else EMPTY


def concat(*parts: Node) -> Node:
    """Concatenation of `parts`, without empty ones."""
    kept = []
    for part in parts:
        if isinstance(part, CharSet) and not part.ranges:
            return NOTHING
        if not isinstance(part, Concat) or part.parts:
            kept.append(part)
    return kept[0] if len(kept) == 1 else Concat(tuple(kept))


def alternation(options: Iterable[Node]) -> Node:
    """Alternation of `options`, each once; NOTHING without any."""
    kept = [option for option in options if not isinstance(option, CharSet) or option.ranges]
    if len(kept) < 2:
        return kept[0] if kept else NOTHING
    for option in kept:
        if isinstance(option, Repeat) and option == ANY_TEXT:
            return ANY_TEXT
    different = tuple(dict.fromkeys(kept))
    return different[0] if len(different) == 1 else Alternation(different)


def repeat(node: Node, least: int, most: int | None) -> Node:
    """Repetition of a node, `least` to `most` times (None: without end)."""
    if node == NOTHING:
        return NOTHING if least else EMPTY
    if isinstance(node, Repeat):
        # a{1,9}{1,9} is a{1,81}: as long as one more of the inner ones leaves no gap between counts.
        inner, low, high = node.node, node.least, node.most
        if least == most or high is None or least * high + 1 >= (least + 1) * low:
            counts = low * least, None if high is None or most is None else high * most
            if (least or low <= 1) and max(counts[0], counts[1] or 0) <= MAX_COUNT:
                return Repeat(inner, *counts)
    return EMPTY if most == 0 else node if least == most == 1 else Repeat(node, least, most)


def optional(node: Node) -> Node:
    return Repeat(node, 0, 1)


def intersection(a: Node, b: Node) -> Node:
    """Intersection of two regular nodes."""
    if a == b or b == ANY_TEXT:
        return a
    if a == ANY_TEXT:
        return b
    if NOTHING in (a, b):
        return NOTHING
    parts = [part for node in (a, b) for part in (node.parts if isinstance(node, Intersection) else (node,))]
    return Intersection(tuple(dict.fromkeys(parts)))


def complement(node: Node) -> Node:
    """Complement of a regular node."""
    if node == NOTHING:
        return ANY_TEXT
    if node == ANY_TEXT:
        return NOTHING
    return node.node if isinstance(node, Complement) else Complement(node)


def text_of(node: Node) -> str | None:
    """The text of a literal node; None for others."""
    match node:
        case Text(text):
            return text
        case CharSet(((low, high),)) if low == high:
            return chr(low)
        case Concat(parts):
            texts = []
            for part in parts:
                if (found := text_of(part)) is None:
                    return None
                texts.append(found)
            return "".join(texts)
    return None


def texts_of(node: Node) -> tuple[str, ...] | None:
    """The texts of an alternation of literals; None for others."""
    if node == NOTHING:
        return ()
    texts = [text_of(option) for option in (node.options if isinstance(node, Alternation) else (node,))]
    return None if None in texts else tuple(text for text in texts if text is not None)


def children(node: Node) -> tuple[Node, ...]:
    match node:
        case Concat(parts) | Intersection(parts) | Alternation(parts):
            return parts
        case Repeat(inner, _, _) | Complement(inner):
            return (inner,)
    return ()


def mapped(node: Node, change: Callable[[Node], Node]) -> Node:
    """The node with `change` of each child in its place; a node without children as it is."""
    match node:
        case Concat(parts):
            return concat(*map(change, parts))
        case Alternation(options):
            return alternation(list(map(change, options)))  # so that it does not take more of the stack
        case Repeat(inner, least, most):
            return Repeat(change(inner), least, most)
        case Intersection(parts):
            return Intersection(tuple(map(change, parts)))
        case Complement(inner):
            return Complement(change(inner))
    return node


def references(node: Node) -> set[str]:
    """The names of rules in a node."""
    found: set[str] = set()
    stack = [node] if node.refers else []
    while stack:
        each = stack.pop()
        if isinstance(each, Ref):
            found.add(each.name)
        else:
            stack += [child for child in children(each) if child.refers]
    return found


def is_plain(node: Node) -> bool:
    """Tells whether a node is free of intersections and complements, which few engines know."""
    return not isinstance(node, Intersection | Complement) and all(map(is_plain, children(node)))
