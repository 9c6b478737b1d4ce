"""Linear layers that add the contributions of a step's LoRA adapters. Needs Triton."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch

from sglang_lite.runtime.kernels.eight_bit_rows import EightBitRows, Scales
from sglang_lite.runtime.kernels.lora import LoraRows, lora_add, lora_add_and_gate, lora_rows
from sglang_lite.runtime.kernels.lora_few import (
    JoinedRanks,
    Shrunk,
    expand,
    expand_and_gate,
    join_ranks,
    shrink,
)
from sglang_lite.runtime.kernels.lora_own import (
    OwnRanks,
    OwnShrunk,
    own_expand,
    own_ranks,
    own_shrink,
)
from sglang_lite.runtime.kernels.lora_weights import LoraStep, LoraWeights
from sglang_lite.runtime.kernels.tiled import (
    MAX_ROWS,
    can_fuse_adapters,
    linear_by_tiles,
    linear_split_k,
    tiled_reduction_splits,
)
from sglang_lite.runtime.models.layers.experts import FeedForward
from sglang_lite.runtime.models.layers.gpu_linear import GpuLinear, GpuProduct, as_gpu_product
from sglang_lite.runtime.models.layers.linear import Linear

if TYPE_CHECKING:
    from sglang_lite.runtime.models.weight_reader import Layer

Rows: TypeAlias = LoraRows | JoinedRanks | OwnRanks  # a step's rows with their adapters


class AdaptedLinear(GpuProduct):
    """Linear layer that adds the LoRA contributions of its rows' adapters. The contributions are
    computed in 16 bits, even if the layer has another format.

    For few rows, the layer's own kernel adds the contributions, or runs concurrently with the
    multiplication by A. Otherwise they are added to the layer's output afterwards.

    Args:
        linear: the layer.
        weights: the adapters' matrices.
        rows: the step's rows and their adapters.
    """

    def __init__(self, linear: GpuProduct, weights: LoraWeights, rows: Rows) -> None:
        self._linear = linear
        self._weights = weights
        self._rows = rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply_adapted(x, self._linear, _linear_with_delta)

    def multiply_into(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return self._multiply_adapted(
            x, partial(self._linear.multiply_into, out=out), partial(_linear_with_delta, out=out)
        )

    def multiply_in_parts(
        self, x: torch.Tensor | EightBitRows
    ) -> tuple[torch.Tensor, Scales | None]:
        if self._linear.eight_bit_input_type(2) is not None:
            return self.multiply_unscaled(x)
        assert isinstance(x, torch.Tensor)
        return self._multiply_adapted(
            x, lambda x: self._linear.multiply_in_parts(x)[0], _linear_parts_with_delta
        ), None

    def multiply_gated(
        self, x: torch.Tensor | EightBitRows, activation: str, *, eight: torch.dtype | None
    ) -> torch.Tensor | EightBitRows:
        assert isinstance(x, torch.Tensor)
        assert eight is None, "the next product is adapted, too"
        low = self._shrink(x)
        linear = self._linear_if_tiled(x)
        if isinstance(low, Shrunk) and linear is not None:
            return _linear_with_delta(linear, x, low, activation)
        if isinstance(low, OwnShrunk):
            return own_expand(
                low,
                self._linear(x) if linear is None else _linear_with_delta(linear, x, low),
                activation,
            )
        if isinstance(low, Shrunk):
            return expand_and_gate(low, self._linear(x), activation)
        assert isinstance(self._rows, LoraRows)
        return lora_add_and_gate(x, self._weights, self._rows, self._linear(x), activation)

    def _multiply_adapted(
        self,
        x: torch.Tensor,
        plain: Callable[[torch.Tensor], torch.Tensor],
        tiled: Callable[[GpuLinear, torch.Tensor, Shrunk | OwnShrunk], torch.Tensor],
    ) -> torch.Tensor:
        """Returns the layer's output for x plus the adapters' contributions. If the output is in
        parts, the contributions are added to the first one.

        Args:
            x: rows.
            plain: returns the layer's output.
            tiled: computes it with the kernel for few rows, which adds the contributions of
                `Shrunk` rows.
        """
        low = self._shrink(x)
        linear = self._linear_if_tiled(x)
        if (
            isinstance(low, Shrunk)
            and linear is not None
            and can_fuse_adapters(linear.weight, self._weights.outputs)
        ):
            return tiled(linear, x, low)
        y = tiled(linear, x, low) if isinstance(low, OwnShrunk) and linear is not None else plain(x)
        out = y if y.dim() == 2 else y[0]
        if isinstance(low, OwnShrunk):
            own_expand(low, out)
        elif isinstance(low, Shrunk):
            expand(low, out)
        else:
            assert isinstance(self._rows, LoraRows)
            lora_add(x, self._weights, self._rows, out)
        return y

    def _shrink(self, x: torch.Tensor) -> Shrunk | OwnShrunk | None:
        """Multiplies x by the adapters' A matrices. Returns None if one later call multiplies by
        both A and B.
        """
        if isinstance(self._rows, OwnRanks):
            return own_shrink(x, self._weights, self._rows)
        return shrink(x, self._weights, self._rows) if isinstance(self._rows, JoinedRanks) else None

    def _linear_if_tiled(self, x: torch.Tensor) -> GpuLinear | None:
        """Returns the layer if the kernel for few rows can multiply x and its weight, else None."""
        linear = self._linear
        return (
            linear
            if isinstance(linear, GpuLinear) and linear.tiles and len(x) <= MAX_ROWS
            else None
        )


def _linear_with_delta(
    linear: GpuLinear,
    x: torch.Tensor,
    low: Shrunk | OwnShrunk,
    activation: str = "",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    return linear_by_tiles(x, linear.weight, linear.bias, activation, out, low)


def _linear_parts_with_delta(
    linear: GpuLinear, x: torch.Tensor, low: Shrunk | OwnShrunk
) -> torch.Tensor:
    parts = tiled_reduction_splits(linear.weight) if linear.bias is None else 1
    return (
        _linear_with_delta(linear, x, low)
        if parts == 1
        else linear_split_k(x, linear.weight, parts, low)
    )


def adapted_rows(step: LoraStep, slots: torch.Tensor, *, tiles: bool) -> Rows:
    """Maps a step's rows to their adapters, in the format of the LoRA kernels that will be used.
    Must be called before the step's first kernel that overlaps with others.

    Args:
        step: adapters of the step.
        slots: int32 [T], slot of each token.
        tiles: whether the kernel for few rows can multiply the weights of all layers.
    """
    if step.own:
        return own_ranks(step, slots)
    return join_ranks(step, slots) if tiles and len(slots) <= MAX_ROWS else lora_rows(step, slots)


def with_adapters(layer: Layer, weights: Mapping[str, LoraWeights], rows: Rows) -> Layer:
    """Returns a copy of a layer whose linear layers add the adapters' contributions.

    Args:
        layer: the layer.
        weights: adapters' matrices, as in LoraStep.
        rows: the step's rows and their adapters.
    """

    def product(name: str, linear: Linear) -> Linear:
        return (
            AdaptedLinear(as_gpu_product(linear), weights[name], rows)
            if name in weights
            else linear
        )

    fed = layer.feed_forward
    if isinstance(fed, FeedForward):
        fed = replace(fed, gate_up=product("gate_up", fed.gate_up), down=product("down", fed.down))
    return replace(
        layer,
        qkv=product("qkv", layer.qkv),
        output=product("output", layer.output),
        feed_forward=fed,
    )
