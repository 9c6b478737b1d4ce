"""JSON whose objects have each name once, which no grammar can say of names that are not listed.

The text is followed as JSON. Where the quotation mark that ends a name would make it one that its object has already,
tokens with it are taken out of the mask. If no token is left then (a pattern's names have run out), they stay, and the
check of the finished value refuses it.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Container, Hashable, Sequence

from sglang_lite.constraints.json_schema.document import Document, Place
from sglang_lite.protocol import Constraint, JsonSchema
from sglang_lite.runtime.structured_output.base import CompiledGrammar, Mask, MaskMaker, Matcher, NumberSoFar
from sglang_lite.runtime.structured_output.vocabulary import mask_of

_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_SCALARS = frozenset({"null", "boolean", "number", "integer", "string"})
_ELSEWHERE = ("enum", "const", "$ref", "$dynamicRef", "anyOf", "oneOf", "allOf")


def names_are_open(constraint: Constraint) -> bool:
    """The constraint is JSON in which an object may have names that the schema does not list."""
    if not isinstance(constraint, JsonSchema):
        return False
    document = Document(json.loads(constraint.schema))
    return any(_is_open(document.schema(place), place) for place in document.places)


def _is_open(schema: object, place: Place) -> bool:
    if not isinstance(schema, dict):
        return schema is True and not place.pointer.endswith(("/additionalProperties", "/items"))
    types = schema.get("type", ())
    types = {types} if isinstance(types, str) else set(types)
    if types and not types - _SCALARS:
        return False
    if "object" in types or "properties" in schema:
        return schema.get("additionalProperties") is not False or "patternProperties" in schema
    if "array" in types:
        return not ("items" in schema and types == {"array"})
    return not any(keyword in schema for keyword in _ELSEWHERE)


class QuotingTokens:
    """The tokens with a quotation mark.

    Args:
        token_bytes: what each token says.
        special: tokens that say nothing.
    """

    def __init__(self, token_bytes: Sequence[bytes], special: Container[int]) -> None:
        self.token_bytes, self.special = token_bytes, special
        quoting = [(text, token) for token, text in enumerate(token_bytes) if _QUOTE in text and token not in special]
        self._sorted = sorted(quoting)
        self.whole = [token for text, token in quoting if text.count(b'"') > 1]  # that may have a name from end to end

    def beginning(self, text: bytes) -> list[int]:
        """The tokens that begin with a text."""
        start = bisect.bisect_left(self._sorted, (text, -1))
        found = []
        for each, token in self._sorted[start:]:
            if not each.startswith(text):
                break
            found.append(token)
        return found


class _Text:
    """A JSON text that is being written: the objects it is in, and the names that they have."""

    def __init__(self) -> None:
        self._open: list[set[bytes] | None] = []  # the names of each object, None for an array
        self._string: bytearray | None = None  # the one it is in
        self._escaped = self._is_name = self._name_next = False

    def copy(self) -> _Text:
        other = _Text()
        other._open = [None if names is None else set(names) for names in self._open]
        other._string = None if self._string is None else bytearray(self._string)
        other._escaped, other._is_name, other._name_next = self._escaped, self._is_name, self._name_next
        return other

    def write(self, text: bytes) -> bool:
        """Moves past a text. False: with it a name is written again."""
        distinct = True
        for byte in text:
            if self._string is not None:
                if byte != _QUOTE or self._escaped:
                    self._escaped = byte == _BACKSLASH and not self._escaped
                    self._string.append(byte)
                    continue
                if self._is_name and self._open and (names := self._open[-1]) is not None:
                    distinct = distinct and bytes(self._string) not in names
                    names.add(bytes(self._string))
                self._string, self._name_next = None, False
            elif byte == _QUOTE:
                self._string, self._is_name = bytearray(), self._name_next
            elif byte in b"{[":
                self._open.append(set() if byte == ord("{") else None)
                self._name_next = byte == ord("{")
            elif byte in b"}]":
                del self._open[-1:]
            elif byte == ord(","):
                self._name_next = bool(self._open) and self._open[-1] is not None
        return distinct

    def endings(self) -> list[bytes]:
        """Texts that would complete the name being written to one that the object already has."""
        names = self._open[-1] if self._open else None
        if self._string is None or not self._is_name or self._escaped or not names:
            return []
        begun = bytes(self._string)
        return [name[len(begun) :] + b'"' for name in names if name.startswith(begun)]

    @property
    def has_names(self) -> bool:
        return any(self._open)


class DistinctGrammar:
    """A grammar of JSON whose objects have each name once.

    Args:
        grammar: of JSON.
        tokens: of the model.
    """

    def __init__(self, grammar: CompiledGrammar, tokens: QuotingTokens) -> None:
        self._grammar, self._tokens = grammar, tokens
        self.size = grammar.size

    def matcher(self) -> DistinctMatcher:
        return DistinctMatcher(self._grammar.matcher(), self._tokens)

    def combinable(self) -> DistinctGrammar:
        return DistinctGrammar(self._grammar.combinable(), self._tokens)


class DistinctMatcher:
    """The inner matcher's masks without the tokens that write a name again."""

    def __init__(self, inner: Matcher, tokens: QuotingTokens) -> None:
        self._inner, self._tokens = inner, tokens
        self._text = _Text()

    @property
    def engine(self) -> MaskMaker:
        return self._inner.engine

    @property
    def parts(self) -> Sequence[Matcher]:
        return self._inner.parts

    @property
    def line(self) -> Hashable:
        return self._inner.line

    @property
    def place(self) -> Hashable:
        return id(self)

    @property
    def number(self) -> NumberSoFar | None:
        return self._inner.number

    def known(self) -> Mask | None:
        mask = self._inner.known()
        again = [] if mask is None else self._again(mask)
        if mask is None or not again:
            return mask
        kept: Mask = mask & ~mask_of(again, 32 * len(mask))
        return kept if kept.any() else mask

    def _again(self, mask: Mask) -> list[int]:
        """The tokens of a mask that write a name again."""
        if not self._text.has_names:
            return []
        endings = self._text.endings()
        found = [token for ending in endings for token in self._tokens.beginning(ending)]
        allowed = (token for token in self._tokens.whole if mask[token >> 5] >> (token & 31) & 1)
        found += (t for t in allowed if not self._text.copy().write(self._tokens.token_bytes[t]))
        return found

    def learn(self, mask: Mask) -> None:
        self._inner.learn(mask)

    def accept(self, token: int) -> bool:
        if not self._inner.accept(token):
            return False
        if token not in self._tokens.special and token < len(self._tokens.token_bytes):
            self._text.write(self._tokens.token_bytes[token])
        return True

    def advance(self, text: bytes) -> bool:
        self._text.write(text)
        return self._inner.advance(text)

    def forced(self) -> list[int]:
        forced = self._inner.forced()
        if forced and self._text.has_names:
            ahead = self._text.copy()
            distinct = [ahead.write(self._tokens.token_bytes[token]) for token in forced]
            return forced if all(distinct) else forced[: distinct.index(False)]
        return forced

    @property
    def complete(self) -> bool:
        return self._inner.complete

    @property
    def finished(self) -> bool:
        return self._inner.finished

    @property
    def error(self) -> str:
        return self._inner.error
