"""Parser of the regex dialect: Python's `re` for `str`, always matched against the whole text, without the features
that no automaton supports.

`parse` returns a small tree whose leaves are sets of code points, so that every engine is given the same language in
its own dialect (emit/regex.py), whatever `\\w`, `.` or `(?i)` mean there. Lookahead and word boundaries become
intersections (zero_width.py). Backreferences, lookbehind, conditionals, atomic and possessive groups are refused, with
a caret under the place.
"""

from __future__ import annotations

from typing import cast

from sglang_lite.constraints.formal import charsets
from sglang_lite.constraints.formal.charsets import ECMA, Ranges
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
from sglang_lite.constraints.syntax.regex_characters import CharacterReader, PatternCursor
from sglang_lite.constraints.syntax.zero_width import (
    Anchor,
    Assertions,
    Boundary,
    Lookahead,
    Tree,
    has_anchor,
    has_assertion,
    is_zero_width,
    position_of_assertion,
)
from sglang_lite.protocol import ConstraintError

MAX_PATTERN_CHARS = 50_000
MAX_REPEAT = 10_000
MAX_NESTING = 100


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
        parser.cursor.fail(
            "lookahead and word boundaries are not supported inside a grammar", position_of_assertion(tree)
        )
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


_SIGNS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class _Parser:
    def __init__(self, pattern: str, *, ecma: bool) -> None:
        self.cursor, self.ecma = PatternCursor(pattern), ecma
        self.characters = CharacterReader(self.cursor, ecma=ecma)
        self.depth = 0
        self.names: set[str] = set()  # names of groups
        self.ignore_case = self.dot_all = False

    def parse(self) -> Tree:
        cursor = self.cursor
        if len(cursor.pattern) > MAX_PATTERN_CHARS:
            length = f"{len(cursor.pattern):,}"
            raise ConstraintError(f"regex: {length} characters long, the limit is {MAX_PATTERN_CHARS:,}.")
        for i, char in enumerate("" if cursor.pattern.isascii() else cursor.pattern):
            if charsets.has_surrogates(char):
                cursor.fail("a lone surrogate is no character", i)
        self.global_flags()
        tree = self.alternation()
        if not cursor.ended:
            cursor.fail("unmatched ')'")
        return tree

    def global_flags(self) -> None:
        cursor = self.cursor
        while match := cursor.match(r"\(\?([a-zA-Z]+)\)"):
            self.set_flags(match[1], "", match.start(1))
            cursor.at = match.end()

    def set_flags(self, on: str, off: str, at: int) -> None:
        cursor = self.cursor
        supported = "isu" if self.ecma else "isum"
        for flag in on + off:
            if flag not in supported:
                cursor.fail(f"flag {flag!r} is not supported", at, hint=f"Supported: {', '.join(supported)}.")
        if set(on) & set(off) or "u" in off:
            cursor.fail("flags that are turned on can't be turned off", at)
        # `m` only changes the meaning of ^ and $ inside the text, where anchors are refused anyway; `u` is the default.
        self.ignore_case = (self.ignore_case or "i" in on) and "i" not in off
        self.dot_all = (self.dot_all or "s" in on) and "s" not in off

    def alternation(self) -> Tree:
        options = [self.concatenation()]
        while self.cursor.take("|"):
            options.append(self.concatenation())
        return options[0] if len(options) == 1 else Alternation(cast(tuple[Node, ...], tuple(options)))

    def concatenation(self) -> Tree:
        parts: list[Tree] = []
        while self.cursor.following not in ("", "|", ")"):
            parts.append(self.repetition())
        return parts[0] if len(parts) == 1 else Concat(cast(tuple[Node, ...], tuple(parts)))

    def repetition(self) -> Tree:
        cursor = self.cursor
        start = cursor.at
        tree = self.atom()
        counts = self.quantifier()
        if counts is None:
            return tree
        if is_zero_width(tree):
            cursor.fail("nothing to repeat", start)
        if cursor.peek("+"):
            cursor.fail("possessive quantifiers are not supported", hint="Drop the '+'.")
        cursor.take("?")  # lazy and greedy repeats match the same language
        if self.quantifier() is not None:
            cursor.fail("multiple repeat", cursor.at - 1)
        return Repeat(cast(Node, tree), *counts)

    def quantifier(self) -> tuple[int, int | None] | None:
        cursor = self.cursor
        sign = cursor.following
        if sign in _SIGNS:
            cursor.at += 1
            return _SIGNS[sign]
        if sign != "{":
            return None
        match = cursor.match(r"\{([0-9]*)(,?)([0-9]*)\}")
        if not match or match[0] == "{}":
            return None  # other braces are literal, as in Python
        if self.ecma and not match[1]:
            cursor.fail("a repeat in a schema's pattern needs a minimum count", hint="Write {0,…}.")
        if max(len(match[1]), len(match[3])) > 100 or max(int(match[1] or 0), int(match[3] or 0)) > MAX_REPEAT:
            cursor.fail(f"repeat counts go up to {MAX_REPEAT:,}")
        least = int(match[1] or 0)
        most = (int(match[3]) if match[3] else None) if match[2] else least
        if most is not None and most < least:
            cursor.fail("min repeat greater than max repeat")
        cursor.at = match.end()
        return least, most

    def atom(self) -> Tree:
        cursor = self.cursor
        start, char = cursor.at, cursor.pattern[cursor.at]
        if char.isalnum():
            cursor.at += 1
            return CharSet(self.cased(((ord(char), ord(char)),)))
        if char == "(":
            return self.group()
        if char == "[":
            return CharSet(self.characters.char_class(ignore_case=self.ignore_case))
        if char == ".":
            cursor.at += 1
            return CharSet(charsets.ALL if self.dot_all else ECMA["."] if self.ecma else charsets.python_class("."))
        if self.quantifier() is not None:
            cursor.fail("nothing to repeat", start)
        for name, at_start in (("^", True), (r"\A", True), ("$", False), (r"\Z", False), (r"\z", False)):
            if cursor.take(name):
                return Anchor(cursor.at - len(name), at_start=at_start)
        for name in (r"\b", r"\B"):
            if cursor.take(name):
                return Boundary(cursor.at - 2, negated=name == r"\B")
        if char == "\\":
            return CharSet(self.cased(self.characters.escape(in_class=False)))
        cursor.at += 1
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
        return Assertions(self.edges, self.cursor.fail, word).language(before, tree, after, caret, dollar)

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
                    position = "start" if tree.at_start else "end"
                    self.cursor.fail(f"an anchor is only supported at the {position} of the pattern", tree.at)
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
        cursor = self.cursor
        start = cursor.at
        saved = self.ignore_case, self.dot_all
        cursor.at += 1
        if cursor.take("?"):
            lookbehind = cursor.peek("<=") or cursor.peek("<!")
            if cursor.take("P<") or (not lookbehind and cursor.take("<")):
                end = cursor.pattern.find(">", cursor.at)
                name = cursor.pattern[cursor.at : end]
                if end < 0 or not name.isidentifier() or name in self.names:
                    cursor.fail("bad group name")
                if not self.ecma:  # in ECMA-262, alternatives may share a name
                    self.names.add(name)
                cursor.at = end + 1
            elif cursor.take("=") or cursor.take("!"):
                return self.lookahead(start, saved)
            elif not cursor.take(":"):
                flags = cursor.match(r"([a-zA-Z]*)(?:-([a-zA-Z]+))?:")
                if not flags:
                    kinds = {"<": "lookbehind", ">": "an atomic group",
                             "(": "a conditional", "P": "a backreference", "#": "a comment"}  # fmt: skip
                    kind = kinds.get(cursor.following, "this group")
                    cursor.fail(f"{kind} is not supported", start)
                self.set_flags(flags[1], flags[2] or "", cursor.at)
                cursor.at = flags.end()
        tree = self.inside(start)
        self.ignore_case, self.dot_all = saved
        return tree

    def inside(self, start: int) -> Tree:
        """Parses the rest of a group, including its closing parenthesis."""
        cursor = self.cursor
        self.depth += 1
        if self.depth > MAX_NESTING:
            cursor.fail(f"groups nest deeper than {MAX_NESTING}")
        tree = self.alternation()
        self.depth -= 1
        if not cursor.take(")"):
            cursor.fail("missing )", start)
        return tree

    def lookahead(self, start: int, saved: tuple[bool, bool]) -> Tree:
        cursor = self.cursor
        negated = cursor.pattern[cursor.at - 1] == "!"
        tree = self.inside(start)
        self.ignore_case, self.dot_all = saved
        return Lookahead(start, tree, negated=negated)
