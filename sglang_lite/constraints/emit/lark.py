"""Serialiser to llguidance's variant of Lark."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from itertools import chain, groupby

from sglang_lite.constraints.emit.regex import repetition_sign, to_rust_regex
from sglang_lite.constraints.formal.automaton import matches_empty_text
from sglang_lite.constraints.formal.equations import build_multiples_node
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
    fold_node,
    literal_text,
    map_children,
    optional,
)
from sglang_lite.constraints.memo import memoize
from sglang_lite.protocol import ConstraintError

# json.dumps would make a new encoder for each call
_JSON = json.JSONEncoder(ensure_ascii=False).encode
MAX_DEPTH = 2_000  # nesting of rules; llguidance 1.9.1 overflows its stack between 4,000 and 8,000
_ANY_BYTES = Complement(NOTHING)  # llguidance's complement is over bytes
# bytes of a language above which each of its large character sets is written only once
_LARGE = 10_000_000
MAX_RANGES = 1_000_000  # in all character sets of a language
_LONG = 100  # characters from which a part of a terminal becomes a separate terminal
_MAX_RUN = 8  # parts in a row that may be empty
_MIN_SIZE = 100  # of a node (`Node.size`)
_MAX_GROUPS = 20  # nesting of groups in a definition; llguidance 1.9.1 rejects 30


def to_lark(language: Language) -> str:
    """Returns a grammar's text with the lexemes of the language (see `Language`).

    Raises:
        ConstraintError: the rules are nested too deeply, or a lexeme is longer than
            `MAX_MIN_LENGTH` characters.
    """
    size = language.size
    if size > MAX_DEPTH * _MIN_SIZE and _nesting_depth(language) > MAX_DEPTH:
        raise ConstraintError(
            "the rules of the grammar lead to each other too deeply.", hint="Use repeats: x* or x+."
        )
    try:
        return _Speller(language, is_large=size > _LARGE).render_lark()
    except RecursionError as error:
        raise ConstraintError("the constraint is nested too deeply.") from error


def _nesting_depth(language: Language) -> int:
    """Returns the nesting depth of the grammar with each rule expanded at its first use, as
    llguidance does it.
    """
    deepest = 0
    seen = {language.start}
    stack: list[tuple[Node, int]] = [(language.rules[language.start], 1)]
    while stack:
        node, depth = stack.pop()
        deepest = max(deepest, depth)
        if isinstance(node, Ref):
            if node.name not in seen:
                seen.add(node.name)
                stack.append((language.rules[node.name], depth + 1))
        else:
            stack += [(child, depth + 1) for child in reversed(children(node)) if child.has_refs]
    return deepest


class _Speller:
    def __init__(self, language: Language, *, is_large: bool) -> None:
        self._language = language
        self._large = is_large
        self._rules = {name: f"r{i}" for i, name in enumerate(language.rules)}
        self._terminals: dict[str, str] = {}  # names of terminals by definition
        self._lexemes: dict[Node, str] = {}
        # texts of parts of terminals, and the depth of their groups
        self._parts: dict[Node, tuple[str, int]] = {}
        self._groups: dict[str, str] = {}  # names of rules for deep groups, by definition
        if is_large and _ranges(language) > MAX_RANGES:
            raise ConstraintError(
                f"its character sets, all different ones together, have more than {MAX_RANGES:,} ranges of characters.",
                hint=r"Use fewer sets that have \w, \d or a Unicode category in them beside other characters.",
            )

    def render_lark(self) -> str:
        rules = self._language.rules.items()
        lines = [f"start: {self._render_lark_node(Ref(self._language.start))[0]}"]
        lines += [
            f"{self._rules[name]}: {self._render_lark_node(body)[0]}"
            for name, body in rules
            if body.has_refs
        ]
        lines += [f"{name}: {definition}" for definition, name in self._groups.items()]
        lines += [f"{name}: {definition}" for definition, name in self._terminals.items()]
        return "\n".join(lines)

    def _render_lark_node(self, node: Node) -> tuple[str, int]:
        """Returns the text of a node, and how deeply its parentheses are nested. A node without
        references is written as a lexeme.
        """
        if node.has_refs:
            match node:
                case Ref(name):
                    body = self._language.rules[name]
                    return self._rules[name] if body.has_refs else self._render_lexeme(body), 0
                case Concat(parts):
                    return _join_in_group(
                        " ",
                        map(self._render_lark_node, _flatten_structure(parts)),
                        self._groups,
                        "g",
                    )
                case Alternation(options):
                    return _join_in_group(
                        " | ", map(self._render_lark_node, options), self._groups, "g"
                    )
                case Repeat(inner, least, most):
                    text, depth = self._render_lark_node(inner)
                    if isinstance(inner, Repeat):
                        text, depth = _join_in_group("", [(text, depth)], self._groups, "g")
                    return text + repetition_sign(least, most), depth
        return self._render_lexeme(node), 0

    def _render_lexeme(self, node: Node) -> str:
        if node not in self._lexemes:
            text = literal_text(node)
            if (lengths(node)[0] if text is None else len(text)) > MAX_MIN_LENGTH:
                raise ConstraintError(
                    f"texts of more than {MAX_MIN_LENGTH:,} characters are required."
                )
            if text is not None:
                self._lexemes[node] = _JSON(text).replace("\x7f", "\\u007f")
            else:
                definition = (
                    None if self._large else _render_as_single_pattern(node)
                ) or self._render_terminal(_group_optional_runs(node))[0]
                self._lexemes[node] = self._terminals.setdefault(
                    definition, f"T{len(self._terminals)}"
                )
        return self._lexemes[node]

    def _render_terminal(self, node: Node) -> tuple[str, int]:
        """Returns the text of a terminal's definition, and how deeply its parentheses are nested.
        Operators bind in the order `~a`, `a*`, `a b`, `a & b`, `a | b`. Every group is in
        parentheses.
        """
        if node == EMPTY:
            return '""', 0
        if isinstance(node, Multiple):
            return self._define_shared_terminals(build_multiples_node(node.divisor)), 0
        if not self._large or not children(node):
            # intersections and complements need operators
            with contextlib.suppress(ConstraintError):
                return f"/{to_rust_regex(node)}/", 0
        match node:
            case Concat(parts):
                return _join_in_group(
                    " ", map(self._render_terminal_part, parts), self._terminals, "T"
                )
            case Alternation(options):
                return _join_in_group(
                    " | ", map(self._render_terminal_part, options), self._terminals, "T"
                )
            case Repeat(inner, least, most):
                text, depth = _join_in_group(
                    "", [self._render_terminal_part(inner)], self._terminals, "T"
                )
                return text + repetition_sign(least, most), depth
            case Intersection(parts):
                texts = [
                    self._render_terminal(part)
                    for part in parts
                    if not isinstance(part, Complement)
                ]
                outside = [part.node for part in parts if isinstance(part, Complement)]
                # llguidance's complement is over bytes, so a text is required as well. The engine
                # has a fast path for the form a & ~b.
                texts = texts or [("/(?s:.*)/", 0)]
                if outside:
                    text, depth = self._render_terminal(alternation(_widen_ends_to_bytes(outside)))
                    texts.append((f"~{text}", depth))
                return _join_in_group(" & ", texts, self._terminals, "T")
            case Complement(inner) if inner == NOTHING:
                return f"~/{to_rust_regex(NOTHING)}/", 0
            case Complement():
                return self._render_terminal(Intersection((node,)))
            case Substring():
                return f"%regex {_JSON({'substring_chunks': node.pieces})}", 0
        raise AssertionError(f"a {type(node).__name__} is no part of a terminal")

    def _define_shared_terminals(self, node: Node) -> str:
        """Defines a terminal for a node with many equal parts, and returns the terminal's name.
        Each different part also becomes a terminal, which is defined once.
        """
        if node not in self._parts:
            match node:
                case Concat(parts):
                    text = " ".join(map(self._define_shared_terminals, parts))
                case Alternation(options):
                    text = " | ".join(map(self._define_shared_terminals, options))
                case Repeat(inner):
                    text = f"{self._define_shared_terminals(inner)}*"
                case _:
                    text = f"/{to_rust_regex(node)}/"
            self._parts[node] = self._terminals.setdefault(text, f"T{len(self._terminals)}"), 0
        return self._parts[node][0]

    def _render_terminal_part(self, node: Node) -> tuple[str, int]:
        """Returns the text of a part of a terminal, and how deeply its parentheses are nested. A
        long part becomes a separate terminal and is referenced by name.
        """
        if node not in self._parts:
            text, depth = self._render_terminal(node)
            if len(text) >= _LONG:
                text = self._terminals.setdefault(text, f"T{len(self._terminals)}")
                depth = 0
            self._parts[node] = text, depth
        return self._parts[node]


def _widen_ends_to_bytes(outside: list[Node]) -> Iterator[Node]:
    """Yields the alternatives to exclude. If an alternative may end with any text, replaces that
    text with any bytes. llguidance then needs no search to find that nothing can follow an excluded
    beginning.
    """
    for node in outside:
        for option in node.options if isinstance(node, Alternation) else (node,):
            if isinstance(option, Concat) and option.parts[-1:] == (ANY_TEXT,):
                yield Concat((*option.parts[:-1], _ANY_BYTES))
            else:
                yield option


def _ranges(language: Language) -> int:
    """Counts the ranges of characters in all distinct sets of a language."""
    sets = set[CharSet]()
    seen = set[int]()
    stack = list(language.rules.values())
    while stack:
        node = stack.pop()
        if isinstance(node, CharSet):
            sets.add(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack += children(node)
    return sum([len(each.ranges) for each in sets])


@memoize  # many schemas share the same strings and numbers
def _render_as_single_pattern(node: Node) -> str | None:
    """Returns the definition of a lexeme as one pattern, or None if it needs operators."""
    with contextlib.suppress(ConstraintError):
        return (
            None if isinstance(node, Multiple) else f"/{to_rust_regex(_group_optional_runs(node))}/"
        )
    return None


def _group_optional_runs(node: Node) -> Node:
    """Divides long runs of possibly empty parts into small nested groups, which match the same
    texts. For each part that may come first, llguidance copies the rest of its group. A single
    group with thousands of parts would take gigabytes.
    """
    return fold_node(node, _group_and_count_optional)[0] if _may_have_optional_run(node) else node


def _may_have_optional_run(node: Node) -> bool:
    """Returns True if a node may contain a long run of possibly empty parts. A very large node is
    assumed to contain one.
    """
    if node.size < _MAX_RUN * _MIN_SIZE:
        return False
    if node.size > _LARGE:
        return True
    stack = [node]
    found = 0
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


def _group_and_count_optional(node: Node, parts: list[tuple[Node, int]]) -> tuple[Node, int]:
    """Divides a node's long runs of possibly empty parts into nested groups. Returns the new node
    and the number of possibly empty nodes in it. `parts` has the results for the node's children.
    """
    count = sum([each for _, each in parts]) + _is_optional(node)
    if count <= _MAX_RUN:
        return node, count
    below = iter([part for part, _ in parts])
    if not isinstance(node, Concat):
        return map_children(node, lambda _: next(below)), count
    runs = groupby(_flatten_concat(below), key=matches_empty_text)
    return concat(
        *chain.from_iterable(_nest_optional(list(run)) if empty else run for empty, run in runs)
    ), count


def _flatten_concat(parts: Iterable[Node]) -> Iterator[Node]:
    """Yields the parts of a concatenation, with nested concatenations flattened."""
    for part in parts:
        if isinstance(part, Concat):
            yield from _flatten_concat(part.parts)
        else:
            yield part


def _flatten_structure(parts: Iterable[Node]) -> Iterator[Node]:
    """Yields the parts of a concatenation. Flattens nested concatenations, unless they are whole
    lexemes.
    """
    for part in parts:
        if isinstance(part, Concat) and part.has_refs:
            yield from _flatten_structure(part.parts)
        else:
            yield part


def _nest_optional(parts: list[Node]) -> list[Node]:
    """Divides a long run of possibly empty parts into nested groups that may be left out.
    llguidance is slow with a single long run.
    """
    while len(parts) > _MAX_RUN:
        parts = [optional(concat(*parts[i : i + _MAX_RUN])) for i in range(0, len(parts), _MAX_RUN)]
    return parts


def _join_in_group(
    operator: str, parts: Iterable[tuple[str, int]], names: dict[str, str], prefix: str
) -> tuple[str, int]:
    """Joins texts with an operator and puts them in parentheses. Returns the result, and how deeply
    its parentheses are nested. Texts that are nested too deeply become separate definitions.

    Args:
        operator: operator between the texts.
        parts: texts, each with the depth of its groups.
        names: names of definitions by text, to which deep ones are added.
        prefix: prefix of their names.
    """
    texts = []
    deepest = 0
    for text, depth in parts:
        if depth < _MAX_GROUPS:
            texts.append(text)
            deepest = max(deepest, depth)
        else:
            texts.append(names.setdefault(text, f"{prefix}{len(names)}"))
    return f"({operator.join(texts)})", deepest + 1
