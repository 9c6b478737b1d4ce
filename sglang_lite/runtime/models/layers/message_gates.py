"""Gates through which a layer reads the previous pass through the same layers (Inkling 2 with loops).

Each of the layer's inputs x, those of queries, keys, values and the feed-forward, has a message m, an
attention over what the previous pass left, by a learnt query:

    low = [normalise(x), normalise(m)] @ down
    x <- (1 - tanh(low @ forget)) * x + tanh(low @ gain) * m
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_lite.runtime.models.layers.linear import Linear
from sglang_lite.runtime.models.layers.norm import apply_norm


@dataclass(frozen=True, slots=True)
class MessageGates:
    """Weights of a layer's gates, of queries, keys, values and the feed-forward in order.

    Attributes:
        down: linear layers from both to a low rank.
        forget, gain: linear layers from there to the factors.
        eps: epsilon of the norms.
    """

    down: tuple[Linear, ...]
    forget: tuple[Linear, ...]
    gain: tuple[Linear, ...]
    eps: float

    def __call__(self, which: int, x: torch.Tensor, message: torch.Tensor) -> torch.Tensor:
        """Returns an input of the layer, changed by its message: float32 [T, hidden_size].

        Args:
            which: index of the input.
            x: the input, [T, hidden_size].
            message: float32 [T, hidden_size].
        """
        x = x.float()
        both = [apply_norm(each, None, self.eps, "rms") for each in (x, message)]
        low = self.down[which](torch.cat(both, 1))
        forgotten = torch.tanh(self.forget[which](low))
        return (1 - forgotten) * x + torch.tanh(self.gain[which](low)) * message
