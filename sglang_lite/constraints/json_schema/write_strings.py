"""Languages of strings as written in JSON. Each character has one spelling: that of `json.dumps`
with `ensure_ascii=False`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache, lru_cache

from sglang_lite.constraints.formal import charsets
from sglang_lite.constraints.formal.nodes import (
    ANY_CHAR,
    ANY_TEXT,
    EMPTY,
    NOTHING,
    Alternation,
    CharSet,
    Complement,
    Concat,
    Intersection,
    LiteralText,
    Node,
    Repeat,
    Substring,
    alternation,
    complement,
    concat,
    intersection,
    literal,
    literal_text,
    literal_texts,
    map_children,
)
from sglang_lite.constraints.json_schema.values import intersection_of_strings
from sglang_lite.constraints.syntax.regex import parse
from sglang_lite.protocol import ConstraintError

_SHORT = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_ESCAPED = {
    code: _SHORT.get(chr(code), f"\\u{code:04x}") for code in (*range(32), ord('"'), ord("\\"))
}
_TO_ESCAPE = re.compile(r'["\\\0-\x1f]')
_ESCAPED_SET = charsets.union((code, code) for code in _ESCAPED)

_ANY_CHARACTER = parse(r'[^"\\\0-\x1f]|\\(?:["\\bfnrt]|u00(?:0[0-7bef]|1[0-9a-f]))')
_ANY_CHARACTERS = Repeat(_ANY_CHARACTER, 0, None)


_QUOTE = literal('"')
# json.dumps would make a new encoder for each call
_JSON = json.JSONEncoder(ensure_ascii=False).encode


def quote_strings(strings: Node, before: Node = EMPTY, after: Node = EMPTY) -> Node:
    """Returns a node for the JSON texts of some strings, each between texts of `before` and
    `after`.
    """
    if isinstance(strings, LiteralText) and None not in (edges := _fixed_edges(before, after)):
        return LiteralText(f"{edges[0]}{_JSON(strings.text)}{edges[1]}")
    return between(concat(before, _QUOTE), strings, concat(_QUOTE, after), _escape_strings)


def between(before: Node, strings: Node, after: Node, written: Callable[[Node], Node]) -> Node:
    """Returns a node for strings as spelled by `written`, each between a text of `before` and a
    text of `after`. Complements are placed outermost, as `a & ~b` of whole lexemes, because engines
    have a fast path for that form.
    """
    parts = strings.parts if isinstance(strings, Intersection) else (strings,)
    inside = [part for part in parts if not isinstance(part, Complement)] or [ANY_TEXT]
    outside = [part.node for part in parts if isinstance(part, Complement)]

    edges = _fixed_edges(before, after)
    before, after = (
        node if text is None else literal(text) for node, text in zip((before, after), edges)
    )

    def write_whole(node: Node) -> Node:
        if node is ANY_TEXT and written is _escape_strings:
            return _surround_any_characters(before, after)
        inner = written(node)
        if isinstance(inner, LiteralText) and None not in edges:
            return LiteralText(f"{edges[0]}{inner.text}{edges[1]}")
        return concat(before, inner, after)

    def write_excluded(node: Node) -> Node:
        if isinstance(node, Concat) and node.parts[-1:] == (ANY_TEXT,):  # only the start matters
            return concat(before, written(concat(*node.parts[:-1])), ANY_TEXT)
        return write_whole(node)

    if not outside and len(inside) == 1:
        return write_whole(inside[0])
    without = [Complement(alternation(map(write_excluded, _options(outside))))] if outside else []
    return Intersection((*map(write_whole, inside), *without))


def write_verbatim_strings(before: str, strings: Node, after: str, mark: str) -> Node:
    """Returns a node for the strings between two texts, except strings that contain a mark.

    Args:
        before, after: text around each string.
        strings: the strings.
        mark: text in `after` by which a reader finds the end of the string.
    """
    without = intersection_of_strings(
        strings, complement(concat(ANY_TEXT, literal(mark), ANY_TEXT))
    )
    if without == NOTHING:
        return NOTHING
    if literal_texts(without) is not None:
        return between(literal(before), without, literal(after), lambda node: node)
    # The exclusion covers the whole text, so that an automaton sees that nothing can follow the
    # closing text: the mark must not be followed by more characters than in that text.
    more = len(after) - after.index(mark) - len(mark) + 1
    again = concat(literal(before), ANY_TEXT, literal(mark), Repeat(ANY_CHAR, more, None))
    return intersection(
        between(literal(before), strings, literal(after), lambda node: node), complement(again)
    )


@cache
def bare_names() -> Node:
    """Returns a node for the names that can be written without quotes."""
    return parse(r"""[^\s"'=,:(){}\[\]<>|\\]+""")


def write_bare_names(names: Node, before: Node, after: Node) -> Node:
    """Returns a node for names without quotes, each between texts of `before` and `after`.

    Raises:
        ConstraintError: the only name can't be written without quotes.
    """
    bare = intersection_of_strings(names, bare_names())
    name = literal_text(names)
    if bare == NOTHING and name is not None:
        raise ConstraintError(
            f"json_schema: the name {name!r} can't be written without quotes.", hint="Rename it."
        )
    return NOTHING if bare == NOTHING else concat(before, bare, after)


@lru_cache(maxsize=64)  # one node for all schemas, so that facts about it are computed only once
def _surround_any_characters(before: Node, after: Node) -> Node:
    return concat(before, _ANY_CHARACTERS, after)


@lru_cache(maxsize=64)
def _fixed_edges(before: Node, after: Node) -> tuple[str | None, str | None]:
    """Returns the fixed texts before and after strings. A text that may vary is None."""
    return literal_text(before), literal_text(after)


def _options(nodes: list[Node]) -> list[Node]:
    return [
        option
        for node in nodes
        for option in (node.options if isinstance(node, Alternation) else (node,))
    ]


def _escape_strings(node: Node) -> Node:
    match node:
        case CharSet():
            return character(node)
        case LiteralText(text):
            return LiteralText(_JSON(text)[1:-1])
        case Substring():
            return _escape_substring(node)
        case Complement(inner):  # relative to valid JSON strings, not to all texts
            return Intersection((_ANY_CHARACTERS, Complement(_escape_strings(inner))))
    return map_children(node, _escape_strings)


def _escape_substring(node: Substring) -> Substring:
    """Returns the written form of a Substring. No piece begins or ends inside an escape."""
    texts = list[str]()
    cuts = list[bytes]()
    at = 0
    for match in _TO_ESCAPE.finditer(node.text):
        escape = _ESCAPED[ord(match[0])]
        texts += node.text[at : match.start()], escape
        cuts += node.cuts[at : match.end()], bytes(len(escape) - 1)
        at = match.end()
    return Substring(
        "".join((*texts, node.text[at:])), b"".join((*cuts, node.cuts[at:])), _ANY_CHARACTERS
    )


@lru_cache(maxsize=1024)
def character(characters: CharSet) -> Node:
    """Returns a node for the written forms of the characters in a set."""
    if characters == ANY_CHAR:
        return _ANY_CHARACTER
    escapes = [
        literal(text)
        for code, text in _ESCAPED.items()
        if any(a <= code <= b for a, b in characters.ranges)
    ]
    plain = CharSet(charsets.difference(characters.ranges, _ESCAPED_SET))
    return alternation([plain, *escapes]) if escapes else characters
