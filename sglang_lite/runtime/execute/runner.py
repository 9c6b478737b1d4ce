"""Runs a batch on a model: inputs, forward, logits, the next tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_lite.protocol import TokenLogprob
from sglang_lite.runtime.cache.table import SlotTable
from sglang_lite.runtime.execute.inputs import build_inputs
from sglang_lite.runtime.execute.sampler import Sampled, SamplingTable, Special, describe, sample
from sglang_lite.runtime.models.model import Model
from sglang_lite.runtime.schedule.batch import Batch


@dataclass(frozen=True, slots=True)
class StepResult:
    """
    Attributes:
        sampled: for the rows that sample, in the batch's order.
        scored: row of the batch to the log-probabilities of prompt tokens computed in this step.
    """

    sampled: Sampled
    scored: dict[int, list[TokenLogprob]]


class Runner:
    """
    Args:
        model: what runs.
        table: the slot table that batches refer to.
        sampling: parameters by slot.
        cache_slots: size of the KV cache in tokens.
    """

    def __init__(self, model: Model, table: SlotTable, sampling: SamplingTable, cache_slots: int) -> None:
        self._model, self._table, self._sampling = model, table, sampling
        self._cache = model.allocate_cache(cache_slots)

    @torch.inference_mode()
    def run(self, batch: Batch, special: dict[int, Special]) -> StepResult:
        """One step.

        Args:
            special: by row, what its draw needs beyond the sampling table.
        """
        inputs = build_inputs(batch, self._table)
        hidden = self._model.forward(inputs.ids, inputs.positions, inputs.plan, self._cache)
        samples = batch.samples.nonzero()[0]
        scored = self._score(batch, inputs.last, hidden)
        if not len(samples):
            return StepResult(Sampled((), {}), scored)
        logits = self._model.logits(hidden[inputs.last[torch.from_numpy(samples)]])
        by_sample = {i: special[row] for i, row in enumerate(samples.tolist()) if row in special}
        slots = batch.slots[samples]
        return StepResult(sample(logits, self._sampling, slots, self._table.length[slots], by_sample), scored)

    def _score(self, batch: Batch, last: torch.Tensor, hidden: torch.Tensor) -> dict[int, list[TokenLogprob]]:
        """Log-probabilities of the prompt tokens that rows asked for and this step's hidden states predict."""
        wanted = [(i, r) for i, r in enumerate(batch.requests) if r.score_from is not None]
        scored: dict[int, list[TokenLogprob]] = {}
        for i, request in wanted:
            start, end = int(batch.starts[i]), int(batch.ends[i])
            assert request.score_from is not None
            first = max(request.score_from, start + 1)  # position p is predicted by the state at p - 1
            stop = min(end + 1, request.prompt_len)
            if first >= stop:
                continue
            offset = int(last[i]) + 1 - end  # of position 0 in the flat batch, were it there
            states = hidden[offset + first - 1 : offset + stop - 1]
            logprobs = self._model.logits(states).log_softmax(-1)
            tokens = self._table.tokens[batch.slots[i], first:stop].tolist()
            scored[i] = [describe(row, token, request.params) for row, token in zip(logprobs, tokens)]
        return scored
