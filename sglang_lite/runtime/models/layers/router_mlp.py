"""Router of experts with hidden layers, which also reads the router of the layer before (ZAYA)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sglang_lite.runtime.models.layers.linear import Linear
from sglang_lite.runtime.models.layers.norm import apply_norm


@dataclass(frozen=True, slots=True)
class RouterMlp:
    """Computes the logits of experts:

        r = inner(x) + carry * (r of the layer before)
        logits = last(gelu(second(gelu(first(norm(r))))))

    Attributes:
        inner: linear layer from a hidden state to r.
        carry: [size], or None in the first layer.
        norm: [size], weight of an RMS norm.
        eps: its epsilon.
        first, second, last: linear layers.
    """

    inner: Linear
    carry: torch.Tensor | None
    norm: torch.Tensor
    eps: float
    first: Linear
    second: Linear
    last: Linear

    def __call__(self, x: torch.Tensor, carried: torch.Tensor) -> torch.Tensor:
        """Returns logits [T, classes] for rows x.

        Args:
            x: input rows [T, hidden_size].
            carried: r of the layer before [T, size], overwritten by that of this layer.
        """
        r = self.inner(x)
        if self.carry is not None:
            r = r + carried * self.carry
        carried.copy_(r)
        h = apply_norm(r, self.norm.to(r.dtype), self.eps, "rms")
        return self.last(F.gelu(self.second(F.gelu(self.first(h)))))
