"""Regular languages in the syntax of regex engines."""

from __future__ import annotations

import re
from collections.abc import Callable

from sglang_lite.constraints.formal.charsets import LAST
from sglang_lite.constraints.formal.nodes import Alternation, CharSet, Concat, Node, Repeat, Text
from sglang_lite.protocol import ConstraintError

_SPECIAL = re.compile("[^a-zA-Z0-9]")


def to_rust(node: Node) -> str:
    """Spell a regular node in the syntax of Rust's `regex` (llguidance), with nothing left to flags.

    Raises:
        ConstraintError: it has intersections or complements in it.
    """
    return _spell(node, lambda code: f"\\x{{{code:X}}}")


def to_python(node: Node) -> str:
    """Spell a regular node in the syntax of Python's `re`.

    Raises:
        ConstraintError: as `to_rust`.
    """
    return _spell(node, lambda code: f"\\U{code:08X}")


def counts(least: int, most: int | None) -> str:
    """The sign of a repetition, the same in every syntax written here."""
    signs = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    return signs.get((least, most), f"{{{least},{'' if most is None else most}}}")


def _spell(node: Node, escape: Callable[[int], str]) -> str:
    def character(code: int) -> str:
        return chr(code) if code < 128 and chr(code).isalnum() else escape(code)

    def escaped(special: re.Match[str]) -> str:
        return escape(ord(special[0]))

    match node:
        case CharSet(ranges):
            if not ranges:
                return f"[^{escape(0)}-{escape(LAST)}]"
            if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
                return character(ranges[0][0])
            return "[" + "".join(character(a) if a == b else f"{character(a)}-{character(b)}" for a, b in ranges) + "]"
        case Text(text):
            return _SPECIAL.sub(escaped, text)
        case Concat(parts):
            return "".join(
                f"(?:{text})" if isinstance(p, Alternation) else text for p in parts for text in [_spell(p, escape)]
            )
        case Alternation(options):
            return "|".join(_spell(o, escape) for o in options)
        case Repeat(inner, least, most):
            text = _spell(inner, escape)
            if not isinstance(inner, CharSet):
                text = f"(?:{text})"
            return text + counts(least, most)
    raise ConstraintError(f"a regular expression can't say {type(node).__name__.lower()}.")
