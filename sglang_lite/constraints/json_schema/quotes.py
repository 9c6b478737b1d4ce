"""Quotes: strings that are spans of given documents (the keyword `x-quote`, and `sgl.quote` for
Python types).

A document is cut into pieces: words and single characters, or only characters. A quote
consists of successive pieces. It begins with a non-blank character, so it is never empty.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import regex

from sglang_lite.constraints.formal import charsets
from sglang_lite.constraints.formal.automaton import accepts
from sglang_lite.constraints.formal.nodes import (
    ANY_TEXT,
    EMPTY,
    Alternation,
    CharSet,
    Complement,
    Intersection,
    Node,
    Repeat,
    Substring,
    alternation,
    concat,
    optional,
    repeat,
)
from sglang_lite.constraints.memo import memoize
from sglang_lite.protocol import ConstraintError
from sglang_lite.protocol.anything import Json
from sglang_lite.protocol.parameter import check_known

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler

# maximum of pieces times `min_words`; an engine counts words from each piece on
MAX_COUNTED = 800_000
MAX_SOURCE_CHARS = 400_000  # characters of the documents of one quote
KEYWORD = "x-quote"
SOURCES = "x-sources"  # keyword of the root schema: documents shared by several quotes

_MEMBERS = {"sources", "by", "min_words"}
# Combining accents belong to words. Emojis contain variation selectors and zero-width joiners.
_LETTER = r"[[\w\p{M}]--[\p{Variation_Selector}\u200D]]"
_WORD = regex.compile(rf"(?V1){_LETTER}+")
# A two-character line end and a multi-character emoji are each one piece.
_PIECE = regex.compile(rf"(?V1){_LETTER}[{_LETTER}\u200D]*|\X")
_OTHER_LETTER = re.compile(r"[^\W\x00-\x7F]")
# Translations of ASCII to 1 for letters, carriage returns, line feeds, and all characters, and to 0
# for others.
_KINDS = [
    bytes(chr(code) in kind for code in range(256))
    for kind in (f"{string.ascii_letters}{string.digits}_", "\r", "\n", [*map(chr, range(256))])
]
# a character that is not joined to others
_ALONE = regex.compile(r"\p{Grapheme_Cluster_Break=Other}")
BLANK = CharSet(
    charsets.singles(
        "".join(
            map(
                chr,
                (
                    *range(9, 14),
                    *range(28, 33),
                    0x85,
                    0xA0,
                    0x1680,
                    *range(0x2000, 0x200B),
                    0x2028,
                    0x2029,
                    0x202F,
                    0x205F,
                    0x3000,
                ),
            )
        )
    )
)


class QuoteLocation(NamedTuple):
    """Location of a quote: the number of its document, and its position there, from `start` to
    before `end`.
    """

    source: int
    start: int
    end: int


@dataclass(frozen=True, repr=False)
class Quote:
    """Requirement that a string is a span of one of the given documents. See `sgl.quote`.

    Raises:
        ConstraintError: a document is empty, has too few words, or is too long.
    """

    sources: tuple[str, ...]
    by: Literal["words", "chars"] = "words"
    min_words: int = 0

    def __post_init__(self) -> None:
        _check_quote_settings(self)

    @property
    def size(self) -> int:
        """Approximate memory in bytes."""
        return self.node.size

    @cached_property
    def node(self) -> Node:
        """Language of the quotes."""
        sources = [Substring(text, _mark_piece_borders(text, self.by)) for text in self.sources]
        count = sum(each.cuts.count(1) - 1 for each in sources)
        if self.min_words * count > MAX_COUNTED:
            raise ConstraintError(
                f"quote: min_words={self.min_words} of documents of {count:,} words and other characters takes too "
                f"much work: at most {MAX_COUNTED // count}.",
                hint="Quote from the passages that matter, or set a smaller min_words.",
            )
        # An engine can exclude these texts after a few characters, and after that they cost
        # nothing.
        excluded = [EMPTY, concat(BLANK, ANY_TEXT)]
        if self.min_words:
            letters = charsets.singles(
                "".join(c for c in set("".join(self.sources)) if _WORD.fullmatch(c))
            )
            word = Repeat(CharSet(letters), 1, None)
            others = Repeat(CharSet(charsets.complement(letters)), 1, None)
            fewer = [repeat(concat(word, others), 0, self.min_words - 1)]
            if self.min_words > 1:
                fewer.append(concat(repeat(concat(word, others), 0, self.min_words - 2), word))
            excluded.append(concat(optional(others), alternation(fewer)))
        return Intersection((alternation(sources), Complement(alternation(excluded))))

    def validate_quote(self, text: str) -> str:
        """Checks that a text is a quote and returns it.

        Raises:
            ValueError: the text is no quote.
        """
        if not accepts(self.node, text):
            raise ValueError(f"{text!r:.200} is not {self}")
        return text

    def __repr__(self) -> str:
        return f"quote({', '.join(f'{text:.20}…' if len(text) > 20 else text for text in self.sources[:3])})"

    def __str__(self) -> str:
        source = (
            "the document" if len(self.sources) == 1 else f"one of {len(self.sources)} documents"
        )
        words = f" of at least {self.min_words} words" if self.min_words else ""
        return f"a quote{words} from {source}, character by character"

    # ------------------------------------------------------------- pydantic's interface of metadata

    # pydantic's dict
    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self.validate_quote, handler(source))

    def __get_pydantic_json_schema__(
        self,
        schema: Any,  # pydantic's dict
        handler: GetJsonSchemaHandler,
    ) -> dict[str, Json]:
        keyword = {"sources": list(self.sources), "by": self.by, "min_words": self.min_words}
        return {**handler(schema), KEYWORD: keyword}


def quote(*documents: str, by: Literal["words", "chars"] = "words", min_words: int = 0) -> Quote:
    """Returns metadata for a `str`, as in `Annotated[str, sgl.quote(document)]`: its values are
    spans of the documents.

    A value matches a document character by character. It begins with a non-blank character,
    so it is never empty. `s.get_meta_info(name)["quotes"]` has the location of each quote in
    a generated value.

    Args:
        documents: texts to quote from, up to 400,000 characters together.
        by: whether a quote begins and ends at boundaries of words and of other characters
            ("words"), or anywhere ("chars").
        min_words: minimum number of words in a quote.

    Raises:
        ConstraintError: there is no document, one is blank, they are too long, or none has
            `min_words` words.
    """
    return Quote(documents, by, min_words)


def parse_quote(value: Json, at: Callable[[str], Json]) -> Quote:
    """Returns the quote that a value of the keyword `x-quote` describes.

    Args:
        value: a document, or an object with "sources", "by" and "min_words". A source is a
            text or a reference to one.
        at: returns the value at a JSON Pointer into the schema; raises KeyError if there is
            none.

    Raises:
        ConstraintError: the value does not describe a quote.
    """
    members = {"sources": [value]} if isinstance(value, str) else value
    known = isinstance(members, Mapping) and members.keys() <= _MEMBERS
    if not known or not isinstance(members.get("sources"), list):
        raise ConstraintError(
            f"{KEYWORD}: {value!r:.60} is no document and no object with sources, by and min_words."
        )
    sources = tuple(_source(each, at) for each in members["sources"])
    return _cached_quote(sources, members.get("by", "words"), members.get("min_words", 0))


def describe_quote(keyword: Json) -> str:
    """Describes a value of the keyword `x-quote` to models, without the documents."""
    least = keyword.get("min_words", 0) if isinstance(keyword, Mapping) else 0
    return f"{f'at least {least} words, ' if least else ''}copied from the text, character by character"


def without_documents(schema: Json) -> Json:
    """Returns the schema without the documents, for a model that has seen them elsewhere.
    Descriptions say which strings are quotes.
    """
    if isinstance(schema, list):
        return [without_documents(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        name: without_documents(each)
        for name, each in schema.items()
        if name not in (KEYWORD, SOURCES)
    }
    if KEYWORD in schema:
        words = describe_quote(schema[KEYWORD])
        found["description"] = (
            f"{found['description']} ({words})" if found.get("description") else words
        )
    return found


def locate_quote(strings: Node, text: str) -> QuoteLocation | None:
    """Returns the first place where a text occurs in the documents, or None if the text is not a
    quote.

    Args:
        strings: language that the text is in.
        text: text that may be a quote.
    """
    match strings:
        case Substring():
            return _locate_in_sources((strings,), text)
        case Alternation(options) if all(isinstance(option, Substring) for option in options):
            return _locate_in_sources(options, text)
        case Alternation(options):
            found = (locate_quote(option, text) for option in options if accepts(option, text))
        case Intersection(parts):
            found = (locate_quote(part, text) for part in parts)
        case _:
            return None
    return next((each for each in found if each is not None), None)


def _locate_in_sources(sources: Iterable[Any], text: str) -> QuoteLocation | None:
    """Returns the first place where a text occurs in some Substring nodes, or None if no node has
    the text.
    """
    starts = ((number, source.find(text)) for number, source in enumerate(sources))
    return next(
        (QuoteLocation(number, at, at + len(text)) for number, at in starts if at is not None), None
    )


def _source(value: Any, at: Callable[[str], Json]) -> str:
    if not isinstance(value, Mapping):
        found = value
    else:
        reference = str(value.get("$ref"))
        try:
            found = at(reference.removeprefix("#"))
        except KeyError:
            raise ConstraintError(f"{KEYWORD}: the schema has no {reference!r:.60}.") from None
    if not isinstance(found, str):
        raise ConstraintError(f"{KEYWORD}: the source {found!r:.60} is no text.")
    return found


@memoize
def _cached_quote(sources: tuple[str, ...], by: Any, min_words: Any) -> Quote:
    return Quote(sources, by, min_words)


def _mark_piece_borders(text: str, by: Literal["words", "chars"]) -> bytes:
    """Returns one byte for each index of a document, and one for its end: 1 if a piece begins or
    ends there, else 0.
    """
    if by == "words" and all(map(_has_simple_word_border, set(text))):
        return _mark_word_borders(text)
    cuts = bytearray(b"\1") * (len(text) + 1)
    if by == "words":
        for found in _PIECE.finditer(text):
            start, end = found.span()
            cuts[start + 1 : end] = bytes(end - start - 1)
    return bytes(cuts)


def _mark_word_borders(text: str) -> bytes:
    """Computes `_mark_piece_borders` with "words" for a text of simple characters
    (`_has_simple_word_border`). Takes a tenth of the time, because it processes all characters
    together as big integers.
    """
    data = _OTHER_LETTER.sub("a", text).encode("ascii", "replace")
    letters, returns, feeds, ones = (int.from_bytes(data.translate(kind), "big") for kind in _KINDS)
    joined = (letters >> 8 & letters) | (returns >> 8 & feeds)
    return (ones ^ joined).to_bytes(len(data), "big") + b"\1"


@lru_cache(maxsize=4096)
def _has_simple_word_border(char: str) -> bool:
    """Returns True if a character has simple word borders. A piece then joins it with its
    neighbours only in a line end, or because `re` considers all of them letters.
    """
    return char.isascii() or (
        _ALONE.match(char) is not None and (_WORD.match(char) is not None) == char.isalnum()
    )


def _check_quote_settings(quote: Quote) -> None:
    if quote.by not in ("words", "chars"):
        raise ConstraintError(
            f'quote: `by` is {quote.by!r:.60}, which is neither "words" nor "chars".'
        )
    if (
        isinstance(quote.min_words, bool)
        or not isinstance(quote.min_words, int)
        or quote.min_words < 0
    ):
        raise ConstraintError(
            f"quote: `min_words` must be a whole number of at least 0, not {quote.min_words!r:.60}."
        )
    if not quote.sources:
        raise ConstraintError("quote: there is no document to quote from.")
    check_known("a document to quote from", *quote.sources)
    for number, text in enumerate(quote.sources):
        if not isinstance(text, str):
            raise ConstraintError(
                f"quote: document {number} is {text!r:.60}, which is not a string."
            )
        if not text or text.isspace():
            raise ConstraintError(
                f"quote: document {number} is {'blank' if text else 'empty'}, so nothing can be quoted from it."
            )
        if not text.isascii() and charsets.has_surrogates(text):
            raise ConstraintError(
                f"quote: document {number} has a lone surrogate in it, which is no character."
            )
        if (first := quote.sources.index(text)) != number:
            raise ConstraintError(f"quote: document {number} repeats document {first}.")
    if (length := sum(map(len, quote.sources))) > MAX_SOURCE_CHARS:
        raise ConstraintError(
            f"quote: the documents have {length:,} characters, the limit is {MAX_SOURCE_CHARS:,}.",
            hint="Quote from the passages that matter.",
        )
    if quote.min_words:
        words = max(len(_WORD.findall(text)) for text in quote.sources)
        if words < quote.min_words:
            raise ConstraintError(
                f"quote: no document has {quote.min_words:,} words: the longest has {words:,}."
            )
