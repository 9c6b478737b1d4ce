"""Languages as text in llguidance's variant of Lark."""

from __future__ import annotations

import json

from sglang_lite.constraints.nodes import (
    Alternation,
    Complement,
    Concat,
    Intersection,
    Language,
    Node,
    Ref,
    Repeat,
    is_plain,
    references,
    text_of,
)
from sglang_lite.constraints.spelling import to_rust


def to_lark(language: Language) -> str:
    """The grammar, whose lexemes are the language's (see `Language`)."""
    return _Speller(language).text()


class _Speller:
    def __init__(self, language: Language) -> None:
        self._language = language
        self._rules = {name: f"r{i}" for i, name in enumerate(language.rules)}
        self._terminals: dict[str, str] = {}  # their names by what they say
        self._lexemes: dict[Node, str] = {}

    def text(self) -> str:
        lines = [f"start: {self._rules[self._language.start]}"]
        lines += [f"{self._rules[name]}: {self._body(body)}" for name, body in self._language.rules.items()]
        lines += [f"{name}: {said}" for said, name in self._terminals.items()]
        return "\n".join(lines)

    def _body(self, node: Node) -> str:
        if not references(node):
            return self._lexeme(node)
        match node:
            case Ref(name):
                return self._rules[name]
            case Concat(parts):
                return " ".join(map(self._grouped, parts))
            case Alternation(options):
                return " | ".join(map(self._body, options))
            case Repeat(inner, least, most):
                return self._grouped(inner) + _counts(least, most)
        raise AssertionError(f"a {type(node).__name__} is regular")

    def _grouped(self, node: Node) -> str:
        text = self._body(node)
        return f"({text})" if isinstance(node, Concat | Alternation) and references(node) else text

    def _lexeme(self, node: Node) -> str:
        if node not in self._lexemes:
            text = text_of(node)
            if text is not None:
                self._lexemes[node] = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
            else:
                self._lexemes[node] = self._terminals.setdefault(_terminal(node), f"T{len(self._terminals)}")
        return self._lexemes[node]


def _counts(least: int, most: int | None) -> str:
    signs = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    return signs.get((least, most), f"{{{least},{'' if most is None else most}}}")


def _terminal(node: Node) -> str:
    """What a terminal's definition says. Operators bind as in `~a`, `a*`, `a b`, `a & b`, `a | b`; all are grouped."""
    if is_plain(node):
        return f"/{to_rust(node)}/" if node != Concat(()) else '""'
    match node:
        case Concat(parts):
            return "(" + " ".join(map(_terminal, parts)) + ")"
        case Alternation(options):
            return "(" + " | ".join(map(_terminal, options)) + ")"
        case Repeat(inner, least, most):
            return f"({_terminal(inner)}){_counts(least, most)}"
        case Intersection(parts):
            return "(" + " & ".join(map(_terminal, parts)) + ")"
        case Complement(inner):  # of texts, not of bytes
            return f"(/(?s:.*)/ & ~({_terminal(inner)}))"
    raise AssertionError(f"a {type(node).__name__} is no part of a terminal")
