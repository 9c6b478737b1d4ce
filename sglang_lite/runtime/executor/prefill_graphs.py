"""Captured CUDA graphs of steps that read prompts.

To launch the kernels of such a step one by one takes the host longer than the device takes to run them, where a model
is small or a prompt short.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from sglang_lite.runtime.attention.expanded import LEAST as EXPANDED
from sglang_lite.runtime.executor.gpu_inputs import BLOCK_SIZES, GpuInputs
from sglang_lite.runtime.executor.gpu_slots import GpuSlots
from sglang_lite.runtime.executor.staging import Staging, aligned
from sglang_lite.runtime.kernels.attention_metadata import DevicePlan
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.models.model import DeviceModel
from sglang_lite.runtime.models.spec import LatentSpec

# Products of a step that take an H200 12 ms, as its host takes to launch one: padding costs more beyond.
_PRODUCTS = 36 * 10**11
_LONGEST = 4096  # tokens of a step: what graphs compute takes memory of their own
_BLOCK = BLOCK_SIZES[-1]
_Array = TypeVar("_Array", torch.Tensor, Ints)
_ROWS = 32  # blocks that a graph has beyond those that its tokens fill


def captured_tokens(model: DeviceModel, step_tokens: int) -> int:
    """Tokens of the largest step that is worth a graph."""
    latent = any(isinstance(each, LatentSpec) for each in model.attentions)
    longest = EXPANDED - 1 if latent else _LONGEST  # longer ones attend by what is made of latents
    return min(longest, step_tokens, _PRODUCTS // model.products)


class PrefillGraphs:
    """Graphs by how many tokens are decoded and how many are read. Each is captured when a step first needs it.

    Args:
        most: tokens of a step; 0 where none is captured.
        slots: state of slots on the device.
        staging: copies to the device.
        page_size: tokens in a page.
        record: captures what a function launches; returns the graph and what the function did.
    """

    def __init__(
        self,
        most: int,
        slots: GpuSlots,
        staging: Staging,
        page_size: int,
        record: Callable[[Callable[[], torch.Tensor]], tuple[torch.cuda.CUDAGraph, torch.Tensor]],
    ) -> None:
        self.most = most
        self._slots, self._staging, self._page_size, self._record = slots, staging, page_size, record
        self.captured: dict[tuple[int, int], _Captured] = {}

    def clear(self) -> None:
        """Drops all graphs: what they computed with has changed."""
        self.captured.clear()

    def run(self, compute: Callable[[DevicePlan], torch.Tensor], inputs: GpuInputs) -> tuple[torch.Tensor, Ints] | None:
        """Launches a step.

        Args:
            compute: hidden states [T, hidden_size] of a plan's tokens; what is captured, and not kept.
            inputs: of the step.

        Returns:
            Hidden states, which the next run of any graph overwrites, and which of them are of rows' last tokens, int64
            [rows]; None where no graph has room for the step.
        """
        if inputs.block_size != _BLOCK or len(inputs.ids) > self.most:
            return None
        decoding, read = inputs.decoding, len(inputs.ids) - inputs.decoding
        size = min(_padded_rows(decoding), self._slots.dummy), _padded_tokens(read)
        padding = self._padding(*size, read)
        if len(inputs.blocks) + len(padding) > _blocks(size[1]):
            return None
        if size not in self.captured:
            self.captured[size] = self._capture(compute, *size)
        graph, behind = self.captured[size], size[0] - decoding
        host = np.zeros(len(graph.static), dtype=np.int32)
        tokens, blocks = _parts(host, sum(size))
        tokens[1] = self._slots.dummy
        for to, of in zip(tokens, (inputs.ids, inputs.slots, inputs.positions)):
            to[:decoding], to[size[0] : size[0] + read] = of[:decoding], of[decoding:]
        blocks[: len(inputs.blocks)] = inputs.blocks
        blocks[: len(inputs.blocks), 0] += behind
        blocks[len(inputs.blocks) : len(inputs.blocks) + len(padding)] = padding
        self._staging.send(host, graph.static)
        graph.graph.replay()
        return graph.hidden, np.where(inputs.last < decoding, inputs.last, inputs.last + behind)

    @property
    def _reach(self) -> int:
        """Tokens of the dummy slot in a block: all at position 0, they read as many as its pages have."""
        return min(_BLOCK, self._slots.page_table.shape[1] * self._page_size)

    def _padding(self, decoding: int, tokens: int, read: int) -> Ints:
        """Blocks of the dummy slot behind the tokens that are read, so that a graph's numbers are all defined."""
        starts = np.arange(decoding + read, decoding + tokens, self._reach, dtype=np.int32)
        counts = np.minimum(decoding + tokens - starts, self._reach)
        return np.stack((starts, counts, np.full_like(starts, self._slots.dummy), np.zeros_like(starts)), 1)

    def _capture(self, compute: Callable[[DevicePlan], torch.Tensor], decoding: int, tokens: int) -> _Captured:
        slots, count = self._slots, decoding + tokens
        device = slots.page_table.device
        static = torch.zeros(3 * aligned(count) + 4 * _blocks(tokens), dtype=torch.int32, device=device)
        (ids, of_slots, positions), blocks = _parts(static, count)
        of_slots.fill_(slots.dummy)
        plan = DevicePlan(
            ids=ids,
            slots=of_slots,
            positions=positions,
            drawn=slots.drawn,
            page_table=slots.page_table,
            page_size=self._page_size,
            decoding=decoding,
            shared=None,
            blocks=blocks,
            block_size=_BLOCK,
        )
        return _Captured(static, *self._record(lambda: compute(plan)))


@dataclass(frozen=True, slots=True)
class _Captured:
    """A captured step.

    Attributes:
        static: int32: ids, slots and positions of its tokens, and their blocks [blocks, 4], as in DevicePlan.
        graph: what computes them.
        hidden: what has been computed.
    """

    static: torch.Tensor
    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor


def _parts(static: _Array, tokens: int) -> tuple[_Array, _Array]:
    """Tokens' ids, slots and positions [3, T], and their blocks [blocks, 4]."""
    stride = aligned(tokens)
    return static[: 3 * stride].reshape(3, stride)[:, :tokens], static[3 * stride :].reshape(-1, 4)


def _padded_rows(rows: int) -> int:
    """Rows that a graph decodes, for so many: 0, 8, 16, 32 and so on."""
    return max(8, 1 << (rows - 1).bit_length()) if rows else 0


def _padded_tokens(tokens: int) -> int:
    """Tokens that a graph reads, for so many: an eighth more at most, from 1,024 on."""
    step = max(_BLOCK, 1 << max((tokens - 1).bit_length() - 4, 0))
    return -(-tokens // step) * step


def _blocks(tokens: int) -> int:
    """Blocks of a graph that reads so many tokens."""
    return tokens // _BLOCK + _ROWS
