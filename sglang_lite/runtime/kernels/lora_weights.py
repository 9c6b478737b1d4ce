"""LoRA adapters (arXiv:2106.09685) on a device: the pages of their matrices, and which token uses
which adapter.

    out[t] += B[adapter of t] (A[adapter of t] x[t])

A product of a layer, such as q, k and v, may stack several matrices, its parts. Each part has its
own A, whose rows are the adapter's rank; B stacks the parts' outputs, each of which belongs to one
part.

Pages hold RANKS ranks. An adapter has the same pages in every product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch

RANKS = 8  # ranks in a page
MAX_PARTS = 6  # of a product


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """Adapters' matrices for one linear layer of the model, in the model's data type.

    Attributes:
        a: [pages, parts, RANKS, inputs], each page contiguous.
        b: [pages, RANKS, outputs], outputs part after part, times the adapter's scaling; each page
            contiguous.
        outputs: number of outputs of each part.
    """

    a: torch.Tensor
    b: torch.Tensor
    outputs: tuple[int, ...]

    @property
    def page_size(self) -> int:
        """Stride between the pages of A, and between those of B, in elements."""
        size = self.a.stride(0)
        assert size == self.b.stride(0)
        return size

    @property
    def ends(self) -> list[int]:
        """Outputs at which each part ends; the last end up to the number of parts that a product
        may have.
        """
        assert len(self.outputs) <= MAX_PARTS
        missing = MAX_PARTS - 1 - len(self.outputs)
        ends = [*accumulate(self.outputs)]
        return [*ends, *[ends[-1]] * missing][: MAX_PARTS - 1]


@dataclass(frozen=True, slots=True)
class LoraStep:
    """Adapters of a step. An adapter is a number below the length of `ranks`; that length itself
    means no adapter.

    Attributes:
        of_slot: int32 [slots], adapter of each slot.
        pages: int32 [adapters, longest], pages of each adapter, in order.
        ranks: int32 [adapters], rank of each adapter; 0 if the number is unused.
        layers: matrices of each layer by product (`models/lora/adapter.py`), without products that
            no adapter changes.
        own: whether most tokens have adapters of their own, so that `lora_own.py` is used.
    """

    of_slot: torch.Tensor
    pages: torch.Tensor
    ranks: torch.Tensor
    layers: tuple[Mapping[str, LoraWeights], ...]
    own: bool = False
