"""Parser for grammars in GBNF, llama.cpp's dialect of EBNF. It follows every derivation; nothing is
read greedily.

Source: llama.cpp, grammars/README.md. Special tokens are supported only if every
tokenizer can spell them as text (`<think>`).
"""

from __future__ import annotations

from sglang_lite.constraints.formal import charsets
from sglang_lite.constraints.formal.nodes import (
    ANY_CHAR,
    CharSet,
    Language,
    Node,
    Ref,
    alternation,
    concat,
    literal,
    repeat,
)
from sglang_lite.constraints.syntax.scanner import Scanner, check_references, read_special_token

_BLANK = r"(?:[ \t\r\n]|#[^\n]*)*"
_NAME = r"[a-zA-Z_][a-zA-Z0-9_-]*"
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


def parse(text: str) -> Language:
    """Parses a grammar into its language. The start rule is `root`. If there is no rule of this
    name, it is the first rule.

    Raises:
        ConstraintError: the grammar is not valid or is outside the dialect. The message shows
            where.
    """
    return _Parser(Scanner("ebnf", text, _BLANK)).grammar()


class _Parser:
    def __init__(self, scanner: Scanner) -> None:
        self._scanner = scanner
        self._uses: dict[str, int] = {}

    def grammar(self) -> Language:
        scanner = self._scanner
        rules: dict[str, Node] = {}
        scanner.skip_blanks()
        while scanner.has_more:
            start = scanner.at
            name = scanner.expect(_NAME, "the name of a rule")[0]
            scanner.expect("::=", "::=")
            if name in rules:
                scanner.raise_grammar_error(f"the rule {name!r} is defined twice", start)
            rules[name] = self._alternation()
        if not rules:
            scanner.raise_grammar_error("the grammar is empty", hint="Begin with: root ::= …")
        start_rule = "root" if "root" in rules else next(iter(rules))
        return check_references(Language(start_rule, rules), scanner, self._uses)

    def _alternation(self) -> Node:
        options = [self._sequence()]
        while self._scanner.match_token(r"\|"):
            options.append(self._sequence())
        return alternation(options)

    def _sequence(self) -> Node:
        parts = []
        while (part := self._item()) is not None:
            counts = self._scanner.counts()
            parts.append(part if counts is None else repeat(part, *counts))
        return concat(*parts)

    def _item(self) -> Node | None:
        scanner = self._scanner
        at = scanner.at
        if scanner.peek(f"{_NAME}{_BLANK}::="):  # the next rule begins
            return None
        if name := scanner.match_token(_NAME):
            self._uses.setdefault(name[0], at)
            return Ref(name[0])
        if scanner.peek('"'):
            return self._literal()
        if scanner.peek(r"\["):
            return self._class()
        if scanner.match_token(r"\."):
            return ANY_CHAR
        if scanner.match_token(r"\("):
            scanner.enter_group()
            node = self._alternation()
            scanner.leave_group()
            scanner.expect(r"\)", "a closing parenthesis")
            return node
        if scanner.peek("!?<"):
            return read_special_token(scanner)
        if scanner.has_more and not scanner.peek(r"[|)]"):
            scanner.raise_grammar_error("a name, a literal, a character class or a group expected")
        return None

    def _literal(self) -> Node:
        scanner = self._scanner
        start = scanner.at
        scanner.at += 1
        text = ""
        while not scanner.peek('"'):
            if not scanner.has_more or scanner.peek("\n"):
                scanner.raise_grammar_error("the literal has no end", start)
            text += self._character()
        scanner.match_token('"')
        return literal(text)

    def _class(self) -> Node:
        scanner = self._scanner
        start = scanner.at
        scanner.at += 1
        negated = scanner.peek(r"\^") is not None
        scanner.at += negated
        ranges: list[tuple[int, int]] = []
        while not scanner.peek(r"\]"):
            if not scanner.has_more:
                scanner.raise_grammar_error("the character class has no end", start)
            low = high = ord(self._character())
            if scanner.peek(r"-[^\]]"):
                dash = scanner.at
                scanner.at += 1
                high = ord(self._character())
                if high < low:
                    scanner.raise_grammar_error("bad character range", dash)
            ranges += charsets.without_surrogates(low, high)
        scanner.match_token(r"\]")
        return CharSet(charsets.complement(ranges) if negated else charsets.union(ranges))

    def _character(self) -> str:
        """Reads one character, plain or escaped. Does not skip blanks after it."""
        scanner = self._scanner
        start = scanner.at
        match = scanner.peek(
            r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(?s:[^\\])"
        )
        if not match:
            scanner.raise_grammar_error("a backslash at the end")
        scanner.at = match.end()
        digits = match[1] or match[2] or match[3]
        if not digits and match[4] in ("x", "u", "U"):
            scanner.raise_grammar_error(f"\\{match[4]} without its hexadecimal digits", start)
        if not digits and match[4] is None:
            code = ord(match[0])
        elif digits:
            code = int(digits, 16)
        elif match[4] in _ESCAPES or not match[4].isalnum():
            return _ESCAPES.get(match[4], match[4])
        else:
            scanner.raise_grammar_error(f"\\{match[4]} is no escape", start)
        if code > charsets.LAST or charsets.has_surrogates(chr(code)):
            scanner.raise_grammar_error("this is no character", start)
        return chr(code)
