"""Matrix products with weights, in the numeric format that is fastest where they run.

Every class answers `linear(x)`: x [M, K] to [M, N]. Weights are packed once, at load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F

from sglang_lite.runtime.models.weights.source import Blocks4

Linear: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class DenseLinear:
    """Weights as they are, through torch."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


# Up to this many rows a product only waits for weights, and half-size ones win although they are unpacked on the way.
_FEW_ROWS = 3


class Bf16Linear:
    """bf16 weights in oneDNN's own layout: torch's plain linear re-orders them at every call, which costs three times
    the product at M = 1. For few rows the checkpoint's own 4-bit blocks are read instead, where it has them: the same
    values, a quarter of the bytes.

    Args:
        parts: matrices [N_i, K] that are stacked along N.
        bias: [N] or None.
        one_path: never the 4-bit path, so that a row is computed the same way at every M.
    """

    def __init__(
        self, parts: Sequence[torch.Tensor | Blocks4], bias: torch.Tensor | None, *, one_path: bool = False
    ) -> None:
        self.blocks = None if one_path else _pack_blocks(parts)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(_dense(parts).bfloat16().contiguous(), 1)
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.blocks is not None and x.shape[0] <= _FEW_ROWS:
            y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.blocks[0], 32, self.blocks[1])
            return y if self.bias is None else y.add_(self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return] # torch.ops is untyped


class Int8Linear:
    """8-bit weights (one scale an output) times 8-bit activations (one scale a row, found at run time), accumulated
    exactly in 32 bits by oneDNN. A row's result does not depend on the other rows.

    Args:
        parts: matrices [N_i, K] that are stacked along N.
        bias: [N] or None.
    """

    def __init__(self, parts: Sequence[torch.Tensor | Blocks4], bias: torch.Tensor | None) -> None:
        dense = _dense(parts)
        self.scale = dense.abs().amax(1).div_(127).clamp_min_(1e-12)
        quantised = (dense / self.scale.unsqueeze(1)).round_().to(torch.int8)
        self.weight = torch.ops.onednn.qlinear_prepack(quantised, None)
        self.zero = torch.zeros(len(self.scale), dtype=torch.int32)
        self.bias = bias
        self._tiny = torch.tensor(1e-12)
        self._middle = torch.tensor(128.5)  # the zero point, and a half so that truncation rounds

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        row_scale = torch.add(self._tiny, torch.linalg.vector_norm(x, float("inf"), 1, keepdim=True), alpha=1 / 127)
        activations = torch.addcdiv(self._middle, x, row_scale).to(torch.uint8)
        y: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            activations,
            1.0,
            128,
            self.weight,
            self.scale,
            self.zero,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        ).mul_(row_scale)
        return y if self.bias is None else y.add_(self.bias)


def _dense(parts: Sequence[torch.Tensor | Blocks4]) -> torch.Tensor:
    return torch.cat([part.dequantise() if isinstance(part, Blocks4) else part.float() for part in parts])


def _pack_blocks(parts: Sequence[torch.Tensor | Blocks4]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """torch's 4-bit layout stores value = (q - 8) * scale + zero; ours is q * scale + minimum."""
    blocks = [part for part in parts if isinstance(part, Blocks4)]
    if len(blocks) < len(parts):
        return None
    scale = torch.cat([b.scale for b in blocks])
    zero = torch.cat([b.minimum for b in blocks]) + 8 * scale
    packed = torch._convert_weight_to_int4pack_for_cpu(torch.cat([b.q for b in blocks]).int(), 1)
    return packed, torch.stack((scale, zero), -1).transpose(0, 1).contiguous().bfloat16()


def make_linear(
    parts: Sequence[torch.Tensor | Blocks4],
    bias: torch.Tensor | None,
    *,
    quantise: bool,
    dtype: torch.dtype,
    device: torch.device,
    one_path: bool = False,
) -> Linear:
    """The best linear layer for where it runs.

    Args:
        parts: matrices [N_i, K], stacked along N.
        bias: [N] or None.
        quantise: 8-bit weights and activations (CPU).
        dtype, device: of the weights otherwise.
        one_path: one numeric path for every M.
    """
    if quantise:
        return Int8Linear(parts, bias)
    bias = None if bias is None else bias.to(device, dtype)
    if device.type == "cpu" and dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return Bf16Linear(parts, bias, one_path=one_path)
    return DenseLinear(_dense(parts).to(device, dtype), bias)
