"""Records of a run's tokens, for training: the sequences that a model read and sampled."""

from __future__ import annotations

from sglang_lite.notebook.markup import definition_list
from sglang_lite.protocol.record import Record
from sglang_lite.protocol.results import TokenArray


class DrawnSpan(Record, frozen=True):
    """Tokens of a sequence that one generation sampled.

    Attributes:
        start, end: their place in the sequence.
        name: variable of the generation, or None.
        path, place: its branch and its place there, as in `TraceNode`.
        sample: index of the sample.
        attempt: number of earlier attempts that failed.
        failed: whether it is the answer of a failed attempt.
        rejected: whether the program rolled back to a place before it.
        finish_reason: see `Generation`.
        weight_version: version of the weights at its end; None if the backend does not report
            it.
        older_weight_versions: earlier versions, if the weights were replaced during the
            generation, as (number of the span's tokens at the replacement, version).
    """

    start: int
    end: int
    name: str | None = None
    path: tuple[int, ...] = ()
    place: int = 0
    sample: int = 0
    attempt: int = 0
    failed: bool = False
    rejected: bool = False
    finish_reason: str = "stop"
    weight_version: str | None = None
    older_weight_versions: tuple[tuple[int, str], ...] = ()


class TokenSequence(Record, frozen=True):
    """Tokens that the model read and sampled, in order. All lists have one entry for each token.

    Attributes:
        ids: token ids.
        loss_mask: True for tokens that the model sampled. False for those of the program, and
            for those that were the only ones that a grammar allowed. A token that a run
            samples once is True in only one sequence.
        logprobs: log-probability of an answer's token with temperature, penalties and
            constraint, before filters such as `top_p`; None for other tokens, and without
            `return_logprob=True`.
        model_logprobs: the model's own log-probability of an answer's token; None for other
            tokens, and if it was not recorded. It is recorded with `confidence=True`, and
            with `return_logprob=True` under a constraint.
        spans: generations that sampled tokens of the sequence.
        routed_experts, hidden_states: data about the sequence's first tokens, from the last
            `Generation` that has the field.
    """

    ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    logprobs: tuple[float | None, ...]
    model_logprobs: tuple[float | None, ...]
    spans: tuple[DrawnSpan, ...]
    routed_experts: TokenArray | None = None
    hidden_states: TokenArray | None = None

    @property
    def prompt_len(self) -> int:
        """Number of tokens before the first generation."""
        return self.spans[0].start

    def __repr__(self) -> str:
        return f"TokenSequence({len(self.ids):,} tokens, {sum(self.loss_mask):,} drawn, {len(self.spans)} generations)"

    def _repr_html_(self) -> str:
        drawn = sum(self.loss_mask)
        return definition_list(
            "TokenSequence",
            {"tokens": len(self.ids), "drawn": drawn, "generations": len(self.spans)},
        )
