"""Number formats of a model's computation."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Precision:
    """Number formats of a model's computation.

    Attributes:
        compute: activations between layers.
        weights: of matrices that are not quantised.
        cache: keys and values.
        blocks: products may be with a checkpoint's own blocks, of activations in 16-bit integers (CPU).
        int8: matrices in 8 bits (CPU).
        fp8: the layers' matrices in 8-bit floating point (GPU).
        keep_fp8: those of them that a checkpoint has in 8-bit floating point (GPU).
        one_path: every row is computed the same way whatever the batch.
    """

    compute: torch.dtype
    weights: torch.dtype
    cache: torch.dtype
    blocks: bool = False
    int8: bool = False
    fp8: bool = False
    keep_fp8: bool = False
    one_path: bool = False

    @property
    def rounds(self) -> bool:
        """True for formats so coarse that the same row computed in another way often gives another token."""
        return self.int8 or min(self.compute.itemsize, self.cache.itemsize) < 4
