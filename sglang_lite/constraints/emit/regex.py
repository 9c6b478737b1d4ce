"""Serialiser of regular languages to the syntax of regex engines."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from sglang_lite.constraints.formal.charsets import LAST, Ranges
from sglang_lite.constraints.formal.nodes import Alternation, CharSet, Concat, Node, Repeat, Text
from sglang_lite.protocol import ConstraintError

_SPECIAL = re.compile("[^a-zA-Z0-9]")


def to_rust(node: Node) -> str:
    """Pattern of a regular node in the syntax of Rust's `regex` (llguidance), independent of flags.

    Raises:
        ConstraintError: the node contains intersections, complements or references.
    """
    return _spell(node, _rust_escape)


def to_python(node: Node) -> str:
    """Pattern of a regular node in the syntax of Python's `re`.

    Raises:
        ConstraintError: the node contains intersections, complements or references.
    """
    return _spell(node, _python_escape)


def repetition_sign(least: int, most: int | None) -> str:
    """Repetition sign, which is the same in every syntax written here."""
    signs = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    return signs.get((least, most), f"{{{least},{'' if most is None else most}}}")


def _rust_escape(code: int) -> str:
    return f"\\x{{{code:X}}}"


def _python_escape(code: int) -> str:
    return f"\\U{code:08X}"


@lru_cache(maxsize=1024)
def _set(ranges: Ranges, escape: Callable[[int], str]) -> str:
    """Pattern of a character set."""

    def character(code: int) -> str:
        return chr(code) if code < 128 and chr(code).isalnum() else escape(code)

    if not ranges:
        return f"[^{escape(0)}-{escape(LAST)}]"
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return character(ranges[0][0])
    return "[" + "".join(character(a) if a == b else f"{character(a)}-{character(b)}" for a, b in ranges) + "]"


def _spell(node: Node, escape: Callable[[int], str]) -> str:
    match node:
        case CharSet(ranges):
            return _set(ranges, escape)
        case Text(text):
            return _SPECIAL.sub(lambda special: escape(ord(special[0])), text)
        case Concat(parts):
            return "".join(
                [
                    f"(?:{_spell(part, escape)})" if isinstance(part, Alternation) else _spell(part, escape)
                    for part in parts
                ]
            )
        case Alternation(options):
            return "|".join([_spell(option, escape) for option in options])
        case Repeat(inner, least, most):
            text = _spell(inner, escape)
            if not isinstance(inner, CharSet):
                text = f"(?:{text})"
            return text + repetition_sign(least, most)
    raise ConstraintError(f"a regular expression can't say {type(node).__name__.lower()}.")
