"""Incremental matching of a text against a constraint: whether the text can continue, and whether
it is complete.

Uses llguidance with one token per byte. The runtime computes the token masks for a
model's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from sglang_lite.constraints.emit.lark import to_lark
from sglang_lite.constraints.emit.lexemes import split_into_lexemes
from sglang_lite.constraints.formal.nodes import Language
from sglang_lite.constraints.formal.shortest_texts import ShortestTexts
from sglang_lite.constraints.kinds import language_for_constraint
from sglang_lite.constraints.memo import memoize
from sglang_lite.constraints.schema import parse_json
from sglang_lite.protocol import Constraint, ConstraintError, JsonSchema

# Limits of llguidance's work. The limits of the lexer exceed the library's defaults, because large
# schemas require that. Lexemes are not precomputed, because that silently spends the fuel of the
# first steps (version 1.9.1 then refuses a text of {1,5000} & [^ ]+).
_LEXER_FUEL = 20_000_000
STEP_FUEL = 10_000_000
_STEP_ITEMS = 500_000
# A lexer keeps every state that any request's text has reached. A quoted document has about 1.6
# states per character.
_LEXER_STATES = 250_000
# Limits of the Earley items in a row. Each new item is looked up in its row, so a character's work
# grows at least with the square of the row. A grammar needs as many items as it has alternatives.
# The rest are parses of the text so far, and an ambiguous grammar adds more with each character.
# (Of 686 real schemas, one has more than 500 items in a row, none more than 1,000.)
_WAYS = 1_000
_ROW_ITEMS = 50_000
PARSER_BYTES = 50  # memory of a parser per character of its grammar
_BETWEEN_MASKS = 100  # bytes of text consumed per mask; each mask renews the work limit
# bytes of look-ahead
_MAX_FORCED = 10_000
_MAX_SLOWLY_FORCED = 200
# characters of forced text above which spelling it out would block the loop for milliseconds
_LONG = 10_000
_SHORT = 100  # forced text of up to this many characters is not measured
NO_FORCING = '%llguidance {"no_forcing": true}\n'
_MAX_SHOWN = 12  # characters listed in a message as possible continuations


def write_llguidance_grammar(language: Language, longest_forced: int) -> str:
    """Returns the grammar of a language in llguidance's variant of Lark.

    Text is forced where the language leaves no choice of characters. If the forced text is very
    long or expensive to find, the grammar turns llguidance's forced tokens off, and any tokens may
    spell that text.

    Args:
        language: the language.
        longest_forced: length in characters of the longest text that it forces.

    Raises:
        ConstraintError: the language can't be enforced.
    """
    text, slow = _build_lark_grammar(language, longest_forced)
    return NO_FORCING + text if slow or longest_forced > _LONG else text


def _build_lark_grammar(language: Language, longest_forced: int) -> tuple[str, bool]:
    """Returns the text of a language's grammar. Also returns whether llguidance needs too much work
    to find the text that every output begins with.
    """
    text = to_lark(split_into_lexemes(language))
    return text, longest_forced > _SHORT and _is_forced_text_expensive(text)


def _is_forced_text_expensive(text: str) -> bool:
    """Returns True if finding the text that every output of a grammar begins with takes more work
    than a mask may take. llguidance limits this work only after the first mask.

    Raises:
        ConstraintError: the first byte alone takes too much work.
    """
    matcher = start(NO_FORCING + text, _byte_tokenizer())
    _next_byte_mask(matcher)  # limits the work until the next mask
    matcher.compute_ff_bytes()
    matcher.compute_bitmask()
    if not matcher.is_error():
        return False
    matcher = start(NO_FORCING + text, _byte_tokenizer())
    _consume_longest_prefix(matcher, _forced_bytes(matcher, slow=True))
    _next_byte_mask(matcher)
    return True


def start(text: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Returns an llguidance matcher at the start of a grammar.

    Args:
        text: grammar in llguidance's variant of Lark.
        tokenizer: vocabulary to match by.

    Raises:
        ConstraintError: llguidance refuses the grammar.
    """
    matcher = LLMatcher(
        tokenizer, LLMatcher.grammar_from_lark(text), log_level=0, limits=_parser_limits(text)
    )
    if matcher.is_error():
        raise matcher_error(matcher)
    return matcher


def _parser_limits(text: str) -> LLParserLimits:
    """Returns limits for llguidance's work on a grammar. Some of them grow with the number of
    alternatives and the size of the texts whose substrings it allows.
    """
    # a terminal is always one item
    rules = (line for line in text.split("\n") if not line.startswith("T"))
    alternatives = sum(1 + line.count(" | ") + line.count("(") for line in rules)
    return LLParserLimits(
        max_lexer_states=max(_LEXER_STATES, 2 * count_substring_source_characters(text)),
        max_items_in_row=min(_WAYS + alternatives, _ROW_ITEMS),
        initial_lexer_fuel=_LEXER_FUEL,
        step_lexer_fuel=STEP_FUEL,
        step_max_items=_STEP_ITEMS,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def count_substring_source_characters(text: str) -> int:
    """Counts the characters of a grammar's `%regex` lines, which contain the texts whose substrings
    the grammar allows.
    """
    return sum(len(line) for line in text.split("\n") if "%regex {" in line)


def matcher_error(matcher: LLMatcher) -> ConstraintError:
    """Returns a ConstraintError with the reason a matcher failed."""
    return ConstraintError(f"llguidance: {explain_matcher_error(matcher)}")


def is_lexer_error(matcher: LLMatcher) -> bool:
    """Returns True if a matcher failed in its lexer. Copies of a matcher share its lexer, so all of
    them fail.
    """
    return matcher.is_error() and "lexer error" in matcher.get_error()


def explain_matcher_error(matcher: LLMatcher) -> str:
    """Returns the reason a matcher failed, or "" if it has not failed."""
    if not matcher.is_error():
        return ""
    error = matcher.get_error()
    if "Current row has" in error:
        return (
            "the text can be read in too many ways at the same time. Give each text of the grammar one way to be read: "
            "repeats by `*`, or by rules that begin with themselves."
        )
    if "too many expressions" in error or "initial lexer configuration" in error:
        return (
            "a pattern takes too much work, as it may go on in too many ways at the same time. Use smaller counts, and "
            "fewer optional parts, lookaheads or repeats that may read the same text."
        )
    if "symbols.len()" in error:
        return "the grammar is too large: the engine takes up to 65,000 rules and lexemes."
    lines = (line.strip() for line in error.splitlines())
    return next(filter(None, lines), "the grammar is refused, without a reason given")


@memoize
def _prepare_start(constraint: Constraint) -> _Start:
    language = language_for_constraint(constraint)
    text, slow = _build_lark_grammar(language, ShortestTexts(language.rules).longest_forced)
    return _Start(NO_FORCING + text, slow)  # forcing would only slow down byte masks


class _Start:
    """Compiled constraint, from which matchers at the start of its grammar are copied.

    Args:
        text: its grammar.
        slow: whether its forced text is expensive to find.

    Attributes:
        slow: see the argument.
        size: approximate memory in bytes.
    """

    __slots__ = ("_matcher", "_text", "size", "slow")

    def __init__(self, text: str, slow: bool) -> None:
        self._text = text
        self.slow = slow
        self.size = PARSER_BYTES * len(text)
        self._matcher = start(text, _byte_tokenizer())

    def copy_start_matcher(self) -> Any:
        """Returns a matcher at the start of the grammar. If the shared lexer has failed on another
        text, compiles the grammar again.
        """
        matcher = self._matcher.deep_copy()
        matcher.compute_bitmask()
        if is_lexer_error(matcher):
            self._matcher = start(self._text, _byte_tokenizer())
            matcher = self._matcher.deep_copy()
        return matcher


@dataclass(frozen=True, slots=True)
class Completion:
    """Possible continuations of a text.

    Attributes:
        forced: text that every continuation begins with, or "" if there is a choice.
        follows: ASCII characters, in order, that may follow `forced`.
        beyond_ascii: True if non-ASCII characters may follow `forced`.
        ends: True if the text may end after `forced`.
        complete: True if the text may end here, without `forced`.
    """

    forced: str
    follows: str
    beyond_ascii: bool
    ends: bool
    complete: bool


@lru_cache(maxsize=1)
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


class ByteMatcher:
    """Matches a growing text against a constraint.

    Args:
        constraint: constraint to match. It is compiled here unless its compiled form is
            cached.

    Attributes:
        text: text matched so far.
        matcher: llguidance matcher after `text`.
        slow: whether forced text is expensive to find.

    Raises:
        ConstraintError: the constraint can't be enforced.
    """

    __slots__ = ("constraint", "matcher", "slow", "text")

    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint
        self.text = ""
        first = _prepare_start(constraint)
        self.matcher = first.copy_start_matcher()
        self.slow = first.slow

    def copy(self) -> ByteMatcher:
        """Returns an independent matcher in the same state."""
        twin = object.__new__(ByteMatcher)
        twin.constraint = self.constraint
        twin.text = self.text
        twin.matcher = self.matcher.deep_copy()
        twin.slow = self.slow
        return twin

    def push(self, text: str) -> None:
        """Appends a text.

        Raises:
            ConstraintError: no text of the constraint continues like this. The matcher is
                unchanged.
        """
        at, accepted = self._try_push(text)
        if accepted is not None:
            after = (self.text + accepted)[-40:]
            raise ConstraintError(
                f"the grammar does not allow {text!r:.80} here, from character {len(accepted) + 1} of it on"
                f"{f', after {after!r}' if after else ''}.{_continuation_hint(at, slow=self.slow)}"
            )
        self.matcher = at
        self.text += text

    def filter(self, texts: Sequence[str]) -> tuple[str, ...]:
        """Returns the texts that `push` would accept.

        Raises:
            ConstraintError: `push` would accept none of the texts.
        """
        found = tuple(text for text in texts if self._try_push(text)[1] is None)
        if not found:
            hint = _continuation_hint(self.matcher, slow=self.slow)
            raise ConstraintError(
                f"the grammar allows none of {', '.join(map(repr, texts))} here.{hint}"
            )
        return found

    def check_complete(self) -> None:
        """Checks that the text is complete and, for a JSON schema, valid.

        Raises:
            ConstraintError: the text is not complete.
            ValueValidationError: the text violates a part of a JSON schema that the grammar does
                not enforce.
        """
        if not self.matcher.is_accepting():
            raise ConstraintError(
                f"the text of the grammar is not complete after {self.text[-40:]!r}."
                f"{_continuation_hint(self.matcher, slow=self.slow)}"
            )
        if isinstance(self.constraint, JsonSchema):
            parse_json(self.constraint, self.text)

    def completion(self) -> Completion:
        """Returns the possible continuations of the text. Forced text is followed for at most
        10,000 bytes, or 200 if it is expensive to find.
        """
        at = self.matcher.deep_copy()
        forced = bytearray()
        most = _MAX_SLOWLY_FORCED if self.slow else _MAX_FORCED
        while len(forced) < most and (more := _forced_bytes(at, slow=self.slow)):
            more = more[: most - len(forced)]
            forced += more
            _consume_longest_prefix(at, more)
        text = forced.decode("utf-8", "ignore")
        inside = len(text.encode()) < len(forced)  # only the first bytes of a character are forced
        mask = 0 if at.is_stopped() else _next_byte_mask(at)
        follows = "" if inside else "".join(chr(byte) for byte in range(128) if mask >> byte & 1)
        beyond = inside or any(mask >> byte & 1 for byte in range(128, 256))
        return Completion(
            text, follows, beyond, not inside and at.is_accepting(), self.matcher.is_accepting()
        )

    def _try_push(self, text: str) -> tuple[Any, str | None]:
        """Tries a text on a copy of the matcher.

        Returns (matcher after the text, None), or (matcher after the longest accepted prefix, that
        prefix) if the text is refused.
        """
        data = text.encode("utf-8", "surrogatepass")
        at = self.matcher.deep_copy()
        count = 0
        while count < len(data) and not at.is_stopped():
            part = data[count : count + _BETWEEN_MASKS]
            _next_byte_mask(at)  # limits the work until the next mask
            accepted = _consume_longest_prefix(at, part)
            count += accepted
            if accepted < len(part):
                break
        return at, None if count == len(data) else data[:count].decode("utf-8", "ignore")


def _forced_bytes(at: Any, *, slow: bool) -> bytes:
    """Returns the bytes that every continuation begins with, or b"" if there is a choice. If
    `slow`, returns at most one byte.
    """
    if at.is_stopped() or at.is_accepting():
        return b""
    if not slow and (found := bytes(at.compute_ff_bytes())):
        return found
    mask = _next_byte_mask(at)
    return bytes([mask.bit_length() - 1]) if mask.bit_count() == 1 else b""


def _next_byte_mask(at: Any) -> int:
    """Returns the bytes that may come next, as a bit mask."""
    mask = int.from_bytes(at.compute_bitmask(), "little") & ((1 << 256) - 1)
    if at.is_error():
        raise matcher_error(at)
    return mask


def _consume_longest_prefix(at: Any, data: bytes) -> int:
    """Consumes the longest allowed prefix of some bytes and returns its length."""
    count: int = at.try_consume_tokens(list(data))
    if at.is_error():
        raise matcher_error(at)
    return count


def _continuation_hint(at: Any, *, slow: bool) -> str:
    """Returns a sentence for an error message that lists the possible continuations, or "" if there
    are too many.
    """
    if at.is_stopped():
        return " It is complete."
    forced = _forced_bytes(at, slow=slow).decode("utf-8", "ignore")
    if forced:
        return f" It continues with {forced!r:.60}."
    mask = _next_byte_mask(at)
    allowed = [chr(byte) for byte in range(128) if mask >> byte & 1]
    if len(allowed) > _MAX_SHOWN or any(mask >> byte & 1 for byte in range(128, 256)):
        return ""
    end = ", or is complete" if at.is_accepting() else ""
    return f" It continues with one of {', '.join(map(repr, allowed))}{end}."
