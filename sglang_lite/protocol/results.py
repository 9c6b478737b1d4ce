"""Results and events that a backend reports for generations, selections and programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from sglang_lite.errors import CapabilityError, SglError
from sglang_lite.notebook.markup import (
    definition_list,
    element,
    notebook_html,
    share_meter,
    shorten_text,
    table_of_rows,
)
from sglang_lite.protocol.prompt import Span
from sglang_lite.protocol.record import Record, Variant


class Usage(Record, frozen=True):
    """Cost of a node: numbers of tokens, and times in seconds. A time that the backend does not
    report is 0.0.

    Attributes:
        prompt_tokens: tokens of the prompt, including cached ones.
        cached_tokens: tokens of the prompt that were read from the cache.
        completion_tokens: generated tokens, including forced ones.
        forced_tokens: generated tokens for which the grammar left no choice, so that they
            needed no decoding step.
        queue_s: time from submission to the first computation.
        first_token_s: time from submission to the first token.
        total_s: time from submission to the end.
        reasoning_tokens: generated tokens of reasoning that is not part of the text.
        written_tokens: tokens of the prompt that were written to the provider's cache.
        thrown_away_tokens: generated tokens of failed attempts.
        host_tokens, disk_tokens: cached tokens that a local engine had to copy from the
            host's memory or read from files.
        image_tokens, cached_image_tokens: tokens of the prompt that stand for images, and how many
            of them were read from the cache. Reported by local engines only.
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
    host_tokens: int = 0
    disk_tokens: int = 0
    image_tokens: int = 0
    cached_image_tokens: int = 0

    @property
    def image_counts(self) -> dict[str, int]:
        """Numbers of image tokens, and of those that were read from the cache, by field name. Empty
        for a prompt without images.
        """
        if not self.image_tokens:
            return {}
        return {"image_tokens": self.image_tokens, "cached_image_tokens": self.cached_image_tokens}

    def __repr__(self) -> str:
        return f"Usage({', '.join(f'{name}={count}' for name, count in self._nonzero_fields().items())})"

    def _repr_html_(self) -> str:
        return definition_list("Usage", self._nonzero_fields())

    def _nonzero_fields(self) -> dict[str, str]:
        """Returns the fields that are not 0, by name, formatted as text."""
        return {
            name: f"{value:.4g}" if isinstance(value, float) else str(value)
            for name, value in msgspec.structs.asdict(self).items()
            if value
        }


class TokenLogprob(Record, frozen=True):
    """Log-probability of a token at its position.

    Attributes:
        logprob: log-probability in nats, or None for the first token of the context.
        token_id: id of the token.
        text: text of the token, if it was requested.
        top: most likely tokens at the position as (log-probability, id, text), likeliest
            first, if requested.
        ids: requested tokens (`token_ids_logprob`) at the position, in the same form.
    """

    logprob: float | None
    token_id: int
    text: str | None = None
    top: tuple[tuple[float, int, str | None], ...] = ()
    ids: tuple[tuple[float, int, str | None], ...] = ()


class TokenScores(Record, frozen=True):
    """Log-probabilities that the model itself gave the tokens of an output, before temperature,
    penalties, biases and constraint. Also has the total probability of the tokens that the
    constraint allowed.

    Attributes:
        logprobs: log-probability of each token in nats; None for a token that was given, to
            continue an output.
        allowed: log of the total probability of the tokens that the constraint allowed at
            that position: 0.0 without a constraint, None for a given token. `logprobs` minus
            `allowed` is the token's log-probability under the constraint.
        ends: for each token, the number of characters of the text up to the token's end. A
            character that the token only begins is counted.
    """

    logprobs: tuple[float | None, ...]
    allowed: tuple[float | None, ...]
    ends: tuple[int, ...]

    def as_meta(self) -> dict[str, list[float | None]]:
        """Returns the log-probabilities as fields of `meta_info`."""
        return {
            "output_model_logprobs": list(self.logprobs),
            "output_allowed_logprobs": list(self.allowed),
        }


# data that an engine can record for each token
RecordName: TypeAlias = Literal["routed_experts", "hidden_states"]


class TokenArray(Record, frozen=True):
    """Numbers for the first tokens of a sequence, readable by `numpy.asarray`.

    Attributes:
        shape: sizes of its axes; the first is the number of tokens.
        dtype: type of the numbers.
        data: the numbers, little-endian, in row-major order.
    """

    shape: tuple[int, ...]
    dtype: Literal["int32", "float32"]
    data: bytes

    @property
    def __array_interface__(self) -> dict[str, Any]:  # NumPy's array interface
        return {
            "shape": self.shape,
            "typestr": f"<{self.dtype[0]}4",
            "data": self.data,
            "version": 3,
        }

    def __repr__(self) -> str:
        return f"TokenArray({' x '.join(map(str, self.shape))}, {self.dtype!r})"


class Delta(Variant, frozen=True):
    """New text of a running generation, or new reasoning that a provider reports separately from
    the text. `index` is the number of the sample.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    index: int = 0
    reasoning: str = ""


class Generation(Variant, frozen=True):
    """A finished generation.

    Attributes:
        text: generated text, without the stop string.
        token_ids: ids of all generated tokens, including those of the stop.
        spans: the text as spans with final token ids, for continuing a prompt.
        finish_reason: "stop" (end of sequence, stop string or token, complete grammar),
            "length", or "abort" (for a partial result: see RequestAbortedError).
        matched: stop string, regex or token id that ended the generation; None at the end of
            the grammar or at max_tokens.
        usage: numbers of tokens, and times.
        index: number of the sample, from 0.
        output_logprobs, prompt_logprobs: log-probabilities, if they were requested. With
            max_tokens=0 and a request for alternatives, `output_logprobs` has one entry, for
            the token that would follow.
        meta: further metadata from the backend.
        reasoning: reasoning that the provider reports separately; None if it does not.
        scores: the model's own scores for the tokens, if confidence was requested, or
            log-probabilities under a constraint.
        prompt_ids: ids of the prompt's tokens, if they were requested.
        routed_experts: experts that each token of the prompt and answer passed through, int32
            [tokens, layers, experts per token], if they were requested. The last token has no
            entry, because it need not be computed. The same holds for tokens right before it that a
            grammar forced. 0 in layers without experts.
        hidden_states: hidden states of the same tokens after the last norm, float32 [tokens,
            hidden size], if they were requested.
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
    scores: TokenScores | None = None
    prompt_ids: tuple[int, ...] = ()
    routed_experts: TokenArray | None = None
    hidden_states: TokenArray | None = None

    @property
    def shortened(self) -> tuple[str, ...]:
        """JSON Pointers of the values missing from a constrained answer that was cut short by a
        limit; "" stands for the whole value.
        """
        return tuple(self.meta.get("shortened") or ())

    def __repr__(self) -> str:
        return f"Generation({shorten_text(repr(self.text), 200)}, {len(self.token_ids)} tokens, {self.finish_reason!r})"

    def _repr_html_(self) -> str:
        finish = f"{self.finish_reason} {'' if self.matched is None else repr(self.matched)}"
        named = {
            "text": self.text,
            "reasoning": self.reasoning,
            "tokens": len(self.token_ids),
            "finish": finish,
        }
        return definition_list(
            "Generation", {name: value for name, value in named.items() if value is not None}
        )


class ChoiceScore(Record, frozen=True):
    """Score of a choice as the continuation of a prompt.

    Attributes:
        text: text of the choice.
        token_ids: tokens that were scored.
        logprobs: log P(token | all tokens before), one for each token, in nats.
        unconditional: the same without the prompt, with None for a token without
            predecessors. None if the method does not use it.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    unconditional: tuple[float | None, ...] | None = None


class Selection(Variant, frozen=True):
    """Scores of all choices of a selection.

    Attributes:
        scores: score of each choice, in the order of the choices; empty if the backend only
            picks one.
        usage: numbers of tokens, and times.
        picked: choice that the backend picked; None if the method decides by the scores. In a
            finished run, the decision.
        meta: further metadata from the backend, and in a finished run from the method.
    """

    scores: tuple[ChoiceScore, ...]
    usage: Usage = Usage()
    picked: str | None = None
    meta: Mapping[str, Any] = msgspec.field(default_factory=dict)

    def __repr__(self) -> str:
        shares = (
            {shorten_text(text, 40): round(share, 4) for text, share in [*self.probs.items()][:4]}
            if self.scores
            else None
        )
        more = f", {len(self.scores) - 4} more" if len(self.scores) > 4 else ""
        return f"Selection(picked={shorten_text(repr(self.picked), 60)}, probs={shares}{more})"

    def _repr_html_(self) -> str:
        picked = f"Selection: {shorten_text(str(self.picked))}"
        if not self.scores:
            return definition_list(picked, {})
        by_share = sorted(self.probs.items(), key=lambda each: -each[1])
        logprobs = {score.text: sum(score.logprobs) for score in self.scores}
        rows = ((text, share_meter(share), f"{logprobs[text]:.3f}") for text, share in by_share)
        return notebook_html(
            element("b", picked), table_of_rows(("choice", "probability", "log-probability"), rows)
        )

    @property
    def probs(self) -> dict[str, float]:
        """Probability of each choice: the softmax of the choices' summed log-probabilities. The
        decision is not always the most probable choice: the default method,
        token_length_normalized, compares means per token.

        Raises:
            CapabilityError: the backend reported no scores.
        """
        if not self.scores:
            raise CapabilityError("the backend reports no probabilities for a selection.")
        totals = {score.text: sum(score.logprobs) for score in self.scores}
        top = max(totals.values())
        weights = {text: math.exp(total - top) for text, total in totals.items()}
        return {text: weight / sum(weights.values()) for text, weight in weights.items()}


class Failure(Variant, frozen=True, tag="Error"):
    """An error as a record. The first fields belong to all errors, and the others only to some
    classes of errors.
    """

    type: str
    message: str
    hint: str = ""
    where: tuple[str, int, str] | None = None
    notes: tuple[str, ...] = ()
    parameter: str | None = None
    pointer: str | None = None
    text: str | None = None
    value: Any = None
    partial: Generation | None = None
    results: tuple[Failure | None, ...] | None = None
    limit: str | None = None
    left_out: tuple[str, ...] | None = None
    max_tokens: int | None = None


# an error's traceback has frames that may hold the event
class Played(Record, frozen=True, gc=True):
    """Event of a running program.

    Attributes:
        path: path of the node: the path of its branch and the node's place in the branch.
        name: name of the node, or None.
        event: new text of a running generation, the node's result, or the error that it
            failed with.
        attempt: number of earlier verdicts that requested a new attempt at this node.
    """

    path: tuple[int, ...]
    name: str | None
    event: Delta | Generation | Selection | SglError
    attempt: int = 0


class ProgramResult(Record, frozen=True):
    """Final event of a program that ran successfully. `text` is the text that the program added to
    its prompt, including joined branches.
    """

    text: str


# the last event is the result or an error
ProgramEvent: TypeAlias = Played | ProgramResult | SglError
ProgramSink: TypeAlias = Callable[[ProgramEvent], None]


def total_usage(usages: Iterable[Usage]) -> Usage:
    """Combines several usages into one: adds up the tokens, and takes the longest times."""
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
        host_tokens=sum(u.host_tokens for u in usages),
        disk_tokens=sum(u.disk_tokens for u in usages),
        image_tokens=sum(u.image_tokens for u in usages),
        cached_image_tokens=sum(u.cached_image_tokens for u in usages),
    )
