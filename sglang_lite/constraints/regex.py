"""The regex dialect: Python's `re` for `str`, always matched against the whole text, minus what no automaton can do.

`parse` gives a small tree whose leaves are sets of code points, so that every engine is handed the same language
spelled in its own dialect (`to_rust`), whatever `\\w`, `.` or `(?i)` mean there. Backreferences, lookaround, word
boundaries, conditionals, atomic and possessive groups are refused with a caret under the place.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn, TypeAlias

from sglang_lite.protocol import ConstraintError

MAX_PATTERN_CHARS = 50_000
MAX_REPEAT = 10_000
MAX_NESTING = 100

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)

Ranges: TypeAlias = tuple[tuple[int, int], ...]  # sorted, disjoint, inclusive, without surrogates


@dataclass(frozen=True, slots=True)
class CharSet:
    """One character out of `ranges`; no ranges: matches nothing."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Concat:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    node: Node
    least: int
    most: int | None


Node: TypeAlias = "CharSet | Concat | Alternation | Repeat | _Anchor"  # no _Anchor is left after parsing

EMPTY = Concat(())


def parse(pattern: str) -> Node:
    """Parses `pattern`.

    Raises:
        ConstraintError: not valid, or outside the dialect; the message shows the place.
    """
    return _Parser(pattern).parse()


def to_rust(node: Node) -> str:
    """The same language in the syntax of Rust's `regex` (llguidance), with nothing left to flags."""
    return _emit(node, lambda code: f"\\x{{{code:X}}}")


def to_python(node: Node) -> str:
    """The same language in the syntax of Python's `re`."""
    return _emit(node, lambda code: f"\\U{code:08X}")


def _emit(node: Node, escape: Callable[[int], str]) -> str:
    def character(code: int) -> str:
        return chr(code) if code < 128 and chr(code).isalnum() else escape(code)

    match node:
        case CharSet(ranges):
            if not ranges:
                return f"[^{escape(0)}-{escape(_LAST)}]"
            if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
                return character(ranges[0][0])
            return "[" + "".join(character(a) if a == b else f"{character(a)}-{character(b)}" for a, b in ranges) + "]"
        case Concat(parts):
            return "".join(
                f"(?:{text})" if isinstance(p, Alternation) else text for p in parts for text in [_emit(p, escape)]
            )
        case Alternation(options):
            return "|".join(_emit(o, escape) for o in options)
        case Repeat(inner, least, most):
            text = _emit(inner, escape)
            if not isinstance(inner, CharSet):
                text = f"(?:{text})"
            counts = {(0, None): "*", (1, None): "+", (0, 1): "?"}
            return text + counts.get((least, most), f"{{{least},{'' if most is None else most}}}")
        case _Anchor():
            raise AssertionError("parse() leaves no anchors")


def literal(text: str) -> Node:
    """A node that matches exactly `text`."""
    return Concat(tuple(CharSet(((ord(c), ord(c)),)) for c in text))


# ------------------------------------------------------------------------------------------- sets of code points


def _union(ranges: list[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def _complement(ranges: Ranges) -> Ranges:
    gaps: list[tuple[int, int]] = []
    start = 0
    for low, high in _union([*ranges, _SURROGATES]):
        if start < low:
            gaps.append((start, low - 1))
        start = high + 1
    if start <= _LAST:
        gaps.append((start, _LAST))
    return tuple(gaps)


@lru_cache(maxsize=1)
def _every_character() -> str:
    low, high = _SURROGATES
    return "".join(map(chr, (*range(low), *range(high + 1, _LAST + 1))))


@lru_cache(maxsize=256)
def _python_class(expression: str, flags: int) -> Ranges:
    """The code points that Python's own `re` puts into a one-character expression: the dialect's definition."""
    found = re.finditer(f"(?:{expression})+", _every_character(), flags)
    return _union([piece for match in found for piece in _without_surrogates(ord(match[0][0]), ord(match[0][-1]))])


def _without_surrogates(low: int, high: int) -> list[tuple[int, int]]:
    if low < _SURROGATES[0] and high > _SURROGATES[1]:
        return [(low, _SURROGATES[0] - 1), (_SURROGATES[1] + 1, high)]
    return [(low, high)]


@lru_cache(maxsize=64)
def _unicode_category(name: str) -> Ranges:
    codes = [c for c in _every_character() if unicodedata.category(c).startswith(name)]
    return _union([(ord(c), ord(c)) for c in codes])


def _ignoring_case(ranges: Ranges) -> Ranges:
    inside = "".join(f"{re.escape(chr(a))}-{re.escape(chr(b))}" for a, b in ranges)
    return _python_class(f"[{inside}]", re.IGNORECASE) if inside else ranges


_SHORTHANDS = frozenset("dDwWsS")
_CATEGORY = re.compile(r"\{(\^?)([A-Z][a-z]?)\}")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}


# --------------------------------------------------------------------------------------------------- the parser


@dataclass(frozen=True, slots=True)
class _Anchor:
    at_start: bool
    at: int


class _Parser:
    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0
        self.depth = 0
        self.ignore_case = self.dot_all = False

    def parse(self) -> Node:
        if len(self.pattern) > MAX_PATTERN_CHARS:
            raise ConstraintError(f"regex: {len(self.pattern):,} characters long, the limit is {MAX_PATTERN_CHARS:,}.")
        for i, char in enumerate(self.pattern):
            if _SURROGATES[0] <= ord(char) <= _SURROGATES[1]:
                self.fail("a lone surrogate is no character", i)
        self.global_flags()
        node = self.alternation()
        if self.at < len(self.pattern):
            self.fail("unmatched ')'")
        return self.without_anchors(node, starts=True, ends=True)

    def fail(self, problem: str, at: int | None = None, hint: str = "") -> NoReturn:
        at = self.at if at is None else at
        start = max(0, at - 40)
        shown = self.pattern[start : at + 30].replace("\n", "⏎")
        raise ConstraintError(f"regex: {problem}\n  {shown}\n  {' ' * (at - start)}^", hint=hint)

    def peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.at)

    def take(self, text: str) -> bool:
        if self.peek(text):
            self.at += len(text)
            return True
        return False

    def global_flags(self) -> None:
        match = re.match(r"\(\?([a-zA-Z]+)\)", self.pattern)
        if match:
            self.set_flags(match[1], "", match.start(1))
            self.at = match.end()

    def set_flags(self, on: str, off: str, at: int) -> None:
        for flag in on + off:
            if flag not in "isum":
                self.fail(f"flag {flag!r} is not supported", at, hint="Supported: i, s, m, u.")
        # `m` changes only what ^ and $ mean inside the text, where they are refused anyway; `u` is the default.
        self.ignore_case = (self.ignore_case or "i" in on) and "i" not in off
        self.dot_all = (self.dot_all or "s" in on) and "s" not in off

    def alternation(self) -> Node:
        options = [self.concatenation()]
        while self.take("|"):
            options.append(self.concatenation())
        return options[0] if len(options) == 1 else Alternation(tuple(options))

    def concatenation(self) -> Node:
        parts: list[Node] = []
        while self.at < len(self.pattern) and not self.peek("|") and not self.peek(")"):
            parts.append(self.repetition())
        return parts[0] if len(parts) == 1 else Concat(tuple(parts))

    def repetition(self) -> Node:
        start = self.at
        node = self.atom()
        counts = self.quantifier()
        if counts is None:
            return node
        if isinstance(node, _Anchor):
            self.fail("nothing to repeat", start)
        if self.peek("+"):
            self.fail("possessive quantifiers are not supported", hint="Drop the '+'.")
        self.take("?")  # lazy or greedy: the same language
        if self.quantifier() is not None:
            self.fail("multiple repeat", self.at - 1)
        return Repeat(node, *counts)

    def quantifier(self) -> tuple[int, int | None] | None:
        for sign, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take(sign):
                return counts
        match = re.compile(r"\{(\d*)(,?)(\d*)\}").match(self.pattern, self.at)
        if not match or not (match[1] or match[3]):
            return None  # as in Python, other braces are literal
        least = int(match[1] or 0)
        most = (int(match[3]) if match[3] else None) if match[2] else least
        if max(least, most or 0) > MAX_REPEAT:
            self.fail(f"repeat counts go up to {MAX_REPEAT:,}")
        if most is not None and most < least:
            self.fail("min repeat greater than max repeat")
        self.at = match.end()
        return least, most

    def atom(self) -> Node:
        char = self.pattern[self.at]
        if char == "(":
            return self.group()
        if char == "[":
            return CharSet(self.char_class())
        if char == ".":
            self.at += 1
            return CharSet(_complement(() if self.dot_all else ((10, 10),)))
        if char == "^":
            return self.anchor("^", at_start=True)
        if char == "$":
            return self.anchor("$", at_start=False)
        if char in "*+?":
            self.fail("nothing to repeat")
        if char == "\\":
            for name, at_start in ((r"\A", True), (r"\Z", False), (r"\z", False)):
                if self.peek(name):
                    return self.anchor(name, at_start=at_start)
            return CharSet(self.cased(self.escape(in_class=False)))
        self.at += 1
        return CharSet(self.cased(((ord(char), ord(char)),)))

    def cased(self, ranges: Ranges) -> Ranges:
        return _ignoring_case(ranges) if self.ignore_case else ranges

    def anchor(self, name: str, *, at_start: bool) -> Node:
        self.at += len(name)
        return _Anchor(at_start, self.at - len(name))

    def without_anchors(self, node: Node, *, starts: bool, ends: bool) -> Node:
        """The whole text is matched anyway, so an anchor at its end says nothing; elsewhere it is refused.
        `starts`: nothing can come before `node`; `ends`: nothing after it."""
        match node:
            case _Anchor(at_start, at):
                if not (starts if at_start else ends):
                    place = "start" if at_start else "end"
                    self.fail(f"an anchor is only supported at the {place} of the pattern", at)
                return EMPTY
            case Alternation(options):
                return Alternation(tuple(self.without_anchors(o, starts=starts, ends=ends) for o in options))
            case Repeat(inner, least, most):
                alone = most is not None and most <= 1
                inner = self.without_anchors(inner, starts=starts and alone, ends=ends and alone)
                return Repeat(inner, least, most)
            case Concat(parts):
                solid = [i for i, part in enumerate(parts) if not isinstance(part, _Anchor)]
                first, last = (solid[0], solid[-1]) if solid else (len(parts), -1)
                return Concat(
                    tuple(
                        self.without_anchors(part, starts=starts and i <= first, ends=ends and i >= last)
                        for i, part in enumerate(parts)
                    )
                )
            case _:
                return node

    def group(self) -> Node:
        start = self.at
        saved = self.ignore_case, self.dot_all
        self.at += 1
        if self.take("?"):
            if self.take("P<") or (self.peek("<") and not self.peek("<=") and not self.peek("<!") and self.take("<")):
                end = self.pattern.find(">", self.at)
                if end < 0 or not self.pattern[self.at : end].isidentifier():
                    self.fail("bad group name")
                self.at = end + 1
            elif not self.take(":"):
                flags = re.compile(r"([a-zA-Z]*)(?:-([a-zA-Z]+))?:").match(self.pattern, self.at)
                if not flags:
                    kinds = {"=": "lookahead", "!": "lookahead", "<": "lookbehind", ">": "an atomic group",
                             "(": "a conditional", "P": "a backreference", "#": "a comment"}  # fmt: skip
                    kind = kinds.get(self.pattern[self.at : self.at + 1], "this group")
                    self.fail(f"{kind} is not supported", start)
                self.set_flags(flags[1], flags[2] or "", self.at)
                self.at = flags.end()
        self.depth += 1
        if self.depth > MAX_NESTING:
            self.fail(f"groups nest deeper than {MAX_NESTING}")
        node = self.alternation()
        self.depth -= 1
        if not self.take(")"):
            self.fail("missing )", start)
        self.ignore_case, self.dot_all = saved
        return node

    def escape(self, *, in_class: bool) -> Ranges:
        start = self.at
        self.at += 1
        if self.at >= len(self.pattern):
            self.fail("the pattern ends in a backslash", start)
        char = self.pattern[self.at]
        self.at += 1
        if char in _SHORTHANDS:
            return _python_class("\\" + char, 0)
        if char in "pP":
            match = _CATEGORY.match(self.pattern, self.at)
            if not match or not _unicode_category(match[2]):
                self.fail(r"\p needs a Unicode category in braces", start, hint=r"As in \p{L} or \p{Nd}.")
            self.at = match.end()
            ranges = _unicode_category(match[2])
            return _complement(ranges) if (char == "P") != bool(match[1]) else ranges
        if char in "xuU":
            width = {"x": 2, "u": 4, "U": 8}[char]
            digits = self.pattern[self.at : self.at + width]
            if not re.fullmatch(f"[0-9a-fA-F]{{{width}}}", digits) or int(digits, 16) > _LAST:
                self.fail(f"\\{char} needs {width} hexadecimal digits of a character", start)
            self.at += width
            code = int(digits, 16)
            if _SURROGATES[0] <= code <= _SURROGATES[1]:
                self.fail("a lone surrogate is no character", start)
            return ((code, code),)
        if char == "b" and in_class:
            return ((8, 8),)
        if char in _ESCAPES:
            return ((ord(_ESCAPES[char]),) * 2,)
        if char.isalnum() and char.isascii():
            kind = {"b": "a word boundary", "B": "a word boundary"}.get(char, f"\\{char}")
            self.fail("a backreference is not supported" if char.isdigit() else f"{kind} is not supported", start)
        return ((ord(char), ord(char)),)

    def char_class(self) -> Ranges:
        start = self.at
        self.at += 1
        negated = self.take("^")
        ranges: list[tuple[int, int]] = []
        first = True
        while first or not self.peek("]"):
            first = False
            item = self.class_item(start)
            if self.peek("-") and not self.pattern.startswith("]", self.at + 1) and self.at + 1 < len(self.pattern):
                dash = self.at
                self.at += 1
                upper = self.class_item(start)
                if len(item) != 1 or len(upper) != 1 or item[0][0] != item[0][1] or upper[0][0] != upper[0][1]:
                    self.fail("bad character range", dash)
                if upper[0][0] < item[0][0]:
                    self.fail("bad character range", dash)
                ranges += _without_surrogates(item[0][0], upper[0][0])
            else:
                ranges += item
        self.at += 1
        united = self.cased(_union(ranges))
        return _complement(united) if negated else united

    def class_item(self, start: int) -> Ranges:
        if self.at >= len(self.pattern):
            self.fail("unterminated character set", start)
        if self.peek("\\"):
            return self.escape(in_class=True)
        char = self.pattern[self.at]
        self.at += 1
        return ((ord(char), ord(char)),)
