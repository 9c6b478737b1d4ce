"""Serialiser of regular languages to the syntax of regex engines."""

from __future__ import annotations

import re
from functools import lru_cache

from sglang_lite.constraints.formal.charsets import LAST, Ranges
from sglang_lite.constraints.formal.equations import build_multiples_node
from sglang_lite.constraints.formal.nodes import (
    Alternation,
    CharSet,
    Concat,
    LiteralText,
    Multiple,
    Node,
    Repeat,
)
from sglang_lite.constraints.memo import memoize
from sglang_lite.protocol import ConstraintError

_MAX_DIVISOR = 7  # largest divisor whose pattern is small enough
MAX_GROUPS = 80  # nesting depth; Rust's parser counts several levels per group
_GROUPS = re.compile(r"[()]")  # characters are never written as brackets
_SPECIAL = re.compile("[^a-zA-Z0-9]")


@memoize
def to_rust_regex(node: Node) -> str:
    """Returns the pattern of a regular node in the syntax of Rust's `regex` (llguidance),
    independent of flags.

    Raises:
        ConstraintError: the node contains intersections, complements or references, or its groups
            are too deep.
    """
    text = _render_rust_pattern(node)
    depth = 0
    for bracket in _GROUPS.findall(text) if text.count("(") > MAX_GROUPS else ():
        depth += 1 if bracket == "(" else -1
        if depth > MAX_GROUPS:
            raise ConstraintError(
                f"a regular expression can't have groups deeper than {MAX_GROUPS}."
            )
    return text


def _render_rust_pattern(node: Node) -> str:
    match node:
        case CharSet(ranges):
            return _render_character_set(ranges)
        case LiteralText(text):
            return _SPECIAL.sub(lambda special: _hex_escape(ord(special[0])), text)
        case Concat(parts):
            return "".join(
                [
                    f"(?:{_render_rust_pattern(part)})"
                    if isinstance(part, Alternation)
                    else _render_rust_pattern(part)
                    for part in parts
                ]
            )
        case Alternation(options):
            return "|".join(map(_render_rust_pattern, options))
        case Repeat(inner, least, most):
            text = _render_rust_pattern(inner)
            if not isinstance(inner, CharSet):
                text = f"(?:{text})"
            return text + repetition_sign(least, most)
        case Multiple(divisor) if divisor <= _MAX_DIVISOR:
            return _render_rust_pattern(build_multiples_node(divisor))
    raise ConstraintError(f"a regular expression can't say {type(node).__name__.lower()}.")


def repetition_sign(least: int, most: int | None) -> str:
    """Returns the repetition sign, which is the same in every syntax written here."""
    signs = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    return signs.get((least, most), f"{{{least},{'' if most is None else most}}}")


@lru_cache(maxsize=1024)
def _render_character_set(ranges: Ranges) -> str:
    """Returns the pattern of a character set."""
    if not ranges:
        return f"[^{_hex_escape(0)}-{_hex_escape(LAST)}]"
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _render_regex_character(ranges[0][0])
    return (
        "["
        + "".join(
            _render_regex_character(a)
            if a == b
            else f"{_render_regex_character(a)}-{_render_regex_character(b)}"
            for a, b in ranges
        )
        + "]"
    )


def _render_regex_character(code: int) -> str:
    return chr(code) if code < 128 and chr(code).isalnum() else _hex_escape(code)


def _hex_escape(code: int) -> str:
    return f"\\x{{{code:X}}}"
