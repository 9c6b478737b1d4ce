"""Runner on a CPU: builds inputs, runs the forward, computes logits and draws the next tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_lite.runtime.executor.cpu_inputs import build_cpu_inputs
from sglang_lite.runtime.executor.logit_adjustments import DrawAdjustments
from sglang_lite.runtime.executor.prompt_logprobs import PromptLogprobs, score
from sglang_lite.runtime.executor.sampler import Masks, Sampled, SamplingTable, sample
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.slot_table import SlotTable
from sglang_lite.runtime.models.model import Model
from sglang_lite.runtime.scheduler.batch import Batch


@dataclass(frozen=True, slots=True)
class CpuForward:
    """Forward that has been computed.

    Attributes:
        batch: batch that was run.
        hidden: hidden states [T, hidden_size] of the batch's tokens.
        last: int64 [rows], index of each row's last token.
        scored: log-probabilities of prompt tokens, by row of the batch.
    """

    batch: Batch
    hidden: torch.Tensor
    last: torch.Tensor
    scored: dict[int, PromptLogprobs]


class CpuRunner:
    """Runner of batches by torch operations, a `ModelRunner`; the forward is complete when `forward` returns.

    Args:
        model: model to run.
        table: slot table that batches refer to.
        sampling: sampling parameters by slot.
        cache_slots: size of the KV cache in tokens.
        one_by_one: whether to compute each token's attention separately, so that it doesn't depend on the batch.
        original_logprobs: whether log-probabilities are those before adjustments of the logits, as in `sampler.sample`.
        cores_contended: callback that returns True if other work of the process needs a core. A step with streamed rows
            then uses one thread fewer: a team in which one thread waits for a core takes longer than a smaller team.
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
        cores_contended: Callable[[], bool] | None = None,
    ) -> None:
        self._cores_contended = cores_contended
        self._model, self._table, self._sampling = model, table, sampling
        self._cache = model.allocate_cache(cache_slots)
        self._one_by_one, self._original_logprobs = one_by_one, original_logprobs
        self._last_tokens: Ints = np.zeros(len(table.length), dtype=np.int32)  # last drawn token of each slot

    @property
    def model(self) -> Model:
        return self._model

    def replace(self, model: Model) -> None:
        """Replaces the model by another of the same shape. The cache keeps the keys and values of the old model."""
        self._model = model

    def close(self) -> None:
        """Frees the memory of the model and the cache. No method may be called afterwards."""
        del self._model, self._cache

    def forward(self, batch: Batch) -> CpuForward:
        """Computes the forward of the batch's tokens."""
        with torch.inference_mode(), self._team(batch):
            if len(batch.copies[0]):
                self._model.copy_slots(self._cache, *(torch.from_numpy(at.astype(np.int64)) for at in batch.copies))
            inputs = build_cpu_inputs(batch, self._table, self._last_tokens, one_by_one=self._one_by_one)
            hidden = self._model.forward(inputs.ids, inputs.positions, inputs.plan, self._cache)
            scored = score(self._model, self._table, batch, inputs.last.tolist(), hidden)
        return CpuForward(batch, hidden, inputs.last, scored)

    def allocate_masks(self, rows: int, words: int) -> NDArray[np.int32]:
        """Allocates int32 [rows, words] for the token masks of a step."""
        return np.empty((rows, words), dtype=np.int32)

    def sample(
        self,
        forward: CpuForward,
        rows: NDArray[np.int64],
        adjustments: dict[int, DrawAdjustments],
        masks: Masks | None = None,
    ) -> Sampled:
        """Draws the next tokens of some rows.

        Args:
            forward: forward that computed the rows' hidden states.
            rows: indices of rows of the batch.
            adjustments: adjustments of draws that the sampling table doesn't cover, by index into `rows`.
            masks: token masks of the rows that have a grammar; None if no row has one.
        """
        if not len(rows):
            return Sampled((), {})
        slots = forward.batch.slots[rows]
        with torch.inference_mode(), self._team(forward.batch):
            logits = self._model.logits(forward.hidden[forward.last[torch.from_numpy(rows)]])
            sampled = sample(
                logits, self._sampling, slots, forward.batch.ends[rows], adjustments, masks,
                original_logprobs=self._original_logprobs,
            )  # fmt: skip
        self._last_tokens[slots] = sampled.tokens
        return sampled

    def _team(self, batch: Batch) -> AbstractContextManager[None]:
        """Context that sets the number of threads for the computations of a step."""
        leaves_one = self._cores_contended is not None and batch.streams > 0 and self._cores_contended()
        return _one_thread_fewer() if leaves_one else nullcontext()


@contextmanager
def _one_thread_fewer() -> Iterator[None]:
    count = torch.get_num_threads()
    torch.set_num_threads(max(count - 1, 1))
    try:
        yield
    finally:
        torch.set_num_threads(count)
