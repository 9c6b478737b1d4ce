"""Serialiser to xgrammar's variant of EBNF. xgrammar follows every derivation."""

from __future__ import annotations

from sglang_lite.constraints.emit.regex import repetition_sign
from sglang_lite.constraints.formal.automaton import Automaton, useful_states
from sglang_lite.constraints.formal.nodes import (
    EMPTY,
    NOTHING,
    Alternation,
    CharSet,
    Complement,
    Concat,
    Intersection,
    Language,
    LiteralText,
    Multiple,
    Node,
    Ref,
    Repeat,
    Substring,
    alternation,
    concat,
)
from sglang_lite.protocol import ConstraintError

MAX_RULES = 20_000  # rules, including those for states of automata


def to_gbnf(language: Language) -> str:
    """Returns a grammar's text, which starts at the rule `root`. Intersections, complements,
    substrings and multiples are written as automata with a rule for each state, because the
    notation lacks them.

    Raises:
        ConstraintError: the language is nested too deeply, or needs too many rules or states.
    """
    try:
        return _Speller(language).render_gbnf()
    except RecursionError as error:
        raise ConstraintError("the constraint is nested too deeply.") from error


class _Speller:
    def __init__(self, language: Language) -> None:
        self._language = language
        self._names = {name: f"r{i}" for i, name in enumerate(language.rules)}
        self._automata: dict[Node, str] = {}
        self._lines: list[str] = []

    def render_gbnf(self) -> str:
        self._add_rule("root", self._names[self._language.start])
        for name, body in self._language.rules.items():
            self._add_rule(self._names[name], self._render_gbnf_node(body))
        return "\n".join(self._lines)

    def _add_rule(self, name: str, body: str) -> None:
        self._lines.append(f"{name} ::= {body}")
        if len(self._lines) > MAX_RULES:
            raise ConstraintError(f"the grammar needs more than {MAX_RULES:,} rules.")

    def _render_gbnf_node(self, node: Node) -> str:
        match node:
            case CharSet(ranges) if ranges:
                spans = (
                    _render_gbnf_character(a)
                    if a == b
                    else f"{_render_gbnf_character(a)}-{_render_gbnf_character(b)}"
                    for a, b in ranges
                )
                return f"[{''.join(spans)}]"
            case LiteralText(text):
                return '"' + "".join(_render_gbnf_character(ord(char)) for char in text) + '"'
            case Concat(parts):
                return "(" + " ".join(map(self._render_gbnf_node, parts)) + ")" if parts else '""'
            case Alternation(options):
                return "(" + " | ".join(map(self._render_gbnf_node, options)) + ")"
            case Repeat(inner, least, most):
                return f"({self._render_gbnf_node(inner)}){repetition_sign(least, most)}"
            case Ref(name):
                return self._names[name]
            case Intersection() | Complement() | Substring() | Multiple():
                if node not in self._automata:
                    self._automata[node] = self._add_state_rules(node)
                return self._automata[node]
        raise ConstraintError("a set without characters can't be written.")

    def _add_state_rules(self, node: Node) -> str:
        """Adds a rule for each state of a node's automaton. Returns the name of the rule for the
        start state.
        """
        found = Automaton(node)
        prefix = f"a{len(self._automata)}s"
        useful = useful_states(found, found.start)
        for state, after in useful.items():
            steps = [
                concat(found.class_characters(symbol), Ref(f"{prefix}{to}"))
                for symbol, to in after.items()
            ]
            self._names |= {f"{prefix}{to}": f"{prefix}{to}" for to in after.values()}
            self._add_rule(
                f"{prefix}{state}",
                self._render_gbnf_node(
                    alternation([*steps, *([EMPTY] if found.accepting(state) else [])])
                ),
            )
        return (
            f"{prefix}{found.start}" if found.start in useful else self._render_gbnf_node(NOTHING)
        )


def _render_gbnf_character(code: int) -> str:
    if code < 128 and chr(code).isalnum():
        return chr(code)
    return f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"
