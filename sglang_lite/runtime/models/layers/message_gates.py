"""Gates through which a layer reads the previous pass through the same layers (Inkling 2 with loops).

Queries, keys, values and the feed-forward each have an input x and a message m. With a learnt query,
the message attends over the sums of the previous pass:

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
    """Weights of a layer's gates: those of queries, keys, values and the feed-forward, in this order.

    Attributes:
        down: linear layers from input and message, side by side, to a low rank.
        forget, gain: linear layers from the low rank to the factors.
        eps: epsilon of the norms.
    """

    down: tuple[Linear, ...]
    forget: tuple[Linear, ...]
    gain: tuple[Linear, ...]
    eps: float

    def __call__(self, which: int, x: torch.Tensor, message: torch.Tensor) -> torch.Tensor:
        """Adds a message to an input of the layer. Returns float32 [T, hidden_size].

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
