"""Parser for the regex dialect: Python's `re` for `str`, always matched against the whole text,
without the features that no automaton supports.

`parse` returns a small tree whose leaves are sets of code points. Every engine thus gets
the same language in its own dialect (emit/regex.py), no matter what `\\w`, `.` or `(?i)`
mean there. Assertions become intersections (zero_width.py); atomic groups and possessive
repeats become lookahead. Backreferences, conditionals and longer lookbehind raise errors
with a caret under the place.
"""

from __future__ import annotations

from collections.abc import Set
from typing import cast

from sglang_lite.constraints.formal import charsets
from sglang_lite.constraints.formal.automaton import accepts, is_empty
from sglang_lite.constraints.formal.charsets import ECMA
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
    intersection,
    optional,
    repeat,
)
from sglang_lite.constraints.memo import memoize
from sglang_lite.constraints.syntax.regex_characters import (
    CharacterReader,
    PatternCursor,
    apply_case_flags,
)
from sglang_lite.constraints.syntax.zero_width import (
    Ahead,
    Assertions,
    Behind,
    Lookahead,
    Tree,
    boundary,
    has_assertion,
    iterate_assertions,
    lookbehind,
)
from sglang_lite.protocol import ConstraintError

MAX_PATTERN_CHARS = 50_000
MAX_REPEAT = 10_000
MAX_NESTING = 100


@memoize
def parse(pattern: str) -> Node:
    """Parses a pattern. Returns a node for the texts that match it as a whole.

    Raises:
        ConstraintError: the pattern is not valid or is outside the dialect. The message shows
            where.
    """
    parser = _Parser(pattern, ecma=False)
    tree = parser.parse()
    node = _without_anchors(tree, EMPTY, EMPTY)
    return (
        Assertions(parser.cursor.raise_regex_error).language(EMPTY, tree, EMPTY)
        if node is None
        else node
    )


def one_line_message(message: str) -> str:
    """Shortens the message about an invalid pattern to one line. Instead of an excerpt with a
    caret, it then quotes the text after the fault.
    """
    problem, *picture = message.split("\n  ")
    if len(picture) != 2:
        return message
    shown, caret = picture
    rest = shown[len(caret) - 1 :]
    return f"{problem}, {f'before {rest!r}' if rest else 'at the end of the pattern'}"


def parse_inside_grammar(pattern: str) -> Node:
    """Parses a pattern that is part of a larger grammar. Anchors at its edges are ignored. Other
    assertions are rejected, because they would depend on the surrounding text.

    Raises:
        ConstraintError: the pattern is not valid, is outside the dialect, or contains assertions.
    """
    parser = _Parser(pattern, ecma=False)
    tree = parser.parse()
    node = _without_anchors(tree, EMPTY, EMPTY)
    other = [
        each.at
        for each in iterate_assertions(tree)
        if isinstance(each, Behind) and not each.requires_text_start
    ]
    if node is None or other:
        at = min(other or [each.at for each in iterate_assertions(tree)])
        parser.cursor.raise_regex_error(
            "lookahead, lookbehind and word boundaries are not supported inside a grammar", at
        )
    return node


@memoize
def parse_schema_pattern(pattern: str) -> Node:
    """Parses the `pattern` of a JSON schema, which has the class escapes of ECMA-262. Returns a
    node for all texts that contain a match anywhere.

    Raises:
        ConstraintError: the pattern is not valid or is outside the dialect. The message shows
            where.
    """
    parser = _Parser(pattern, ecma=True)
    tree = parser.parse()
    more = Repeat(ANY_CHAR, 1, None)
    # Pairs of (texts before the match, what ^ matches there), and pairs of (texts after the match,
    # what $ matches there).
    anchored: list[tuple[Node, Node]] = [(EMPTY, EMPTY), (more, NOTHING)]
    free: list[tuple[Node, Node]] = [(ANY_TEXT, EMPTY)]
    fronts = (
        anchored if any(isinstance(each, Behind) for each in iterate_assertions(tree)) else free
    )
    backs = anchored if any(isinstance(each, Ahead) for each in iterate_assertions(tree)) else free
    options = []
    for before, caret in fronts:
        for after, dollar in backs:
            node = _without_anchors(tree, caret, dollar)
            if node is None:
                return Assertions(parser.cursor.raise_regex_error).language(
                    ANY_TEXT, tree, ANY_TEXT
                )
            options.append(concat(before, node, after))
    return alternation(options)


def _without_anchors(
    tree: Tree, caret: Node, dollar: Node, *, starts: bool = True, ends: bool = True
) -> Node | None:
    """Converts a tree to a node and replaces its anchors. Returns None if the tree has any
    assertion other than `^` at its start and `$` at its end.

    Args:
        tree: tree of a pattern.
        caret, dollar: EMPTY if no text comes before (after) the pattern's match, else
            NOTHING.
        starts, ends: whether the tree is at the start (end) of the pattern.
    """
    parts: list[Node | None]
    match tree:
        case Behind():
            if caret == EMPTY:  # no character precedes
                return None if not starts else EMPTY if tree.at_start else NOTHING
            return NOTHING if starts and tree.requires_text_start else None
        case Ahead(_, rest):
            if dollar == EMPTY:  # no character follows
                return None if not ends else EMPTY if accepts(rest, "") else NOTHING
            return NOTHING if ends and rest == EMPTY else None
        case Lookahead():
            return None
        case Alternation(options):
            parts = [
                _without_anchors(option, caret, dollar, starts=starts, ends=ends)
                for option in options
            ]
            return (
                None if None in parts else alternation(part for part in parts if part is not None)
            )
        case Repeat(inner, least, most):
            alone = most is not None and most <= 1
            node = _without_anchors(
                inner, caret, dollar, starts=starts and alone, ends=ends and alone
            )
            return None if node is None else repeat(node, least, most)
        case Concat(trees):
            solid = [i for i, part in enumerate(trees) if not isinstance(part, Behind | Ahead)]
            first, last = (solid[0], solid[-1]) if solid else (len(trees), -1)
            parts = [
                _without_anchors(
                    part, caret, dollar, starts=starts and i <= first, ends=ends and i >= last
                )
                for i, part in enumerate(trees)
            ]
            return None if None in parts else concat(*(part for part in parts if part is not None))
    return tree


_SIGNS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_LINE_FEED = ((10, 10),)
_LOOKS = ("(?=", "(?!", "(?<=", "(?<!")


class _Parser:
    def __init__(self, pattern: str, *, ecma: bool) -> None:
        self.cursor = PatternCursor(pattern)
        self.ecma = ecma
        self.characters = CharacterReader(self.cursor, ecma=ecma)
        self.depth = 0
        self.names: set[str] = set()  # names of groups
        self.flags: frozenset[str] = frozenset()
        self.lazy_at = -1  # place of the last lazy repeat

    def parse(self) -> Tree:
        cursor = self.cursor
        if len(cursor.pattern) > MAX_PATTERN_CHARS:
            length = f"{len(cursor.pattern):,}"
            raise ConstraintError(
                f"regex: {length} characters long, the limit is {MAX_PATTERN_CHARS:,}."
            )
        for i, char in enumerate("" if cursor.pattern.isascii() else cursor.pattern):
            if charsets.has_surrogates(char):
                cursor.raise_regex_error("a lone surrogate is no character", i)
        self.global_flags()
        tree = self.alternation()
        if not cursor.ended:
            cursor.raise_regex_error("unmatched ')'")
        return tree

    def global_flags(self) -> None:
        cursor = self.cursor
        while match := cursor.match(r"\(\?([a-zA-Z]+)\)"):
            self.set_flags(self.flags | set(match[1]), "", match.start(1))
            cursor.at = match.end()
            self.skip_comments()

    def set_flags(self, on: Set[str], off: str, at: int) -> None:
        cursor = self.cursor
        supported = "isu" if self.ecma else "isumxa"
        for flag in (*on, *off):
            if flag not in supported:
                cursor.raise_regex_error(
                    f"flag {flag!r} is not supported",
                    at,
                    hint=f"Supported: {', '.join(supported)}.",
                )
        if on & set(off) or set(off) & set("ua") or on >= set("ua"):
            cursor.raise_regex_error(
                "these flags contradict each other, or can't be turned off", at
            )
        self.flags = (self.flags - set(off) - (set("ua") if on & set("ua") else set())) | on

    def skip_comments(self) -> None:
        """Skips comments. In verbose patterns, also skips blanks."""
        cursor = self.cursor
        comment = "" if self.ecma else r"\(\?#[^)]*\)"
        if "x" in self.flags:
            comment += r"|[ \t\n\r\f\v]+|#[^\n]*"
        while comment and (match := cursor.match(comment)):
            cursor.at = match.end()

    def alternation(self) -> Tree:
        options = [self.concatenation()]
        while self.cursor.skip_over("|"):
            options.append(self.concatenation())
        return options[0] if len(options) == 1 else _alternation(*options)

    def concatenation(self) -> Tree:
        parts: list[Tree] = []
        self.skip_comments()
        while self.cursor.following not in ("", "|", ")"):
            parts.append(self.repetition())
            self.skip_comments()
        return parts[0] if len(parts) == 1 else _concat(*parts)

    def repetition(self) -> Tree:
        cursor = self.cursor
        start = cursor.at
        tree = self.atom()
        self.skip_comments()
        counts = self.quantifier()
        if counts is None:
            return tree
        grouped = cursor.pattern[start] == "(" and not (
            self.ecma and isinstance(tree, Behind | Lookahead)
        )
        if not grouped and isinstance(tree, Behind | Ahead | Alternation | Lookahead):
            cursor.raise_regex_error("nothing to repeat", start)
        repeated = Repeat(cast(Node, tree), *counts)
        possessive = not self.ecma and cursor.skip_over("+")
        if not possessive and cursor.skip_over(
            "?"
        ):  # lazy and greedy repeats match the same language
            self.lazy_at = cursor.at
        self.skip_comments()
        if self.quantifier() is not None:
            cursor.raise_regex_error("multiple repeat", cursor.at - 1)
        return self.make_atomic(repeated, start) if possessive else repeated

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
            cursor.raise_regex_error(
                "a repeat in a schema's pattern needs a minimum count", hint="Write {0,…}."
            )
        if (
            max(len(match[1]), len(match[3])) > 100
            or max(int(match[1] or 0), int(match[3] or 0)) > MAX_REPEAT
        ):
            cursor.raise_regex_error(f"repeat counts go up to {MAX_REPEAT:,}")
        least = int(match[1] or 0)
        most = (int(match[3]) if match[3] else None) if match[2] else least
        if most is not None and most < least:
            cursor.raise_regex_error("min repeat greater than max repeat")
        cursor.at = match.end()
        return least, most

    def atom(self) -> Tree:
        cursor = self.cursor
        start = cursor.at
        char = cursor.pattern[cursor.at]
        if char.isalnum():
            cursor.at += 1
            return CharSet(apply_case_flags(((ord(char), ord(char)),), self.flags))
        if char == "(":
            return self.group()
        if char == "[":
            return CharSet(self.characters.read_character_class(self.flags))
        if char == ".":
            cursor.at += 1
            line = ECMA["."] if self.ecma else charsets.python_class_characters(".")
            return CharSet(charsets.ALL if "s" in self.flags else line)
        if self.quantifier() is not None:
            cursor.raise_regex_error("nothing to repeat", start)
        for name in ("^", r"\A", "$", r"\Z", r"\z", r"\b", r"\B"):
            if cursor.skip_over(name):
                return self.assertion(name, start)
        if char == "\\":
            return CharSet(
                apply_case_flags(self.characters.escape(self.flags, in_class=False), self.flags)
            )
        cursor.at += 1
        return CharSet(apply_case_flags(((ord(char), ord(char)),), self.flags))

    def assertion(self, name: str, at: int) -> Tree:
        lines = "m" in self.flags
        match name:
            case "^":
                return Behind(at, _LINE_FEED if lines else (), True)
            case r"\A":
                return Behind(at, (), True)
            case "$" if not self.ecma:
                return Ahead(
                    at, optional(concat(CharSet(_LINE_FEED), ANY_TEXT if lines else EMPTY))
                )
            case r"\b" | r"\B":
                word = (
                    ECMA["w"]
                    if self.ecma or "a" in self.flags
                    else charsets.python_class_characters(r"\w")
                )
                return boundary(at, word, negated=name == r"\B")
        return Ahead(at, EMPTY)

    def group(self) -> Tree:
        cursor = self.cursor
        start = cursor.at
        flags = self.flags
        cursor.at += 1
        look = next((look for look in _LOOKS if cursor.pattern.startswith(look, start)), "")
        atomic = not look and not self.ecma and cursor.skip_over("?>")
        if look:
            cursor.at = start + len(look)
        elif not atomic and cursor.skip_over("?"):
            self.kind(start)
        tree = self.inside(start)
        self.flags = flags
        if atomic:
            return self.make_atomic(tree, start)
        if look in ("(?=", "(?!"):
            return Lookahead(start, tree, negated=look == "(?!")
        if look:
            behind = lookbehind(start, tree, negated=look == "(?<!", mixed=self.ecma)
            return behind or cursor.raise_regex_error(
                "lookbehind is only supported for one character", start
            )
        return tree

    def kind(self, start: int) -> None:
        """Parses what follows `(?`: a name, or flags for the group."""
        cursor = self.cursor
        if cursor.skip_over("P<") or cursor.skip_over("<"):
            end = cursor.pattern.find(">", cursor.at)
            name = cursor.pattern[cursor.at : end]
            if end < 0 or not name.isidentifier() or name in self.names:
                cursor.raise_regex_error("bad group name")
            if not self.ecma:  # in ECMA-262, alternatives may share a name
                self.names.add(name)
            cursor.at = end + 1
        elif not cursor.skip_over(":"):
            flags = cursor.match(r"([a-zA-Z]*)(?:-([a-zA-Z]+))?:")
            if not flags:
                kinds = {
                    ">": "an atomic group",
                    "(": "a conditional",
                    "P": "a backreference",
                    "#": "this comment",
                }
                cursor.raise_regex_error(
                    f"{kinds.get(cursor.following, 'this group')} is not supported", start
                )
            self.set_flags(set(flags[1]), flags[2] or "", cursor.at)
            cursor.at = flags.end()

    def inside(self, start: int) -> Tree:
        """Parses the rest of a group, including its closing parenthesis."""
        cursor = self.cursor
        self.depth += 1
        if self.depth > MAX_NESTING:
            cursor.raise_regex_error(f"groups nest deeper than {MAX_NESTING}")
        tree = self.alternation()
        self.depth -= 1
        if not cursor.skip_over(")"):
            cursor.raise_regex_error("missing )", start)
        return tree

    def make_atomic(self, tree: Tree, start: int) -> Tree:
        """Converts an atomic group to a tree. Such a group never backtracks: only its first match
        at a position counts.
        """
        if self.lazy_at > start:
            self.cursor.raise_regex_error("lazy repeats are not supported in atomic groups", start)
        if _is_prefix_free(tree):
            return tree
        parts: tuple[Tree, ...]
        match tree:
            case Repeat(inner, least, most) if _is_prefix_free(inner) or (
                least < 2 and _has_no_empty_match(inner)
            ):
                # never backtracks into a round, because the repeat may always end
                each = cast(Node, self.make_atomic(inner, start))
                ended = Lookahead(start, inner, negated=True)
                if most is None:
                    return _concat(Repeat(each, least, None), ended)
                return _alternation(
                    Repeat(each, most, most), _concat(Repeat(each, least, most - 1), ended)
                )
            case Alternation(options):
                parts = tuple(self.make_atomic(option, start) for option in options)
                earlier = [Lookahead(start, option, negated=True) for option in options]
                return _alternation(*(_concat(*earlier[:i], part) for i, part in enumerate(parts)))
            case Concat((*first, last)) if all(map(_is_prefix_free, first)):
                return _concat(*first, self.make_atomic(last, start))
        return self.cursor.raise_regex_error(
            "this atomic group, or possessive repeat, is not supported", start
        )


def _concat(*parts: Tree) -> Tree:
    return Concat(cast(tuple[Node, ...], parts))


def _alternation(*options: Tree) -> Tree:
    return Alternation(cast(tuple[Node, ...], options))


def _has_no_empty_match(tree: Tree) -> bool:
    """Returns True if a tree matches no empty text and contains no assertion."""
    return not has_assertion(tree) and not accepts(cast(Node, tree), "")


def _is_prefix_free(tree: Tree) -> bool:
    """Returns True if no text of a tree is a prefix of another. The tree then has at most one match
    at each position.
    """
    if isinstance(tree, CharSet):
        return True
    if has_assertion(tree):
        return False
    node = cast(Node, tree)
    return is_empty(intersection(node, concat(node, Repeat(ANY_CHAR, 1, None))))
