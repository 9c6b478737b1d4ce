"""Captured CUDA graphs of steps that prefill prompts.

For a small model or a short prompt, launching the kernels of a step one by one takes the host
longer than the device needs to run them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from sglang_lite.runtime.attention.expanded import MIN_EXPANDED_TOKENS as MIN_EXPANDED_TOKENS
from sglang_lite.runtime.executor.gpu_inputs import BLOCK_SIZES, GpuInputs
from sglang_lite.runtime.executor.gpu_slots import GpuSlots
from sglang_lite.runtime.executor.staging import Staging, round_up_to_16_bytes
from sglang_lite.runtime.kernels.attention_metadata import DevicePlan
from sglang_lite.runtime.kernels.lora_weights import LoraStep
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.models.model import DeviceModel
from sglang_lite.runtime.models.spec import LatentSpec

# Multiplications of a step that take an H200 12 ms, as long as its host needs to launch the
# kernels. Beyond that, padding costs more.
_PRODUCTS = 36 * 10**11
_LONGEST = 4096  # maximum tokens of a step, since each graph's results take separate memory
_BLOCK = BLOCK_SIZES[-1]
_Array = TypeVar("_Array", torch.Tensor, Ints)
_ROWS = 32  # spare blocks of a graph, for rows that don't fill their last block


def max_captured_tokens(model: DeviceModel, step_tokens: int) -> int:
    """Returns the number of tokens of the largest step that is worth a captured graph."""
    latent = any(isinstance(each, LatentSpec) for each in model.attentions)
    longest = (
        MIN_EXPANDED_TOKENS - 1 if latent else _LONGEST
    )  # longer prompts attend to keys and values expanded from latents
    return min(longest, step_tokens, _PRODUCTS // model.active_parameters)


class PrefillGraphs:
    """Captured graphs of prefill steps. There is one for each number of decoded tokens and of
    prefilled tokens, with or without adapters. It is captured when a step first needs it.

    Args:
        max_tokens: maximum number of tokens in a captured step; 0 to capture none.
        slots: state of slots on the device.
        staging: copies to the device.
        page_size: tokens in a page.
        record: function that captures what another function launches. It returns the graph and the
            tensor that the function returned.
    """

    def __init__(
        self,
        max_tokens: int,
        slots: GpuSlots,
        staging: Staging,
        page_size: int,
        record: Callable[[Callable[[], torch.Tensor]], tuple[torch.cuda.CUDAGraph, torch.Tensor]],
    ) -> None:
        self.max_tokens = max_tokens
        self._slots = slots
        self._staging = staging
        self._page_size = page_size
        self._record = record
        self._rows = 3 if slots.axes is None else 6  # arrays by token among a graph's inputs
        self.captured: dict[tuple[int, int, bool], _Captured] = {}

    def drop_prefill_graphs(self) -> None:
        """Drops all graphs, because the model or the cache that they use has changed."""
        self.captured.clear()

    def run(
        self,
        compute: Callable[[DevicePlan], torch.Tensor],
        inputs: GpuInputs,
        lora: LoraStep | None = None,
    ) -> tuple[torch.Tensor, Ints] | None:
        """Runs a step as a captured graph.

        Args:
            compute: function that computes hidden states [T, hidden_size] of a plan's tokens. Used
                only to capture a graph.
            inputs: inputs of the step.
            lora: adapters of the slots, or None if no row has one.

        Returns:
            Hidden states, valid until any graph runs again, and int64 [rows], the index of each
            row's last token among them; or None if no graph fits the step.
        """
        if inputs.block_size != _BLOCK or inputs.limits.size or len(inputs.ids) > self.max_tokens:
            return None
        decoding = inputs.decoding
        prefilled = len(inputs.ids) - inputs.decoding
        size = min(_padded_rows(decoding), self._slots.dummy), _padded_tokens(prefilled)
        padding = self._padding_blocks(*size, prefilled)
        if len(inputs.blocks) + len(padding) > _max_blocks(size[1]):
            return None
        key = *size, lora is not None
        if key not in self.captured:
            self.captured[key] = self._capture(compute, *size, lora)
        graph = self.captured[key]
        shift = size[0] - decoding
        host = np.zeros(len(graph.static), dtype=np.int32)
        tokens, blocks = _split_inputs(host, sum(size), self._rows)
        tokens[1] = self._slots.dummy
        threefold = () if self._slots.axes is None else inputs.mrope_positions
        for to, of in zip(tokens, (inputs.ids, inputs.slots, inputs.positions, *threefold)):
            to[:decoding] = of[:decoding]
            to[size[0] : size[0] + prefilled] = of[decoding:]
        blocks[: len(inputs.blocks)] = inputs.blocks
        blocks[: len(inputs.blocks), 0] += shift
        blocks[len(inputs.blocks) : len(inputs.blocks) + len(padding)] = padding
        self._staging.send(host, graph.static)
        graph.graph.replay()
        return graph.hidden, np.where(inputs.last < decoding, inputs.last, inputs.last + shift)

    @property
    def _max_padding_per_block(self) -> int:
        """Maximum number of padding tokens in a block: the size of a block, or the number of
        positions in the dummy slot if that is smaller.
        """
        return min(_BLOCK, self._slots.page_table.shape[1] * self._page_size)

    def _padding_blocks(self, decoding: int, tokens: int, prefilled: int) -> Ints:
        """Returns blocks of the dummy slot that cover the graph's padding tokens, so that their
        results are defined.

        Args:
            decoding: decoded tokens of the graph.
            tokens: prefilled tokens of the graph.
            prefilled: prefilled tokens of the step.
        """
        starts = np.arange(
            decoding + prefilled, decoding + tokens, self._max_padding_per_block, dtype=np.int32
        )
        counts = np.minimum(decoding + tokens - starts, self._max_padding_per_block)
        return np.stack(
            (starts, counts, np.full_like(starts, self._slots.dummy), np.zeros_like(starts)), 1
        )

    def _capture(
        self,
        compute: Callable[[DevicePlan], torch.Tensor],
        decoding: int,
        tokens: int,
        lora: LoraStep | None,
    ) -> _Captured:
        slots = self._slots
        count = decoding + tokens
        device = slots.page_table.device
        static = torch.zeros(
            self._rows * round_up_to_16_bytes(count) + 4 * _max_blocks(tokens),
            dtype=torch.int32,
            device=device,
        )
        arrays, blocks = _split_inputs(static, count, self._rows)
        ids, of_slots, positions = arrays[:3]
        of_slots.fill_(slots.dummy)
        plan = slots.plan(
            ids,
            of_slots,
            positions,
            arrays[3:],
            decoding=decoding,
            blocks=blocks,
            block_size=_BLOCK,
        )
        plan = replace(plan, lora=lora)
        return _Captured(static, *self._record(lambda: compute(plan)))


@dataclass(frozen=True, slots=True)
class _Captured:
    """Captured graph of a prefill step, with its inputs and output.

    Attributes:
        static: int32 inputs: ids, slots and positions of the tokens, possibly `DevicePlan.rotary`,
            then their blocks [blocks, 4], as in DevicePlan.
        graph: captured CUDA graph.
        hidden: hidden states of the last run.
    """

    static: torch.Tensor
    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor


def _split_inputs(static: _Array, tokens: int, rows: int) -> tuple[_Array, _Array]:
    """Returns views of a graph's inputs. The first is [rows, T]: ids, slots and positions of its
    tokens, and `DevicePlan.rotary` if the model has it. The second is their blocks [blocks, 4].
    """
    stride = round_up_to_16_bytes(tokens)
    return static[: rows * stride].reshape(rows, stride)[:, :tokens], static[
        rows * stride :
    ].reshape(-1, 4)


def _padded_rows(rows: int) -> int:
    """Rounds a number of decoded rows up to the number in a graph: 0, 8, 16, 32 or a higher power
    of two.
    """
    return max(8, 1 << (rows - 1).bit_length()) if rows else 0


def _padded_tokens(tokens: int) -> int:
    """Rounds a number of prefilled tokens up to the number in a graph, which consists of whole
    blocks. From 1,024 tokens on, padding is at most an eighth.
    """
    step = max(_BLOCK, 1 << max((tokens - 1).bit_length() - 4, 0))
    return -(-tokens // step) * step


def _max_blocks(tokens: int) -> int:
    """Returns the number of blocks of a graph with this many prefilled tokens."""
    return tokens // _BLOCK + _ROWS
