"""Trajectory of a run: its text as sequences of tokens. They are taken from the trace, so nothing
is tokenised again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_lite.protocol import (
    DrawnSpan,
    Generation,
    ProgramError,
    TokenArray,
    TokenScores,
    TokenSequence,
    TraceNode,
)

_EQUAL = 1e-6  # nats by which equal log-probabilities may differ due to rounding


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Tokens that the model read and tokens that it sampled in a run, for training.

    A branch is one sequence as long as each prompt continues the tokens before it, as prompts do in
    an engine. If a prompt does not (because a stop string was cut off, or a template was rendered
    again, for example), a new sequence begins. Branches of a fork, further samples, and answers of
    failed attempts have sequences of their own.

    Attributes:
        sequences: the sequences, in the order in which they end.
    """

    sequences: tuple[TokenSequence, ...]

    def __repr__(self) -> str:
        tokens = sum(len(each.ids) for each in self)
        drawn = sum(sum(each.loss_mask) for each in self)
        count = len(self.sequences)
        return (
            f"Trajectory({count} sequence{'s' * (count != 1)}, {tokens:,} tokens, {drawn:,} drawn)"
        )

    def __iter__(self) -> Iterator[TokenSequence]:
        return iter(self.sequences)

    def __len__(self) -> int:
        return len(self.sequences)


@dataclass(slots=True)
class _Sequence:
    """Token sequence under construction, to which prompts and answers are appended."""

    ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    model_logprobs: list[float | None] = field(default_factory=list)
    spans: list[DrawnSpan] = field(default_factory=list)
    recorded: dict[str, TokenArray] = field(default_factory=dict)

    def append_unsampled(self, ids: Sequence[int]) -> None:
        """Appends tokens that the model did not sample."""
        nothing = [None] * len(ids)
        self.ids += ids
        self.loss_mask += [False] * len(ids)
        self.logprobs += nothing
        self.model_logprobs += nothing

    def append_sampled(self, answer: Generation, **said: Any) -> None:  # fields of the span
        """Appends the tokens of an answer. Leaves out a last token that only marks the end of a
        number, because later prompts don't contain it.
        """
        start = len(self.ids)
        meta = answer.meta
        given = meta.get("continued_from", 0)  # ids that the caller gave have no log-probabilities
        logprobs = [entry.logprob for entry in answer.output_logprobs]
        count = given + len(logprobs) if logprobs else len(answer.token_ids)
        self.append_unsampled(answer.token_ids[:count])
        self.loss_mask[start:] = [True] * count
        for first, end in meta.get("forced_tokens", ()):
            self.loss_mask[start + first : start + end] = [False] * (end - first)
        self.logprobs[start + given : start + count] = logprobs or [None] * (count - given)
        if answer.scores is not None:
            self._add_scores(start, answer.scores, count, constrained="constraint_backend" in meta)
        found = {"routed_experts": answer.routed_experts, "hidden_states": answer.hidden_states}
        self.recorded |= {name: array for name, array in found.items() if array is not None}
        older = tuple(
            (int(number), str(version)) for number, version in meta.get("older_weight_versions", ())
        )
        self.spans.append(
            DrawnSpan(
                start,
                start + count,
                finish_reason=answer.finish_reason,
                sample=answer.index,
                weight_version=meta.get("weight_version"),
                older_weight_versions=older,
                **said,
            )
        )

    def _add_scores(
        self, start: int, scores: TokenScores, count: int, *, constrained: bool
    ) -> None:
        """Adds the model's own log-probabilities of an answer's tokens. Under a constraint, a token
        counts as forced, not sampled, if no other allowed token had any probability.
        """
        own = scores.logprobs[:count]
        allowed = scores.allowed[:count]
        self.model_logprobs[start : start + len(own)] = own
        for i, (logprob, of_all) in enumerate(zip(own, allowed), start):
            if (
                constrained
                and logprob is not None
                and of_all is not None
                and of_all <= logprob + _EQUAL
            ):
                self.loss_mask[i] = False

    def to_token_sequence(self) -> TokenSequence:
        return TokenSequence(
            tuple(self.ids),
            tuple(self.loss_mask),
            tuple(self.logprobs),
            tuple(self.model_logprobs),
            tuple(self.spans),
            **self.recorded,
        )


def build_trajectory(nodes: Iterable[TraceNode]) -> Trajectory:
    """Builds the trajectory of a run: the token sequences that the model read and sampled in its
    generations.

    Args:
        nodes: nodes of its trace.

    Raises:
        ProgramError: the run has no answered generation, or one without the ids of its prompt.
    """
    ended: list[_Sequence] = []
    open_ones: dict[tuple[int, ...], _Sequence] = {}  # by path of the branch
    for node in nodes:
        # a node of the body without a question has a backend of its own
        if node.kind != "gen" or (node.node and not node.asked):
            continue
        ended += [
            _continue_sequence(_Sequence(), node, answer, attempt=number, failed=True)
            for number, attempt in enumerate(node.attempts)
            for answer in attempt.answers
        ]
        samples = [each for each in node.results if isinstance(each, Generation)]
        for answer in samples[:1]:
            before = open_ones.get(node.path, _Sequence())
            if list(answer.prompt_ids[: len(before.ids)]) != before.ids:
                ended.append(before)
                before = _Sequence()
            open_ones[node.path] = _continue_sequence(
                before, node, answer, attempt=len(node.attempts)
            )
        ended += [
            _continue_sequence(_Sequence(), node, each, attempt=len(node.attempts))
            for each in samples[1:]
        ]
    ended += open_ones.values()
    if not ended:
        raise ProgramError(
            "the run has no answer of a generation: it has none, they have failed, or it was loaded or resumed.",
            hint="Read the trajectory of the state that has run.",
        )
    return Trajectory(tuple(each.to_token_sequence() for each in ended))


def _continue_sequence(
    sequence: _Sequence, node: TraceNode, answer: Generation, **said: Any
) -> _Sequence:  # fields of the span
    """Extends a sequence by a generation: the part of its prompt that the sequence lacks, then its
    answer. Returns the sequence.
    """
    if not answer.prompt_ids:
        raise ProgramError(
            f"the generation of {node.name!r} has no token ids of its prompt.",
            hint="Run the program with return_prompt_token_ids=True, on an engine or a RuntimeEndpoint.",
        )
    sequence.append_unsampled(answer.prompt_ids[len(sequence.ids) :])
    sequence.append_sampled(
        answer, name=node.name, path=node.path, place=node.place, rejected=node.rejected, **said
    )
    return sequence
