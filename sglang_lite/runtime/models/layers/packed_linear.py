"""Linear layers with matrices of 4-bit numbers on a GPU. Needs Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from sglang_lite.runtime.kernels.eight_bit_rows import EightBitRows, Scales
from sglang_lite.runtime.kernels.packed_products import add_parts, decoded, max_rows, packed_rows, parts_of
from sglang_lite.runtime.kernels.packed_row import packed_row
from sglang_lite.runtime.kernels.packed_weight import PackedWeight, can_pack, in_few_bits, packed_weight
from sglang_lite.runtime.models.layers.gpu_linear import GpuLinear
from sglang_lite.runtime.models.weights.blocks import Blocks, order_of
from sglang_lite.runtime.models.weights.fp4 import E2M1
from sglang_lite.runtime.models.weights.source import Weight


class PackedLinear(GpuLinear):
    """Linear layer whose weights stay in 4 bits. Products of many rows decode the matrix first.

    Args:
        weight: the matrix on the device.
        bias: bias [N], or None.
        order: int64 [K], the input that each column of the matrix belongs to; None if they are in order.
    """

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None, order: torch.Tensor | None) -> None:
        self.packed, self.bias, self.order = weight, bias, order
        self._tiled = range(0)
        self._single = weight.table is None  # a single row has its own kernel

    @property
    def fuses_one(self) -> bool:
        return self.order is None and self._single

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.parts(x)
        return add_parts(y, x.dtype) if y.dim() == 3 else y

    def into(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(self(x))

    def unscaled(self, x: torch.Tensor | EightBitRows) -> tuple[torch.Tensor, Scales | None]:
        assert isinstance(x, torch.Tensor)
        return self(x), None

    def parts(self, x: torch.Tensor | EightBitRows) -> tuple[torch.Tensor, Scales | None]:
        assert isinstance(x, torch.Tensor)
        x = self._ordered(x)
        if len(x) == 1 and self._single:
            return packed_row(x, self.packed, self.bias)[0], None
        if len(x) > max_rows(x.device, x.dtype):
            return F.linear(x, decoded(self.packed, x.dtype), self.bias), None
        parts = parts_of(self.packed, len(x)) if self.bias is None else 1
        return packed_rows(x, self.packed, self.bias, parts=parts), None

    def gated(
        self, x: torch.Tensor | EightBitRows, activation: str, *, eight: torch.dtype | None
    ) -> torch.Tensor | EightBitRows:
        if isinstance(x, torch.Tensor) and len(x) <= max_rows(x.device, x.dtype) and eight is None:
            return packed_rows(self._ordered(x), self.packed, self.bias, activation)
        return super().gated(x, activation, eight=eight)

    def one(
        self, x: torch.Tensor, *, residual: torch.Tensor | None, norm: torch.Tensor, eps: float, gate: str = ""
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return packed_row(x, self.packed, self.bias, residual=residual, norm=norm, eps=eps, gate=gate)

    def _ordered(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.order is None else x[:, self.order]


def packed_linear(parts: Sequence[Weight], bias: torch.Tensor | None, device: torch.device) -> PackedLinear | None:
    """Linear layer over matrices [N_i, K] stacked along N that stays in 4 bits, or None if one of them doesn't allow
    it."""
    first = parts[0]
    if (packed := packed_matrix(parts, device)) is None or not isinstance(first, Blocks):
        return None
    return PackedLinear(packed, bias, None if first.order is None else first.order.to(device))


def packed_experts(experts: Sequence[Sequence[Weight]], device: torch.device) -> PackedWeight | None:
    """Matrices of all experts, each stacked as for `packed_linear`, in one matrix, or None if they don't allow it."""
    found = [packed_matrix(parts, device) for parts in experts]
    matrices = [matrix for matrix in found if matrix is not None]
    ordered = any(isinstance(part, Blocks) and part.order is not None for parts in experts for part in parts)
    alike = {(each.half, each.zero, each.kind, each.slice, each.group) for each in matrices}
    if ordered or len(matrices) < len(experts) or len(alike) > 1:
        return None
    words, scales = torch.cat([each.words for each in matrices]), torch.cat([each.scales for each in matrices], 1)
    return replace(matrices[0], words=words, scales=scales)


def packed_matrix(parts: Sequence[Weight], device: torch.device) -> PackedWeight | None:
    """Matrices [N_i, K] of one format stacked along N, or None if they are of several or none of 4 bits, a minimum is
    no multiple of its scale, or scales beside minima need more than 16 bits."""
    blocks = [part for part in parts if isinstance(part, Blocks)]
    if len(blocks) < len(parts) or len({(part.format, order_of(part)) for part in blocks}) > 1:
        return None
    first, zero, zeros = blocks[0], 0, None
    if first.format.bits != 4 or not can_pack(first.shape[1], first.format.group):
        return None
    scale = torch.cat([part.scale for part in blocks])
    if first.minimum is not None:
        minima = torch.cat([part.minimum for part in blocks if part.minimum is not None])
        zeros = (-minima / scale).round()
        if not torch.equal(-zeros * scale, minima) or zeros.min() < 0 or zeros.max() > 255:
            return None
        if (zeros == zeros[0, 0]).all():
            zero, zeros = int(zeros[0, 0]), None
        elif in_few_bits(scale) == torch.float32:
            return None
    table = None if first.table in (None, E2M1) else torch.tensor(first.table, device=device)
    return packed_weight(
        torch.cat([part.q.to(device) for part in blocks]), scale.to(device, in_few_bits(scale)),
        zeros=None if zeros is None else zeros.to(device, torch.uint8), zero=zero,
        kind="integers" if first.table is None else "e2m1" if table is None else "table", table=table,
    )  # fmt: skip
