"""Inputs that each layer gets for each token, besides the residual (Gemma 4's E2B and E4B)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sglang_lite.runtime.models.layers.linear import Linear
from sglang_lite.runtime.models.layers.norm import apply_norm


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Computes the inputs of all layers from tokens and their embeddings.

    Attributes:
        table: [tokens, layers * size], a vector of each token for each layer.
        projection: linear layer from an embedding to vectors of all layers.
        norm: [size], weight of the norm of these vectors.
        eps: epsilon of the norm.
    """

    table: torch.Tensor
    projection: Linear
    norm: torch.Tensor
    eps: float

    def __call__(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Returns inputs [T, layers, size].

        Args:
            ids: tokens, int64 [T].
            x: their embeddings [T, hidden_size], as they enter the first layer.
        """
        size = len(self.norm)
        root = torch.tensor(math.sqrt(size), dtype=x.dtype).item()  # rounded, as in transformers
        own = self.table[ids].to(x.dtype).view(len(ids), -1, size) * root
        seen = (self.projection(x) * x.shape[1] ** -0.5).view(len(ids), -1, size)
        return apply_norm(seen, self.norm, self.eps, "rms").add(own).mul(0.5**0.5)
