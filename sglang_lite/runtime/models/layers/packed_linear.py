"""Linear layers with matrices of 4-bit numbers on a GPU. Needs Triton."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from sglang_lite.runtime.kernels.eight_bit_rows import EightBitRows, Scales
from sglang_lite.runtime.kernels.packed_products import (
    add_parts,
    decode_weight,
    max_packed_rows,
    packed_rows,
    parts_of,
)
from sglang_lite.runtime.kernels.packed_row import packed_row
from sglang_lite.runtime.kernels.packed_weight import (
    Kind,
    PackedWeight,
    can_pack,
    pack_weight,
    shortest_exact_dtype,
)
from sglang_lite.runtime.models.layers.gpu_linear import GpuProduct
from sglang_lite.runtime.models.weights.blocks import Blocks, column_order_key
from sglang_lite.runtime.models.weights.fp4 import E2M1
from sglang_lite.runtime.models.weights.source import Weight

_FARTHEST = 1 << 15  # a zero at least this large makes 4-bit numbers vanish in 16 bits
_SMALLEST_HALF = 2.0**-14  # smallest number for which float16 has full precision


class PackedLinear(GpuProduct):
    """Linear layer whose weights stay in 4 bits. For many rows, the matrix is decoded first.

    Args:
        weight: the matrix on the device.
        bias: bias [N], or None.
        order: int64 [K], the input that each column of the matrix belongs to; None if they are in
            order.
    """

    def __init__(
        self, weight: PackedWeight, bias: torch.Tensor | None, order: torch.Tensor | None
    ) -> None:
        self.packed = weight
        self.bias = bias
        self.order = order
        self._single = weight.table is None  # a single row has its own kernel
        self.fuses_one = order is None and self._single

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.multiply_in_parts(x)
        return add_parts(y, x.dtype) if y.dim() == 3 else y

    def multiply_in_parts(
        self, x: torch.Tensor | EightBitRows
    ) -> tuple[torch.Tensor, Scales | None]:
        assert isinstance(x, torch.Tensor)
        x = self._reorder_inputs(x)
        if len(x) == 1 and self._single:
            return packed_row(x, self.packed, self.bias)[0], None
        if len(x) > max_packed_rows(x.device, x.dtype):
            return F.linear(x, decode_weight(self.packed, x.dtype), self.bias), None
        parts = parts_of(self.packed, len(x), x.dtype) if self.bias is None else 1
        return packed_rows(x, self.packed, self.bias, parts=parts), None

    def multiply_gated(
        self, x: torch.Tensor | EightBitRows, activation: str, *, eight: torch.dtype | None
    ) -> torch.Tensor | EightBitRows:
        if (
            isinstance(x, torch.Tensor)
            and len(x) <= max_packed_rows(x.device, x.dtype)
            and eight is None
        ):
            return packed_rows(self._reorder_inputs(x), self.packed, self.bias, activation)
        return super().multiply_gated(x, activation, eight=eight)

    def multiply_single_row(
        self,
        x: torch.Tensor,
        *,
        residual: torch.Tensor | None,
        norm: torch.Tensor,
        eps: float,
        gate: str = "",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return packed_row(
            x, self.packed, self.bias, residual=residual, norm=norm, eps=eps, gate=gate
        )

    def _reorder_inputs(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.order is None else x[:, self.order]


def build_packed_linear(
    parts: Sequence[Weight], bias: torch.Tensor | None, device: torch.device
) -> PackedLinear | None:
    """Builds a linear layer over matrices [N_i, K] stacked along N, and keeps its weights in 4
    bits. Returns None if one of the matrices can't be packed in 4 bits.
    """
    first = parts[0]
    if (packed := pack_matrix(parts, device)) is None or not isinstance(first, Blocks):
        return None
    return PackedLinear(packed, bias, None if first.order is None else first.order.to(device))


def pack_experts(
    experts: Iterable[Sequence[Weight]], count: int, device: torch.device
) -> PackedWeight | None:
    """Packs the 4-bit matrices of `count` experts into one matrix, after stacking each expert's
    parts along N. Returns None if a matrix can't be packed, or the experts' formats differ.

    Besides the result, only one expert is in memory at a time.
    """
    whole: PackedWeight | None = None
    for i, parts in enumerate(experts):
        one = pack_matrix(parts, device)
        if one is None or any(
            isinstance(part, Blocks) and part.order is not None for part in parts
        ):
            return None
        rows = len(one.words)
        if whole is None:
            words = one.words.new_empty(count * rows, one.words.shape[1])
            whole = replace(
                one, words=words, scales=one.scales.new_empty(len(one.scales), count * rows)
            )
        if any(
            getattr(one, name) != getattr(whole, name)
            for name in ("half", "zero", "kind", "slice", "group")
        ):
            return None
        here = slice(i * rows, (i + 1) * rows)
        whole.words[here] = one.words
        whole.scales[:, here] = one.scales
    return whole


def pack_matrix(parts: Sequence[Weight], device: torch.device) -> PackedWeight | None:
    """Stacks 4-bit matrices [N_i, K] along N. Returns None unless all are in the same 4-bit format
    and of a supported shape.

    If blocks have minima, these become zero points. Unless all zero points are the same integer
    in 0 … 255, scales and zero points are stored in 16 bits, and rounded to float16 where they
    don't fit exactly. Returns None if scales would have to be rounded and the largest is outside
    float16's normal range.
    """
    blocks = [part for part in parts if isinstance(part, Blocks)]
    if (
        len(blocks) < len(parts)
        or len({(part.format, column_order_key(part)) for part in blocks}) > 1
    ):
        return None
    first = blocks[0]
    if first.format.bits != 4 or not can_pack(first.shape[1], first.format.group):
        return None
    q = torch.cat([part.q.to(device) for part in blocks])
    scale = torch.cat([part.scale.to(device) for part in blocks])
    kind: Kind = "integers" if first.table is None else "e2m1" if first.table == E2M1 else "table"
    table = torch.tensor(first.table, device=device) if kind == "table" else None
    minima = [part.minimum.to(device) for part in blocks if part.minimum is not None]
    if not minima:
        return pack_weight(q, scale, kind=kind, table=table)
    scale, zeros = _scales_and_zeros(q, scale, torch.cat(minima))
    if (zero := _common_zero(zeros)) is not None:
        return pack_weight(q, scale, zero=zero, kind=kind, table=table)
    if (half := shortest_exact_dtype(scale)) == torch.float32:
        half = torch.float16
        if not _SMALLEST_HALF <= scale.abs().max() <= torch.finfo(half).max:
            return None
    return pack_weight(q, scale.to(half), zeros=zeros, kind=kind, table=table)


def _scales_and_zeros(
    q: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts minima to zero points. Returns scales and zero points [N, groups] such that scale *
    (number - zero) = scale * number + minimum.

    If a group's minimum is so large that its numbers make no difference, its scale becomes
    -minimum, its zero point 1, and its numbers in `q` are overwritten with 0.
    """
    flat = scale.abs() * _FARTHEST <= minimum.abs()
    q.view(*scale.shape, -1).masked_fill_(flat.unsqueeze(-1), 0)
    zeros = torch.where(flat, 1.0, -minimum / scale)
    scale = torch.where(flat, -minimum, scale)
    whole = zeros.round()  # a quotient may be slightly off the integer that was multiplied
    return scale, torch.where(whole * scale == -minimum, whole, zeros)


def _common_zero(zeros: torch.Tensor) -> int | None:
    """Returns the zero point of all groups if it is the same integer in 0 … 255, else None. Always
    returns None for tensors on the meta device.
    """
    if zeros.is_meta:
        return None
    first = zeros[0, 0].item()
    return int(first) if first in range(256) and bool((zeros == first).all()) else None
