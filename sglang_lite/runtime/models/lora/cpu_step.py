"""Adapters of a step on a CPU: in a compiled step of few tokens the products of each adapter's own, else two products
over all of them, of which a token keeps its own adapter's numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_lite.runtime.kernels.cpu_small_batch_step import PRODUCTS, AdapterDelta, StepAdapters
from sglang_lite.runtime.models.lora.adapter import Adapter, ProductDelta

_KEPT = 4  # sets of adapters that are kept side by side


@dataclass(frozen=True, slots=True)
class JoinedDelta:
    """Parts of several adapters in one product of one layer, side by side.

    Attributes:
        a: [parts * ranks, inputs], for each stacked part of the product the ranks of all adapters.
        b: for each part [ranks, outputs].
    """

    a: torch.Tensor
    b: tuple[torch.Tensor, ...]


class AdapterSet:
    """Adapters that run together, in the forms that steps take, each of which is made when a step first needs it.

    Args:
        adapters: the adapters.
    """

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        self.adapters = adapters

    @cached_property
    def layers(self) -> tuple[Mapping[str, JoinedDelta], ...]:
        """Parts of the adapters side by side, in each layer and by product."""
        return joined(self.adapters)

    @cached_property
    def deltas(self) -> ctypes.Array[AdapterDelta]:
        """Parts of the adapters as `StepAdapters` has them."""
        found = [
            AdapterDelta() if (delta := layer.get(product)) is None
            else AdapterDelta(delta.a.data_ptr(), delta.b.data_ptr(), adapter.rank)
            for layers in zip(*(adapter.layers for adapter in self.adapters))
            for product in PRODUCTS
            for adapter, layer in zip(self.adapters, layers)
        ]  # fmt: skip
        return (AdapterDelta * len(found))(*found)


@dataclass(frozen=True)
class CpuLoraStep:
    """Adapters of a step's tokens.

    Attributes:
        adapters: the adapters of the step.
        of_token: index of each token's adapter among them, -1 if it has none.
    """

    adapters: AdapterSet
    of_token: NDArray[np.int64]

    def layer(self, index: int) -> LayerAdapters:
        """The step's adapters in one layer."""
        return LayerAdapters(self.adapters.layers[index], self.kept)

    @cached_property
    def kept(self) -> Mapping[int, torch.Tensor]:
        """For each number of parts, [T, parts * ranks], 1 for the ranks of a token's own adapter and 0 for others."""
        ranks = [adapter.rank for adapter in self.adapters.adapters]
        dtype = next(delta.a.dtype for layer in self.adapters.adapters[0].layers for delta in layer.values())
        own = torch.from_numpy(self.of_token[:, None] == np.repeat(np.arange(len(ranks)), ranks)).to(dtype)
        return {parts: own.repeat(1, parts) for parts in (1, 2, 3)}

    @property
    def compiled(self) -> StepAdapters:
        """The adapters as a compiled step takes them."""
        order = np.argsort(self.of_token, kind="stable").astype(np.int32)
        starts = np.searchsorted(self.of_token[order], np.arange(len(self.adapters.adapters) + 1)).astype(np.int32)
        rank = max(adapter.rank for adapter in self.adapters.adapters)
        return StepAdapters(self.adapters.deltas, torch.from_numpy(order), torch.from_numpy(starts), rank)


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """Adapters of a step's tokens in one layer: those of AdapterSet, and `kept` of CpuLoraStep."""

    products: Mapping[str, JoinedDelta]
    kept: Mapping[int, torch.Tensor]

    def add(self, product: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Adds the adapters' parts to a product, in place.

        Args:
            product: name of the product, as in `product_shapes`.
            x: its inputs [T, inputs].
            y: its outputs [T, outputs].
        """
        if (delta := self.products.get(product)) is not None:
            low = (x.to(delta.a.dtype) @ delta.a.t()).mul_(self.kept[len(delta.b)])
            outputs = y.split_with_sizes([each.shape[1] for each in delta.b], 1)
            for part, own, b in zip(outputs, low.chunk(len(delta.b), 1), delta.b):
                part += (own @ b).to(y.dtype)
        return y


def joined(adapters: Sequence[Adapter]) -> tuple[Mapping[str, JoinedDelta], ...]:
    """Adapters side by side, in each layer and by product."""
    layers = []
    for each in zip(*(adapter.layers for adapter in adapters)):
        shapes = {product: delta for layer in each for product, delta in layer.items()}
        layers.append({
            product: _side_by_side([layer.get(product) for layer in each], adapters, shape)
            for product, shape in shapes.items()
        })  # fmt: skip
    return tuple(layers)


def _side_by_side(
    deltas: Sequence[ProductDelta | None], adapters: Sequence[Adapter], like: ProductDelta
) -> JoinedDelta:
    parts, _, inputs = like.a.shape
    a, b = [], []
    for delta, adapter in zip(deltas, adapters):
        a.append(like.a.new_zeros(parts, adapter.rank, inputs) if delta is None else delta.a)
        b.append(like.b.new_zeros(adapter.rank, like.b.shape[1]) if delta is None else delta.b)
    by_part = torch.cat(b).split_with_sizes(like.outputs, 1)
    return JoinedDelta(torch.cat(a, 1).flatten(0, 1), tuple(each.contiguous() for each in by_part))


class CpuAdapters:
    """Adapters by adapter slot, for a runner on a CPU, which uses the host's tensors as they are.

    Args:
        slots: number of adapter slots.
        sequences: number of slots of sequences.
    """

    def __init__(self, slots: int, sequences: int) -> None:
        self._adapters: list[Adapter | None] = [None] * slots
        self._of_slot: NDArray[np.int32] = np.full(sequences, -1, dtype=np.int32)
        self._sets: dict[tuple[int, ...], AdapterSet] = {}  # adapters of the last steps, by generations

    def pack(self, adapter: Adapter) -> Adapter:
        """Returns the adapter as it is."""
        return adapter

    def write(self, slot: int, pages: Sequence[int], adapter: Adapter) -> None:
        """Makes an adapter the one of an adapter slot."""
        self._adapters[slot] = adapter

    def clear(self, slot: int) -> None:
        """Empties an adapter slot, which no running request uses."""
        self._adapters[slot] = None

    def change(self, slots: NDArray[np.int32], adapters: NDArray[np.int32]) -> None:
        """Changes the adapter slots of sequences; -1 for none."""
        self._of_slot[slots] = adapters

    def step(self, token_slots: NDArray[np.int32]) -> CpuLoraStep | None:
        """Adapters of a step's tokens, given the slot of each, or None if no token has one."""
        of_token = self._of_slot[token_slots]
        numbers = np.unique(of_token[of_token >= 0]).tolist()
        adapters = [adapter for number in numbers if (adapter := self._adapters[number]) is not None]
        assert len(adapters) == len(numbers), "a running request uses an empty adapter slot"
        if not adapters:
            return None
        generations = tuple(adapter.generation for adapter in adapters)
        if generations not in self._sets:
            while len(self._sets) >= _KEPT:
                del self._sets[next(iter(self._sets))]
            self._sets[generations] = AdapterSet(adapters)
        return CpuLoraStep(
            self._sets[generations], np.where(of_token < 0, -1, np.searchsorted(np.array(numbers), of_token))
        )
