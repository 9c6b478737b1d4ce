"""Matrix products with weights, in the numeric format that is fastest where they run.

Every class answers `linear(x)`: x [M, K] to [M, N]. Weights are packed once, at load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F

from sglang_lite.runtime.models.weights.source import Blocks4, Weight

Linear: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class DenseLinear:
    """Weights as they are, through torch; activations and results are in their format."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


# Up to this many rows a product only waits for weights, and half-size ones win although they are unpacked on the way.
_FEW_ROWS = 5


class Bf16Linear:
    """bf16 weights in oneDNN's own layout: torch's plain linear re-orders them at every call, which costs three times
    the product at M = 1. For few rows the checkpoint's own 4-bit blocks are read instead, where it has them: the same
    values, a quarter of the bytes.

    Args:
        parts: matrices [N_i, K] that are stacked along N.
        bias: [N] or None.
        one_path: never the 4-bit path, so that a row is computed the same way at every M.
    """

    def __init__(self, parts: Sequence[Weight], bias: torch.Tensor | None, *, one_path: bool = False) -> None:
        self.blocks = None if one_path else _pack_blocks(parts)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(stacked(parts, torch.bfloat16), 1)  # noqa: SLF001 # torch has no other name for it
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.blocks is not None and x.shape[0] <= _FEW_ROWS:
            y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.blocks[0], 32, self.blocks[1])  # noqa: SLF001 # torch has no other name for it
            return y if self.bias is None else y.add_(self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return] # noqa: SLF001 # torch.ops is untyped; torch has no other name for it


class Float32Linear:
    """float32 weights through oneDNN, of activations in any format. Unlike MKL's, its products give a row the same bits
    beside any number of others.

    Args:
        parts: matrices [N_i, K] that are stacked along N.
        bias: [N] or None.
    """

    def __init__(self, parts: Sequence[Weight], bias: torch.Tensor | None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(stacked(parts, torch.float32), 32)  # noqa: SLF001 # torch has no other name for it
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x.float(), self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return] # noqa: SLF001 # torch.ops is untyped; torch has no other name for it


class Float16Linear:
    """float16 weights, of activations in any format; sums and results are float32. Through FBGEMM, which reads as few
    bytes as 16-bit products do. Weights lie between -65,504 and 65,504.

    Args:
        parts: matrices [N_i, K] that are stacked along N.
    """

    def __init__(self, parts: Sequence[Weight]) -> None:
        self.weight = torch.ops.quantized.linear_prepack_fp16(stacked(parts, torch.float32), None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(x.float(), self.weight)  # type: ignore[no-any-return] # torch.ops is untyped


class PairedLinear:
    """A product that always has two rows at least: for a single one oneDNN has a kernel that adds in another order."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if len(x) > 1 else self.linear(x.repeat(2, 1))[:1]


class Int8Linear:
    """8-bit weights (one scale an output) times 8-bit activations (one scale a row, found at run time), accumulated
    exactly in 32 bits by oneDNN. A row's result does not depend on the other rows.

    Args:
        parts: matrices [N_i, K] that are stacked along N.
        bias: [N] or None.
    """

    def __init__(self, parts: Sequence[Weight], bias: torch.Tensor | None) -> None:
        quantised = torch.empty(stacked_shape(parts), dtype=torch.int8)
        self.scale = torch.empty(len(quantised))
        for start, rows in stacked_rows(parts):
            scale = torch.linalg.vector_norm(rows, float("inf"), 1).div_(127).clamp_min_(1e-12)
            quantised[start : start + len(rows)] = (rows / scale.unsqueeze(1)).round_()
            self.scale[start : start + len(rows)] = scale
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


_CONVERTED_AT_ONCE = 1 << 19  # elements


def stacked(parts: Sequence[Weight], dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """Matrices [N_i, K] as one [N, K]. A single one that is like that already is not copied."""
    if len(parts) == 1 and isinstance(parts[0], torch.Tensor) and parts[0].dtype == dtype:
        return parts[0].to(device)
    whole = torch.empty(stacked_shape(parts), dtype=dtype, device=device)
    for start, rows in stacked_rows(parts):
        whole[start : start + len(rows)] = rows
    return whole


def stacked_shape(parts: Sequence[Weight]) -> tuple[int, int]:
    return sum(part.shape[0] for part in parts), parts[0].shape[1]


def stacked_rows(parts: Sequence[Weight]) -> Iterator[tuple[int, torch.Tensor]]:
    """Rows as float32, some at a time so that converting takes little memory, with the index of the first."""
    at, step = 0, max(1, _CONVERTED_AT_ONCE // parts[0].shape[1])
    for part in parts:
        for start in range(0, part.shape[0], step):
            end = start + step
            rows = part[start:end].float() if isinstance(part, torch.Tensor) else part.decode(start, end)
            yield at, rows
            at += len(rows)


def _pack_blocks(parts: Sequence[Weight]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """torch's 4-bit layout stores value = (q - 8) * scale + zero; ours is q * scale + minimum."""
    blocks = [part for part in parts if isinstance(part, Blocks4)]
    if len(blocks) < len(parts):
        return None
    scale = torch.cat([b.scale for b in blocks])
    zero = torch.cat([b.minimum for b in blocks]) + 8 * scale
    packed = torch._convert_weight_to_int4pack_for_cpu(torch.cat([b.q for b in blocks]).int(), 1)  # noqa: SLF001 # torch has no other name for it
    return packed, torch.stack((scale, zero), -1).transpose(0, 1).contiguous().bfloat16()


def make_linear(
    parts: Sequence[Weight],
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
    if one_path and not quantise:  # 8-bit products are exact
        return PairedLinear(_dense_linear(parts, bias, dtype, device, one_path=True))
    return Int8Linear(parts, bias) if quantise else _dense_linear(parts, bias, dtype, device, one_path=False)


def make_head(parts: Sequence[Weight], *, one_path: bool) -> Linear:
    """The product that gives the logits of a model in 16 bits on a CPU. Its sums and results are float32: logits of 16
    bits lie so far apart (0.125 between 16 and 32) that the largest ones are often equal.

    Args:
        parts, one_path: as `make_linear`.
    """
    if one_path:
        return PairedLinear(Float32Linear(parts, None))
    if "fbgemm" in torch.backends.quantized.supported_engines:
        return Float16Linear(parts)
    return DenseLinear(stacked(parts, torch.float32), None)


def _dense_linear(
    parts: Sequence[Weight], bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device, *, one_path: bool
) -> Linear:
    bias = None if bias is None else bias.to(device, dtype)
    if device.type == "cpu" and dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():  # noqa: SLF001 # torch has no other name for it
        return Bf16Linear(parts, bias, one_path=one_path)
    if device.type == "cpu" and dtype == torch.float32 and one_path:
        return Float32Linear(parts, bias)
    return DenseLinear(stacked(parts, dtype, device), bias)


class RowByRow:
    """A product that is computed for one row at a time: slow, and the same everywhere."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.linear(x[i : i + 1]) for i in range(len(x))])


def has_one_path(linear: Linear, inputs: int, dtype: torch.dtype) -> bool:
    """Sees for itself whether a row's product has the same bits beside any other rows on this machine.

    Args:
        inputs: K.
        dtype: of activations.
    """
    x = torch.randn(257, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = linear(x)
    for rows in (1, 2, 3, 5, 8, 17, 64):
        # In 16 bits few outputs show a difference: enough of them are looked at.
        for start in range(0, min(64, 1 + 50_000 // whole.shape[1]), rows):
            if not torch.equal(linear(x[start : start + rows]), whole[start : start + rows]):
                return False
    return True
