"""Tokens that may end a name, an item or an object in JSON text."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from functools import cache
from itertools import combinations

from sglang_lite.runtime.structured_output.base import Mask
from sglang_lite.runtime.structured_output.json_text import JsonText
from sglang_lite.runtime.structured_output.unique_names import MARK, UniqueNames
from sglang_lite.runtime.structured_output.vocabulary import build_token_mask, list_allowed_tokens

_QUOTE = ord('"')
_BLANKS = b" \t\r\n"
_ENDS = frozenset(b",]}" + _BLANKS)  # bytes outside strings that end names, items and objects


class EndingTokens:
    """Index of the tokens that may end a name, an item or an object.

    Args:
        token_bytes: bytes of each token.
        special: tokens that have no text.

    Attributes:
        unmarked: for each token, 1 if it has none of the characters that begin or end names and
            containers; else 0.
    """

    def __init__(self, token_bytes: Sequence[bytes], special: Container[int]) -> None:
        self.token_bytes = token_bytes
        self._texts = [b"" if token in special else text for token, text in enumerate(token_bytes)]
        self.unmarked = bytes(MARK.search(text) is None for text in self._texts)
        spelled = [(text, token) for token, text in enumerate(token_bytes) if token not in special]
        quoting = [(text, token) for text, token in spelled if _QUOTE in text]
        self._beginning: dict[bytes, list[int]] = {}
        self._writing: dict[bytes, list[int]] = {}  # tokens that may write this name
        # tokens that may end a name and write one again
        self._ending_and_writing: dict[bytes, list[int]] = {}
        self._writing_twice: list[int] = []  # tokens that may write a name twice
        for text, token in quoting:
            quotes = [at for at, byte in enumerate(text) if byte == _QUOTE]
            for at in quotes:
                self._beginning.setdefault(text[: at + 1], []).append(token)
            names = [
                (start, text[start : end + 1]) for start, end in _find_name_spans(text, quotes)
            ]
            for name in {name for _, name in names}:
                self._writing.setdefault(name, []).append(token)
            for begun in {
                name[:end]
                for start, name in names
                if start > quotes[0]
                for end in range(len(name) + 1)
            }:
                self._ending_and_writing.setdefault(begun, []).append(token)
            if len({name for _, name in names}) < len(names):
                self._writing_twice.append(token)
        size = len(token_bytes)
        self._whole = build_token_mask(
            (token for text, token in quoting if text.count(b'"') > 1), size
        )
        ending = (
            token for text, token in quoting if not _ENDS.isdisjoint(text[text.index(_QUOTE) :])
        )
        self._in_string = self._whole | build_token_mask(ending, size)
        self._outside = self._whole | build_token_mask(
            (token for text, token in spelled if not _ENDS.isdisjoint(text)), size
        )

    def text_of(self, token: int) -> bytes:
        """Returns the text of a token; empty if it has none."""
        return self._texts[token] if token < len(self._texts) else b""

    def tokens_starting_with(self, text: bytes) -> Sequence[int]:
        """Returns the tokens that begin with `text`, which ends with a quotation mark."""
        return self._beginning.get(text, ())

    def tokens_repeating_names(self, used: Iterable[frozenset[bytes]]) -> list[int]:
        """Returns the tokens that may write the whole of a used name, or that may write any name
        twice. `used` has the names in each open object.
        """
        found = list(self._writing_twice)
        for names in used:
            found += (
                token for name in self._writing.keys() & names for token in self._writing[name]
            )
        return found

    def tokens_ending_and_repeating(self, begun: bytes) -> Sequence[int]:
        """Returns the tokens that may end the name being written and then write it again."""
        return self._ending_and_writing.get(begun, ())

    def tokens_that_may_end(self, mask: Mask, text: JsonText | UniqueNames) -> list[int]:
        """Returns the tokens of a mask that may end a name, an item or an object. If the text has
        no rules, returns only tokens with at least two quotation marks.
        """
        group = (
            self._whole if not text.has_rules else self._in_string if text.quoted else self._outside
        )
        return list_allowed_tokens(mask[: len(group)] & group[: len(mask)])


def _find_name_spans(text: bytes, quotes: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the indexes of the quotation marks around each possible whole name in a text."""
    return [
        (start, end)
        for start, end in combinations(quotes, 2)
        if text[:start].rstrip(_BLANKS)[-1:] in (b"", b"{", b",")
        and text[end + 1 :].lstrip(_BLANKS)[:1] in (b"", b":")
    ]


@cache
def byte_token_index() -> EndingTokens:
    """Returns the index for a vocabulary with one token per byte."""
    return EndingTokens([bytes([byte]) for byte in range(256)], ())
