"""Activations of feed-forward layers in one pass: act(gate) * up, or act(up) without a gate."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.eight_bit_rows import EightBitRows, Scales
from sglang_lite.runtime.kernels.eight_bits import store_eight
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2


@triton.jit
def apply_activation(x, KIND: tl.constexpr):
    """Applies the activation KIND to float32 x."""
    if KIND == "silu":
        x = x * tl.sigmoid(x)
    elif KIND == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x * tl.sigmoid(2.0 * inner)  # 0.5 (1 + tanh(y)) = sigmoid(2 y)
    elif KIND == "relu2":
        x = tl.where(x < 0.0, 0.0, x * x)  # NaN stays NaN
    else:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return x


@triton.jit
def gated_pair(gate, up, alpha, limit, KIND: tl.constexpr):
    """Returns act(gate) * up in float32. "clamped" (gpt-oss) is gate * sigmoid(alpha * gate) * (up
    + 1), with gate clamped to at most `limit`, and up to between -limit and limit.
    """
    if KIND == "clamped":
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL) + 1.0
        gate = gate * tl.sigmoid(alpha * gate)
    else:
        gate = apply_activation(gate, KIND)
    return gate * up


@cached_launch
@triton.jit
def _activate(
    x,
    row_scales,
    scales,
    out,
    out_scales,
    size,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    EIGHT: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    first = x + row * (2 * size if GATED else size) + at
    value = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    own = 1.0
    if SCALED:
        own = tl.load(row_scales + row)
        value *= own * tl.load(scales + at, mask=inside, other=0.0)
    value = apply_activation(value, KIND)
    if GATED:
        up = tl.load(first + size, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            up *= own * tl.load(scales + size + at, mask=inside, other=0.0)
        # Rounded before the product, as two separate operations would.
        value = value.to(x.dtype.element_ty).to(tl.float32) * up
    if EIGHT:
        store_eight(value, row, at, size, out, out_scales)
    else:
        tl.store(out + row * size + at, value.to(out.dtype.element_ty), mask=inside)


def apply_gated(
    gate_up: torch.Tensor, activation: str, scales: Scales | None = None
) -> torch.Tensor:
    """Returns act(gate) * up of gate_up [T, 2 I], gates first. Moves 3 T I elements.

    Args:
        gate_up: [T, 2 I].
        activation: "silu", "gelu" or "gelu_tanh".
        scales: scales still to be applied to gate_up after an 8-bit matmul, or None.
    """
    return _launch(gate_up, gate_up.shape[1] // 2, activation, scales)


def apply_gated_eight(
    gate_up: torch.Tensor, activation: str, scales: Scales | None, kind: torch.dtype
) -> EightBitRows:
    """Returns act(gate) * up of gate_up [T, 2 I] in an 8-bit type. A program computes a whole row."""
    return _launch_eight_bit(gate_up, gate_up.shape[1] // 2, activation, scales, kind)


def apply_ungated(up: torch.Tensor, activation: str, scales: Scales | None = None) -> torch.Tensor:
    """Returns act(up) of up [T, I]. Moves 2 T I elements.

    Args:
        up: [T, I].
        activation: as for `apply_gated`, or "relu2".
        scales: scales still to be applied to up after an 8-bit matmul, or None.
    """
    return _launch(up, up.shape[1], activation, scales)


def apply_ungated_eight(
    up: torch.Tensor, activation: str, scales: Scales | None, kind: torch.dtype
) -> EightBitRows:
    """Returns act(up) of up [T, I] in an 8-bit type. A program computes a whole row."""
    return _launch_eight_bit(up, up.shape[1], activation, scales, kind)


def _launch(x: torch.Tensor, size: int, activation: str, scales: Scales | None) -> torch.Tensor:
    rows = len(x)
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    block = min(1024, round_up_to_power_of_2(size))
    _activate[(rows, cdiv(size, block))](
        x,
        scales and scales.rows,
        scales and scales.columns,
        out,
        None,
        size,
        GATED=x.shape[1] > size,
        SCALED=scales is not None,
        EIGHT=False,
        KIND=activation,
        BLOCK=block,
        num_warps=4,
        **pdl_options(x.device),
    )
    return out


def _launch_eight_bit(
    x: torch.Tensor, size: int, activation: str, scales: Scales | None, kind: torch.dtype
) -> EightBitRows:
    eight = EightBitRows.allocate_eight_bit(x, size, kind)
    block = round_up_to_power_of_2(size)
    _activate[(len(x), 1)](
        x,
        scales and scales.rows,
        scales and scales.columns,
        eight.values,
        eight.scales,
        size,
        GATED=x.shape[1] > size,
        SCALED=scales is not None,
        EIGHT=True,
        KIND=activation,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **pdl_options(x.device),
    )
    return eight
