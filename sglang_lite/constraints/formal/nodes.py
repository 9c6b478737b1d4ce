"""Nodes of languages: small trees of character sets, regular operations and names of rules.

A tree without `Ref` is a regular language. `Language` defines the rules that the names
refer to and is context-free. Every constraint on output (regex, schema, grammar) becomes
one `Language`, and engines read its text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, compress, pairwise
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

from msgspec import Struct

from sglang_lite.constraints.formal import charsets
from sglang_lite.constraints.formal.charsets import Ranges
from sglang_lite.protocol import ConstraintError

_T = TypeVar("_T")


class Facts(NamedTuple):
    """Facts about a node and its descendants: its hash, whether it refers to rules, and its
    approximate size in bytes.
    """

    hash: int
    has_refs: bool
    size: int


class _CachedFacts:
    """Base of nodes that compute their facts once and keep them, because large nodes are often used
    as keys.
    """

    __slots__ = ("facts",)
    facts: Facts

    def __hash__(self) -> int:
        try:
            return self.facts.hash
        except AttributeError:
            return self._compute_facts().hash

    @property
    def has_refs(self) -> bool:
        try:
            return self.facts.has_refs
        except AttributeError:
            return self._compute_facts().has_refs

    @property
    def size(self) -> int:
        try:
            return self.facts.size
        except AttributeError:
            return self._compute_facts().size

    def _compute_facts(self) -> Facts:
        """Computes the facts of a node after those of its descendants. It does not recurse, so
        depth is not limited.
        """
        stack: list[Any] = [self]
        while stack:
            each = stack[-1]
            if isinstance(each, CharSet):
                facts = Facts(hash((CharSet, each.ranges)), False, 140 + 70 * len(each.ranges))
            else:
                below = children(each)
                missing = []
                has_refs = False
                size = 140
                for child in below:
                    if isinstance(child, _CachedFacts):
                        known = getattr(child, "facts", None)
                        if known is None:
                            missing.append(child)
                            continue
                    else:
                        known = child
                    has_refs = has_refs or known.has_refs
                    size += 8 + known.size
                if missing:
                    stack += missing
                    continue
                own = (each.node, each.least, each.most) if isinstance(each, Repeat) else below
                facts = Facts(hash((type(each), own)), has_refs, size)
            object.__setattr__(each, "facts", facts)
            stack.pop()
        return self.facts


@dataclass(frozen=True, slots=True)
class CharSet(_CachedFacts):
    """Any single character of `ranges`. Without ranges, nothing matches."""

    ranges: Ranges
    __hash__ = _CachedFacts.__hash__


# numerous, like Ref: a Struct is created, hashed and compared faster
class LiteralText(Struct, frozen=True):
    """Exactly `text`, which must not be empty."""

    text: str
    has_refs: ClassVar[bool] = False

    @property
    def size(self) -> int:
        return 100 + len(self.text) * (1 if self.text.isascii() else 3)


@dataclass(frozen=True, slots=True)
class Substring:
    """Language of the substrings of `text` that start and end at a cut, including the empty text.

    Attributes:
        text: the text, which must not be empty.
        cuts: for each index of the text, its end included: 1 if there is a cut, else 0.
        superset: simple language that contains all these texts and is faster for engines; None if
            there is none.
    """

    text: str
    cuts: bytes
    superset: Node | None = None
    has_refs: ClassVar[bool] = False

    @property
    def size(self) -> int:
        return 100 + len(self.text) * (2 if self.text.isascii() else 4)

    @property
    def pieces(self) -> list[str]:
        """Pieces of the text, in order."""
        bounds = compress(range(len(self.cuts)), self.cuts)
        return [self.text[start:end] for start, end in pairwise(bounds)]

    @property
    def sample_beginnings(self) -> Iterator[str]:
        """A few of the texts, short and long, that start at the beginning of the whole text,
        without surrounding blanks.
        """
        length = 1
        while length < min(2 * len(self.text), _MAX_BEGINNING):
            yield self.text[: self.cuts.find(1, min(length, len(self.text)))].strip()
            length *= 2

    def find(self, text: str) -> int | None:
        """Returns the index of the first occurrence of `text` that consists of successive pieces,
        or None if there is none.
        """
        at = self.text.find(text)
        while at >= 0 and not (self.cuts[at] and self.cuts[at + len(text)]):
            at = self.text.find(text, at + 1)
        return None if at < 0 else at


@dataclass(frozen=True, slots=True)
class Multiple:
    """Digits that spell a multiple of a divisor, with points anywhere among them, or the empty
    text.
    """

    divisor: int
    has_refs: ClassVar[bool] = False
    size: ClassVar[int] = 100


@dataclass(frozen=True, slots=True)
class Concat(_CachedFacts):
    """Texts that consist of one text of each part, in order."""

    parts: tuple[Node, ...]
    __hash__ = _CachedFacts.__hash__


@dataclass(frozen=True, slots=True)
class Alternation(_CachedFacts):
    """Texts of any of the options."""

    options: tuple[Node, ...]
    __hash__ = _CachedFacts.__hash__


@dataclass(frozen=True, slots=True)
class Repeat(_CachedFacts):
    """`least` to `most` texts of `node` in a row, without an upper limit if `most` is None."""

    node: Node
    least: int
    most: int | None
    __hash__ = _CachedFacts.__hash__


@dataclass(frozen=True, slots=True)
class Intersection(_CachedFacts):
    """Texts that are in all parts. The parts are regular."""

    parts: tuple[Node, ...]
    __hash__ = _CachedFacts.__hash__


@dataclass(frozen=True, slots=True)
class Complement(_CachedFacts):
    """Texts that are not in `node`, which is regular."""

    node: Node
    __hash__ = _CachedFacts.__hash__


class Ref(Struct, frozen=True):
    """Reference to the rule called `name`."""

    name: str
    has_refs: ClassVar[bool] = True
    size: ClassVar[int] = 120


Node: TypeAlias = (
    "CharSet | LiteralText | Substring | Multiple | Concat | Alternation | Repeat | Intersection "
    "| Complement | Ref"
)

MAX_COUNT = 1_000_000  # maximum count of a repeat that is merged from two

_MAX_BEGINNING = 10_000  # characters

EMPTY = Concat(())
NOTHING = CharSet(())
ANY_CHAR = CharSet(charsets.ALL)
ANY_TEXT = Repeat(ANY_CHAR, 0, None)


@dataclass(frozen=True, slots=True)
class Language:
    """A context-free language.

    Attributes:
        start: name of the rule for the whole text.
        rules: bodies of the rules by name. In a body with references, each largest part
            without references is one lexeme. emit/lexemes.py ensures that the language stays
            the same if engines read lexemes greedily.
        sealed: names of rules for JSON values. Their lexemes, and the lexemes of all rules below
            them, end at the same place in every context. Greedy reading is therefore exact.
    """

    start: str
    rules: Mapping[str, Node]
    sealed: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        """Approximate memory in bytes."""
        return sum([120 + len(name) + body.size for name, body in self.rules.items()])


def literal(text: str) -> Node:
    """Returns a node that matches exactly `text`.

    Raises:
        ConstraintError: the text contains a lone surrogate.
    """
    if not text.isascii() and charsets.has_surrogates(text):
        raise ConstraintError(f"{text!r} has a lone surrogate in it, which is no character.")
    return LiteralText(text) if text else EMPTY


def substring(pieces: Iterable[str]) -> Node:
    """Returns a node for the texts of some successive pieces, the empty text included.

    Raises:
        ConstraintError: a piece contains a lone surrogate.
    """
    pieces = list(pieces)
    text = "".join(pieces)
    if not text.isascii() and charsets.has_surrogates(text):
        raise ConstraintError("the text has a lone surrogate in it, which is no character.")
    cuts = bytearray(len(text) + 1)
    cuts[0] = 1
    for end in accumulate(map(len, pieces)):
        cuts[end] = 1
    return Substring(text, bytes(cuts)) if text else EMPTY


def concat(*parts: Node) -> Node:
    """Concatenates `parts` and simplifies the result: empty parts are dropped, and a part without
    texts makes it NOTHING.
    """
    nonempty = []
    for part in parts:
        if isinstance(part, CharSet) and not part.ranges:
            return NOTHING
        if not isinstance(part, Concat) or part.parts:
            nonempty.append(part)
    return nonempty[0] if len(nonempty) == 1 else Concat(tuple(nonempty))


def alternation(options: Iterable[Node]) -> Node:
    """Returns an alternation of `options` without duplicates, or NOTHING if no option is left."""
    nonempty = [option for option in options if not isinstance(option, CharSet) or option.ranges]
    if len(nonempty) < 2:
        return nonempty[0] if nonempty else NOTHING
    for option in nonempty:
        if isinstance(option, Repeat) and option == ANY_TEXT:
            return ANY_TEXT
    different = tuple(dict.fromkeys(nonempty))
    return different[0] if len(different) == 1 else Alternation(different)


def repeat(node: Node, least: int, most: int | None) -> Node:
    """Repeats a node `least` to `most` times, without an upper limit if `most` is None."""
    if node == NOTHING:
        return NOTHING if least else EMPTY
    if isinstance(node, Repeat):
        # a{1,9}{1,9} is a{1,81}, provided that one more round of the inner repeat leaves no gap
        # between counts.
        inner = node.node
        low = node.least
        high = node.most
        if least == most or high is None or least * high + 1 >= (least + 1) * low:
            counts = low * least, None if high is None or most is None else high * most
            if (least or low <= 1) and max(counts[0], counts[1] or 0) <= MAX_COUNT:
                return Repeat(inner, *counts)
    return EMPTY if most == 0 else node if least == most == 1 else Repeat(node, least, most)


def optional(node: Node) -> Node:
    return Repeat(node, 0, 1)


def intersection(a: Node, b: Node) -> Node:
    """Returns the intersection of two regular nodes."""
    if a == b or b == ANY_TEXT:
        return a
    if a == ANY_TEXT:
        return b
    if NOTHING in (a, b):
        return NOTHING
    parts = [
        part
        for node in (a, b)
        for part in (node.parts if isinstance(node, Intersection) else (node,))
    ]
    return Intersection(tuple(dict.fromkeys(parts)))


def complement(node: Node) -> Node:
    """Returns the complement of a regular node."""
    if node == NOTHING:
        return ANY_TEXT
    if node == ANY_TEXT:
        return NOTHING
    return node.node if isinstance(node, Complement) else Complement(node)


def literal_text(node: Node) -> str | None:
    """Returns the text of a node that matches exactly one literal, or None for any other node."""
    match node:
        case LiteralText(text):
            return text
        case CharSet(((low, high),)) if low == high:
            return chr(low)
        case Concat(parts):
            texts = []
            for part in parts:
                if (found := literal_text(part)) is None:
                    return None
                texts.append(found)
            return "".join(texts)
    return None


def literal_texts(node: Node) -> tuple[str, ...] | None:
    """Returns the texts of a literal or an alternation of literals, or None for any other node."""
    if node == NOTHING:
        return ()
    texts = [
        literal_text(option)
        for option in (node.options if isinstance(node, Alternation) else (node,))
    ]
    return None if None in texts else tuple(text for text in texts if text is not None)


_CHILDREN: Mapping[type, Callable[[Any], tuple[Node, ...]]] = {
    Concat: attrgetter("parts"),
    Alternation: attrgetter("options"),
    Intersection: attrgetter("parts"),
    Repeat: lambda node: (node.node,),
    Complement: lambda node: (node.node,),
}


def children(node: Node) -> tuple[Node, ...]:
    of = _CHILDREN.get(type(node))
    return () if of is None else of(node)


def fold_node(node: Node, result: Callable[[Node, list[_T]], _T]) -> _T:
    """Folds a node bottom-up: calls `result` with the node and the results for its children. A node
    with children is visited only once, even if it is part of several others.
    """
    return _fold_recursively(result, {}, node)


def _fold_recursively(
    result: Callable[[Node, list[_T]], _T], known: dict[int, _T], node: Node
) -> _T:
    """Computes `fold_node` recursively. This is not a closure, because a closure would form a
    reference cycle that keeps all of `known` alive.
    """
    children_of = _CHILDREN.get(type(node))
    if children_of is None:
        return result(node, [])
    found = known.get(id(node))
    if found is None:
        fold = partial(_fold_recursively, result, known)
        found = known[id(node)] = result(node, [*map(fold, children_of(node))])
    return found


def map_children(node: Node, change: Callable[[Node], Node]) -> Node:
    """Applies `change` to each child of a node. A node without children is returned unchanged."""
    match node:
        case Concat(parts):
            return concat(*map(change, parts))
        case Alternation(options):
            # a list, which uses less of the stack than a generator
            return alternation(list(map(change, options)))
        case Repeat(inner, least, most):
            return Repeat(change(inner), least, most)
        case Intersection(parts):
            return Intersection(tuple(map(change, parts)))
        case Complement(inner):
            return Complement(change(inner))
    return node


def references(node: Node) -> set[str]:
    """Returns the names of the rules that a node refers to."""
    found: set[str] = set()
    stack = [node] if node.has_refs else []
    while stack:
        each = stack.pop()
        if isinstance(each, Ref):
            found.add(each.name)
        else:
            stack += [child for child in children(each) if child.has_refs]
    return found


def substrings(language: Language) -> set[Substring]:
    """Returns all Substrings of a language."""
    found: set[Substring] = set()
    stack = list(language.rules.values())
    seen = set[int]()
    while stack:
        node = stack.pop()
        if isinstance(node, Substring):
            found.add(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack += children(node)
    return found


def has_no_set_operations(node: Node) -> bool:
    """Returns True if a node contains no intersections or complements, which few engines support."""
    return not isinstance(node, Intersection | Complement) and all(
        map(has_no_set_operations, children(node))
    )
