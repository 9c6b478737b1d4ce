"""Numeric formats of a model's computation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_lite.runtime.models.weights.rounding import Rounding


@dataclass(frozen=True, slots=True)
class Precision:
    """Numeric formats of a model's computation.

    Attributes:
        compute: dtype of activations between layers.
        weights: dtype of matrices that are not quantised.
        cache: dtype of keys and values.
        states: dtype of the states of layers that sum up a sequence, such as linear attention.
        blocks: whether block-quantised matrices of a checkpoint may be multiplied without decoding
            them, with activations in 16-bit integers (CPU).
        int8: whether the layers' matrices are quantised to 8-bit integers. With `packed` on a GPU:
            whether matrices that a checkpoint stores as such, with a scale per row, stay so.
        fp8: whether the layers' matrices are quantised to 8-bit floating point (GPU).
        keep_fp8: whether matrices that a checkpoint stores in 8-bit floating point stay so (GPU).
        packed: whether matrices that a checkpoint stores in up to 4 bits stay so (GPU).
        rounding: how plain matrices of the layers are quantised while they are loaded: "int4",
            "int8" or "nf4"; None for not at all.
        batch_invariant: whether each row is computed the same way whatever the batch, so that its
            bits don't depend on it.
    """

    compute: torch.dtype
    weights: torch.dtype
    cache: torch.dtype
    states: torch.dtype = torch.float32
    blocks: bool = False
    int8: bool = False
    fp8: bool = False
    keep_fp8: bool = False
    packed: bool = False
    rounding: Rounding | None = None
    batch_invariant: bool = False

    @property
    def batch_sensitive(self) -> bool:
        """True if the formats are so coarse that computing a row in a different order often changes
        the token chosen.
        """
        return self.int8 or min(self.compute.itemsize, self.cache.itemsize) < 4
