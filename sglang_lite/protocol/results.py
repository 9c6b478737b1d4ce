"""Results: what a backend reports of generations, selections and programs, whole and in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from sglang_lite.errors import SglError
from sglang_lite.protocol.prompt import Span
from sglang_lite.protocol.record import Record, Variant


class Usage(Record, frozen=True):
    """Cost of a node: token counts, and times in seconds, 0.0 where the backend does not tell.

    Attributes:
        prompt_tokens: tokens the model was conditioned on, cached ones included.
        cached_tokens: those of them that were not computed again.
        completion_tokens: tokens generated, forced ones included.
        forced_tokens: those the grammar left no choice about and that took no decode step.
        queue_s: waiting before the first computation.
        first_token_s: submission to the first token.
        total_s: submission to the end.
        reasoning_tokens: those of `completion_tokens` that are reasoning which the text does not show.
        written_tokens: those of `prompt_tokens` that were written to the provider's cache.
        thrown_away_tokens: those of `completion_tokens` that were generated in vain: by attempts that failed.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    forced_tokens: int = 0
    queue_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0
    reasoning_tokens: int = 0
    written_tokens: int = 0
    thrown_away_tokens: int = 0


class TokenLogprob(Record, frozen=True):
    """Log-probability of a token at its position (None where nothing precedes it), its id, and on request its text
    and the alternatives as (log-probability, id, text) from most to least likely."""

    logprob: float | None
    token_id: int
    text: str | None = None
    top: tuple[tuple[float, int, str | None], ...] = ()
    ids: tuple[tuple[float, int, str | None], ...] = ()


class Delta(Variant, frozen=True):
    """New text of a running generation (`index` tells the sample when n > 1), or new reasoning that a provider shows
    apart from the text."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    index: int = 0
    reasoning: str = ""


class Generation(Variant, frozen=True):
    """A finished generation.

    Attributes:
        text: the result, stop string trimmed.
        token_ids: every id the model wrote, the stop's included.
        kept_ids: how many of `token_ids` lie wholly within `text`; `spans` are those and what is left.
        finish_reason: "stop" (end of sequence, stop string or token, complete grammar), "length", or "abort" (of a
            partial result: see RequestAbortedError).
        matched: the stop string, regex or token id that ended it; None for end of grammar or length.
        usage: tokens and times.
        index: which sample it is, when n > 1.
        output_logprobs, prompt_logprobs: when asked for. With max_tokens=0 and alternatives asked for,
            `output_logprobs` has one entry: of the token that would follow.
        meta: anything else the backend reports.
        reasoning: what was thought, where a provider tells it apart; None: it is in the text, if anywhere.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    spans: tuple[Span, ...] = ()
    finish_reason: Literal["stop", "length", "abort"] = "stop"
    matched: str | int | None = None
    usage: Usage = Usage()
    index: int = 0
    output_logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    meta: Mapping[str, Any] = msgspec.field(default_factory=dict)
    reasoning: str | None = None


class ChoiceScore(Record, frozen=True):
    """Score of a choice, as the model sees it after the prompt.

    Attributes:
        text: the choice.
        token_ids: the tokens that were scored.
        logprobs: log P(token | everything before), one per id, in nats.
        unconditional: the same without the prompt, where the method asked; None where nothing precedes the token.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    unconditional: tuple[float | None, ...] | None = None


class Selection(Variant, frozen=True):
    """Scores of all choices, in their order.

    Attributes:
        scores: empty where a backend only picks.
        picked: the choice that was taken already; None: it is for the method to decide.
    """

    scores: tuple[ChoiceScore, ...]
    usage: Usage = Usage()
    picked: str | None = None
    meta: Mapping[str, Any] = msgspec.field(default_factory=dict)


class Played(Record, frozen=True):
    """Event of a running program.

    Attributes:
        path: of the node: its branch's path, and its place there.
        name: of the node.
        event: text of a running generation, the node's result, or what it failed with.
    """

    path: tuple[int, ...]
    name: str | None
    event: Delta | Generation | Selection | SglError


class ProgramResult(Record, frozen=True):
    """A program that has been played to its end. `text` is what it added to its prompt, joined branches included."""

    text: str


ProgramEvent: TypeAlias = Played | ProgramResult | SglError  # the last one is the result, or why there is none
ProgramSink: TypeAlias = Callable[[ProgramEvent], None]


def total_usage(usages: Iterable[Usage]) -> Usage:
    """Summed tokens; times are the longest."""
    usages = list(usages)
    return Usage(
        prompt_tokens=sum(u.prompt_tokens for u in usages),
        cached_tokens=sum(u.cached_tokens for u in usages),
        completion_tokens=sum(u.completion_tokens for u in usages),
        forced_tokens=sum(u.forced_tokens for u in usages),
        queue_s=max((u.queue_s for u in usages), default=0.0),
        first_token_s=max((u.first_token_s for u in usages), default=0.0),
        total_s=max((u.total_s for u in usages), default=0.0),
        reasoning_tokens=sum(u.reasoning_tokens for u in usages),
        written_tokens=sum(u.written_tokens for u in usages),
        thrown_away_tokens=sum(u.thrown_away_tokens for u in usages),
    )
