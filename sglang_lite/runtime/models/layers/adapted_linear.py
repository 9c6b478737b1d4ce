"""Linear layers with the products of a step's LoRA adapters added. Needs Triton."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from sglang_lite.runtime.kernels.eight_bit_rows import EightBitRows, Scales
from sglang_lite.runtime.kernels.lora import LoraRows, lora_add, lora_gated
from sglang_lite.runtime.kernels.lora_weights import LoraWeights
from sglang_lite.runtime.models.layers.experts import FeedForward
from sglang_lite.runtime.models.layers.gpu_linear import GpuLinear, matrix
from sglang_lite.runtime.models.layers.linear import Linear
from sglang_lite.runtime.models.weight_reader import Layer


class AdaptedLinear(GpuLinear):
    """Linear layer whose rows get the products of their adapters, in 16 bits whatever the layer's own format is.

    Args:
        linear: the layer.
        weights: the adapters' matrices.
        rows: the step's rows, sorted by adapter.
    """

    def __init__(self, linear: GpuLinear, weights: LoraWeights, rows: LoraRows) -> None:
        self._linear, self._weights, self._rows = linear, weights, rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return lora_add(x, self._weights, self._rows, self._linear(x))

    def into(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return lora_add(x, self._weights, self._rows, self._linear.into(x, out))

    def unscaled(self, x: torch.Tensor | EightBitRows) -> tuple[torch.Tensor, Scales | None]:
        assert isinstance(x, torch.Tensor)
        return self(x), None

    def parts(self, x: torch.Tensor | EightBitRows) -> tuple[torch.Tensor, Scales | None]:
        if self._linear.eight_bits(2) is not None:
            return self.unscaled(x)
        assert isinstance(x, torch.Tensor)
        y, _ = self._linear.parts(x)
        lora_add(x, self._weights, self._rows, y if y.dim() == 2 else y[0])
        return y, None

    def gated(
        self, x: torch.Tensor | EightBitRows, activation: str, *, eight: torch.dtype | None
    ) -> torch.Tensor | EightBitRows:
        assert isinstance(x, torch.Tensor)
        assert eight is None, "the next product is adapted, too"
        return lora_gated(x, self._weights, self._rows, self._linear(x), activation)


def adapted(layer: Layer, weights: Mapping[str, LoraWeights], rows: LoraRows) -> Layer:
    """Returns a layer whose products get those of adapters.

    Args:
        layer: the layer.
        weights: adapters' matrices, as in LoraStep.
        rows: the step's rows, sorted by adapter.
    """

    def product(name: str, linear: Linear) -> Linear:
        return AdaptedLinear(matrix(linear), weights[name], rows) if name in weights else linear

    fed = layer.feed_forward
    if isinstance(fed, FeedForward):
        fed = replace(fed, gate_up=product("gate_up", fed.gate_up), down=product("down", fed.down))
    return replace(layer, qkv=product("qkv", layer.qkv), output=product("output", layer.output), feed_forward=fed)
