"""Parser for grammars in Lark's syntax. It follows every derivation; nothing is read greedily.

Terminals match their regular expressions, which are in the project's only dialect
(regex.py). Names in upper case are terminals, which can't be recursive. `%ignore` allows
its text after every terminal. Templates are expanded to a rule for each use, `%extend`
adds an alternative to a rule, `%override` replaces it.

Supported additions of llguidance: `{m,n}`, `&` and `~` between terminals, `%json {…}`, `%regex {…}`
(substrings of a text), special tokens that grammars may use as text, and the attributes `lazy` and
`suffix` (the shortest texts of a rule). Not supported: other attributes, other special tokens,
imports from modules other than `common`, and uses of terminals that `%declare` leaves to a
postlexer. Priorities choose among derivations, all of which are followed here, so they have no
effect. Aliases and the marks `?`, `!`, `_` have no effect either.

Source: Lark's grammar reference; llguidance, docs/syntax.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from sglang_lite.constraints.formal import charsets
from sglang_lite.constraints.formal.nodes import (
    ANY_CHAR,
    ANY_TEXT,
    EMPTY,
    CharSet,
    Complement,
    Intersection,
    Language,
    Node,
    Ref,
    Repeat,
    alternation,
    concat,
    literal,
    map_children,
    repeat,
    substring,
)
from sglang_lite.constraints.syntax import regex
from sglang_lite.constraints.syntax.scanner import Scanner, check_references, read_special_token
from sglang_lite.protocol import ConstraintError, JsonSchema

_BLANK = r"(?:[ \t\r\n]|(?://|#)[^\n]*)*"
_RULE = r"_?[a-z](?:[_a-z0-9]|-(?!>))*"
_TERMINAL = r"_?[A-Z][_A-Z0-9]*"
_NAME = f"(?:{_TERMINAL}|{_RULE})"
_INSTEAD = {  # hints for attributes of rules that only llguidance supports
    "stop": "Use suffix=…, which stays in the text, or gen(stop=…) inside of s.grammar(…).",
    "capture": "Name a generation inside of s.grammar(…).",
    "stop_capture": "Name a generation inside of s.grammar(…).",
    "max_tokens": "Use gen(max_tokens=…) inside of s.grammar(…).",
    "temperature": "Use gen(temperature=…) inside of s.grammar(…).",
}
_STRING = r'"((?:\\.|[^"\\\n])*)"(i?)'
_REGEX = r"/((?:\\.|[^/\\\n])+)/([imslux]*)"
_ATTRIBUTES = rf"\[(?:{_STRING}|{_REGEX}|[^\]\n\"/])*\]"
_PRIORITY = r"\.[+-]?[0-9]+"
# attributes, template parameters, priorities
_ADDED = rf"(?:{_ATTRIBUTES}|\{{[^}}\n]*\}}|{_PRIORITY})"
_DEFINITION = rf"[?!]*{_NAME}{_BLANK}(?:{_ADDED}{_BLANK})*:(?!:)"

_COMMON = {
    "DIGIT": "[0-9]", "HEXDIGIT": "[0-9a-fA-F]", "INT": "[0-9]+", "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+", "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]", "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+", "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*", "WS_INLINE": r"[ \t]+", "WS": r"[ \t\f\r\n]+", "CR": r"\r",
    "LF": r"\n", "NEWLINE": r"(?:\r?\n)+", "SH_COMMENT": r"#[^\n]*", "CPP_COMMENT": r"//[^\n]*",
    "SQL_COMMENT": r"--[^\n]*", "C_COMMENT": r"/\*(?:[^*]|\*+[^*/])*\*+/",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
}  # fmt: skip
_FLOAT = r"(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)"
_COMMON |= {
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": f"[+-]?{_FLOAT}",
    "NUMBER": f"{_FLOAT}|[0-9]+",
    "SIGNED_NUMBER": f"[+-]?(?:{_FLOAT}|[0-9]+)",
}


def parse(text: str) -> tuple[Language, dict[str, JsonSchema]]:
    """Parses a grammar. Returns its language, which starts at the rule `start`, and a mapping from
    rule names to schemas. Those rules are defined with `%json` and still have to be added to the
    language.

    Raises:
        ConstraintError: the grammar is not valid or is outside the dialect. The message shows
            where.
    """
    return _Parser(Scanner("lark", text, _BLANK)).grammar()


class _Parser:
    def __init__(self, scanner: Scanner) -> None:
        self._scanner = scanner
        self._uses: dict[str, int] = {}
        self._rules: dict[str, Node] = {}
        self._ignored: list[str] = []
        self._terminals: dict[str, Node] = {}  # bodies with references resolved
        self._schemas: dict[str, JsonSchema] = {}
        self._templates = Templates(scanner)
        self._declared: set[str] = set()

    def grammar(self) -> tuple[Language, dict[str, JsonSchema]]:
        scanner = self._scanner
        scanner.skip_blanks()
        while scanner.has_more:
            if scanner.peek("%"):
                self._directive()
            else:
                self._definition()
        if "start" not in self._rules:
            scanner.raise_grammar_error("there is no rule 'start'", 0)
        for name in self._declared & self._uses.keys() - self._rules.keys():
            scanner.raise_grammar_error(
                f"{name} is declared: it comes from a postlexer, and no text is known of it",
                self._uses[name],
            )
        self._rules |= self._templates.instances(self._rules)
        names = {**self._rules, **dict.fromkeys(self._schemas, ANY_TEXT)}
        check_references(Language("start", names), scanner, self._uses)
        between = repeat(
            alternation(self._resolve_terminal(name) for name in self._ignored), 0, None
        )
        rules = {
            name: self._insert_terminal_bodies(body, between)
            for name, body in self._rules.items()
            if not _is_terminal(name)
        }
        return Language("start", rules), self._schemas

    def _definition(self) -> None:
        scanner = self._scanner
        start = scanner.at
        scanner.match_token(r"[?!]+")
        name = scanner.expect(_NAME, "a name")[0]
        parameters = scanner.match_token(r"\{([^}\n]*)\}")
        scanner.match_token(_PRIORITY)
        at = scanner.at
        suffix = self._attributes() if scanner.match_token(r"\[") else None
        if suffix is not None and (parameters or _is_terminal(name)):
            scanner.raise_grammar_error(
                "only a rule of terminals has attributes, no terminal and no template", at
            )
        scanner.expect(":", "a colon")
        if name in self._rules or name in self._templates:
            scanner.raise_grammar_error(f"{name!r} is defined twice", start)
        body = self._alternation()
        if suffix is not None:
            body = self._add_anonymous_terminal(_exclude_longer_extensions(concat(body, suffix)))
        if parameters is None:
            self._rules[name] = body
        else:
            self._templates.define(name, parameters[1], body, start)

    def _attributes(self) -> Node:
        """Parses a rule's attributes. Returns the suffix that a lazy rule ends with, or EMPTY if it
        has none.
        """
        scanner = self._scanner
        suffix: Node = EMPTY
        while True:
            at = scanner.at
            name = scanner.expect(r"\w+", "an attribute")[0]
            if name == "suffix":
                scanner.expect("=", "=")
                item = self._item()
                suffix = (
                    scanner.raise_grammar_error("the end of the text expected", at)
                    if item is None
                    else item
                )
            elif name != "lazy":
                explanation = (
                    f": a grammar says what a text is, and {name!r} how it is generated"
                    if name in _INSTEAD
                    else ""
                )
                scanner.raise_grammar_error(
                    f"the attribute {name!r} is not supported{explanation}",
                    at,
                    hint=_INSTEAD.get(name, ""),
                )
            if not scanner.match_token(","):
                break
        scanner.expect(r"\]", "a closing ]")
        return suffix

    def _directive(self) -> None:
        scanner = self._scanner
        start = scanner.at
        if scanner.match_token("%ignore"):
            self._ignored.append(self._add_anonymous_terminal(self._alternation()).name)
        elif scanner.match_token("%import"):
            match = scanner.expect(
                r"common\.(\w+|\([\w\s,]+\))(?:\s*->\s*(\w+))?|common\s*\(([\w\s,]+)\)", "common.…"
            )
            for name in re.findall(r"\w+", match[1] or match[3]):
                if name not in _COMMON:
                    scanner.raise_grammar_error(f"common has no {name}", start)
                known = match[2] or name
                body = regex.parse(_COMMON[name])
                if self._rules.get(known, body) != body:
                    scanner.raise_grammar_error(f"{known!r} is defined twice", start)
                self._rules[known] = body
        elif scanner.match_token("%declare"):
            while name := scanner.match_token(rf"(?!{_DEFINITION}){_TERMINAL}"):
                self._declared.add(name[0])
        elif directive := scanner.match_token("%(extend|override)"):
            scanner.match_token("[?!]+")
            name = scanner.expect(_NAME, "a name")
            scanner.match_token(_PRIORITY)
            scanner.expect(":", "a colon")
            if name[0] not in self._rules:
                scanner.raise_grammar_error(
                    f"there is no {name[0]!r} to {directive[1]}",
                    start,
                    hint="Define or import it above.",
                )
            body = self._alternation()
            old_body = self._rules[name[0]]
            self._rules[name[0]] = (
                alternation((old_body, body)) if directive[1] == "extend" else body
            )
        else:
            scanner.raise_grammar_error(
                "only %ignore, %import, %declare, %extend and %override are supported"
            )

    # ---------------------------------------------------------------------------------- expressions

    def _at_definition(self) -> bool:
        return self._scanner.starts_line and self._scanner.peek(_DEFINITION) is not None

    def _alternation(self) -> Node:
        options = [self._sequence()]
        while self._scanner.match_token(r"\|"):
            options.append(self._sequence())
        return alternation(options)

    def _sequence(self) -> Node:
        """Parses a concatenation, or several joined by `&`."""
        several = [self._concatenation()]
        while self._scanner.match_token("&"):
            several.append(self._concatenation())
        self._scanner.match_token(r"->\s*\w+")
        return several[0] if len(several) == 1 else Intersection(tuple(several))

    def _concatenation(self) -> Node:
        parts = []
        while (part := self._item()) is not None:
            # A sign at the start of a line belongs to no item: `?` and `!` there begin the next
            # definition.
            counts = None if self._scanner.starts_line else self._scanner.counts()
            parts.append(part if counts is None else repeat(part, *counts))
        return concat(*parts)

    def _item(self) -> Node | None:
        scanner = self._scanner
        at = scanner.at
        if (
            not scanner.has_more
            or self._at_definition()
            or scanner.peek(r"[|&)\]},]|->|%(?!json|regex)")
        ):
            return None
        if scanner.match_token("~"):
            inner = self._item()
            return Complement(
                scanner.raise_grammar_error("an expression after ~ expected", at)
                if inner is None
                else inner
            )
        if name := scanner.match_token(_NAME):
            self._uses.setdefault(name[0], at)
            return (
                self._template(name[0], at)
                if scanner.match_token(r"\{(?!\s*,?\s*[0-9])")
                else Ref(name[0])
            )
        if scanner.peek("<"):
            return self._add_anonymous_terminal(read_special_token(scanner))
        if match := scanner.match_token(_STRING):
            return self._add_anonymous_terminal(self._string(match, at))
        if match := scanner.match_token(_REGEX):
            flags = match[2].replace("u", "")
            with_flags = f"(?{flags}:{match[1]})" if flags else match[1]
            return self._add_anonymous_terminal(
                self._parse_pattern(with_flags.replace(r"\/", "/"), at)
            )
        if scanner.match_token("%json"):
            return self._parse_json_directive(at)
        if scanner.match_token("%regex"):
            return self._add_anonymous_terminal(_read_substring(scanner, at))
        for opening, closing in ((r"\(", r"\)"), (r"\[", r"\]")):
            if scanner.match_token(opening):
                scanner.enter_group()
                node = self._alternation()
                scanner.leave_group()
                scanner.expect(closing, f"a closing {closing[1]}")
                return Repeat(node, 0, 1) if closing == r"\]" else node
        return scanner.raise_grammar_error(
            "a name, a string, a regular expression or a group expected", at
        )

    def _string(self, match: re.Match[str], at: int) -> Node:
        scanner = self._scanner
        text = _unescape_string(scanner, match[1], at)
        if scanner.match_token(r"\.\."):
            end = scanner.expect(_STRING, "the last character of the range")
            last = _unescape_string(scanner, end[1], at)
            if len(text) != 1 or len(last) != 1 or last < text:
                scanner.raise_grammar_error("a range goes from one character to a later one", at)
            return CharSet(((ord(text), ord(last)),))
        return self._parse_pattern(f"(?i:{re.escape(text)})", at) if match[2] else literal(text)

    def _parse_pattern(self, pattern: str, at: int) -> Node:
        try:
            return regex.parse_inside_grammar(pattern)
        except ConstraintError as error:
            self._scanner.raise_grammar_error(
                error.message.removeprefix("regex: "), at, hint=error.hint
            )

    def _template(self, name: str, at: int) -> Node:
        """Parses the arguments of a template and returns a reference to its instance."""
        scanner = self._scanner
        arguments: list[Node] = []
        while not arguments or scanner.match_token(","):
            item = self._item()
            arguments.append(
                scanner.raise_grammar_error("an argument of the template expected")
                if item is None
                else item
            )
        scanner.expect(r"\}", "a closing }")
        return self._templates.rule_for_use(name, arguments, at)

    def _parse_json_directive(self, at: int) -> Node:
        schema = _read_json(self._scanner, "%json", at)
        name = f"%json {len(self._schemas)}"
        self._schemas[name] = JsonSchema(json.dumps(schema))
        return Ref(name)

    # ------------------------------------------------------------------------------------ terminals

    def _add_anonymous_terminal(self, node: Node) -> Ref:
        """Adds an anonymous terminal and returns a reference to it."""
        name = f"%T{len(self._rules)}"
        self._rules[name] = node
        return Ref(name)

    def _resolve_terminal(self, name: str, inside: tuple[str, ...] = ()) -> Node:
        """Returns the body of a terminal without references to other terminals."""
        if name in inside:
            self._scanner.raise_grammar_error(
                f"the terminal {name} refers to itself", self._uses.get(name, 0)
            )
        if name not in self._terminals:
            self._terminals[name] = self._resolve_terminal_names(self._rules[name], (*inside, name))
        return self._terminals[name]

    def _resolve_terminal_names(self, node: Node, inside: tuple[str, ...]) -> Node:
        match node:
            case Ref(name) if _is_terminal(name):
                return self._resolve_terminal(name, inside)
            case Ref(name):
                self._scanner.raise_grammar_error(
                    f"a terminal, or a lazy rule, refers to the rule {name}",
                    self._uses.get(name, 0),
                )
        return map_children(node, partial(self._resolve_terminal_names, inside=inside))

    def _insert_terminal_bodies(self, node: Node, between: Node) -> Node:
        """Returns the body of a rule with each terminal replaced by the terminal's body and the
        ignored text that may follow.
        """
        match node:
            case Ref(name) if _is_terminal(name):
                return concat(self._resolve_terminal(name), between)
            case Intersection() | Complement():
                return concat(self._resolve_terminal_names(node, ()), between)
        return map_children(node, partial(self._insert_terminal_bodies, between=between))


def _unescape_string(scanner: Scanner, text: str, at: int) -> str:
    text = re.sub(r"\\x([0-9a-fA-F]{2})", r"\\u00\1", text)
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        scanner.raise_grammar_error(
            "the string has an invalid escape", at, hint="Use the escapes of JSON."
        )


def _read_json(scanner: Scanner, directive: str, at: int) -> Any:
    try:
        found, scanner.at = json.JSONDecoder().raw_decode(scanner.text, scanner.at)
    except ValueError as error:
        scanner.raise_grammar_error(f"no JSON after {directive}: {error}", at)
    scanner.skip_blanks()
    return found


def _read_substring(scanner: Scanner, at: int) -> Node:
    """Reads a `%regex` directive. Returns a node for any run of successive pieces of a text. The
    directive says whether the pieces are characters, words, or the items of a list.
    """
    options = _read_json(scanner, "%regex", at)
    kind, value = (
        next(iter(options.items()))
        if isinstance(options, dict) and len(options) == 1
        else ("", None)
    )
    if (
        kind == "substring_chunks"
        and isinstance(value, list)
        and all(isinstance(each, str) for each in value)
    ):
        pieces = value
    elif kind in ("substring_chars", "substring_words") and isinstance(value, str):
        pieces = list(value) if kind == "substring_chars" else re.findall(r"\w+|\W", value)
    else:
        scanner.raise_grammar_error(
            "%regex has substring_chars, substring_words or substring_chunks", at
        )
    if any(map(charsets.has_surrogates, pieces)):
        scanner.raise_grammar_error("a lone surrogate is no character", at)
    return substring(pieces)


def _exclude_longer_extensions(node: Node) -> Node:
    """Returns the shortest texts of a node. A text is left out if it begins with another text of
    the node.
    """
    return Intersection((node, Complement(concat(node, Repeat(ANY_CHAR, 1, None)))))


def _is_terminal(name: str) -> bool:
    return name.strip("_%")[:1].isupper()


_MAX_INSTANCES = 1_000  # maximum number of template instances


class Templates:
    """A grammar's templates and their uses. Each use refers to a rule, and `instances` creates
    these rules.
    """

    def __init__(self, scanner: Scanner) -> None:
        self._scanner = scanner
        self._bodies: dict[str, tuple[tuple[str, ...], Node]] = {}
        self._names: dict[tuple[str, tuple[Node, ...]], str] = {}  # name of the rule for each use
        # rule names of arguments that are not references, so that keys stay flat
        self._arguments: dict[Node, str] = {}
        self._bodies_of: dict[str, Node] = {}
        # template, arguments and offset, by rule
        self._uses: dict[str, tuple[str, tuple[Node, ...], int]] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._bodies

    def define(self, name: str, parameters: str, body: Node, at: int) -> None:
        """Adds a template. Raises ConstraintError if its parameters are not distinct names."""
        names = tuple(each.strip() for each in parameters.split(","))
        if len(set(names)) < len(names) or not all(
            each.replace("-", "_").isidentifier() for each in names
        ):
            self._scanner.raise_grammar_error(
                f"the parameters of {name} must be distinct names", at
            )
        self._bodies[name] = names, body

    def rule_for_use(self, name: str, arguments: Sequence[Node], at: int) -> Ref:
        """Returns a reference to the rule of a template with these arguments."""
        key = name, tuple(map(self._name_for_argument, arguments))
        if key not in self._names:
            if len(self._names) == _MAX_INSTANCES:
                self._scanner.raise_grammar_error(
                    f"templates make more than {_MAX_INSTANCES:,} rules", at
                )
            self._names[key] = rule = f"%{name} {len(self._names)}"
            self._uses[rule] = *key, at
        return Ref(self._names[key])

    def _name_for_argument(self, node: Node) -> Ref:
        if isinstance(node, Ref):
            return node
        if node not in self._arguments:
            self._arguments[node] = name = f"%argument {len(self._arguments)}"
            self._bodies_of[name] = node
        return Ref(self._arguments[node])

    def instances(self, rules: Mapping[str, Node]) -> dict[str, Node]:
        """Returns the rules of all uses, by name.

        Args:
            rules: rules of the grammar, which use templates only through `rule_for_use`.

        Raises:
            ConstraintError: a template is not defined or takes a different number of arguments, or
                templates make too many rules.
        """
        expanded: dict[str, Node] = {}
        waiting = [*(name for body in rules.values() for name in self._references_in(body))]
        while waiting:
            rule = waiting.pop()
            if rule in expanded:
                continue
            if rule in self._bodies_of:
                expanded[rule] = self._bodies_of[rule]
                waiting += self._references_in(expanded[rule])
                continue
            name, arguments, at = self._uses[rule]
            if name not in self._bodies:
                self._scanner.raise_grammar_error(f"there is no template {name!r}", at)
            parameters, body = self._bodies[name]
            if len(parameters) != len(arguments):
                self._scanner.raise_grammar_error(
                    f"{name} takes {len(parameters)} arguments, not {len(arguments)}", at
                )
            expanded[rule] = self._fill_parameters(body, dict(zip(parameters, arguments)))
            waiting += self._references_in(expanded[rule])
        return expanded

    def _references_in(self, node: Node) -> list[str]:
        found: list[str] = []

        def look(each: Node) -> Node:
            if isinstance(each, Ref):
                found.extend(
                    [each.name] if each.name in self._uses or each.name in self._bodies_of else []
                )
                return each
            return map_children(each, look)

        look(node)
        return found

    def _fill_parameters(self, node: Node, arguments: Mapping[str, Node]) -> Node:
        """Returns a body with its parameters replaced by arguments. Parameters that it passes to
        other templates are replaced, too.
        """
        match node:
            case Ref(name) if name in arguments:
                return arguments[name]
            case Ref(name) if name in self._bodies_of:
                return self._name_for_argument(
                    self._fill_parameters(self._bodies_of[name], arguments)
                )
            case Ref(name) if name in self._uses:
                template, template_arguments, at = self._uses[name]
                return self.rule_for_use(
                    template,
                    [self._fill_parameters(each, arguments) for each in template_arguments],
                    at,
                )
        return map_children(node, partial(self._fill_parameters, arguments=arguments))
