"""Ends of constrained texts that are complete but could continue. What the model writes next
decides whether such a text ends.

With the grammar alone, a model that wants to write something else could only continue the text or
end the sequence, and most models then continue. So the text ends where a reader of the model's free
text would end it:

- Where the text is complete, any token may come. One that the grammar does not allow ends the text.
- A letter does not end a text whose last character is a letter: " blueish" is not read as " blue".
  A digit does not end a text whose last character is a digit: 47 is not read as 4. Scripts without
  case, which have no blanks between words, have no such rule.
- The text is the longest prefix that is complete. It may end within a token, and the remainder of
  that token does not belong to the text. Tokens that continue the text are not searched for an end.
- Choices, regexes and JSON scalars follow the rule "read": after a possible end any token may come,
  so "24. The" is read as 24. Grammars and repetitions follow the rule "written": once the model has
  begun to continue the text, the text may end only where it is complete again.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from copy import copy
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np

from sglang_lite.protocol import (
    Choices,
    Constraint,
    Ebnf,
    InOrder,
    JsonSchema,
    Lark,
    OneOf,
    Regex,
    Repeated,
)
from sglang_lite.runtime.structured_output.base import (
    CompiledGrammar,
    DelegatingMatcher,
    Endings,
    Mask,
    Matcher,
    TextLengths,
    next_mask,
)
from sglang_lite.runtime.structured_output.vocabulary import Vocabulary, build_token_mask

# Whether a text may fall back to an earlier possible end ("read"), or ends only where it is
# complete ("written").
EndRule: TypeAlias = Literal["read", "written"]
Kind: TypeAlias = Literal["letter", "digit", "other"]

_CACHED = 512  # maximum number of masks that are kept
# first bytes of the two-byte characters in blocks that have letters with case
_LEADS = range(0xC3, 0xD7)


def find_end_rule(constraint: Constraint) -> EndRule | None:
    """Returns the rule by which a text ends if it is complete under a constraint but could
    continue. Returns None if there are no such texts. Also returns None for free text with tags,
    which the grammar never ends, and for numbers, whose grammar handles their ends.
    """
    match constraint:
        case Choices(options) if not _any_is_prefix(options):
            return None
        case Choices() | Regex() | JsonSchema():
            return "read"
        case Lark() | Ebnf() | Repeated():
            return "written"
        case InOrder(parts):
            last = next((part for part in reversed(parts) if part != Choices(("",))), None)
            return None if last is None else find_end_rule(last)
        case OneOf(options):
            rules = set(map(find_end_rule, options))
            if all(isinstance(option, Choices | Regex | JsonSchema) for option in options):
                return "read"  # one option may continue where another ends
            return None if None in rules else "written" if "written" in rules else "read"
    return None


def _any_is_prefix(options: Sequence[str]) -> bool:
    ordered = sorted(set(options))
    return any(after.startswith(before) for before, after in pairwise(ordered))


def classify_character(char: str) -> Kind:
    """Classifies a character, to decide whether it continues a word or a number."""
    if char.isdecimal():
        return "digit"
    return "letter" if char.isupper() or char.islower() or char.istitle() else "other"


def first_character_class(text: bytes) -> Kind:
    """Returns the kind of a text's first character. An incomplete character counts as a letter if
    most characters with that first byte are letters.
    """
    found = text[:4].decode("utf-8", "ignore")
    if found and text.startswith(found[0].encode()):
        return classify_character(found[0])
    return "letter" if text and text[0] in _LEADS else "other"


def last_character_class(text: bytes) -> Kind:
    """Returns the kind of the last character of a text, which must not end inside a character."""
    return classify_character(text[-4:].decode("utf-8", "ignore")[-1:] or " ")


def may_end_before(text: bytes, following: bytes) -> bool:
    """Returns True if a text may end before the text that follows it. It may not if both are parts
    of one word or number.
    """
    last = last_character_class(text)
    return last == "other" or last != first_character_class(following)


class EndTokens:
    """Tokens of a model that may end texts, and masks that include these tokens. Shared by all
    grammars of the model.

    Args:
        vocabulary: vocabulary of the model.

    Attributes:
        tokens: bytes of each token.
        all: mask of all tokens.
        silent: tokens without text that end a sequence.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        kinds = list(map(first_character_class, vocabulary.tokens))
        self._behind = {
            kind: ~build_token_mask(
                (token for token, each in enumerate(kinds) if each == kind), vocabulary.size
            )
            for kind in ("letter", "digit")
        }
        self.all: Mask = np.full_like(self._behind["digit"], -1)
        self._behind["other"] = self.all
        self._eos = vocabulary.eos_mask()
        self.silent = [token for token in vocabulary.eos_ids if not vocabulary.tokens[token]]
        # Extended masks, by the id of the original mask and the kind of the last character. An
        # entry keeps its original mask alive. Rows with the same mask also share the extended one.
        self._joined: dict[tuple[int, Kind], tuple[Mask, Mask]] = {}
        self._lock = threading.Lock()

    def ends_sequence(self, token: int) -> bool:
        return mask_allows_token(self._eos, token)

    def with_ending_tokens(self, mask: Mask, text: bytes) -> Mask:
        """Returns a mask extended by the tokens that may end a complete text.

        Args:
            mask: tokens that continue the text.
            text: the text.
        """
        kind = last_character_class(text)
        if kind == "other":
            return self.all
        with self._lock:
            known = self._joined.get((id(mask), kind))
            if known is None:
                known = self._joined[id(mask), kind] = mask, mask | self._behind[kind]
                if len(self._joined) > _CACHED:
                    del self._joined[next(iter(self._joined))]
            return known[1]


class OpenText:
    """Text that a token outside the grammar may end. Knows which part of the text is certain so
    far.

    Attributes:
        text: the whole text, including the part before the first token.
        count: number of tokens in the text.
        end: number of bytes, and number of tokens, in the part that is certain; None if the whole
            text is certain.
    """

    def __init__(self) -> None:
        self.text = b""
        self.count = 0
        self.end: tuple[int, int] | None = None
        self._start = 0  # bytes before the first token
        self._before = (0, 0)  # bytes and tokens before the last token

    def add_text_before_tokens(self, text: bytes) -> None:
        """Appends text that belongs to no token."""
        self.text += text
        self._start = len(self.text)

    def push(self, pieces: Sequence[bytes]) -> None:
        """Appends tokens, given as their bytes."""
        for piece in pieces:
            self._before = len(self.text), self.count
            self.text += piece
            self.count += 1

    @property
    def tokens(self) -> int:
        """Number of tokens that certainly lie entirely within the text."""
        return self.count if self.end is None else self.end[1]

    @property
    def certain_text(self) -> str:
        """The part of the text that tokens have written and that certainly belongs to it."""
        end = len(self.text) if self.end is None else self.end[0]
        return self.text[self._start : end].decode("utf-8", "ignore")

    def close(self, kept: int) -> None:
        """Ends the text: no more tokens follow. If the text has no earlier end, it ends after
        the last token of the output.

        Args:
            kept: number of tokens of the output, without a token that stopped the output.
        """
        if self.end is None and self.count > kept:
            self.end = self._before


class OpenEndMatcher(DelegatingMatcher):
    """Matcher of texts that end at a token outside the grammar. Such a token may come once the text
    is complete.

    Args:
        grammar: grammar that made the matcher.
        inner: matcher of its texts.
    """

    def __init__(self, grammar: OpenEndGrammar, inner: Matcher) -> None:
        super().__init__(inner)
        self._grammar = grammar
        self._ends = grammar.ends
        self._text = OpenText()
        # whether the text has an earlier possible end that it may fall back to
        self._may_go_back = False
        # whether the text ever had such an end, or was ended by a token outside it
        self._is_open = False
        self._ended = False
        self._complete: bool | None = None  # None if it is not known here
        self._own: Mask | None = None  # the inner matcher's mask here, once it is known
        self._mask: Mask | None = None
        self._error = ""

    @property
    def continuing_matcher(self) -> Matcher:
        """Inner matcher, which is at the same position and follows the text as if it continued."""
        return self._inner

    @property
    def open_text(self) -> OpenText | None:
        if not self._is_open:
            return None
        if self._may_go_back and not self._ended and self._is_complete():
            self._text.end = None
            self._may_go_back = False
        return self._text

    @property
    def state_key(self) -> Hashable:
        return self._inner.state_key, self._may_go_back, self._text.text[-1:]

    def _is_complete(self) -> bool:
        if self._complete is None:
            own = self._own = self._inner.cached_mask()
            if own is None or not self._ends.silent:
                self._complete = self._inner.complete
            else:
                self._complete = any(mask_allows_token(own, token) for token in self._ends.silent)
        return self._complete

    @property
    def _may_end(self) -> bool:
        """True if a token that does not continue the text may come here."""
        return self._is_complete() or self._may_go_back

    def cached_mask(self) -> Mask | None:
        if self._mask is None:
            own = self._own = self._inner.cached_mask()
            if own is not None:
                self._mask = own
                if self._inner.error:  # the request fails with it
                    return own
                if self._is_complete():
                    self._mask = self._ends.with_ending_tokens(own, self._text.text)
                elif self._may_go_back:
                    self._mask = self._ends.all
        return self._mask

    def copy(self) -> OpenEndMatcher | None:
        inner = self._inner.copy()
        if inner is None:
            return None
        copied = copy(self)
        vars(copied).update(_inner=inner, _text=copy(self._text))
        return copied

    def accept(self, token: int) -> bool:
        piece = self._ends.tokens[token] if token < len(self._ends.tokens) else b""
        complete = self._is_complete()
        moved = False
        if complete and self._ends.ends_sequence(token):
            self._text.end = len(self._text.text), self._text.count
            self._ended = self._is_open = True
            return True
        if self._may_end and not mask_allows_token(next_mask(self._inner), token):
            copied = self._continue_or_end(piece)
            if copied is None:
                return self._ended
            self._inner = copied
            moved = True
        if not moved and not self._inner.accept(token):
            return False
        if complete:
            self._text.end = None
            self._may_go_back = False
            if self._grammar.rule == "read" and may_end_before(self._text.text, piece):
                self._text.end = (len(self._text.text), self._text.count)
                self._may_go_back = True
                self._is_open = True
        self._push_text_pieces((piece,))
        return True

    def _push_text_pieces(self, pieces: Sequence[bytes]) -> None:
        self._text.push(pieces)
        self._complete = self._own = self._mask = None

    def _continue_or_end(self, piece: bytes) -> Matcher | None:
        """Handles a token that the inner mask excludes. Returns the matcher after the token if it
        continues the text after all. This happens because a mask allows only one spelling of forced
        text, and the token may belong to another. Otherwise returns None, and ends the text if it
        may end here.

        Args:
            piece: text of the token.
        """
        text = self._text
        at = 0
        end = None
        copied = self._inner.copy() or self._grammar.matcher_after_prefix(text.text)
        for char in _split_characters(piece):
            if copied is None or not copied.accept_text(char):
                break
            at += len(char)
            if copied.complete and may_end_before(text.text + piece[:at], piece[at:]):
                end = at
        else:
            if piece:
                return copied
        if end is not None:
            text.text += piece[:end]
            text.end = len(text.text), text.count
        elif self._is_complete():
            if not may_end_before(text.text, piece):
                self._error = f"{piece!r} goes on with a word or number, and is not allowed"
                return None
            text.end = len(text.text), text.count
        text.push((b"",))
        self._ended = self._is_open = True
        return None

    def accept_all(self, tokens: Sequence[int]) -> bool:
        if self._may_go_back:
            return super().accept_all(tokens)
        if not self._inner.accept_all(tokens):  # forced text, which has no possible end inside
            return False
        self._push_text_pieces([self._ends.tokens[token] for token in tokens])
        return True

    def accept_text(self, text: bytes) -> bool:
        self._text.add_text_before_tokens(text)
        self._complete = self._own = self._mask = None
        return self._inner.accept_text(text)

    def find_forced_tokens(self) -> list[int]:
        forced = [] if self._may_go_back else self._inner.find_forced_tokens()
        return [] if forced and self._is_complete() else forced

    @property
    def complete(self) -> bool:
        return not self._ended and self._inner.complete

    @property
    def finished(self) -> bool:
        return self._ended or self._inner.finished

    @property
    def error(self) -> str:
        return self._error or self._inner.error


class OpenEndGrammar:
    """Grammar whose complete texts may be ended by other tokens.

    Args:
        inner: grammar of the texts.
        ends: tokens that may end them.
        rule: rule by which they end, "read" or "written".

    Attributes:
        inner, ends, rule: the arguments.
    """

    def __init__(self, inner: CompiledGrammar, ends: EndTokens, rule: EndRule) -> None:
        self.inner = inner
        self.ends = ends
        self.rule = rule

    @property
    def size(self) -> int:
        return self.inner.size

    @property
    def sources(self) -> Sequence[str]:
        return self.inner.sources

    def matcher(self) -> OpenEndMatcher:
        return OpenEndMatcher(self, self.inner.matcher())

    def matcher_after_prefix(self, text: bytes) -> Matcher | None:
        """Returns a matcher that has advanced past the beginning of a text, or None if it can't
        accept that beginning.
        """
        matcher = self.inner.matcher()
        return matcher if not text or matcher.accept_text(text) else None

    def as_combinable(self) -> CompiledGrammar:
        return self.inner.as_combinable()

    def lengths(self, written: str = "") -> TextLengths:
        return self.inner.lengths(written)

    def endings(self) -> Endings | None:
        return self.inner.endings()


def may_begin_with_tokens(grammar: CompiledGrammar, tokens: Mask) -> bool:
    """Returns True if a text of the grammar may begin with one of the mask's tokens."""
    return bool((next_mask(grammar.matcher()) & tokens).any())


def mask_allows_token(mask: Mask, token: int) -> bool:
    return bool(mask[token >> 5] >> (token & 31) & 1)


def _split_characters(text: bytes) -> list[bytes]:
    """Splits text into its characters, or into single bytes if it is not valid UTF-8."""
    try:
        return [char.encode() for char in text.decode()]
    except UnicodeDecodeError:
        return [text[at : at + 1] for at in range(len(text))]
