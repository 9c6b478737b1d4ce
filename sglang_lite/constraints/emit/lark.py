"""Serialiser to llguidance's variant of Lark."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from itertools import chain, groupby

from sglang_lite.constraints.emit.regex import repetition_sign, to_rust
from sglang_lite.constraints.formal.automaton import may_be_empty
from sglang_lite.constraints.formal.equations import multiples
from sglang_lite.constraints.formal.lengths import MAX_MIN_LENGTH, lengths
from sglang_lite.constraints.formal.nodes import (
    ANY_TEXT,
    EMPTY,
    NOTHING,
    Alternation,
    CharSet,
    Complement,
    Concat,
    Intersection,
    Language,
    Multiple,
    Node,
    Ref,
    Repeat,
    Substring,
    alternation,
    children,
    concat,
    folded,
    literal_text,
    mapped,
    optional,
)
from sglang_lite.constraints.memo import memoized
from sglang_lite.protocol import ConstraintError

_JSON = json.JSONEncoder(ensure_ascii=False).encode  # json.dumps would make a new encoder for each call
MAX_DEPTH = 2_000  # nesting of rules; llguidance 1.9.1 overflows its stack between 4,000 and 8,000
_ANY_BYTES = Complement(NOTHING)  # of llguidance's complement, which is over bytes
_LARGE = 10_000_000  # bytes of a language, above which each of its large character sets is written once
MAX_RANGES = 1_000_000  # of the character sets of a language
_LONG = 100  # characters of a part of a terminal, from which on it is a terminal of its own
_MAX_RUN = 8  # parts in a row that may be empty
_MIN_SIZE = 100  # of a node (`Node.size`)
_MAX_GROUPS = 20  # depth of groups in a definition; llguidance 1.9.1 refuses 30


def to_lark(language: Language) -> str:
    """Grammar text, whose lexemes are those of the language (see `Language`).

    Raises:
        ConstraintError: the rules are nested too deeply, or a lexeme is longer than `MAX_MIN_LENGTH` characters.
    """
    size = language.size
    if size > MAX_DEPTH * _MIN_SIZE and _depth(language) > MAX_DEPTH:
        raise ConstraintError("the rules of the grammar lead to each other too deeply.", hint="Use repeats: x* or x+.")
    try:
        return _Speller(language, is_large=size > _LARGE).text()
    except RecursionError as error:
        raise ConstraintError("the constraint is nested too deeply.") from error


def _depth(language: Language) -> int:
    """Nesting depth of the grammar with each rule expanded at its first use, as llguidance does."""
    deepest, seen = 0, {language.start}
    stack: list[tuple[Node, int]] = [(language.rules[language.start], 1)]
    while stack:
        node, depth = stack.pop()
        deepest = max(deepest, depth)
        if isinstance(node, Ref):
            if node.name not in seen:
                seen.add(node.name)
                stack.append((language.rules[node.name], depth + 1))
        else:
            stack += [(child, depth + 1) for child in reversed(children(node)) if child.refers]
    return deepest


class _Speller:
    def __init__(self, language: Language, *, is_large: bool) -> None:
        self._language, self._large = language, is_large
        self._rules = {name: f"r{i}" for i, name in enumerate(language.rules)}
        self._terminals: dict[str, str] = {}  # names of terminals by definition
        self._lexemes: dict[Node, str] = {}
        self._parts: dict[Node, tuple[str, int]] = {}  # texts of parts of terminals, and the depth of their groups
        self._groups: dict[str, str] = {}  # names of rules for deep groups, by definition
        if is_large and _ranges(language) > MAX_RANGES:
            raise ConstraintError(
                f"its character sets, all different ones together, have more than {MAX_RANGES:,} ranges of characters.",
                hint=r"Use fewer sets that have \w, \d or a Unicode category in them beside other characters.",
            )

    def text(self) -> str:
        rules = self._language.rules.items()
        lines = [f"start: {self._body(Ref(self._language.start))[0]}"]
        lines += [f"{self._rules[name]}: {self._body(body)[0]}" for name, body in rules if body.refers]
        lines += [f"{name}: {definition}" for definition, name in self._groups.items()]
        lines += [f"{name}: {definition}" for definition, name in self._terminals.items()]
        return "\n".join(lines)

    def _body(self, node: Node) -> tuple[str, int]:
        """Text of a node and the depth of its groups. A node without references is part of a lexeme."""
        if node.refers:
            match node:
                case Ref(name):
                    body = self._language.rules[name]
                    return self._rules[name] if body.refers else self._lexeme(body), 0
                case Concat(parts):
                    return _group(" ", map(self._body, _joined(parts)), self._groups, "g")
                case Alternation(options):
                    return _group(" | ", map(self._body, options), self._groups, "g")
                case Repeat(inner, least, most):
                    text, depth = self._body(inner)
                    if isinstance(inner, Repeat):
                        text, depth = _group("", [(text, depth)], self._groups, "g")
                    return text + repetition_sign(least, most), depth
        return self._lexeme(node), 0

    def _lexeme(self, node: Node) -> str:
        if node not in self._lexemes:
            text = literal_text(node)
            if (lengths(node)[0] if text is None else len(text)) > MAX_MIN_LENGTH:
                raise ConstraintError(f"texts of more than {MAX_MIN_LENGTH:,} characters are required.")
            if text is not None:
                self._lexemes[node] = _JSON(text).replace("\x7f", "\\u007f")
            else:
                definition = (None if self._large else _pattern(node)) or self._terminal(_grouped(node))[0]
                self._lexemes[node] = self._terminals.setdefault(definition, f"T{len(self._terminals)}")
        return self._lexemes[node]

    def _terminal(self, node: Node) -> tuple[str, int]:
        """Text of a terminal's definition and the depth of its groups. Operators bind in the order `~a`, `a*`, `a b`,
        `a & b`, `a | b`; every group is in parentheses.
        """
        if node == EMPTY:
            return '""', 0
        if isinstance(node, Multiple):
            return self._shared(multiples(node.divisor)), 0
        if not self._large or not children(node):
            with contextlib.suppress(ConstraintError):  # intersections and complements, which need operators
                return f"/{to_rust(node)}/", 0
        match node:
            case Concat(parts):
                return _group(" ", map(self._part, parts), self._terminals, "T")
            case Alternation(options):
                return _group(" | ", map(self._part, options), self._terminals, "T")
            case Repeat(inner, least, most):
                text, depth = _group("", [self._part(inner)], self._terminals, "T")
                return text + repetition_sign(least, most), depth
            case Intersection(parts):
                texts = [self._terminal(part) for part in parts if not isinstance(part, Complement)]
                outside = [part.node for part in parts if isinstance(part, Complement)]
                # llguidance's complement is over bytes, so a text is demanded as well. The form a & ~b takes a shortcut
                # in the engine.
                texts = texts or [("/(?s:.*)/", 0)]
                if outside:
                    text, depth = self._terminal(alternation(_with_any_bytes(outside)))
                    texts.append((f"~{text}", depth))
                return _group(" & ", texts, self._terminals, "T")
            case Complement(inner) if inner == NOTHING:
                return f"~/{to_rust(NOTHING)}/", 0
            case Complement():
                return self._terminal(Intersection((node,)))
            case Substring():
                return f"%regex {_JSON({'substring_chunks': node.pieces})}", 0
        raise AssertionError(f"a {type(node).__name__} is no part of a terminal")

    def _shared(self, node: Node) -> str:
        """Name of the terminal of a node with many equal parts, each of which is a terminal of its own."""
        if node not in self._parts:
            match node:
                case Concat(parts):
                    text = " ".join(map(self._shared, parts))
                case Alternation(options):
                    text = " | ".join(map(self._shared, options))
                case Repeat(inner):
                    text = f"{self._shared(inner)}*"
                case _:
                    text = f"/{to_rust(node)}/"
            self._parts[node] = self._terminals.setdefault(text, f"T{len(self._terminals)}"), 0
        return self._parts[node][0]

    def _part(self, node: Node) -> tuple[str, int]:
        """Text of a part of a terminal, if it is long the name of a terminal of its own; and its groups' depth."""
        if node not in self._parts:
            text, depth = self._terminal(node)
            if len(text) >= _LONG:
                text, depth = self._terminals.setdefault(text, f"T{len(self._terminals)}"), 0
            self._parts[node] = text, depth
        return self._parts[node]


def _with_any_bytes(outside: list[Node]) -> Iterator[Node]:
    """Yields the alternatives of texts to exclude from other texts, with any bytes instead of any text at their ends.
    llguidance then knows that no text is left after such a beginning, and that every text is after another one; else
    it would search for one.
    """
    for node in outside:
        for option in node.options if isinstance(node, Alternation) else (node,):
            if isinstance(option, Concat) and option.parts[-1:] == (ANY_TEXT,):
                yield Concat((*option.parts[:-1], _ANY_BYTES))
            else:
                yield option


def _ranges(language: Language) -> int:
    """Number of ranges of characters in all different sets of a language."""
    sets, seen = set[CharSet](), set[int]()
    stack = list(language.rules.values())
    while stack:
        node = stack.pop()
        if isinstance(node, CharSet):
            sets.add(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack += children(node)
    return sum([len(each.ranges) for each in sets])


@memoized  # many places of a schema, and many schemas, have the same strings and numbers
def _pattern(node: Node) -> str | None:
    """Definition of a lexeme as one pattern, or None if it needs operators."""
    with contextlib.suppress(ConstraintError):
        return None if isinstance(node, Multiple) else f"/{to_rust(_grouped(node))}/"
    return None


def _grouped(node: Node) -> Node:
    """Regular node of the same texts, whose runs of parts that may be empty are in nested groups of a few. For each
    part that may come first, llguidance copies all that follow it in its group: in one group of thousands, gigabytes.
    """
    return folded(node, _regrouped)[0] if _may_have_run(node) else node


def _may_have_run(node: Node) -> bool:
    """True if a node has so many parts that may be empty that a run of them may be too long, or is too large to count
    them in each place."""
    if node.size < _MAX_RUN * _MIN_SIZE:
        return False
    if node.size > _LARGE:
        return True
    stack, found = [node], 0
    while stack and found <= _MAX_RUN:
        each = stack.pop()
        found += _is_optional(each)
        stack += children(each)
    return found > _MAX_RUN


def _is_optional(node: Node) -> bool:
    match node:
        case Repeat(_, least, _):
            return not least
        case Concat(parts):
            return not parts
    return isinstance(node, Substring | Complement)


def _regrouped(node: Node, parts: list[tuple[Node, int]]) -> tuple[Node, int]:
    """Node with such groups, and how many nodes in it may be empty, given those of its parts."""
    count = sum([each for _, each in parts]) + _is_optional(node)
    if count <= _MAX_RUN:
        return node, count
    below = iter([part for part, _ in parts])
    if not isinstance(node, Concat):
        return mapped(node, lambda _: next(below)), count
    runs = groupby(_flat(below), key=may_be_empty)
    return concat(*chain.from_iterable(_nested(list(run)) if empty else run for empty, run in runs)), count


def _flat(parts: Iterable[Node]) -> Iterator[Node]:
    """Parts of a concatenation, with those of its concatenations in their place."""
    for part in parts:
        if isinstance(part, Concat):
            yield from _flat(part.parts)
        else:
            yield part


def _joined(parts: Iterable[Node]) -> Iterator[Node]:
    """Parts of a concatenation, with those of its concatenations in their place, but for whole lexemes."""
    for part in parts:
        if isinstance(part, Concat) and part.refers:
            yield from _joined(part.parts)
        else:
            yield part


def _nested(parts: list[Node]) -> list[Node]:
    """Parts that may be empty, in groups that may be left out, as llguidance would join the others."""
    while len(parts) > _MAX_RUN:
        parts = [optional(concat(*parts[i : i + _MAX_RUN])) for i in range(0, len(parts), _MAX_RUN)]
    return parts


def _group(operator: str, parts: Iterable[tuple[str, int]], names: dict[str, str], prefix: str) -> tuple[str, int]:
    """Group of texts and the depth of its groups. A text whose groups are deep becomes a definition of its own.

    Args:
        operator: operator between the texts.
        parts: texts, each with the depth of its groups.
        names: names of definitions by text, to which deep ones are added.
        prefix: prefix of their names.
    """
    texts, deepest = [], 0
    for text, depth in parts:
        if depth < _MAX_GROUPS:
            texts.append(text)
            deepest = max(deepest, depth)
        else:
            texts.append(names.setdefault(text, f"{prefix}{len(names)}"))
    return f"({operator.join(texts)})", deepest + 1
