"""Limits on a model's thoughts: a thought that has used up its tokens or time is ended, and the
answer follows.

A thought that must end is ended after its current sentence, or after `GRACE` more tokens: the
tokens that close it in the model's own format are then forced, like text that a grammar forces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Literal

from sglang_lite.protocol import ParameterError, Span
from sglang_lite.runtime.structured_output.base import (
    CompiledGrammar,
    DelegatingMatcher,
    Mask,
    Matcher,
)
from sglang_lite.runtime.structured_output.free_text import FreeText
from sglang_lite.runtime.structured_output.vocabulary import build_token_mask
from sglang_lite.text.reasoning import detect_model_type, reasoning_format, thought_closing_text

if TYPE_CHECKING:
    from sglang_lite.runtime.tokens.tokenizer import Tokenizer

GRACE = 32  # tokens after which a thought that must end is ended, if no sentence ends earlier
_MIN_ROOM = 16  # tokens that an answer gets beyond its shortest text, if the total allows it
_LOOKED_AT = 64  # last tokens of a prompt that are searched for an open thought
_SENTENCE_END = re.compile(
    r"(?:[.!?\u2026\u3002\uff01\uff1f][\"'\u2019\u201d)\]*_`]*[ \t]*|\n[ \t]*)\Z"
)

EndedBy = Literal["model", "limit", "time"]


def tokens_left_for_answer(shortest: int, total: int) -> int:
    """Returns how many tokens a thought must leave for the answer. That is twice the shortest
    answer, or `_MIN_ROOM` more than it if that is larger. It is at most half of the total, unless
    the shortest answer needs more.

    Args:
        shortest: number of tokens of the answer's shortest text.
        total: number of tokens of thought and answer combined.
    """
    return max(min(max(2 * shortest, shortest + _MIN_ROOM), total // 2), shortest)


class ThoughtFormat:
    """Format of a model's thoughts, including the tokens that end one.

    Args:
        model_type: type of the model, a key of text.reasoning.FORMATS.
        tokenizer: tokenizer of the model.

    Attributes:
        start, end: marks before and after a thought, in UTF-8.

    Raises:
        ParameterError: the model type is unknown.
    """

    def __init__(self, model_type: str, tokenizer: Tokenizer) -> None:
        found = reasoning_format(model_type)
        self._tokenizer = tokenizer
        self._open = found.open
        self._closing = thought_closing_text(found, tokenizer.chat_template or "")
        self.start = found.start.encode()
        self.end = found.end.encode()

    @staticmethod
    def for_model_type(model_type: str | None, tokenizer: Tokenizer) -> ThoughtFormat:
        """Returns the format of a model type, or the one detected in the model's chat template if
        the type is None.

        Raises:
            ParameterError: the type is unknown, or not given where the template shows no thoughts.
        """
        if model_type is None:
            model_type = detect_model_type(tokenizer.chat_template or "")
        if model_type is None:
            raise ParameterError(
                "thinking",
                "the model's chat template shows no marks of thoughts.",
                hint='Name the type of the model: gen(reasoning="qwen3"), or reasoning_format in sampling_params.',
            )
        return ThoughtFormat(model_type, tokenizer)

    def is_open_after(self, prompt: Sequence[int]) -> bool:
        """Returns True if an output after a prompt begins inside a thought."""
        end = self.decode_with_special_tokens(prompt[-_LOOKED_AT:]).rstrip()
        return end.endswith(self.start.strip()) or (self._open and not end.endswith(self.end))

    def decode_with_special_tokens(self, tokens: Sequence[int]) -> bytes:
        """Decodes tokens, including special ones."""
        return self._tokenizer.decode_bytes(tokens, skip_special=False)

    def closing_token_sequences(self, text: bytes, *, constrained: bool) -> list[list[int]]:
        """Returns the token sequences that can end a thought after its last text, the model's own
        tokenisation first.

        Args:
            text: last part of the thought.
            constrained: whether the answer follows a grammar. The grammar may allow only text
                without special tokens, and it determines which mark begins the answer.
        """
        parts = self._closing
        begun = next((n for n in range(len(self.end) - 1, 0, -1) if text.endswith(self.end[:n])), 0)
        end = self.end[begun:].decode("utf-8", "ignore")
        newlines = len(text) - len(text.rstrip(b"\n"))
        before = "" if begun else parts.before[newlines:]
        if not constrained:
            return [self._tokenizer.encode(f"{before}{end}{parts.after}{parts.mark}", first=False)]
        texts = dict.fromkeys((f"{before}{end}{parts.after}", f"{end}{parts.after}", end))
        spans = [(Span(each, special=special),) for each, special in product(texts, (True, False))]
        return [self._tokenizer.encode_spans(each, first=False).tolist() for each in spans]


@dataclass(frozen=True, slots=True)
class ThinkingLimits:
    """Limits on the thinking in an output.

    Attributes:
        tokens: maximum number of thinking tokens, not counting `GRACE`; None for no separate limit.
        seconds: maximum duration of a thought in seconds; None for no limit.
        total: number of tokens of the output.
        reserve: number of tokens at the end of the output that are reserved for ending the thought
            and for the answer.
    """

    tokens: int | None
    seconds: float | None
    total: int
    reserve: int

    @staticmethod
    def from_parameter(
        thinking: int | tuple[str, ...] | None, total: int, shortest: int | None, closing: int
    ) -> ThinkingLimits:
        """Returns the limits for a value of the parameter `thinking`.

        Args:
            thinking: the value.
            total: number of tokens of the output.
            shortest: number of tokens of the answer's shortest text; None if the answer is free.
            closing: number of tokens that end a thought.

        Raises:
            ParameterError: the total leaves nothing for a thought.
        """
        if shortest is not None and total <= shortest + closing:
            raise ParameterError(
                "max_tokens",
                f"leaves {total:,} tokens for thought and answer, and the shortest answer has {shortest:,}, with "
                f"{closing:,} to end the thought.",
                hint="Raise it, or turn thinking off.",
            )
        room = tokens_left_for_answer(1 if shortest is None else shortest, total)
        reserve = min(room + closing, max(total - 1, 0))
        tokens: int | None = None
        seconds: float | None = None
        if isinstance(thinking, int):
            tokens = thinking
        elif thinking is not None:
            (text,) = thinking
            amount = float(text[:-1])
            tokens, seconds = (
                (int(total * amount / 100), None) if text.endswith("%") else (None, amount)
            )
        return ThinkingLimits(tokens, seconds, total, reserve)

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of the thoughts, not counting `GRACE`."""
        available = self.total - self.reserve
        return available if self.tokens is None else min(self.tokens, available)


@dataclass(slots=True)
class _Progress:
    """Progress of an output and its thoughts.

    Attributes:
        stage: "before" (the start mark may come), "thought", "ending" (its closing tokens are
            forced) or "answer".
        left: number of tokens until the end of the output.
        count: number of tokens of thoughts so far.
        tail: last text, searched for marks and ends of sentences.
        sizes: lengths of the tail's tokens, if in a thought.
        forced: tokens that end the thought and are still to come.
        due: number of thought tokens when the thought had to end; None before that.
        cause: reason why it had to end.
        until: time by which the thought must end, on the engine's clock.
        ended_by: how the last thought ended; None if none has.
    """

    stage: Literal["before", "thought", "ending", "answer"]
    left: int
    count: int = 0
    tail: bytes = b""
    sizes: list[int] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)
    due: int | None = None
    cause: EndedBy = "limit"
    until: float | None = None
    ended_by: EndedBy | None = None


class ThinkingMatcher(DelegatingMatcher):
    """Matcher that limits the length of the thoughts in an output.

    Args:
        inner: matcher of the whole output.
        form: format of the model's thoughts.
        limits: limits of the thoughts.
        inside: whether the output begins inside a thought.
        constrained: whether the answer is constrained, so that a thought comes only at the
            beginning.
        now: clock.
    """

    def __init__(
        self,
        inner: Matcher,
        form: ThoughtFormat,
        limits: ThinkingLimits,
        *,
        inside: bool,
        constrained: bool,
        now: Callable[[], float],
    ) -> None:
        super().__init__(inner)
        self._form = form
        self._limits = limits
        self._constrained = constrained
        self._now = now
        self._progress = _Progress("before", limits.total)
        if inside:
            self._begin_thought(b"")

    @property
    def thinking(self) -> dict[str, object]:
        """Metadata about the output's thoughts."""
        found: dict[str, object] = {
            "tokens": self._progress.count,
            "limit": self._limits.max_tokens,
            "ended_by": self._progress.ended_by,
        }
        if self._limits.seconds is not None:
            found |= {"seconds": self._limits.seconds, "reproducible": False}
        return found

    # --------------------------------------------------------------------------------------- tokens

    def accept(self, token: int) -> bool:
        if not self._inner.accept(token):
            return False
        self._update_progress(token)
        return True

    def accept_all(self, tokens: Sequence[int]) -> bool:
        if self._constrained and self._progress.stage == "answer":
            return self._inner.accept_all(tokens)
        return super().accept_all(tokens)

    def accept_text(self, text: bytes) -> bool:
        return self._inner.accept_text(text)

    def find_forced_tokens(self) -> list[int]:
        return list(self._progress.forced) or self._inner.find_forced_tokens()

    def cached_mask(self) -> Mask | None:
        if forced := self._progress.forced:
            return build_token_mask(forced[:1], self.engine.vocab_size)
        return self._inner.cached_mask()

    @property
    def state_key(self) -> Hashable:
        forced = self._progress.forced
        return ("end of a thought", forced[0]) if forced else self._inner.state_key

    def copy(self) -> ThinkingMatcher | None:
        """Returns a copy with its own counts. Returns None while a time limit may end the thought."""
        if self._limits.seconds is not None and self._progress.stage != "answer":
            return None
        inner = self._inner.copy()
        if inner is None:
            return None
        copied = copy(self)
        progress = self._progress
        progress = replace(progress, sizes=progress.sizes.copy(), forced=progress.forced.copy())
        vars(copied).update(_inner=inner, _progress=progress)
        return copied

    # ------------------------------------------------------------------------------------- thoughts

    def _update_progress(self, token: int) -> None:
        """Updates the progress after a token."""
        progress = self._progress
        progress.left -= 1
        if progress.forced:
            self._advance_closing(token)
        elif progress.stage == "thought":
            self._extend_thought(self._form.decode_with_special_tokens((token,)))
        elif progress.stage == "before" or not self._constrained:
            self._look_for_start(self._form.decode_with_special_tokens((token,)))

    def _advance_closing(self, token: int) -> None:
        progress = self._progress
        if progress.forced[0] != token:  # another part of the engine chose the token
            progress.forced = []
            progress.stage = "thought"
            self._extend_thought(self._form.decode_with_special_tokens((token,)))
            return
        progress.forced = progress.forced[1:]
        if not progress.forced:
            progress.stage = "answer"
            progress.tail = b""
            progress.sizes = []
            progress.ended_by = progress.cause

    def _look_for_start(self, text: bytes) -> None:
        """Looks for the start mark: at the beginning, or anywhere in a free answer."""
        progress = self._progress
        start = self._form.start
        progress.tail += text
        if progress.stage == "before":
            begun = progress.tail.lstrip()
            mark = start.lstrip()
            if begun.startswith(mark):
                self._begin_thought(begun[len(mark) :])
                return
            if mark.startswith(begun):
                return
            progress.stage = "answer"
        at = progress.tail.find(start)
        if not self._constrained and at >= 0:
            self._begin_thought(progress.tail[at + len(start) :])
            return
        progress.tail = progress.tail[-len(start) :]

    def _begin_thought(self, text: bytes) -> None:
        """Begins a thought.

        Args:
            text: text after the start mark, in the token that completes the mark.
        """
        progress = self._progress
        progress.stage = "thought"
        progress.tail = text
        progress.sizes = [len(text)]
        self._end_if_due(at_end=not text.strip())

    def _extend_thought(self, text: bytes) -> None:
        """Adds a token's text to the thought. Ends the thought at the end mark, or when it is due."""
        progress = self._progress
        end = self._form.end
        progress.count += 1
        progress.tail += text
        progress.sizes.append(len(text))
        at = progress.tail.find(end)
        if at >= 0:
            place = len(progress.tail)
            # the mark's tokens don't count
            while len(progress.sizes) > 1 and place - progress.sizes[-1] >= at:
                place -= progress.sizes.pop()
                progress.count -= 1
            progress.stage = "answer"
            progress.tail = progress.tail[at + len(end) :]
            progress.sizes = []
            progress.ended_by = "model"
            return
        while len(progress.sizes) > 1 and len(progress.tail) - progress.sizes[0] > len(end) + 8:
            progress.tail = progress.tail[progress.sizes.pop(0) :]
        self._end_if_due(at_end=bool(_SENTENCE_END.search(progress.tail.decode("utf-8", "ignore"))))

    def _end_if_due(self, *, at_end: bool) -> None:
        """Ends the thought if it must end here.

        Args:
            at_end: whether its text ends with a sentence.
        """
        progress = self._progress
        reserve = self._limits.reserve
        if progress.due is None:
            cause = self._find_end_cause()
            if cause is None:
                return
            progress.due = progress.count
            progress.cause = cause
        if at_end or progress.count - progress.due >= GRACE or progress.left <= reserve:
            progress.forced = self._closing_tokens()
            progress.stage = "ending" if progress.forced else "thought"

    def _find_end_cause(self) -> EndedBy | None:
        """Returns the reason why the thought must end soon, or None if it may continue."""
        progress = self._progress
        limits = self._limits
        if limits.seconds is not None:
            if progress.until is None:
                progress.until = self._now() + limits.seconds
            if self._now() >= progress.until:
                return "time"
        if limits.tokens is not None and progress.count >= limits.tokens:
            return "limit"
        grace = min(GRACE, (limits.total - limits.reserve) // 4)
        return "limit" if progress.left <= limits.reserve + grace else None

    def _closing_tokens(self) -> list[int]:
        """Returns tokens that end the thought here; empty if the grammar allows no such text."""
        endings = self._form.closing_token_sequences(
            self._progress.tail, constrained=self._constrained
        )
        if not self._constrained:
            return endings[0]
        for tokens in endings:
            inner = self._inner.copy()
            if inner is None:  # can't be tested in advance
                return endings[-1]
            if inner.accept_all(tokens):
                return tokens
        return []


class ThoughtLimiter:
    """Creates the matchers that limit the thoughts of an engine's outputs.

    Args:
        form: format of the model's thoughts.
        free_text: grammar of outputs without a constraint.
        now: clock.

    Attributes:
        free_text: the argument of this name.
    """

    def __init__(self, form: ThoughtFormat, free_text: FreeText, now: Callable[[], float]) -> None:
        self._form = form
        self.free_text = free_text
        self._now = now

    def limit_thoughts(
        self,
        inner: Matcher,
        grammar: CompiledGrammar | None,
        thinking: int | tuple[str, ...] | None,
        *,
        total: int,
        prompt: Sequence[int],
    ) -> ThinkingMatcher:
        """Returns a matcher of an output whose thoughts are limited.

        Args:
            inner: matcher of the output, at its beginning.
            grammar: grammar of the output; None if the answer is free.
            thinking: value of the parameter `thinking`.
            total: maximum number of tokens of the output.
            prompt: tokens before the output.

        Raises:
            ParameterError: the total leaves nothing for a thought.
        """
        form = self._form
        constrained = grammar is not None
        closing = len(form.closing_token_sequences(b"", constrained=constrained)[0])
        shortest = None if grammar is None else grammar.lengths().fewest or 1
        limits = ThinkingLimits.from_parameter(thinking, total, shortest, closing)
        inside = form.is_open_after(prompt)
        return ThinkingMatcher(
            inner, form, limits, inside=inside, constrained=constrained, now=self._now
        )
