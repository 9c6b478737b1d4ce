"""Adapters of a step on a CPU. For few tokens, compiled code multiplies by each adapter's own
matrices. Otherwise two batched matmuls multiply each adapter's tokens by its matrices, padded to a
common rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_lite.runtime.kernels.cpu_small_batch_step import PRODUCTS, AdapterDelta, StepAdapters
from sglang_lite.runtime.models.lora.adapter import Adapter, AdapterRoom, ProductDelta

_KEPT = 4  # maximum number of sets of adapters that are kept
_PADDED = 256  # up to this many tokens, padding included, adapters are always multiplied together


@dataclass(frozen=True, slots=True)
class StackedDelta:
    """Matrices of several adapters for one linear layer, all padded to the largest rank.

    Attributes:
        a: [adapters, inputs, parts * rank], a view whose inputs are contiguous.
        b: for each stacked part of the linear layer, [adapters, rank, outputs].
    """

    a: torch.Tensor
    b: tuple[torch.Tensor, ...]


class AdapterSet:
    """Adapters that run together, in the layouts that steps need. Each layout is built when a step
    first needs it.

    Args:
        adapters: the adapters.
    """

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        self.adapters = adapters

    @property
    def bytes(self) -> int:
        """Bytes of the padded copies, if they have been made."""
        layers: tuple[Mapping[str, StackedDelta], ...] = vars(self).get("layers", ())
        return sum(
            part.nbytes
            for layer in layers
            for delta in layer.values()
            for part in (delta.a, *delta.b)
        )

    @cached_property
    def layers(self) -> tuple[Mapping[str, StackedDelta], ...]:
        """Padded matrices of the adapters, by layer and linear layer."""
        return stack_adapters(self.adapters)

    @cached_property
    def deltas(self) -> ctypes.Array[AdapterDelta]:
        """Matrices of the adapters in the form that `StepAdapters` needs."""
        found = [
            AdapterDelta()
            if (delta := layer.get(product)) is None
            else AdapterDelta(delta.a.data_ptr(), delta.b.data_ptr(), adapter.rank)
            for layers in zip(*(adapter.layers for adapter in self.adapters))
            for product in PRODUCTS
            for adapter, layer in zip(self.adapters, layers)
        ]
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
        """Returns the step's adapters in one layer."""
        return LayerAdapters(self.adapters.layers[index], self.groups)

    @cached_property
    def groups(self) -> tuple[AdapterGroup, ...]:
        """The step's adapters in groups: a single group, or one group per adapter if a single group
        would be mostly padding.
        """
        order = np.argsort(self.of_token, kind="stable")[(self.of_token < 0).sum() :]
        counts = np.bincount(self.of_token[order], minlength=len(self.adapters.adapters))
        own = np.arange(counts.max()) < counts[:, None]
        if len(counts) > 1 and own.size <= max(2 * len(order), _PADDED):
            tokens = np.zeros(own.shape, dtype=np.int64)
            tokens[own] = order
            tokens = np.where(own, tokens, tokens[:, :1])
            return (
                AdapterGroup(
                    slice(None), torch.from_numpy(tokens), torch.from_numpy(own[..., None])
                ),
            )
        each = enumerate(np.split(order, counts.cumsum()[:-1]))
        return tuple(AdapterGroup(i, _slice_if_contiguous(tokens), None) for i, tokens in each)

    @property
    def compiled(self) -> StepAdapters:
        """The adapters in the form that a step in compiled code needs."""
        order = np.argsort(self.of_token, kind="stable").astype(np.int32)
        starts = np.searchsorted(
            self.of_token[order], np.arange(len(self.adapters.adapters) + 1)
        ).astype(np.int32)
        rank = max(adapter.rank for adapter in self.adapters.adapters)
        return StepAdapters(
            self.adapters.deltas, torch.from_numpy(order), torch.from_numpy(starts), rank
        )


@dataclass(frozen=True, slots=True)
class AdapterGroup:
    """Adapters whose tokens are multiplied together.

    Attributes:
        adapters: slice of all adapters of an AdapterSet, or the index of a single one.
        tokens: int64 [adapters, most], tokens of each adapter. Padding repeats one of them, so that
            an overflow affects no other requests. For a single adapter [tokens], or a slice.
        own: [adapters, most, 1], False for padding; None without padding.
    """

    adapters: slice | int
    tokens: torch.Tensor | slice
    own: torch.Tensor | None


def _slice_if_contiguous(tokens: NDArray[np.int64]) -> torch.Tensor | slice:
    """Converts ascending tokens to an index: a slice if they are contiguous, because indexing with
    it makes no copy.
    """
    first = int(tokens[0])
    end = int(tokens[-1]) + 1
    return slice(first, end) if end - first == len(tokens) else torch.from_numpy(tokens)


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """Adapters of a step's tokens in one layer: the matrices of an AdapterSet, and the `groups` of
    a CpuLoraStep.
    """

    products: Mapping[str, StackedDelta]
    groups: tuple[AdapterGroup, ...]

    def add_adapter_deltas(self, product: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Adds the adapters' contributions to the output of a linear layer, in place.

        Args:
            product: name of the linear layer, as in `product_shapes`.
            x: its inputs [T, inputs].
            y: its outputs [T, outputs].
        """
        if (delta := self.products.get(product)) is not None:
            for group in self.groups:
                low = x[group.tokens].to(delta.a.dtype) @ delta.a[group.adapters]
                if group.own is not None:
                    low *= group.own
                added = [
                    own @ b[group.adapters] for own, b in zip(low.chunk(len(delta.b), -1), delta.b)
                ]
                joined = torch.cat(added, -1).to(y.dtype)
                if isinstance(group.tokens, slice):
                    y[group.tokens] += joined
                else:
                    y.index_add_(0, group.tokens.flatten(), joined.flatten(0, -2))
        return y


def stack_adapters(adapters: Sequence[Adapter]) -> tuple[Mapping[str, StackedDelta], ...]:
    """Stacks the adapters' matrices, by layer and linear layer."""
    layers = []
    for each in zip(*(adapter.layers for adapter in adapters)):
        shapes = {product: delta for layer in each for product, delta in layer.items()}
        layers.append(
            {
                product: _stack_deltas(
                    [layer.get(product) for layer in each],
                    max(adapter.rank for adapter in adapters),
                    shape,
                )
                for product, shape in shapes.items()
            }
        )
    return tuple(layers)


def _stack_deltas(
    deltas: Sequence[ProductDelta | None], rank: int, like: ProductDelta
) -> StackedDelta:
    parts, _, inputs = like.a.shape
    a = like.a.new_zeros(len(deltas), parts, rank, inputs)
    b = like.b.new_zeros(len(deltas), rank, like.b.shape[1])
    for i, delta in enumerate(deltas):
        if delta is not None:
            a[i, :, : delta.a.shape[1]] = delta.a
            b[i, : len(delta.b)] = delta.b
    by_part = b.split_with_sizes(like.outputs, 2)
    return StackedDelta(
        a.flatten(1, 2).transpose(1, 2), tuple(each.contiguous() for each in by_part)
    )


class CpuAdapters:
    """Adapters by adapter slot, for a runner on a CPU, which uses the host's tensors directly.

    Args:
        slots: number of adapter slots.
        sequences: number of slots of sequences.
    """

    def __init__(self, slots: int, sequences: int) -> None:
        self._adapters: list[Adapter | None] = [None] * slots
        self._of_slot: NDArray[np.int32] = np.full(sequences, -1, dtype=np.int32)
        # adapters of the last steps, by generations
        self._sets: dict[tuple[int, ...], AdapterSet] = {}

    def allocate_adapter_buffer(self, rank: int) -> AdapterRoom | None:
        """Returns None: adapters keep separate tensors, which steps use directly."""
        return None

    def write_adapter_slot(self, slot: int, pages: Sequence[int], adapter: Adapter) -> None:
        """Writes an adapter to an adapter slot."""
        self._adapters[slot] = adapter

    def clear_adapter_slot(self, slot: int) -> None:
        """Empties an adapter slot, which no running request uses."""
        self._adapters[slot] = None

    @property
    def bytes(self) -> int:
        """Bytes of the adapters in slots, and of the copies that steps have made of them."""
        own = sum(adapter.bytes for adapter in self._adapters if adapter is not None)
        return own + sum(each.bytes for each in self._sets.values())

    def free_step_copies(self) -> None:
        """Frees the copies that steps have made of adapters. They are made again when needed."""
        self._sets.clear()

    def change(self, slots: NDArray[np.int32], adapters: NDArray[np.int32]) -> None:
        """Sets the adapter slot that each of these sequence slots uses; -1 for no adapter."""
        self._of_slot[slots] = adapters

    def cpu_lora_step(self, token_slots: NDArray[np.int32]) -> CpuLoraStep | None:
        """Returns the adapters of a step's tokens, given each token's sequence slot. Returns None
        if no token has an adapter.
        """
        return self.adapters_of_tokens(self._of_slot[token_slots])

    def adapters_of_tokens(self, of_token: NDArray[np.int32]) -> CpuLoraStep | None:
        """Returns the adapters of tokens, given each token's adapter slot (-1 for none). Returns
        None if no token has an adapter.
        """
        numbers = np.unique(of_token[of_token >= 0]).tolist()
        adapters = [
            adapter for number in numbers if (adapter := self._adapters[number]) is not None
        ]
        assert len(adapters) == len(numbers), "a running request uses an empty adapter slot"
        if not adapters:
            return None
        generations = tuple(adapter.generation for adapter in adapters)
        if generations not in self._sets:
            while len(self._sets) >= _KEPT:
                del self._sets[next(iter(self._sets))]
            self._sets[generations] = AdapterSet(adapters)
        return CpuLoraStep(
            self._sets[generations],
            np.where(of_token < 0, -1, np.searchsorted(np.array(numbers), of_token)),
        )
