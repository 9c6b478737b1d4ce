"""Linear layers with the products of a step's LoRA adapters added. Needs Triton."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from sglang_lite.runtime.kernels import tiled
from sglang_lite.runtime.kernels.eight_bit_rows import EightBitRows, Scales
from sglang_lite.runtime.kernels.lora import LoraRows, lora_add, lora_gated
from sglang_lite.runtime.kernels.lora_few import JoinedRanks, Shrunk, expand, expand_gated, shrink
from sglang_lite.runtime.kernels.lora_weights import LoraWeights
from sglang_lite.runtime.models.layers.experts import FeedForward
from sglang_lite.runtime.models.layers.gpu_linear import GpuLinear, matrix
from sglang_lite.runtime.models.layers.linear import Linear
from sglang_lite.runtime.models.weight_reader import Layer


class AdaptedLinear(GpuLinear):
    """Linear layer whose rows get the products of their adapters, in 16 bits whatever the layer's own format is. The
    kernel of few rows adds them where its sums end; else they are added to the product.

    Args:
        linear: the layer.
        weights: the adapters' matrices.
        rows: the step's rows and their adapters.
    """

    def __init__(self, linear: GpuLinear, weights: LoraWeights, rows: LoraRows | JoinedRanks) -> None:
        self._linear, self._weights, self._rows = linear, weights, rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if (shrunk := self._shrunk(x)) is not None:
            return tiled.linear_tiled(x, self._linear.weight, self._linear.bias, shrunk=shrunk)
        return self._add(x, self._linear(x))

    def into(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if (shrunk := self._shrunk(x)) is not None:
            return tiled.linear_tiled(x, self._linear.weight, self._linear.bias, out=out, shrunk=shrunk)
        return self._add(x, self._linear.into(x, out))

    def unscaled(self, x: torch.Tensor | EightBitRows) -> tuple[torch.Tensor, Scales | None]:
        assert isinstance(x, torch.Tensor)
        return self(x), None

    def parts(self, x: torch.Tensor | EightBitRows) -> tuple[torch.Tensor, Scales | None]:
        if self._linear.eight_bits(2) is not None:
            return self.unscaled(x)
        assert isinstance(x, torch.Tensor)
        if (shrunk := self._shrunk(x)) is not None:
            parts = tiled.split_k_of(self._linear.weight) if self._linear.bias is None else 1
            if parts > 1:
                return tiled.linear_split_k(x, self._linear.weight, parts, shrunk), None
            return tiled.linear_tiled(x, self._linear.weight, self._linear.bias, shrunk=shrunk), None
        y, _ = self._linear.parts(x)
        self._add(x, y if y.dim() == 2 else y[0])
        return y, None

    def gated(
        self, x: torch.Tensor | EightBitRows, activation: str, *, eight: torch.dtype | None
    ) -> torch.Tensor | EightBitRows:
        assert isinstance(x, torch.Tensor)
        assert eight is None, "the next product is adapted, too"
        if (shrunk := self._shrunk(x, gated=True)) is not None:
            return tiled.linear_tiled(x, self._linear.weight, self._linear.bias, activation, shrunk=shrunk)
        if isinstance(self._rows, JoinedRanks):
            return expand_gated(shrink(x, self._weights, self._rows), self._linear(x), activation)
        return lora_gated(x, self._weights, self._rows, self._linear(x), activation)

    def _add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Adds the adapters' products of x to y, in kernels of their own."""
        if isinstance(self._rows, JoinedRanks):
            return expand(shrink(x, self._weights, self._rows), y)
        return lora_add(x, self._weights, self._rows, y)

    def _shrunk(self, x: torch.Tensor, *, gated: bool = False) -> Shrunk | None:
        """x times A, for the kernel of few rows; None if that can't multiply so many rows, or this layer's weight."""
        rows = self._rows
        if not isinstance(rows, JoinedRanks) or len(x) > tiled.MAX_ROWS or not self._linear.tiles:
            return None
        if not gated and not tiled.can_expand(self._linear.weight, self._weights.outputs):
            return None
        return shrink(x, self._weights, rows)


def adapted(layer: Layer, weights: Mapping[str, LoraWeights], rows: LoraRows | JoinedRanks) -> Layer:
    """Returns a layer whose products get those of adapters.

    Args:
        layer: the layer.
        weights: adapters' matrices, as in LoraStep.
        rows: the step's rows and their adapters.
    """

    def product(name: str, linear: Linear) -> Linear:
        return AdaptedLinear(matrix(linear), weights[name], rows) if name in weights else linear

    fed = layer.feed_forward
    if isinstance(fed, FeedForward):
        fed = replace(fed, gate_up=product("gate_up", fed.gate_up), down=product("down", fed.down))
    return replace(layer, qkv=product("qkv", layer.qkv), output=product("output", layer.output), feed_forward=fed)
