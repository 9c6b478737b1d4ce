"""Serialiser to llguidance's variant of Lark."""

from __future__ import annotations

import contextlib
import json

from sglang_lite.constraints.emit.regex import repetition_sign, to_rust
from sglang_lite.constraints.formal.lengths import MAX_LEAST, lengths
from sglang_lite.constraints.formal.nodes import (
    EMPTY,
    Alternation,
    Complement,
    Concat,
    Intersection,
    Language,
    Node,
    Ref,
    Repeat,
    alternation,
    children,
    literal_text,
)
from sglang_lite.protocol import ConstraintError

_JSON = json.JSONEncoder(ensure_ascii=False).encode  # json.dumps would make a new encoder for each call
MAX_DEPTH = 2_000  # nesting of rules; llguidance 1.9.1 overflows its stack between 4,000 and 8,000


def to_lark(language: Language) -> str:
    """Grammar text, whose lexemes are those of the language (see `Language`).

    Raises:
        ConstraintError: the rules are nested too deeply, or a lexeme is longer than `MAX_LEAST` characters.
    """
    if _depth(language) > MAX_DEPTH:
        raise ConstraintError("the rules of the grammar lead to each other too deeply.", hint="Use repeats: x* or x+.")
    return _Speller(language).text()


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
    def __init__(self, language: Language) -> None:
        self._language = language
        self._rules = {name: f"r{i}" for i, name in enumerate(language.rules)}
        self._terminals: dict[str, str] = {}  # names of terminals by definition
        self._lexemes: dict[Node, str] = {}

    def text(self) -> str:
        rules = self._language.rules.items()
        lines = [f"start: {self._body(Ref(self._language.start))}"]
        lines += [f"{self._rules[name]}: {self._body(body)}" for name, body in rules if body.refers]
        lines += [f"{name}: {definition}" for definition, name in self._terminals.items()]
        return "\n".join(lines)

    def _body(self, node: Node) -> str:
        structure = self._structure(node)
        return self._lexeme(node) if structure is None else structure

    def _structure(self, node: Node) -> str | None:
        """Text of a node with references, or None for a node without references, which is part of a lexeme."""
        if not node.refers:
            return None
        match node:
            case Ref(name):
                body = self._language.rules[name]
                return self._rules[name] if body.refers else self._lexeme(body)
            case Concat(parts) | Alternation(parts):
                parts_text = [self._body(part) for part in parts]
                return "(" + (" " if isinstance(node, Concat) else " | ").join(parts_text) + ")"
            case Repeat(inner, least, most):
                return f"({self._body(inner)}){repetition_sign(least, most)}"
        return None

    def _lexeme(self, node: Node) -> str:
        if node not in self._lexemes:
            text = literal_text(node)
            if (lengths(node)[0] if text is None else len(text)) > MAX_LEAST:
                raise ConstraintError(f"texts of more than {MAX_LEAST:,} characters are required.")
            if text is not None:
                self._lexemes[node] = _JSON(text).replace("\x7f", "\\u007f")
            else:
                self._lexemes[node] = self._terminals.setdefault(_terminal(node), f"T{len(self._terminals)}")
        return self._lexemes[node]


def _terminal(node: Node) -> str:
    """Text of a terminal's definition. Operators bind in the order `~a`, `a*`, `a b`, `a & b`, `a | b`; every group is
    in parentheses.
    """
    if node == EMPTY:
        return '""'
    with contextlib.suppress(ConstraintError):  # intersections and complements, which need operators
        return f"/{to_rust(node)}/"
    match node:
        case Concat(parts):
            return "(" + " ".join(map(_terminal, parts)) + ")"
        case Alternation(options):
            return "(" + " | ".join(map(_terminal, options)) + ")"
        case Repeat(inner, least, most):
            return f"({_terminal(inner)}){repetition_sign(least, most)}"
        case Intersection(parts):
            inside = [_terminal(part) for part in parts if not isinstance(part, Complement)]
            outside = [part.node for part in parts if isinstance(part, Complement)]
            without = [f"~{_terminal(alternation(outside))}"] if outside else []
            # llguidance's complement is over bytes, so a text is demanded as well. The form a & ~b takes a shortcut in
            # the engine.
            return "(" + " & ".join([*(inside or ["/(?s:.*)/"]), *without]) + ")"
        case Complement():
            return _terminal(Intersection((node,)))
    raise AssertionError(f"a {type(node).__name__} is no part of a terminal")
