"""Parser of the regex dialect: Python's `re` for `str`, always matched against the whole text, without the features
that no automaton supports.

`parse` returns a small tree whose leaves are sets of code points, so that every engine is given the same language in
its own dialect (emit/regex.py), whatever `\\w`, `.` or `(?i)` mean there. Lookahead and word boundaries become
intersections (zero_width.py). Backreferences, lookbehind, conditionals, atomic and possessive groups are refused, with
a caret under the place.
"""

from __future__ import annotations

import re
import unicodedata
from itertools import chain
from typing import NoReturn, cast

from sglang_lite.constraints.formal import charsets
from sglang_lite.constraints.formal.charsets import ECMA, LAST, Ranges
from sglang_lite.constraints.formal.nodes import (
    ANY_CHAR,
    ANY_TEXT,
    EMPTY,
    NOTHING,
    Alternation,
    CharSet,
    Concat,
    Node,
    Repeat,
    alternation,
    concat,
    repeat,
)
from sglang_lite.constraints.memo import memoized
from sglang_lite.constraints.syntax.zero_width import (
    Anchor,
    Assertions,
    Boundary,
    Lookahead,
    Tree,
    has_anchor,
    has_assertion,
    is_zero_width,
    place_of_assertion,
)
from sglang_lite.protocol import ConstraintError

MAX_PATTERN_CHARS = 50_000
MAX_REPEAT = 10_000
MAX_NESTING = 100
MAX_RANGES = 1_000_000  # in the character classes of a pattern


@memoized
def parse(pattern: str) -> Node:
    """Node of the texts that `pattern` matches from start to end.

    Raises:
        ConstraintError: the pattern is not valid or is outside the dialect; the message shows the place.
    """
    parser = _Parser(pattern, ecma=False)
    return parser.language(EMPTY, parser.parse(), EMPTY, EMPTY, EMPTY)


def one_line_message(message: str) -> str:
    """Converts the message of a refused pattern to one line: the excerpt with the caret is replaced by the text after
    the fault.
    """
    problem, *picture = message.split("\n  ")
    if len(picture) != 2:
        return message
    shown, caret = picture
    rest = shown[len(caret) - 1 :]
    return f"{problem}, {f'before {rest!r}' if rest else 'at the end of the pattern'}"


def parse_inside_grammar(pattern: str) -> Node:
    """Node of a pattern that is matched within other text, where lookahead and word boundaries would depend on that
    text.

    Raises:
        ConstraintError: the pattern is not valid, is outside the dialect, or contains lookahead or word boundaries.
    """
    parser = _Parser(pattern, ecma=False)
    tree = parser.parse()
    if has_assertion(tree):
        parser.fail("lookahead and word boundaries are not supported inside a grammar", place_of_assertion(tree))
    return parse(pattern)


@memoized
def parse_schema_pattern(pattern: str) -> Node:
    """Node of the texts that contain a match of a JSON schema's `pattern`, which may match anywhere and has the class
    escapes of ECMA-262.

    Raises:
        ConstraintError: the pattern is not valid or is outside the dialect; the message shows the place.
    """
    parser = _Parser(pattern, ecma=True)
    tree = parser.parse()
    more = Repeat(ANY_CHAR, 1, None)
    # Pairs of (texts before the match, meaning of ^ then), and likewise for the texts after it and $.
    anchored: list[tuple[Node, Node]] = [(EMPTY, EMPTY), (more, NOTHING)]
    free: list[tuple[Node, Node]] = [(ANY_TEXT, EMPTY)]
    fronts = anchored if has_anchor(tree, at_start=True) else free
    backs = anchored if has_anchor(tree, at_start=False) else free
    return alternation(
        parser.language(before, tree, after, caret, dollar) for before, caret in fronts for after, dollar in backs
    )


_CATEGORY = re.compile(r"\{(\^?)([A-Za-z_]+)\}")
_CHARACTER_NAME = re.compile(r"\{([^}]+)\}")
_OCTAL = re.compile("0[0-7]{0,2}|[1-7][0-7]{2}")  # three digits, or fewer after a leading zero
_OCTAL_IN_CLASS = re.compile("[0-7]{1,3}")  # no escape is a backreference here
_SIGNS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}


class _Parser:
    def __init__(self, pattern: str, *, ecma: bool) -> None:
        self.pattern, self.ecma = pattern, ecma
        self.at = 0
        self.depth = 0
        self.names: set[str] = set()  # names of groups
        self.classes: dict[tuple[frozenset[Ranges], bool, bool], Ranges] = {}  # by items, case and negation
        self.ranges = 0  # in all of them
        self.ignore_case = self.dot_all = False

    def parse(self) -> Tree:
        if len(self.pattern) > MAX_PATTERN_CHARS:
            raise ConstraintError(f"regex: {len(self.pattern):,} characters long, the limit is {MAX_PATTERN_CHARS:,}.")
        for i, char in enumerate("" if self.pattern.isascii() else self.pattern):
            if charsets.has_surrogates(char):
                self.fail("a lone surrogate is no character", i)
        self.global_flags()
        tree = self.alternation()
        if self.at < len(self.pattern):
            self.fail("unmatched ')'")
        return tree

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
        while match := re.compile(r"\(\?([a-zA-Z]+)\)").match(self.pattern, self.at):
            self.set_flags(match[1], "", match.start(1))
            self.at = match.end()

    def set_flags(self, on: str, off: str, at: int) -> None:
        supported = "isu" if self.ecma else "isum"
        for flag in on + off:
            if flag not in supported:
                self.fail(f"flag {flag!r} is not supported", at, hint=f"Supported: {', '.join(supported)}.")
        if set(on) & set(off) or "u" in off:
            self.fail("flags that are turned on can't be turned off", at)
        # `m` only changes the meaning of ^ and $ inside the text, where anchors are refused anyway; `u` is the default.
        self.ignore_case = (self.ignore_case or "i" in on) and "i" not in off
        self.dot_all = (self.dot_all or "s" in on) and "s" not in off

    def alternation(self) -> Tree:
        options = [self.concatenation()]
        while self.take("|"):
            options.append(self.concatenation())
        return options[0] if len(options) == 1 else Alternation(cast(tuple[Node, ...], tuple(options)))

    def concatenation(self) -> Tree:
        parts: list[Tree] = []
        while self.at < len(self.pattern) and not self.peek("|") and not self.peek(")"):
            parts.append(self.repetition())
        return parts[0] if len(parts) == 1 else Concat(cast(tuple[Node, ...], tuple(parts)))

    def repetition(self) -> Tree:
        start = self.at
        tree = self.atom()
        counts = self.quantifier()
        if counts is None:
            return tree
        if is_zero_width(tree):
            self.fail("nothing to repeat", start)
        if self.peek("+"):
            self.fail("possessive quantifiers are not supported", hint="Drop the '+'.")
        self.take("?")  # lazy and greedy repeats match the same language
        if self.quantifier() is not None:
            self.fail("multiple repeat", self.at - 1)
        return Repeat(cast(Node, tree), *counts)

    def quantifier(self) -> tuple[int, int | None] | None:
        sign = self.pattern[self.at : self.at + 1]
        if sign in _SIGNS:
            self.at += 1
            return _SIGNS[sign]
        if sign != "{":
            return None
        match = re.compile(r"\{([0-9]*)(,?)([0-9]*)\}").match(self.pattern, self.at)
        if not match or match[0] == "{}":
            return None  # other braces are literal, as in Python
        if self.ecma and not match[1]:
            self.fail("a repeat in a schema's pattern needs a minimum count", hint="Write {0,…}.")
        if max(len(match[1]), len(match[3])) > 100 or max(int(match[1] or 0), int(match[3] or 0)) > MAX_REPEAT:
            self.fail(f"repeat counts go up to {MAX_REPEAT:,}")
        least = int(match[1] or 0)
        most = (int(match[3]) if match[3] else None) if match[2] else least
        if most is not None and most < least:
            self.fail("min repeat greater than max repeat")
        self.at = match.end()
        return least, most

    def atom(self) -> Tree:
        start, char = self.at, self.pattern[self.at]
        if char.isalnum():
            self.at += 1
            return CharSet(self.cased(((ord(char), ord(char)),)))
        if char == "(":
            return self.group()
        if char == "[":
            return CharSet(self.char_class())
        if char == ".":
            self.at += 1
            return CharSet(charsets.ALL if self.dot_all else ECMA["."] if self.ecma else charsets.python_class("."))
        if self.quantifier() is not None:
            self.fail("nothing to repeat", start)
        for name, at_start in (("^", True), (r"\A", True), ("$", False), (r"\Z", False), (r"\z", False)):
            if self.take(name):
                return Anchor(self.at - len(name), at_start=at_start)
        for name in (r"\b", r"\B"):
            if self.take(name):
                return Boundary(self.at - 2, negated=name == r"\B")
        if char == "\\":
            return CharSet(self.cased(self.escape(in_class=False)))
        self.at += 1
        return CharSet(self.cased(((ord(char), ord(char)),)))

    def cased(self, ranges: Ranges) -> Ranges:
        return charsets.ignoring_case(ranges) if self.ignore_case else ranges

    def language(self, before: Node, tree: Tree, after: Node, caret: Node, dollar: Node) -> Node:
        """Texts that consist of a text of `before`, one of the tree and one of `after`; `caret` and `dollar` are as for
        `edges`.
        """
        if not has_assertion(tree):
            return concat(before, self.edges(tree, caret, dollar), after)
        word = ECMA["w"] if self.ecma else charsets.python_class(r"\w")
        return Assertions(self.edges, self.fail, word).language(before, tree, after, caret, dollar)

    def edges(self, tree: Tree, caret: Node, dollar: Node, *, starts: bool = True, ends: bool = True) -> Node:
        """Node of a tree with its anchors replaced. Anchors may only stand at the edges of the pattern.

        Args:
            tree: tree without lookahead and boundaries.
            caret, dollar: EMPTY if no text comes before (after) the pattern's match, else NOTHING.
            starts, ends: whether the tree is at the start (end) of the pattern.
        """
        match tree:
            case Anchor():
                if not (starts if tree.at_start else ends):
                    place = "start" if tree.at_start else "end"
                    self.fail(f"an anchor is only supported at the {place} of the pattern", tree.at)
                return caret if tree.at_start else dollar
            case Alternation(options):
                return alternation(self.edges(o, caret, dollar, starts=starts, ends=ends) for o in options)
            case Repeat(inner, least, most):
                alone = most is not None and most <= 1
                inside = self.edges(inner, caret, dollar, starts=starts and alone, ends=ends and alone)
                return repeat(inside, least, most)
            case Concat(parts):
                solid = [i for i, part in enumerate(parts) if not is_zero_width(part)]
                first, last = (solid[0], solid[-1]) if solid else (len(parts), -1)
                return concat(
                    *(
                        self.edges(part, caret, dollar, starts=starts and i <= first, ends=ends and i >= last)
                        for i, part in enumerate(parts)
                    )
                )
        assert not isinstance(tree, Lookahead | Boundary), "those are read by `language`"
        return tree

    def group(self) -> Tree:
        start = self.at
        saved = self.ignore_case, self.dot_all
        self.at += 1
        if self.take("?"):
            if self.take("P<") or (self.peek("<") and not self.peek("<=") and not self.peek("<!") and self.take("<")):
                end = self.pattern.find(">", self.at)
                name = self.pattern[self.at : end]
                if end < 0 or not name.isidentifier() or name in self.names:
                    self.fail("bad group name")
                if not self.ecma:  # in ECMA-262, alternatives may share a name
                    self.names.add(name)
                self.at = end + 1
            elif self.take("=") or self.take("!"):
                return self.lookahead(start, saved)
            elif not self.take(":"):
                flags = re.compile(r"([a-zA-Z]*)(?:-([a-zA-Z]+))?:").match(self.pattern, self.at)
                if not flags:
                    kinds = {"<": "lookbehind", ">": "an atomic group",
                             "(": "a conditional", "P": "a backreference", "#": "a comment"}  # fmt: skip
                    kind = kinds.get(self.pattern[self.at : self.at + 1], "this group")
                    self.fail(f"{kind} is not supported", start)
                self.set_flags(flags[1], flags[2] or "", self.at)
                self.at = flags.end()
        tree = self.inside(start)
        self.ignore_case, self.dot_all = saved
        return tree

    def inside(self, start: int) -> Tree:
        """Parses the rest of a group, including its closing parenthesis."""
        self.depth += 1
        if self.depth > MAX_NESTING:
            self.fail(f"groups nest deeper than {MAX_NESTING}")
        tree = self.alternation()
        self.depth -= 1
        if not self.take(")"):
            self.fail("missing )", start)
        return tree

    def lookahead(self, start: int, saved: tuple[bool, bool]) -> Tree:
        negated = self.pattern[self.at - 1] == "!"
        tree = self.inside(start)
        self.ignore_case, self.dot_all = saved
        return Lookahead(start, tree, negated=negated)

    def escape(self, *, in_class: bool) -> Ranges:
        start = self.at
        self.at += 1
        if self.at >= len(self.pattern):
            self.fail("the pattern ends in a backslash", start)
        char = self.pattern[self.at]
        self.at += 1
        if char in "dDwWsS":
            if not self.ecma:
                return charsets.python_class("\\" + char)
            ranges = ECMA[char.lower()]
            return ranges if char.islower() else charsets.complement(ranges)
        if char in "pP":
            match = _CATEGORY.match(self.pattern, self.at)
            if not match or not charsets.unicode_category(match[2]):
                self.fail(r"\p needs a Unicode category in braces", start, hint=r"As in \p{L} or \p{Nd}.")
            self.at = match.end()
            ranges = charsets.unicode_category(match[2])
            return charsets.complement(ranges) if (char == "P") != bool(match[1]) else ranges
        if char in "xuU":
            return self.code_point(char, start)
        if char == "b" and in_class:
            return ((8, 8),)
        if char in _ESCAPES:
            return ((ord(_ESCAPES[char]),) * 2,)
        if octal := (_OCTAL_IN_CLASS if in_class else _OCTAL).match(self.pattern, start + 1):
            self.at = octal.end()
            if int(octal[0], 8) > 0o377:
                self.fail(f"\\{octal[0]} is above \\377, the last octal escape", start)
            return ((int(octal[0], 8),) * 2,)
        if char == "N" and not self.ecma:
            return self.named_character(start)
        if char.isalnum() and char.isascii():
            kind = f"\\{char}"
            backreference = char.isdigit() and not in_class
            self.fail("a backreference is not supported" if backreference else f"{kind} is not supported", start)
        return ((ord(char), ord(char)),)

    def named_character(self, start: int) -> Ranges:
        name = _CHARACTER_NAME.match(self.pattern, self.at)
        try:
            char = unicodedata.lookup(name[1]) if name else ""
        except KeyError:
            char = ""
        if name is None or len(char) != 1:  # some names denote sequences of characters
            self.fail(r"\N needs the name of a Unicode character in braces", start)
        self.at = name.end()
        return ((ord(char), ord(char)),)

    def code_point(self, kind: str, start: int) -> Ranges:
        braces = (
            re.compile(r"\{([0-9a-fA-F]{1,6})\}").match(self.pattern, self.at) if self.ecma and kind == "u" else None
        )
        width = {"x": 2, "u": 4, "U": 8}[kind]
        digits = braces[1] if braces else self.pattern[self.at : self.at + width]
        if (
            not re.fullmatch("[0-9a-fA-F]{1,6}" if braces else f"[0-9a-fA-F]{{{width}}}", digits)
            or int(digits, 16) > LAST
        ):
            self.fail(f"\\{kind} needs {width} hexadecimal digits of a character", start)
        self.at = braces.end() if braces else self.at + width
        code = int(digits, 16)
        if charsets.has_surrogates(chr(code)):
            self.fail("a lone surrogate is no character", start)
        return ((code, code),)

    def char_class(self) -> Ranges:
        start = self.at
        self.at += 1
        negated = self.take("^")
        items: set[Ranges] = set()
        first = not self.ecma  # in Python, a ] in first position is a character
        while first or not self.peek("]"):
            first = False
            item = self.class_item(start)
            if self.peek("-") and not self.pattern.startswith("]", self.at + 1) and self.at + 1 < len(self.pattern):
                dash = self.at
                self.at += 1
                upper = self.class_item(start)
                single = len(item) == len(upper) == 1 and item[0][0] == item[0][1] and upper[0][0] == upper[0][1]
                if self.ecma and not single:  # ECMA-262, B.1.2: a hyphen next to a class is a character
                    items |= {item, upper, ((ord("-"), ord("-")),)}
                    continue
                if not single or upper[0][0] < item[0][0]:
                    self.fail("bad character range", dash)
                items.add(tuple(charsets.without_surrogates(item[0][0], upper[0][0])))
            else:
                items.add(item)
        self.at += 1
        key = frozenset(items), self.ignore_case, negated
        if key not in self.classes:
            united = self.cased(charsets.union(chain.from_iterable(items)))
            self.classes[key] = charsets.complement(united) if negated else united
            self.ranges += len(self.classes[key])
            if self.ranges > MAX_RANGES:
                self.fail(f"its different character classes have more than {MAX_RANGES:,} ranges of characters", start)
        return self.classes[key]

    def class_item(self, start: int) -> Ranges:
        if self.at >= len(self.pattern):
            self.fail("unterminated character set", start)
        if self.peek("\\"):
            return self.escape(in_class=True)
        char = self.pattern[self.at]
        self.at += 1
        return ((ord(char), ord(char)),)
