"""JSON grammars whose masks enforce rules that no grammar can express: unique names, and the
schema's mask rules.

A grammar can't express that names not listed in the schema come only once in an object, nor other
rules that a schema leaves to the masks (constraints/json_schema/mask_rules.py).

The text is followed as JSON (json_text.py). Tokens that would complete a name that its object
already has are removed from the mask, and if names may run out, so are tokens that begin such a
name. If no token would be left (at a position without a rule), these tokens stay in the mask, and
the check of the finished value rejects the text. If all positions have rules, some token is always
left.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from copy import copy

from sglang_lite.constraints.formal import nodes
from sglang_lite.constraints.json_schema import mask_rules
from sglang_lite.constraints.json_schema.document import REFERENCES, SchemaLocation
from sglang_lite.constraints.json_schema.mask_rules import RulePosition
from sglang_lite.constraints.json_schema.normal_form import normalise, parse_schema_document
from sglang_lite.protocol import Constraint, JsonSchema
from sglang_lite.runtime.structured_output.base import (
    CompiledGrammar,
    DelegatingMatcher,
    Endings,
    Mask,
    Matcher,
    TextLengths,
)
from sglang_lite.runtime.structured_output.ending_tokens import EndingTokens
from sglang_lite.runtime.structured_output.json_text import JsonText, RulePositions
from sglang_lite.runtime.structured_output.limited_endings import RuledEndings
from sglang_lite.runtime.structured_output.own_classes import unpickle_trusted
from sglang_lite.runtime.structured_output.unique_names import UniqueNames
from sglang_lite.runtime.structured_output.vocabulary import (
    filter_allowed_tokens,
    list_allowed_tokens,
    without_tokens,
)

_SCALARS = frozenset({"null", "boolean", "number", "integer", "string"})
_ELSEWHERE = ("enum", "const", *REFERENCES, "anyOf", "oneOf", "allOf")


def names_are_open(constraint: Constraint) -> bool:
    """Returns True if the constraint is a JSON schema in which an object may have names that the
    schema does not list.
    """
    if not isinstance(constraint, JsonSchema):
        return False
    document = parse_schema_document(constraint.schema)
    return any(
        _allows_unlisted_parts(document.schema(location), location)
        for location in document.locations
    )


def _allows_unlisted_parts(schema: object, location: SchemaLocation) -> bool:
    if not isinstance(schema, dict):
        return schema is True and not location.pointer.endswith(("/additionalProperties", "/items"))
    types = schema.get("type", ())
    types = {types} if isinstance(types, str) else set(types)
    if types and not types - _SCALARS:
        return False
    if "object" in types or "properties" in schema:
        return schema.get("additionalProperties") is not False or "patternProperties" in schema
    if "array" in types:
        return not ("items" in schema and types == {"array"})
    return not any(keyword in schema for keyword in _ELSEWHERE)


def extract_mask_rules(constraint: Constraint) -> tuple[RulePosition, ...] | None:
    """Returns the positions at which masks enforce rules under a constraint, or None if they
    enforce none.

    The result is empty if only names have to be unique. Takes long for a large schema.
    """
    if not isinstance(constraint, JsonSchema):
        return None
    positions = normalise(constraint).mask_rules
    return positions if positions or names_are_open(constraint) else None


def pack_mask_rules(positions: tuple[RulePosition, ...] | None) -> bytes:
    """Serialises the result of `extract_mask_rules` for another process or the disk."""
    return b"" if positions is None else pickle.dumps(positions, protocol=5)


def unpack_mask_rules(data: bytes) -> tuple[RulePosition, ...] | None:
    """Restores the result of `extract_mask_rules` from serialised bytes.

    Raises:
        pickle.UnpicklingError: the bytes contain anything other than positions.
    """
    found: tuple[RulePosition, ...] | None = (
        unpickle_trusted(data, nodes, mask_rules) if data else None
    )
    return found


def with_mask_rules(
    grammar: CompiledGrammar, tokens: EndingTokens, positions: tuple[RulePosition, ...] | None
) -> CompiledGrammar:
    """Returns a grammar whose masks also enforce the rules, or the grammar itself if there are
    none.

    Args:
        grammar: grammar of JSON.
        tokens: tokens of the grammar's masks.
        positions: result of `extract_mask_rules` for the constraint of the grammar.
    """
    if positions is None:
        return grammar
    return RuledGrammar(
        grammar, tokens, JsonText(RulePositions(positions)) if positions else UniqueNames()
    )


class RuledGrammar:
    """Grammar of JSON with unique names in each object and enforced mask rules.

    Args:
        grammar: grammar of JSON.
        tokens: tokens of the model.
        text: tracker of a text, at its start.
    """

    def __init__(
        self, grammar: CompiledGrammar, tokens: EndingTokens, text: JsonText | UniqueNames
    ) -> None:
        self._grammar = grammar
        self._tokens = tokens
        self._text = text

    @property
    def size(self) -> int:
        return self._grammar.size

    @property
    def sources(self) -> Sequence[str]:
        return self._grammar.sources

    def matcher(self) -> RuledMatcher:
        return RuledMatcher(self._grammar.matcher(), self._tokens, self._text)

    def as_combinable(self) -> RuledGrammar:
        return RuledGrammar(self._grammar.as_combinable(), self._tokens, self._text)

    def lengths(self, written: str = "") -> TextLengths:
        return self._grammar.lengths(written)

    def endings(self) -> Endings | None:
        found = self._grammar.endings()
        return None if found is None else RuledEndings(found, (found.start, self._text))


class RuledMatcher(DelegatingMatcher):
    """Matcher whose masks exclude the tokens that would break a rule, such as repeating a name."""

    def __init__(self, inner: Matcher, tokens: EndingTokens, text: JsonText | UniqueNames) -> None:
        super().__init__(inner)
        self._tokens = tokens
        self._text = text.copy()
        # mask at this position: the inner matcher's mask without the tokens that break a rule
        self._mask: Mask | None = None
        # names that have come in the open objects
        self._used: Sequence[frozenset[bytes]] | None = None
        self._writing: list[int] = []  # tokens that may write one of these names
        # whether a token may break a rule at this position, or must be tracked
        self._watches = True
        # whether no token can break a rule before the next JSON punctuation, because no used name
        # begins like the current one
        self._settled = False
        self._error = ""

    def cached_mask(self) -> Mask | None:
        if self._mask is None and (mask := self._inner.cached_mask()) is not None:
            self._mask = mask
            if self._watches and not self._settled and (breaking := self._find_rule_breakers(mask)):
                left = without_tokens(mask, breaking)
                self._mask = left if self._text.is_strict or left.any() else mask
        return self._mask

    def _find_rule_breakers(self, mask: Mask) -> list[int]:
        """Returns the tokens of a mask that repeat a name or an item, or end an object too early."""
        text = self._text
        tokens = self._tokens
        if self._used is not (used := text.used_names):  # changes only at some places
            self._used = used
            self._writing = tokens.tokens_repeating_names(used)
        self._watches = text.is_restricted or bool(self._writing)
        if not self._watches:
            return []
        forbidden = text.forbidden_continuations()
        tried = self._tokens_to_try(mask)
        if not forbidden and not tried:
            self._settled = text.is_naming
            return []
        found = [
            each
            for each in filter_allowed_tokens(mask, tried)
            if not text.copy().track_text(tokens.token_bytes[each])
        ]
        others: list[bytes] = []
        for ending in forbidden:
            if ending.endswith(b'"'):
                found += tokens.tokens_starting_with(ending)
            else:
                others.append(ending)
        if others:
            found += (
                token
                for token in list_allowed_tokens(mask)
                if tokens.text_of(token).startswith(tuple(others))
            )
        return found

    def _tokens_to_try(self, mask: Mask) -> Sequence[int]:
        """Returns the tokens that may break a rule and must be tested one by one. Tokens that begin
        with a forbidden continuation may be missing. Some of the tokens may not be allowed by the
        mask.
        """
        text = self._text
        if text.has_rules or text.escaped:
            return self._tokens.tokens_that_may_end(mask, text)
        begun = text.name_so_far
        if begun and (ending := self._tokens.tokens_ending_and_repeating(begun)):
            return [*self._writing, *ending]
        return self._writing

    def copy(self) -> RuledMatcher | None:
        inner = self._inner.copy()
        if inner is None:
            return None
        copied = copy(self)
        vars(copied).update(_inner=inner, _text=self._text.copy())
        return copied

    def accept(self, token: int) -> bool:
        self._mask = None
        if not self._inner.accept(token):
            return False
        if self._tokens.unmarked[token : token + 1] == b"\0":
            self._watches = True
            self._settled = False
        elif not self._watches:
            return True
        text = self._tokens.text_of(token)
        return not text or self._text.track_text(text) or self._record_violation(obeys=False)

    def accept_text(self, text: bytes) -> bool:
        self._mask = None
        self._watches = True
        self._settled = False
        obeys = self._text.track_text(text)
        return self._inner.accept_text(text) and self._record_violation(obeys=obeys)

    def _record_violation(self, *, obeys: bool) -> bool:
        if self._text.is_strict and not obeys:
            self._error = "a name or an item comes again, or an object ends before all names came that have to."
            return False
        return True

    def find_forced_tokens(self) -> list[int]:
        forced = self._inner.find_forced_tokens()
        if forced:
            text = self._text.copy()
            obeys = [text.track_text(self._tokens.token_bytes[token]) for token in forced]
            return forced if all(obeys) else forced[: obeys.index(False)]
        return forced

    @property
    def error(self) -> str:
        return self._error or self._inner.error
