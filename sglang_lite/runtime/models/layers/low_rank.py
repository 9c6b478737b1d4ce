"""Low-rank matrices of a model's own that are added to a linear layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from sglang_lite.runtime.models.layers.experts import FeedForward
from sglang_lite.runtime.models.layers.linear import Linear

if TYPE_CHECKING:
    from sglang_lite.runtime.models.weight_reader import Layer


@dataclass(frozen=True, slots=True)
class LowRank:
    """Low-rank matrices with the inputs and outputs of a linear layer.

    Attributes:
        first: linear layer to the low-rank vectors, side by side.
        seconds: for each of these vectors, a linear layer to its part of the outputs.
    """

    first: Linear
    seconds: tuple[Linear, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        vectors = self.first(x).chunk(len(self.seconds), 1)
        parts = [second(each.contiguous()) for second, each in zip(self.seconds, vectors)]
        return torch.cat(parts, 1)


def add_linear(linear: Linear, addition: LowRank) -> Linear:
    """Returns a linear layer whose outputs are the sum of both."""
    return lambda x: linear(x) + addition(x)


def with_additions(layer: Layer, add: Callable[[Linear, LowRank], Linear]) -> Layer:
    """Returns a copy of a layer whose first projections include its low-rank additions.

    Args:
        layer: the layer, whose feed-forward is dense.
        add: function like `add_linear`, for the layer's device.
    """
    qkv = layer.qkv
    fed = layer.feed_forward
    assert isinstance(fed, FeedForward)
    if layer.qkv_addition is not None:
        qkv = add(qkv, layer.qkv_addition)
    if layer.gate_up_addition is not None:
        fed = replace(fed, gate_up=add(fed.gate_up, layer.gate_up_addition))
    return replace(layer, qkv=qkv, feed_forward=fed)
