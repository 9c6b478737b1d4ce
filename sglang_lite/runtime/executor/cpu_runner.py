"""CPU runner: builds inputs, runs the forward, computes logits and draws the next tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from sglang_lite.protocol import RecordName, TokenArray
from sglang_lite.runtime.executor.cpu_inputs import build_cpu_inputs, fill_in_drawn_ids
from sglang_lite.runtime.executor.page_memory import CpuPageMemory
from sglang_lite.runtime.executor.prompt_logprobs import PromptLogprobs, score_prompts
from sglang_lite.runtime.executor.sampler import Draws, SampledTokens, SamplingTable, sample
from sglang_lite.runtime.executor.step_record import SlotPages, StepRecord
from sglang_lite.runtime.executor.token_records import read_records
from sglang_lite.runtime.kernels.arena import Arena
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.race import compile_race
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.models.lora.cpu_step import CpuAdapters
from sglang_lite.runtime.models.lora.pool import COLUMN
from sglang_lite.runtime.models.model import Model


@dataclass(frozen=True, slots=True)
class CpuForward:
    """Completed forward of a step.

    Attributes:
        record: step that was run.
        hidden: hidden states [T, hidden_size] of the step's tokens.
        last: int64 [rows], index of each row's last token.
        scored: log-probabilities of prompt tokens, by row of the step.
    """

    record: StepRecord
    hidden: torch.Tensor
    last: torch.Tensor
    scored: dict[int, PromptLogprobs]


class CpuRunner:
    """Runs steps with torch operations; a `ModelRunner`. The forward is complete when `forward`
    returns.

    Args:
        model: model to run.
        pages: pages of the slots, still empty.
        cache_slots: size of the KV cache in tokens.
        window_slots: size of the cache for layers with a window if these have separate pages,
            excluding one extra page that stands for those outside the window; else 0.
        states: number of places for states of sequences, if the model has any.
        one_by_one: whether to compute each token's attention separately, so that it doesn't depend
            on the batch.
        original_logprobs: whether log-probabilities are computed before the logits are adjusted, as
            in `sampler.sample`.
        cores_contended: callback that returns True if other work of the process needs a core. A
            step with streamed rows then uses one thread fewer: a team in which one thread waits for
            a core takes longer than a smaller team.
        adapters: adapters of the slots, or None if no request may have one.
    """

    def __init__(
        self,
        model: Model,
        pages: SlotPages,
        cache_slots: int,
        window_slots: int = 0,
        states: int = 0,
        *,
        one_by_one: bool = False,
        original_logprobs: bool = False,
        cores_contended: Callable[[], bool] | None = None,
        adapters: CpuAdapters | None = None,
    ) -> None:
        self._cores_contended = cores_contended
        self._adapters = adapters
        compile_race()  # now, so that the first draw doesn't wait
        slots = len(pages.pages)
        self._model = model
        self._pages = pages
        self._sampling = SamplingTable(slots)
        self._cache = model.allocate_cache(
            cache_slots, window_slots and window_slots + pages.page_size, states
        )
        self._one_by_one = one_by_one
        self._original_logprobs = original_logprobs
        self._last_tokens: Ints = np.zeros(slots, dtype=np.int32)  # last drawn token of each slot

    @property
    def model(self) -> Model:
        return self._model

    def read_recorded_values(
        self, token_slots: Ints, names: Iterable[RecordName]
    ) -> dict[str, TokenArray]:
        """Returns values that the cache has recorded for the tokens in `token_slots`, int32 [N],
        such as the experts they chose. There is one array for each of `names`.
        """
        return read_records(self._cache, token_slots, names)

    def allocate_page_memory(self, slots: int) -> CpuPageMemory:
        """Allocates host memory for copies of `slots` pages of the KV cache."""
        return CpuPageMemory(self._cache.planes, self._pages.page_size, slots)

    def allocate_state_memory(self, slots: int) -> CpuPageMemory:
        """Allocates host memory for copies of `slots` states. Its pages are the places of states."""
        return CpuPageMemory(self._cache.state_planes, 1, slots)

    @property
    def cache_memory(self) -> Arena | None:
        return self._cache.memory if isinstance(self._cache, KVCache) else None

    def drop_graphs(self) -> None:
        """Does nothing: a CPU has no graphs."""

    def capture_graphs(self) -> None:
        """Does nothing: a CPU has no graphs."""

    def close(self) -> None:
        """Frees the memory of the model and the cache. No method may be called afterwards."""
        del self._model, self._cache

    def forward(self, record: StepRecord) -> CpuForward:
        """Computes the forward of a step."""
        self._pages.apply_record(record)
        self._sampling.set_parameters(record.started, record.sampling)
        if self._adapters is not None:
            changes = record.changes_of(COLUMN)
            self._adapters.change(changes.slots, changes.values)
        with torch.inference_mode(), self._limit_step_threads(record):
            self._copy_token_slots(record)
            inputs = build_cpu_inputs(
                record, self._pages, self._last_tokens, self._adapters, one_by_one=self._one_by_one
            )
            hidden = self._model.forward(inputs.ids, inputs.positions, inputs.plan, self._cache)
            if isinstance(self._cache, KVCache):  # models in tests have other caches
                self._cache.record_hidden(inputs.plan.store_at, hidden)
            scored = score_prompts(self._model, record, inputs.last.numpy(), hidden)
        return CpuForward(record, hidden, inputs.last, scored)

    def _copy_token_slots(self, record: StepRecord) -> None:
        """Copies keys and values between the token slots listed in the record's `copies`."""
        if not record.copies.shape[1]:
            return
        if self._pages.windows is None:
            self._model.copy_slots(self._cache, *torch.from_numpy(record.copies.astype(np.int64)))
            return
        for windowed, copies in ((False, record.copies), (True, record.window_copies)):
            cache = self._cache.of_kind(windowed=windowed)
            self._model.copy_slots(cache, *torch.from_numpy(copies.astype(np.int64)))

    def allocate_masks(self, rows: int, words: int) -> NDArray[np.int32]:
        """Allocates int32 [rows, words] for the token masks of a step."""
        return np.empty((rows, words), dtype=np.int32)

    def sample(self, forward: CpuForward, draws: Draws) -> SampledTokens:
        """Draws the next tokens of some rows from a forward that has computed their hidden states."""
        rows = draws.rows
        behind = draws.behind
        if not len(rows):
            return SampledTokens((), {})
        assert draws.adjustments is not None
        record = forward.record
        slots = record.slots[rows]
        positions = record.ends[rows] if behind is None else record.ends[rows] - behind
        with torch.inference_mode(), self._limit_step_threads(record):
            sampled = sample(
                self.logits(forward, rows, behind),
                self._sampling,
                slots,
                positions,
                draws.adjustments,
                draws.masks,
                draws.scored,
                original_logprobs=self._original_logprobs,
            )
        self._last_tokens[slots] = sampled.tokens
        return sampled

    def logits(
        self, forward: CpuForward, rows: NDArray[np.int64], behind: Ints | None = None
    ) -> torch.Tensor:
        """Returns the logits [R, vocab_size] from which `sample` draws. `rows` and `behind` are as
        in `Draws`.
        """
        last = forward.last[torch.from_numpy(rows)]
        if behind is not None:
            last = last - torch.from_numpy(behind)
        with torch.inference_mode():
            return self._model.logits(forward.hidden[last])

    def with_drawn_ids(self, record: StepRecord) -> StepRecord:
        """Returns the record with each id of -1 replaced by the token that was last drawn in its
        slot.
        """
        return replace(record, ids=fill_in_drawn_ids(record, self._last_tokens))

    def _limit_step_threads(self, record: StepRecord) -> AbstractContextManager[None]:
        """Returns a context that sets how many threads compute a step."""
        leaves_one = (
            self._cores_contended is not None and record.streams > 0 and self._cores_contended()
        )
        return _one_thread_fewer() if leaves_one else nullcontext()


@contextmanager
def _one_thread_fewer() -> Iterator[None]:
    count = torch.get_num_threads()
    torch.set_num_threads(max(count - 1, 1))
    try:
        yield
    finally:
        torch.set_num_threads(count)
