"""Adapters of a step's tokens on a CPU: two small products for each adapter, added to those of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_lite.runtime.models.lora.adapter import Adapter, ProductDelta


@dataclass(frozen=True, slots=True)
class CpuLoraStep:
    """Adapters of a step's tokens.

    Attributes:
        groups: tokens of each adapter, as int64 indices into the step's tokens, or a slice.
    """

    groups: tuple[tuple[torch.Tensor | slice, Adapter], ...]

    def layer(self, index: int) -> LayerAdapters:
        """The step's adapters in one layer."""
        return LayerAdapters(index, self.groups)


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """Adapters of a step's tokens in one layer; attributes as of CpuLoraStep."""

    index: int
    groups: tuple[tuple[torch.Tensor | slice, Adapter], ...]

    def add(self, product: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Adds the adapters' parts to a product, in place if possible.

        Args:
            product: name of the product, as in `product_shapes`.
            x: its inputs [T, inputs].
            y: its outputs [T, outputs].
        """
        for tokens, adapter in self.groups:
            if (delta := adapter.layers[self.index].get(product)) is not None:
                y[tokens] += _product(delta, x[tokens]).to(y.dtype)
        return y


def _product(delta: ProductDelta, x: torch.Tensor) -> torch.Tensor:
    parts, rank, inputs = delta.a.shape
    low = x.to(delta.a.dtype) @ delta.a.view(parts * rank, inputs).t()
    if parts == 1:
        return low @ delta.b
    pairs = zip(low.split_with_sizes([rank] * parts, 1), delta.b.split_with_sizes(delta.outputs, 1))
    return torch.cat([each @ b for each, b in pairs], 1)


class CpuAdapters:
    """Adapters by adapter slot, for a runner on a CPU, which uses the host's tensors as they are.

    Args:
        slots: number of adapter slots.
        sequences: number of slots of sequences.
    """

    def __init__(self, slots: int, sequences: int) -> None:
        self._adapters: list[Adapter | None] = [None] * slots
        self._of_slot: NDArray[np.int32] = np.full(sequences, -1, dtype=np.int32)

    def pack(self, adapter: Adapter) -> Adapter:
        """Returns the adapter as it is."""
        return adapter

    def write(self, slot: int, pages: Sequence[int], adapter: Adapter) -> None:
        """Makes an adapter the one of an adapter slot."""
        self._adapters[slot] = adapter

    def clear(self, slot: int) -> None:
        """Empties an adapter slot, which no running request uses."""
        self._adapters[slot] = None

    def start(self, slots: NDArray[np.int32], adapters: NDArray[np.int32]) -> None:
        """Sets the adapter slots of sequences that begin; none has one if `adapters` is empty."""
        self._of_slot[slots] = adapters if len(adapters) else -1

    def step(self, token_slots: NDArray[np.int32]) -> CpuLoraStep | None:
        """Adapters of a step's tokens, given the slot of each, or None if no token has one."""
        of_token = self._of_slot[token_slots]
        used = np.unique(of_token)
        groups: list[tuple[torch.Tensor | slice, Adapter]] = []
        for number in used[used >= 0].tolist():
            adapter, tokens = self._adapters[number], np.flatnonzero(of_token == number)
            assert adapter is not None, "a running request uses an empty adapter slot"
            first, last = int(tokens[0]), int(tokens[-1])
            whole = last - first + 1 == len(tokens)
            groups.append((slice(first, last + 1) if whole else torch.from_numpy(tokens), adapter))
        return CpuLoraStep(tuple(groups)) if groups else None
