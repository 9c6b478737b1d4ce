"""Adapters of a step on a CPU: two products over all of them, of which a token keeps its own adapter's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_lite.runtime.models.lora.adapter import Adapter, ProductDelta

_KEPT = 4  # sets of adapters that are kept side by side


@dataclass(frozen=True, slots=True)
class JoinedDelta:
    """Parts of several adapters in one product of one layer, side by side.

    Attributes:
        parts: number of stacked parts of the product.
        a: [ranks, inputs], for each adapter those of all parts.
        b: [ranks, outputs], zero outside the outputs of a rank's part.
    """

    parts: int
    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class CpuLoraStep:
    """Adapters of a step's tokens.

    Attributes:
        layers: adapters of the step in each layer, by product.
        kept: for each number of parts, [T, ranks], 1 for the ranks of a token's own adapter and 0 for others.
    """

    layers: tuple[Mapping[str, JoinedDelta], ...]
    kept: Mapping[int, torch.Tensor]

    def layer(self, index: int) -> LayerAdapters:
        """The step's adapters in one layer."""
        return LayerAdapters(self.layers[index], self.kept)


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """Adapters of a step's tokens in one layer; attributes as of CpuLoraStep."""

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
            low = (x.to(delta.a.dtype) @ delta.a.t()).mul_(self.kept[delta.parts])
            y += (low @ delta.b).to(y.dtype)
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
        if delta is None:
            a.append(like.a.new_zeros(parts * adapter.rank, inputs))
            b.append(like.b.new_zeros(parts * adapter.rank, like.b.shape[1]))
        else:
            a.append(delta.a.flatten(0, 1))
            b.append(torch.block_diag(*delta.b.split_with_sizes(delta.outputs, 1)))  # type: ignore[no-untyped-call] # untyped in torch
    return JoinedDelta(parts, torch.cat(a), torch.cat(b))


class CpuAdapters:
    """Adapters by adapter slot, for a runner on a CPU, which uses the host's tensors as they are.

    Args:
        slots: number of adapter slots.
        sequences: number of slots of sequences.
    """

    def __init__(self, slots: int, sequences: int) -> None:
        self._adapters: list[Adapter | None] = [None] * slots
        self._of_slot: NDArray[np.int32] = np.full(sequences, -1, dtype=np.int32)
        # By generations: adapters of the last steps, side by side.
        self._joined: dict[tuple[int, ...], tuple[Mapping[str, JoinedDelta], ...]] = {}

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
        numbers = np.unique(of_token[of_token >= 0]).tolist()
        adapters = [adapter for number in numbers if (adapter := self._adapters[number]) is not None]
        assert len(adapters) == len(numbers), "a running request uses an empty adapter slot"
        if not adapters:
            return None
        generations = tuple(adapter.generation for adapter in adapters)
        if generations not in self._joined:
            while len(self._joined) >= _KEPT:
                del self._joined[next(iter(self._joined))]
            self._joined[generations] = joined(adapters)
        ranks = np.array([adapter.rank for adapter in adapters])
        own = of_token[:, None] == np.repeat(np.array(numbers), ranks)
        dtype = next(delta.a.dtype for layer in adapters[0].layers for delta in layer.values())
        kept = {}
        for parts in (1, 2, 3):
            columns = np.concatenate([np.tile(np.flatnonzero(np.repeat(numbers, ranks) == n), parts) for n in numbers])
            kept[parts] = torch.from_numpy(own[:, columns]).to(dtype)
        return CpuLoraStep(self._joined[generations], kept)
