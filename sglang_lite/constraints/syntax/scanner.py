"""Scanner of grammar text, with error messages that show the place."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NoReturn

from sglang_lite.constraints.formal.nodes import Language, Node, literal, references
from sglang_lite.protocol import ConstraintError

MAX_GRAMMAR_CHARS = 500_000
MAX_NESTING = 100
_SIGNS = ("*", "+", "?", "{", "~")  # signs that begin a repetition
# Special tokens that every tokenizer contains as text or can spell.
_SPECIAL_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_compiled = lru_cache(256)(re.compile)  # faster than the cache of `re`


class Scanner:
    """Reads a grammar's text from left to right, with error messages that show the place.

    Args:
        kind: kind of grammar, for error messages.
        text: text of the grammar.
        blank: regular expression of the whitespace and comments between tokens.

    Attributes:
        at: current offset in the text.
        starts_line: whether a line has ended between the last token and the current offset.
    """

    def __init__(self, kind: str, text: str, blank: str) -> None:
        if len(text) > MAX_GRAMMAR_CHARS:
            raise ConstraintError(
                f"{kind}: {len(text):,} characters long, the limit is {MAX_GRAMMAR_CHARS:,}."
            )
        self.kind = kind
        self.text = text
        self.at = 0
        self.starts_line = True
        self._blank = re.compile(blank)
        self._depth = 0

    @property
    def has_more(self) -> bool:
        return self.at < len(self.text)

    def raise_grammar_error(self, problem: str, at: int | None = None, hint: str = "") -> NoReturn:
        at = self.at if at is None else at
        line = self.text.count("\n", 0, at) + 1
        begin = self.text.rfind("\n", 0, at) + 1
        shown = self.text[max(begin, at - 60) : at + 40].partition("\n")[0]
        caret = " " * (at - max(begin, at - 60)) + "^"
        raise ConstraintError(
            f"{self.kind}: line {line}: {problem}\n  {shown}\n  {caret}", hint=hint
        )

    def skip_blanks(self) -> None:
        """Skips whitespace and comments."""
        match = self._blank.match(self.text, self.at)
        if match:
            self.at = match.end()
            self.starts_line = "\n" in match[0]

    def peek(self, pattern: str) -> re.Match[str] | None:
        return _compiled(pattern).match(self.text, self.at)

    def match_token(self, pattern: str) -> re.Match[str] | None:
        """Matches a pattern at the current offset and skips the blanks after the match. Returns
        None, without moving, if the pattern does not match.
        """
        match = self.peek(pattern)
        if match:
            self.at = match.end()
            self.skip_blanks()
        return match

    def expect(self, pattern: str, what: str) -> re.Match[str]:
        return self.match_token(pattern) or self.raise_grammar_error(f"{what} expected")

    def enter_group(self) -> None:
        self._depth += 1
        if self._depth > MAX_NESTING:
            self.raise_grammar_error(f"groups nest deeper than {MAX_NESTING}")

    def leave_group(self) -> None:
        self._depth -= 1

    def counts(self) -> tuple[int, int | None] | None:
        """Reads a repetition sign and returns its (least, most) counts, or None if no repetition
        sign follows.
        """
        if not self.text.startswith(_SIGNS, self.at):
            return None
        for sign, counts in ((r"\*", (0, None)), (r"\+", (1, None)), (r"\?", (0, 1))):
            if self.match_token(sign):
                return counts
        start = self.at
        match = self.match_token(r"\{\s*(\d*)\s*(,?)\s*(\d*)\s*\}") or self.match_token(
            r"~\s*(\d+)(?:\s*(\.\.)\s*(\d*))?"
        )
        if not match:
            return None
        if max(len(match[1] or ""), len(match[3] or "")) > 100:
            self.raise_grammar_error(
                "a repetition is {least,most}, with counts up to 10,000", start
            )
        least = int(match[1] or 0)
        most = (int(match[3]) if match[3] else None) if match[2] else least
        if (
            not (match[1] or match[3])
            or (most is not None and most < least)
            or max(least, most or 0) > 10_000
        ):
            self.raise_grammar_error(
                "a repetition is {least,most}, with counts up to 10,000", start
            )
        return least, most


def read_special_token(scanner: Scanner) -> Node:
    """Reads a special token that grammars may use as text, such as `<think>`, and returns its
    literal node.

    Raises:
        ConstraintError: the special token is not one of the supported ones.
    """
    found = scanner.match_token(r"<\[?[^<>\s]*>")
    if found is None or found[0] not in _SPECIAL_TOKENS:
        scanner.raise_grammar_error(
            "the only supported special tokens are " + ", ".join(_SPECIAL_TOKENS),
            None if found is None else found.start(),
            hint="Leave out tokens that end the text: the model writes them itself. Quote other tokens as text.",
        )
    return literal(found[0])


def check_references(language: Language, scanner: Scanner, uses: dict[str, int]) -> Language:
    """Checks that every rule used in a language is defined, and returns the language unchanged.

    Args:
        language: language to check.
        scanner: scanner that raises the error.
        uses: offset of the first use of each name.
    """
    for name in dict.fromkeys(
        name for body in language.rules.values() for name in sorted(references(body))
    ):
        if name not in language.rules:
            scanner.raise_grammar_error(f"there is no rule {name!r}", uses.get(name, 0))
    return language
