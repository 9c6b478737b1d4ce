"""Writes the grammar of programs over some functions, in Lark's syntax.

A context-free grammar can't count indentation, so each of the few depths of nested blocks has its
own set of rules. Arguments are literals of the parameter's type, or expressions that don't begin
with a literal. A grammar can't know which variables are set, or their types; check_types.py checks
both.
"""

from __future__ import annotations

import json
import keyword
from collections.abc import Iterable, Mapping
from typing import Final

from sglang_lite.lang.code_mode.builtin_types import BUILTINS
from sglang_lite.lang.code_mode.static_types import ANY, StaticType
from sglang_lite.lang.code_mode.tool_signatures import ToolParameter, ToolSignature
from sglang_lite.protocol.anything import UserValue

MAX_BLOCKS: Final = 3  # blocks inside each other
_INDENT: Final = "    "

_EXPRESSIONS: Final = r"""
expr: test (" if " test " else " test)?
test: conj (" or " conj)*
conj: neg (" and " neg)*
neg: "not " neg | cmp
cmp: arith (CMP arith | NONE_TEST)?
CMP: / (==|!=|<=|>=|<|>|in|not in) /
NONE_TEST: / is (not )?None/
arith: unit (OP unit)*
OP: / (\+|-|\*|\/|\/\/|%) /
unit: power | "-" power
power: atom POW?
POW: / ?\*\* ?([0-9]|[1-5][0-9]|6[0-4])/
atom: opened | STRING text_trailers | FSTRING | NUMBER | CONSTANT | list | dict
opened: NAME trailers | call trailers | "(" expr ")" trailers
trailers: trailer*
trailer: FIELD | "[" index "]" | method
text_trailers: "" | "[" index "]" trailers | method trailers
index: expr (":" expr?)? | ":" expr?
list: "[" "]" | "[" expr in_list "]"
in_list: (", " expr)* | each
dict: "{" "}" | "{" expr ": " expr in_dict "}"
in_dict: (", " expr ": " expr)* | each
each: " for " target " in " items (" if " test)?
target: NAME more_names
more_names: "" | ", " target
items: open_arith | list | STRING text_trailers | lazy
lazy: "range(" whole (", " whole){0,2} ")" | "enumerate(" items (", " whole)? ")" | "zip(" items ", " items ")"
whole: natural | "-" natural | open_arith
natural: INT operations
operations: (OP unit)*
open_arith: open_unit operations
open_unit: open_power | "-" open_power
open_power: opened POW?
open: open_arith (" if " test " else " test)?
open_test: open_arith (CMP arith | NONE_TEST)? (BOOL_OP neg)*
BOOL_OP: / (and|or) /
real: real_power operations | "-" real_power operations
real_power: NUMBER powers
powers: POW? operations
call: builtin
method: ".get(" expr (", " expr)? ")" | METHOD | ".split(" text? ")" | ".join(" items_or_each ")"
    | ".startswith(" text ")" | ".endswith(" text ")" | ".replace(" text ", " text ")"
METHOD: /\.(keys|values|items|lower|upper|strip)\(\)/
text: STRING text_trailers operations | FSTRING operations | open
items_or_each: items | expr each
builtin: "len(" expr ")" | "round(" expr (", " whole)? ")" | CONVERT expr ")" | ONE items_or_each ")"
    | FOLD folded ")" | "sorted(" sortable ")"
folded: expr (each | ", " (by | expr (", " expr)?))?
FOLD: /(min|max)\(/
by: "key=" ("lambda " NAME ": " expr | FUNCTION)
sortable: expr (each | ", " order)?
order: by | by_reverse | reverse
by_reverse: "key=" ("lambda " NAME ": " arith | FUNCTION) ", " reverse
reverse: "reverse=" ("True" | "False")
ONE: /(sum|list)\(/
CONVERT: /(abs|str|int|float)\(/
INT: /0|[1-9][0-9]{0,14}/
NUMBER: /(0|[1-9][0-9]{0,14})(\.[0-9]{1,10})?/
CONSTANT: /True|False|None/
STRING: /"([^"\\\n]|\\["'nt\\])*"|'([^'\\\n]|\\["'nt\\])*'/
FSTRING: /f"([^"\\\n{}]|\\["'nt\\]|\{PLACE(:SPEC)?\})*"/
WORD: /[a-z_][a-z0-9_]{0,39}/
"""
# Names may not begin with one of these words, or contain capital letters. Otherwise, a model that
# tries to write such a statement, or a sentence, would find it accepted as the beginning of a name,
# and would have to continue a name that it did not want.
_STARTS: Final = [
    "def",
    "import",
    "class",
    "while",
    "print",
    "break",
    "continue",
    "lambda",
    "raise",
]
# Allowed between the braces of an f-string: a variable, with fields, items and one operation.
_PLACE: Final = (
    r"(len\([a-z][a-z0-9_]*\)|[a-z][a-z0-9_]*(\.[a-zA-Z][a-zA-Z0-9_]*|\['[^'\"\\\n\]]+'\]|\[[0-9]{1,6}\])*"
    r"( [-+*\/] ([a-z][a-z0-9_]*|[0-9]{1,9}))?)"
)
_SPEC: Final = r"(,|,?\.[0-9][f%]|[<>]?[0-9]{1,2})"


def write_grammar(tools: Mapping[str, ToolSignature]) -> str:
    """Returns the grammar of the programs over some functions."""
    writer = _GrammarWriter()
    calls = [writer.write_call(tool) for tool in tools.values()]
    text = _EXPRESSIONS.replace("call: builtin", f"call: {' | '.join(['builtin', *calls])}")
    text = text.replace("PLACE", _PLACE).replace("SPEC", _SPEC)
    starts = [f"{each}[a-z0-9_]*" for each in _STARTS]
    names = "|".join([*tools, *BUILTINS, *keyword.kwlist, *starts])
    # a NAME may be none of `names`
    keys = [name for name, tool in tools.items() if tool.takes_one()]
    functions = "|".join(["len", "abs", "str", "int", "float", *keys])
    lines = [
        f"NAME: WORD & ~/{names}/",
        f"FUNCTION: /{functions}/",
        *_write_blocks(),
        text,
        *writer.rules,
    ]
    whole = "\n".join(lines) + "\n"
    fields = _find_fields(tools)
    if fields:
        return f"{whole}{fields}\n"
    return whole.replace("FIELD inside | ", "").replace("FIELD | ", "")


def _find_fields(tools: Mapping[str, ToolSignature]) -> str:
    """Returns the terminal for the fields that results may have, or "" if no result has fields."""
    names: set[str] = set()
    anything = False
    waiting = [tool.result for tool in tools.values()]
    while waiting:
        found = waiting.pop()
        anything |= found.kind == "any"
        if found.kind == "record":
            names |= {name for name, _ in found.fields if not name.startswith("_")}
        waiting += [*found.items, *(kind for _, kind in found.fields)]
    if anything:
        return r"FIELD: /\.[A-Za-z][A-Za-z0-9_]*/"
    return rf"FIELD: /\.({'|'.join(sorted(names))})/" if names else ""


def _write_blocks() -> Iterable[str]:
    """Yields the rules of statements. `line_2` is a statement inside two blocks. `end_2` is one
    that returns on every path.
    """
    yield 'start: body | "```python\\n" body "\\n```"'
    yield "body: line_0* end_0"
    # an empty line and comments, which may precede a statement
    yield r"GAP_0: /(\n?#[^\n]+\n){1,3}\n?|\n/"
    yield r"ASSIGN: / (=|\+=|-=|\*=|\/=) /"
    yield "action: NAME changed | call"
    yield "changed: ASSIGN expr | inside"
    yield 'inside: FIELD inside | "[" expr "]" changed | ".append(" expr ")"'
    for depth in range(MAX_BLOCKS + 1):
        blank = _INDENT * depth
        gap = f"GAP_{depth} "
        if depth:
            yield rf"GAP_{depth}: /(\n?{blank}#[^\n]+\n){{0,3}}\n?{blank}/"
        optional = "" if depth else " | {0}_0"
        yield f"line_{depth}: {gap}inner_{depth}{optional.format('inner')}"
        yield f"end_{depth}: {gap}last_{depth}{optional.format('last')}"
        inner = ['action "\\n"'] + (['"return " expr "\\n"'] if depth else [])
        last = ['"return " expr']
        if depth < MAX_BLOCKS:
            yield from _write_inner_blocks(depth, gap)
            inner += [f"for_{depth}", f"if_{depth}"]
            last.append(f"last_if_{depth}")
        yield f"inner_{depth}: {' | '.join(inner)}"
        yield f"last_{depth}: {' | '.join(last)}"


def _write_inner_blocks(depth: int, gap: str) -> Iterable[str]:
    """Yields the rules of blocks inside a block. The text after a gap has a separate rule, so that
    the gap is parsed separately.
    """
    gap = gap if depth else ""
    block = f'":\\n" block_{depth + 1}'
    last = f'":\\n" last_block_{depth + 1}'
    yield f"block_{depth + 1}: line_{depth + 1}+"
    yield f"last_block_{depth + 1}: line_{depth + 1}* end_{depth + 1}"
    yield f'for_{depth}: "for " target " in " items {block}'
    yield f'if_{depth}: "if " test {block} ({gap}elif_{depth})* ({gap}else_{depth})?'
    yield f'elif_{depth}: "elif " test {block}'
    yield f'else_{depth}: "else" {block}'
    yield f'last_if_{depth}: "if " test {last} "\\n" ({gap}last_elif_{depth})* {gap}last_else_{depth}'
    yield f'last_elif_{depth}: "elif " test {last} "\\n"'
    yield f'last_else_{depth}: "else" {last}'


class _GrammarWriter:
    """Writes rules for calls and their arguments. `rules` are those written so far."""

    def __init__(self) -> None:
        self.rules: list[str] = []
        self._names: dict[StaticType, str] = {}
        self._calls = 0

    def write_call(self, tool: ToolSignature) -> str:
        """Writes the rules for calls of a function, and returns the name of the first rule."""
        rule = f"tool_{self._calls}"
        self._calls += 1
        parameters = tool.parameters
        values = [self._write_value(each.type) for each in parameters]
        count = len(parameters)
        # named_2: keyword arguments from the third parameter on, each after a comma
        # first_2: the same, but without the first comma
        # next_2: the text after two positional arguments
        self.rules.append(f'{rule}_named_{count}: ""')
        for i in reversed(range(count)):
            optional = not parameters[i].required
            skip = f" | {rule}_named_{i + 1}" if optional else ""
            later = f" | {rule}_first_{i + 1}" if optional and i + 1 < count else ""
            self.rules.append(f'{rule}_named_{i}: ", " {rule}_first_{i}{skip}')
            self.rules.append(
                f'{rule}_first_{i}: "{parameters[i].name}=" {values[i]} {rule}_named_{i + 1}{later}'
            )
        self._write_positions(rule, tool, parameters, values)
        return rule

    def _write_positions(
        self,
        rule: str,
        tool: ToolSignature,
        parameters: tuple[ToolParameter, ...],
        values: list[str],
    ) -> None:
        count = len(parameters)
        firsts = [f"{rule}_first_{i}" for i in range(count)]
        if tool.positional:
            for i in range(count):
                firsts[i] = f"{rule}_any_{i}"
                stops = all(not each.required for each in parameters[i + 1 :])
                more = [f'", " {rule}_any_{i + 1}'] if i + 1 < count else []
                more += ['""'] if stops else []
                self.rules.append(
                    f"{rule}_any_{i}: {values[i]} {rule}_next_{i + 1} | {rule}_first_{i}"
                )
                self.rules.append(f"{rule}_next_{i + 1}: {' | '.join(more)}")
        inside = firsts[:1]
        if not any(each.required for each in parameters):
            inside.append('""')
        self.rules.append(f'{rule}: "{tool.name}(" ({" | ".join(inside)}) ")"')

    def _write_value(self, kind: StaticType) -> str:
        """Writes the rules for arguments of a type, and returns the name of the first rule."""
        if kind not in self._names:
            name = self._names[kind] = f"value_{len(self._names)}"
            self.rules.append(f"{name}: {' | '.join(self._list_values(kind))}")
        return self._names[kind]

    def _list_values(self, kind: StaticType) -> list[str]:
        match kind.kind:
            case "none":
                return ['"None"', "open"]
            case "bool":
                return ['"True"', '"False"', '"not " neg', "open_test"]
            case "int":
                return ["whole", "open"]
            case "float":
                return ["real", "open"]
            case "str" | "value":
                return ["text"]
            case "literal":
                return [*(_quote(each) for value in kind.values for each in _spell(value)), "open"]
            case "list" | "tuple":
                item = self._write_value(kind.items[0] if kind.items else ANY)
                return ['"[" "]"', f'"[" {item} (each | (", " {item})*) "]"', "open"]
            case "dict":
                item = self._write_value(kind.items[1])
                return [
                    '"{" "}"',
                    f'"{{" expr ": " {item} (each | (", " expr ": " {item})*) "}}"',
                    "open",
                ]
            case "object":
                return [self._write_members(kind), "open"]
            case "union":
                return [self._write_value(each) for each in kind.items]
        return ["expr"]

    def _write_members(self, kind: StaticType) -> str:
        """Writes the rules for the members of an object, in their order. Returns the right-hand
        side of a rule for the whole dict.
        """
        rule = f"members_{len(self.rules)}_{len(self._names)}"
        members = [(json.dumps(name), name, self._write_value(each)) for name, each in kind.fields]
        count = len(members)
        more = [f'{rule}_more_{count}: ""']
        for i in reversed(range(count)):
            shown, name, value = members[i]
            own = f'{_quote(shown)} ": " {value} {rule}_more_{i + 1}'
            optional = name not in kind.required
            skip = f" | {rule}_more_{i + 1}" if optional else ""
            more.append(f'{rule}_more_{i}: ", " {rule}_{i}{skip}')
            later = f" | {rule}_{i + 1}" if optional and i + 1 < count else ""
            more.append(f"{rule}_{i}: {own}{later}")
        self.rules += more
        empty = "" if kind.required else ' | "{" "}"'
        return f'"{{" {rule}_0 "}}"{empty}'


def _spell(value: UserValue) -> list[str]:
    """Returns the ways in which a program may write a constant."""
    if not isinstance(value, str):
        return [repr(value)]
    simple = value.isprintable() and "'" not in value and "\\" not in value
    double = json.dumps(value, ensure_ascii=False)
    return [double, f"'{value}'"] if simple and '"' not in value else [double]


def _quote(text: str) -> str:
    """Returns a text as a terminal of the grammar."""
    return json.dumps(text, ensure_ascii=False)
