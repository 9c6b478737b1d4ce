"""The runner on a CPU: inputs, forward, logits, the next tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_lite.runtime.executor.cpu_inputs import build_cpu_inputs
from sglang_lite.runtime.executor.prompt_logprobs import Scored, score
from sglang_lite.runtime.executor.sampler import DrawAdjustments, Masks, Sampled, SamplingTable, sample
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.slot_table import SlotTable
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
        crowded: tells whether others need a core. Then a step beside a stream leaves them one: a team of threads of
            which one waits for a core takes longer than a smaller one.
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
        crowded: Callable[[], bool] | None = None,
    ) -> None:
        self._crowded = crowded
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

    def forward(self, batch: Batch) -> CpuForward:
        """Computes the batch's tokens."""
        with torch.inference_mode(), self._team(batch):
            if len(batch.copies[0]):
                self._model.copy_slots(self._cache, *(torch.from_numpy(at.astype(np.int64)) for at in batch.copies))
            inputs = build_cpu_inputs(batch, self._table, self._drawn, one_by_one=self._one_by_one)
            hidden = self._model.forward(inputs.ids, inputs.positions, inputs.plan, self._cache)
            scored = score(self._model, self._table, batch, inputs.last.tolist(), hidden)
        return CpuForward(batch, hidden, inputs.last, scored)

    def allocate_masks(self, rows: int, words: int) -> NDArray[np.int32]:
        """Memory for the masks of a step, int32 [rows, words]."""
        return np.empty((rows, words), dtype=np.int32)

    def sample(
        self,
        forward: CpuForward,
        rows: NDArray[np.int64],
        special: dict[int, DrawAdjustments],
        masks: Masks | None = None,
    ) -> Sampled:
        """Draws the next tokens of some rows.

        Args:
            rows: of the batch.
            special: by index into `rows`, what its draw needs beyond the sampling table.
            masks: of those that have one.
        """
        if not len(rows):
            return Sampled((), {})
        slots = forward.batch.slots[rows]
        with torch.inference_mode(), self._team(forward.batch):
            logits = self._model.logits(forward.hidden[forward.last[torch.from_numpy(rows)]])
            sampled = sample(
                logits, self._sampling, slots, forward.batch.ends[rows], special, masks,
                original_logprobs=self._original_logprobs,
            )  # fmt: skip
        self._drawn[slots] = sampled.tokens
        return sampled

    def _team(self, batch: Batch) -> AbstractContextManager[None]:
        """The threads of a step: for all that it computes."""
        leaves_one = self._crowded is not None and batch.streams > 0 and self._crowded()
        return _one_thread_fewer() if leaves_one else nullcontext()


@contextmanager
def _one_thread_fewer() -> Iterator[None]:
    count = torch.get_num_threads()
    torch.set_num_threads(max(count - 1, 1))
    try:
        yield
    finally:
        torch.set_num_threads(count)
