"""Grammars of JSON with quotes from long documents.

llguidance follows the text with a grammar in which any string may stand for a quote, and this
module narrows its masks. Inside a quote, only those tokens remain that continue it in a document,
at one of the places from which the quote so far may be copied. The states of the language
(language_states.py) record these places.
"""

from __future__ import annotations

import weakref
from array import array
from bisect import bisect_right
from collections.abc import Container, Hashable, Iterable, Sequence
from copy import copy
from typing import Self

import numpy as np
from numpy.typing import NDArray

from sglang_lite.constraints.formal.copies import Copied, find_source_positions
from sglang_lite.constraints.formal.nodes import Substring
from sglang_lite.runtime.structured_output.base import (
    CompiledGrammar,
    LoneMatcher,
    Mask,
    MaskMaker,
    Matcher,
    TextLengths,
    next_mask,
)
from sglang_lite.runtime.structured_output.language_endings import LanguageEndings, Place
from sglang_lite.runtime.structured_output.language_states import LanguageStates, State
from sglang_lite.runtime.structured_output.vocabulary import (
    build_token_mask,
    list_allowed_tokens,
    without_tokens,
)

_QUOTE = ord('"')
_MANY = 64  # masks of quotes that may continue at more places than this are cached
_KEPT_BYTES = 16 << 20  # bytes of cached masks


class QuoteTokens:
    """Tokens of a vocabulary, indexed to find those that continue or end a quote.

    Args:
        token_bytes: bytes of each token.
        special: tokens that have no text.
        size: number of tokens of a mask.

    Attributes:
        token_bytes, size: the arguments of these names.
        opening: mask of the tokens that begin with a quotation mark.
        passing: mask of the tokens with a quotation mark before their last byte, so that a quote
            may begin in them.
    """

    def __init__(self, token_bytes: Sequence[bytes], special: Container[int], size: int) -> None:
        self.token_bytes = token_bytes
        self.size = size
        texts = [(b"" if token in special else text) for token, text in enumerate(token_bytes)]
        whole: dict[bytes, list[int]] = {}
        # tokens with a quotation mark, by the text before the mark in the token
        self._closing: dict[bytes, list[int]] = {}
        for token, text in enumerate(texts):
            if text:
                whole.setdefault(text, []).append(token)
            for at, byte in enumerate(text):
                if byte == _QUOTE:
                    self._closing.setdefault(text[:at], []).append(token)
        self.opening = build_token_mask(self._closing.pop(b"", []), size)
        self.passing = build_token_mask(
            (token for token, text in enumerate(texts) if _QUOTE in text[:-1]), size
        )
        self._longest = max(map(len, whole), default=0)
        # lengths of these texts before a quotation mark, by the texts' first byte
        self._closing_lengths: dict[bytes, set[int]] = {}
        for text in self._closing:
            self._closing_lengths.setdefault(text[:1], set()).add(len(text))
        self._special = frozenset(token for token, text in enumerate(texts) if not text)
        self._texts = sorted(whole)
        self._tokens = [whole[text] for text in self._texts]
        # for each text, index of the longest other text that is a prefix of it, or -1
        self._shorter: list[int] = []
        for index, text in enumerate(self._texts):
            shorter = index - 1
            while shorter >= 0 and not text.startswith(self._texts[shorter]):
                shorter = self._shorter[shorter]
            self._shorter.append(shorter)

    def has_text(self, token: int) -> bool:
        return token < len(self.token_bytes) and token not in self._special

    def tokens_continuing(self, document: SourceBytes, places: Iterable[int]) -> set[int]:
        """Returns the tokens that continue a quote at one of the given places in a document, and
        the tokens that end a quote there.
        """
        text = document.text
        cuts = document.cuts
        texts = self._texts
        shorter = self._shorter
        known = set[int]()
        closing = set[bytes]()
        for at in places:
            following = text[at : at + self._longest]
            # following `shorter` from here visits all texts that are prefixes of `following`
            index = bisect_right(texts, following) - 1
            while index >= 0 and index not in known:
                if following.startswith(texts[index]):
                    known.add(index)
                index = shorter[index]
            for length in self._closing_lengths.get(following[:1], ()):
                if (last := following[:length]) in self._closing and cuts[at + len(last)]:
                    closing.add(last)
        found = {token for index in known for token in self._tokens[index]}
        return found.union(*map(self._closing.__getitem__, closing))


class SourceBytes:
    """UTF-8 bytes of a document, and the byte indexes at which quotes may begin or end.

    Args:
        source: its text as written in JSON.

    Attributes:
        text: the text.
        cuts: for each byte index, including the end, 1 if a quote may begin or end there, else 0.
        starts: byte index at which each character begins.
    """

    def __init__(self, source: Substring) -> None:
        self.text = source.text.encode()
        self.cuts = source.cuts
        self.starts: Sequence[int] = range(len(source.text) + 1)
        if len(self.text) > len(source.text):
            codes = np.frombuffer(source.text.encode("utf-32-le"), np.uint32)
            lengths = 1 + (codes > 0x7F) + (codes > 0x7FF) + (codes > 0xFFFF).astype(np.int64)
            starts = np.concatenate(([0], np.cumsum(lengths)))
            # its items are ints, faster than numpy's
            self.starts = array("Q", starts.astype(np.uint64).tobytes())
            cuts = np.zeros(len(self.text) + 1, np.uint8)
            cuts[starts] = np.frombuffer(source.cuts, np.uint8)
            self.cuts = cuts.tobytes()


class QuoteGrammar:
    """Grammar of JSON with quotes. Also computes the masks of its matchers.

    Args:
        strings: grammar in which any string may stand for a quote.
        maker: engine that computes the masks before they are narrowed.
        endings: endings of the grammar, whose states already exist.
        tokens: tokens of the vocabulary.
        sources: documents.
    """

    def __init__(
        self,
        strings: CompiledGrammar,
        maker: MaskMaker,
        endings: LanguageEndings,
        tokens: QuoteTokens,
        sources: Sequence[str],
    ) -> None:
        self.sources = sources
        self.name = maker.name
        self.vocab_size = maker.vocab_size
        self._strings = strings
        self._maker = maker
        self._endings = endings
        self._tokens = tokens
        self._bytes: dict[int, SourceBytes] = {}  # by source number in the states' automaton
        # Masks outside quotes and where a quote continues in many places, kept as long as the
        # states are in use.
        self._kept: weakref.WeakKeyDictionary[LanguageStates, dict[State, Mask]] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def size(self) -> int:
        masks = sum(map(len, self._kept.values())) * self.vocab_size // 8
        return self._strings.size + self._endings.size + masks + 4 * sum(map(len, self.sources))

    def matcher(self) -> QuoteMatcher:
        return QuoteMatcher(self, self._strings.matcher(), self._endings.start)

    def as_combinable(self) -> QuoteGrammar:
        return QuoteGrammar(
            self._strings.as_combinable(), self._maker, self._endings, self._tokens, self.sources
        )

    def lengths(self, written: str = "") -> TextLengths:
        return self._strings.lengths(written)  # bounds for a superset of the texts

    def endings(self) -> LanguageEndings:
        return self._endings

    # --------------------------------------------------------------------------------------- states

    def place_after_token(self, place: Place, token: int) -> Place | None:
        """Returns the place after a token, or None if it is not allowed or there are too many
        states.
        """
        return (
            self._endings.place_after_token(place, token) if self._tokens.has_text(token) else place
        )

    def place_after_text(self, place: Place, text: bytes) -> Place | None:
        """Returns the place after a text, or None if it is not allowed or there are too many
        states.
        """
        return self._endings.advance_state(place, text)

    # ---------------------------------------------------------------------------------------- masks

    def masks(self, matchers: Sequence[QuoteMatcher]) -> NDArray[np.int32]:
        new = [each.strings for each in matchers if each.strings.cached_mask() is None]
        if new:
            for each, mask in zip(new, self._maker.masks(new)):
                each.set_mask(mask)
        return np.stack(
            [self._narrow_to_documents(next_mask(each.strings), each.place) for each in matchers]
        )

    def _narrow_to_documents(self, mask: Mask, place: Place) -> Mask:
        """Narrows a mask to the tokens that the language allows at a place. The given mask allows
        any string as a quote.
        """
        found = self._endings.resolve_place(place)
        if found is None:
            return np.zeros_like(mask)
        states, state = found
        kept = self._kept.setdefault(states, {})
        if (known := kept.get(state)) is not None:
            return known
        places = _find_positions_with_lock(states, state)
        if places:
            mask = mask & self._build_quote_mask(states, state, places)
        if wrong := self._find_disallowed(
            list_allowed_tokens(mask & self._tokens.passing), states, state
        ):
            mask = without_tokens(mask, wrong)
        if len(kept) * mask.nbytes < _KEPT_BYTES and (
            not places or sum(len(offsets) for _, offsets in places) > _MANY
        ):
            kept[state] = mask
        return mask

    def _find_disallowed(
        self, tokens: Iterable[int], states: LanguageStates, state: State
    ) -> list[int]:
        """Returns the given tokens that the language does not allow."""
        known = self._tokens
        return [
            token
            for token in tokens
            if known.has_text(token)
            and not self._allows_next_text(known.token_bytes[token], states, state)
        ]

    def _allows_next_text(self, text: bytes, states: LanguageStates, state: State) -> bool:
        """Returns True if the language allows a text next. The caller must have checked that the
        text is allowed if any string may stand for a quote.
        """
        after = states.state_after_text(state, text)
        if after is None:
            return False
        places = _find_positions_with_lock(states, after)
        return not places or any(
            document.text.startswith(after[1], document.starts[offset])
            for number, offsets in places
            for document in [self._source_bytes(states, number)]
            for offset in offsets
        )

    def _build_quote_mask(
        self, states: LanguageStates, state: State, places: Iterable[Copied]
    ) -> Mask:
        """Returns the mask of tokens that continue or end a quote in a state."""
        partial = state[1]
        found = set[int]()
        ends = False
        for number, offsets in places:
            document = self._source_bytes(states, number)
            starts = (document.starts[offset] for offset in offsets)
            if partial:
                starts = (
                    at + len(partial) for at in starts if document.text.startswith(partial, at)
                )
            reached = list(starts)
            ends = ends or any(document.cuts[at] for at in reached)
            found |= self._tokens.tokens_continuing(document, reached)
        mask = build_token_mask(found, self.vocab_size)
        if ends:
            mask |= self._tokens.opening
        return mask

    def _source_bytes(self, states: LanguageStates, number: int) -> SourceBytes:
        if number not in self._bytes:
            self._bytes[number] = SourceBytes(states.automaton.sources[number])
        return self._bytes[number]


def _find_positions_with_lock(states: LanguageStates, state: State) -> list[Copied]:
    with states.lock:
        return find_source_positions(states.automaton, state[0])


class QuoteMatcher(LoneMatcher):
    """Matcher of a JSON text with quotes.

    Args:
        grammar: its grammar.
        strings: matcher of the text in which any string may stand for a quote.
        place: state of the text in the language.

    Attributes:
        strings, place: the arguments of these names.
    """

    def __init__(self, grammar: QuoteGrammar, strings: Matcher, place: Place) -> None:
        self.engine = grammar
        self.strings = strings
        self.place = place
        self._mask: Mask | None = None
        self._error = ""

    @property
    def lock_key(self) -> Hashable:
        return self.strings.lock_key

    def cached_mask(self) -> Mask | None:
        return self._mask

    def set_mask(self, mask: Mask) -> None:
        self._mask = mask

    def copy(self) -> Self | None:
        strings = self.strings.copy()
        if strings is None:
            return None
        twin = copy(self)
        twin.strings = strings
        return twin

    def accept(self, token: int) -> bool:
        return self.strings.accept(token) and self._move_or_fail(
            self.engine.place_after_token(self.place, token)
        )

    def accept_text(self, text: bytes) -> bool:
        return self.strings.accept_text(text) and self._move_or_fail(
            self.engine.place_after_text(self.place, text)
        )

    def _move_or_fail(self, place: Place | None) -> bool:
        self._mask = None
        if place is None:
            self._error = "the text is in none of the documents, or its language is too complex."
            return False
        self.place = place
        return True

    def find_forced_tokens(self) -> list[int]:
        return self.strings.find_forced_tokens()

    @property
    def complete(self) -> bool:
        return self.strings.complete

    @property
    def finished(self) -> bool:
        return self.strings.finished

    @property
    def error(self) -> str:
        return self._error or self.strings.error
