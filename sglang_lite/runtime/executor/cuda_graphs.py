"""Captured CUDA graphs of decoding steps, one for each step size."""

from __future__ import annotations

import gc
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from sglang_lite.runtime.executor.gpu_inputs import NO_TOKENS, GpuInputs
from sglang_lite.runtime.executor.gpu_slots import GpuSlots
from sglang_lite.runtime.executor.prefix_groups import MAX_CHUNKS, SharedPrefixArrays
from sglang_lite.runtime.executor.staging import Staging, make_event, round_up_to_16_bytes
from sglang_lite.runtime.executor.step_record import StepRecord
from sglang_lite.runtime.kernels.attention_metadata import DevicePlan, SharedPrefixes
from sglang_lite.runtime.kernels.lora_own import is_own_lora_faster
from sglang_lite.runtime.kernels.lora_weights import LoraStep
from sglang_lite.runtime.kernels.state_rows import StateRows, StateWave
from sglang_lite.runtime.kv_cache.pages import Ints

_MEASURED = 3  # replays over which a step's time is measured
# Writes logits [R, vocab_size] of a plan's tokens into the last argument, for the tokens at the
# indices [R] in the second argument, or for all tokens if it is None. A model with several stages
# returns the rows of one stage instead.
Compute = Callable[[DevicePlan, torch.Tensor | None, torch.Tensor], torch.Tensor]


class CudaGraphs:
    """Captured graphs of decoding steps, by number of tokens. All share the same memory for
    results.

    Args:
        sizes: numbers of rows that are worth a graph, ascending; empty if steps can't be captured.
        max_tokens: maximum number of tokens decoded in one step, as for `build_gpu_inputs`.
        slots: state of slots on the device.
        staging: copies to the device.
        extra_items: items for chunks of shared prefixes in addition to one for each token.
        vocab_size: number of tokens whose logits are computed.
        dtype: data type of logits.
        drafts: whether rows with several tokens need all their logits, to check drafts, or only the
            last token's.
        received: [tokens, hidden_size] for `DevicePlan.rows` of all sizes; None to begin with
            embeddings.
        states: whether rows have states, so that graphs are captured only for rows of one token.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        max_tokens: int,
        slots: GpuSlots,
        staging: Staging,
        *,
        extra_items: int,
        vocab_size: int,
        dtype: torch.dtype,
        drafts: bool = False,
        received: torch.Tensor | None = None,
        states: bool = False,
    ) -> None:
        self._states = states
        self.sizes = sizes
        self._drafts = drafts
        self._received = received
        self._max_tokens = max_tokens
        self._slots = slots
        self._staging = staging
        self._extra_items = extra_items
        self._vocab_size = vocab_size
        self._dtype = dtype
        self._logits: torch.Tensor | None = None  # shared by all graphs
        # Key: number of tokens, whether rows have several tokens, share prefixes, have adapters (2:
        # mostly distinct).
        self.captured: dict[tuple[int, bool, bool, int], CapturedGraph] = {}
        self._pool: Any = None

    def drop_decode_graphs(self) -> None:
        """Drops all graphs, because the model or the cache that they use has changed."""
        self.captured.clear()

    def capture_all(
        self, compute: Compute, sharing: Sequence[bool], adapters: Sequence[LoraStep | None]
    ) -> None:
        """Captures the graphs of all sizes.

        Args:
            compute: function to capture, as for `find_or_capture`.
            sharing: variants to capture: False for rows without shared prefixes, True for rows with
                them.
            adapters: variants to capture: None for rows without adapters, the slots' adapters for
                others.
        """
        sizes = [(size, False, size > 1) for size in sorted(self.sizes, reverse=True)]
        sizes += [
            (size, True, size <= self._max_tokens)
            for size in reversed(self._token_sizes)
            if self.sizes and not self._states
        ]
        for (size, several, can_share), lora in itertools.product(sizes, adapters):
            if lora is not None and lora.own and not is_own_lora_faster(size, size):
                continue
            for shared in sharing if can_share else (False,):
                self._graph_for_key(compute, size, several, shared, lora)

    def measure_steps(self) -> dict[int, float]:
        """Measures how long each captured step without shared prefixes and adapters takes, using
        the dummy slot. Returns the seconds by number of tokens.
        """
        found: dict[int, float] = {}
        for (tokens, _, shared, adapted), each in sorted(
            self.captured.items(), key=lambda item: item[0][:2]
        ):
            if not shared and not adapted:
                each.graph.replay()
                began = make_event(timed=True)
                ended = make_event(timed=True)
                began.record()
                for _ in range(_MEASURED):
                    each.graph.replay()
                ended.record()
                ended.synchronize()
                found[tokens] = began.elapsed_time(ended) / 1000 / _MEASURED
        return found

    def run_padding_graph(self, compute: Compute, size: int) -> None:
        """Launches a graph of `size` padding tokens. `compute` is the same as for
        `find_or_capture`.
        """
        self.find_or_capture(compute, NO_TOKENS, size, shared=False).run(NO_TOKENS, None)

    def padded_rows(self, rows: int) -> int:
        """Returns the number of rows of the smallest graph that fits `rows` rows, or `rows` if no
        graph fits.
        """
        at = bisect_left(self.sizes, rows)
        return self.sizes[at] if at < len(self.sizes) else rows

    def can_run(self, record: StepRecord) -> bool:
        """Returns True if a graph can run the step, assuming that all its tokens are decoded. No
        graph runs a step that scores prompt tokens, lets tokens see later ones, or has tokens of
        images or sounds.

        Prompt tokens can't be scored because graphs return only the logits of last tokens. If the
        model has states, rows must have one token each.
        """
        alone = record.scores or record.limits.size or record.has_ready_embeddings
        if self._states and record.singles < len(record.slots):
            return False
        return not alone and self.padded_rows(len(record.slots)) in self.sizes

    def smallest_graph_size(self, inputs: GpuInputs) -> int:
        """Returns the number of tokens of the smallest graph that fits a step. Returns 0 if some of
        the step's tokens are not decoded. `can_run` must be True for the step.
        """
        tokens = len(inputs.ids)
        rows = len(inputs.last)
        if inputs.decoding < tokens:
            return 0
        return (
            self.padded_rows(rows)
            if tokens == rows
            else self._token_sizes[bisect_left(self._token_sizes, tokens)]
        )

    def find_or_capture(
        self,
        compute: Compute,
        inputs: GpuInputs,
        size: int,
        shared: bool,
        lora: LoraStep | None = None,
    ) -> CapturedGraph:
        """Returns the graph that runs a step, capturing it if necessary.

        Args:
            compute: function to capture. Used only to capture a graph.
            inputs: inputs of a step that `can_run`.
            size: number of the graph's tokens, at least `smallest_graph_size(inputs)`.
            shared: whether rows share prefixes.
            lora: adapters of the slots, or None if no row has one.
        """
        multi_token_rows = len(inputs.ids) > len(inputs.last) or size not in self.sizes
        return self._graph_for_key(compute, size, multi_token_rows, shared, lora)

    def _graph_for_key(
        self,
        compute: Compute,
        tokens: int,
        multi_token_rows: bool,
        shared: bool,
        lora: LoraStep | None,
    ) -> CapturedGraph:
        key = tokens, multi_token_rows, shared, 0 if lora is None else 1 + lora.own
        if key not in self.captured:
            self.captured[key] = self._capture(
                compute, tokens, multi_token_rows=multi_token_rows, shared=shared, lora=lora
            )
        return self.captured[key]

    @cached_property
    def _token_sizes(self) -> list[int]:
        """Numbers of tokens for which graphs are captured if rows have several tokens. The numbers
        are closer together with drafts: every step then has such rows, so padding costs more.
        """
        few = (
            (8, 16, 24, *range(32, 128, 16), 128, 160, 192, 224)
            if self._drafts
            else (8, 16, 32, 64, 128, 192)
        )
        sizes = (*few, *range(256, self._max_tokens, 128))
        most = self._max_tokens
        return [*(size for size in sizes if size < most), most, most * 3 // 2, 2 * most]

    def _capture(
        self,
        compute: Compute,
        tokens: int,
        *,
        multi_token_rows: bool,
        shared: bool,
        lora: LoraStep | None,
    ) -> CapturedGraph:
        """Captures a graph that decodes `tokens` tokens and computes their logits. Computes only
        the logits of each row's last token if rows may have several tokens and no drafts are
        checked.
        """
        slots = self._slots
        items = tokens + self._extra_items
        stride = round_up_to_16_bytes(tokens)
        device = slots.page_table.device
        rows_of_inputs = (4 if slots.axes is None else 7) + 2 * self._states
        arrays = rows_of_inputs * stride
        memory = torch.zeros(
            arrays + (3 * stride + 6 * items) * shared, dtype=torch.int32, device=device
        )
        static = memory[:arrays].view(rows_of_inputs, stride)
        static[1] = slots.dummy
        prefixes = None
        if shared:
            lengths, chunks, order = memory[arrays : arrays + 3 * stride].view(3, stride)[
                :, :tokens
            ]
            prefixes = SharedPrefixes(
                lengths, chunks, order, memory[arrays + 3 * stride :].view(-1, 6), MAX_CHUNKS
            )
        no_blocks = torch.zeros((0, 4), dtype=torch.int32, device=device)
        plan = slots.plan(
            static[0, :tokens],
            static[1, :tokens],
            static[2, :tokens],
            static[4:7, :tokens],
            decoding=tokens,
            blocks=no_blocks,
            block_size=16,
            shared=prefixes,
        )
        if self._states:
            static[-2:] = -1
            each = torch.arange(tokens + 1, dtype=torch.int32, device=device)
            rows_of_states = StateRows(each, static[-2, :tokens], static[-1, :tokens], 1)
            plan = replace(plan, states=(StateWave(rows_of_states),))
        received = None if self._received is None else self._received[:tokens]
        plan = replace(
            plan, separate=not multi_token_rows, lora=lora, features=False, rows=received
        )

        last_only = multi_token_rows and not self._drafts
        rows = min(tokens, slots.dummy) if last_only else tokens
        # a tensor for each graph would in total take as much memory as a model's weights
        if self._logits is None:
            shape = (
                max(slots.dummy, *self.sizes, *(self._token_sizes if self._drafts else ())),
                self._vocab_size,
            )
            self._logits = torch.empty(shape, dtype=self._dtype, device=device)
        out = self._logits[:rows]

        def compute_static() -> torch.Tensor:
            return compute(plan, static[3, :rows] if last_only else None, out)

        graph, logits = self.capture_function(compute_static)
        return CapturedGraph(
            graph, plan, memory, static, logits, self._staging, slots.dummy, last_only
        )

    def capture_function(
        self, compute: Callable[[], torch.Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Captures the kernels that a function launches. Returns the graph, and the tensor that
        each replay computes.
        """
        graph = torch.cuda.CUDAGraph()
        # Only the mode "relaxed" allows loading kernels that have not been launched before.
        with (
            _without_garbage_collection(),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="relaxed"),
        ):
            logits = compute()
        if self._pool is None:
            self._pool = graph.pool()
        return graph, logits


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Prevents garbage collection during a capture. Freeing an object, such as another engine's
    pinned memory, may wait for the device, which is an error during a capture.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@dataclass(slots=True)
class CapturedGraph:
    """Captured decoding step for a fixed number of tokens.

    Attributes:
        graph: captured CUDA graph.
        plan: plan of the step; its slots and positions are those of the last run.
        memory: int32, `static` followed by the data of shared prefixes, if rows share any.
        static: int32 [4 to 9, tokens], padded: ids, slots and positions of the tokens, indices of
            rows' last tokens, the positions of `DevicePlan.rotary`, if the model has any, and the
            places of the states that rows read and write, if it has any.
        logits: logits of the last run of any graph.
        staging: copies to the device.
        dummy: index of the dummy slot.
        last_only: whether there are logits for only each row's last token, or for all tokens.
        draws: graphs that draw a token for each row, without and with masks; None if draws are not
            captured.
    """

    graph: torch.cuda.CUDAGraph
    plan: DevicePlan
    memory: torch.Tensor
    static: torch.Tensor
    logits: torch.Tensor
    staging: Staging
    dummy: int
    last_only: bool
    draws: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None
    _shared: SharedPrefixArrays | None = None

    def run(
        self, inputs: GpuInputs, shared: SharedPrefixArrays | None, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Ints]:
        """Launches the step. Returns the logits [N, vocab_size], and the index of each row's last
        token in them, int32 [rows]. The logits are valid until any graph runs again.

        Args:
            inputs: inputs of the step, with at most as many tokens as were captured.
            shared: prefixes that rows share; None if the graph was captured without them.
            rows: `DevicePlan.rows` of the tokens; None to begin with embeddings.
        """
        (arrays, stride), real, count = self.static.shape, len(inputs.ids), len(inputs.last)
        changed = shared is not None and shared is not self._shared
        sent = np.zeros(len(self.memory) if changed else arrays * stride, dtype=np.int32)
        host = sent[: arrays * stride].reshape(arrays, stride)
        host[1, real:] = self.dummy
        host[0, :real] = inputs.ids
        host[1, :real] = inputs.slots
        host[2, :real] = inputs.positions
        host[3, :count] = inputs.last
        if self.plan.rotary is not None:
            host[4:7, :real] = inputs.mrope_positions
        if self.plan.states:
            host[-2:] = -1  # padding neither reads nor writes a state
            host[-2:, : inputs.states.shape[1]] = inputs.states
        if shared is not None and changed:
            parts = shared.lengths, shared.chunks, shared.order, shared.items.reshape(-1)
            for i, array in enumerate(parts, arrays):
                sent[i * stride : i * stride + len(array)] = array
            self._shared = shared
        self.staging.send(sent, self.memory[: len(sent)])
        if rows is not None and self.plan.rows is not None:
            self.plan.rows[: len(rows)] = rows
        self.graph.replay()
        return (
            (self.logits[:count], np.arange(count, dtype=np.int32))
            if self.last_only
            else (self.logits, inputs.last)
        )


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Returns the batch sizes for which separate graphs are worth capturing."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows + 32, 32)]
    return (*(size for size in sizes if size < max_rows), max_rows)
