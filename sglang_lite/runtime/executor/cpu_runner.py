"""The runner on a CPU: inputs, forward, logits, the next tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_lite.runtime.executor.cpu_inputs import build_cpu_inputs
from sglang_lite.runtime.executor.sampler import Masks, Sampled, SamplingTable, Special, sample
from sglang_lite.runtime.executor.scoring import Scored, score
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.table import SlotTable
from sglang_lite.runtime.models.model import Model
from sglang_lite.runtime.scheduler.batch import Batch


@dataclass(frozen=True, slots=True)
class CpuForward:
    """A forward that was computed.

    Attributes:
        batch: the batch that was run.
        hidden: [T, hidden_size] of its tokens.
        last: int64 [rows]: index of each row's last token.
        scored: of rows of the batch, what was scored of their prompts.
    """

    batch: Batch
    hidden: torch.Tensor
    last: torch.Tensor
    scored: dict[int, Scored]


class CpuRunner:
    """Batches as torch operations. Meets `ModelRunner`; its forward is computed when `forward` returns.

    Args:
        model: what runs.
        table: the slot table that batches refer to.
        sampling: parameters by slot.
        cache_slots: size of the KV cache in tokens.
        one_by_one: each token's attention is computed by itself.
        original_logprobs: as `sample` takes it.
    """

    def __init__(
        self,
        model: Model,
        table: SlotTable,
        sampling: SamplingTable,
        cache_slots: int,
        *,
        one_by_one: bool = False,
        original_logprobs: bool = False,
    ) -> None:
        self._model, self._table, self._sampling = model, table, sampling
        self._cache = model.allocate_cache(cache_slots)
        self._one_by_one, self._original_logprobs = one_by_one, original_logprobs
        self._drawn: Ints = np.zeros(len(table.length), dtype=np.int32)  # each slot's last token

    @property
    def model(self) -> Model:
        return self._model

    def replace(self, model: Model) -> None:
        """Takes another model of the same shape. Keys and values in the cache stay those of the model before."""
        self._model = model

    def close(self) -> None:
        """Frees the model's and the cache's memory. No other call may follow."""
        del self._model, self._cache

    @torch.inference_mode()
    def forward(self, batch: Batch) -> CpuForward:
        """Computes the batch's tokens."""
        if len(batch.copies[0]):
            self._model.copy_slots(self._cache, *(torch.from_numpy(at.astype(np.int64)) for at in batch.copies))
        inputs = build_cpu_inputs(batch, self._table, self._drawn, one_by_one=self._one_by_one)
        hidden = self._model.forward(inputs.ids, inputs.positions, inputs.plan, self._cache)
        scored = score(self._model, self._table, batch, inputs.last.tolist(), hidden)
        return CpuForward(batch, hidden, inputs.last, scored)

    def allocate_masks(self, rows: int, words: int) -> NDArray[np.int32]:
        """Memory for the masks of a step, int32 [rows, words]."""
        return np.empty((rows, words), dtype=np.int32)

    @torch.inference_mode()
    def sample(
        self, forward: CpuForward, rows: NDArray[np.int64], special: dict[int, Special], masks: Masks | None = None
    ) -> Sampled:
        """Draws the next tokens of some rows.

        Args:
            rows: of the batch.
            special: by index into `rows`, what its draw needs beyond the sampling table.
            masks: of those that have one.
        """
        if not len(rows):
            return Sampled((), {})
        logits = self._model.logits(forward.hidden[forward.last[torch.from_numpy(rows)]])
        slots = forward.batch.slots[rows]
        sampled = sample(
            logits, self._sampling, slots, forward.batch.ends[rows], special, masks,
            original_logprobs=self._original_logprobs,
        )  # fmt: skip
        self._drawn[slots] = sampled.tokens
        return sampled
